"""The files of postings that stand alone: a segment's, opening what a manifest names, and which
names are ours."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from .. import errors
from ..sizes import format_size
from ..storage import NativeEngine
from ..storage.files import Section, StreamWriter, crc32c, names_in, read_file, write_error
from ..storage.manifest import NAME as MANIFEST
from ..storage.replacing import StoreKind
from ..storage.work import WORK, check_work, is_own_work
from ..suggestions import CALL_FRAMES
from .build.writer import SectionContent
from .compaction import Rounding
from .deletions import Deletions
from .documents import Documents
from .format import (
    KINDS,
    MAGIC,
    SECTIONS,
    SUFFIX,
    VERSION,
    Facts,
    SegmentFacts,
    read_facts,
    section_offset,
)
from .stored.layout import REMOVED
from .stored.segment import Segment

#: The manifest of a part of a collection that is about to be in force.
NEXT = f"{MANIFEST}.next"
_NUMBERED = re.compile(r"[sd]([0-9]{1,15})\.")
_OWN = re.compile(
    rf"s[0-9]{{1,15}}\.{SUFFIX}|d[0-9]{{1,15}}\.{REMOVED}|spool-[0-9a-f]{{8}}-f?[0-9]+\.tmp|"
    rf"{re.escape(MANIFEST)}(\.new|\.next|\.next\.new)"
)
#: Of the weights that are written: where more of them are below half a step, a report is not
#: enough.
_RAISED_SHARE = 0.01


@dataclass(frozen=True)
class PostingsReport:
    """What a build, an addition or a compaction has written.

    Attributes:
        n_records, n_terms, n_postings: of the new segment.
        size_bytes: of it on storage.
        memory_bytes: that a search keeps in memory for it.
        n_raised: of weights in one byte: how many were below half a step, and are stored as a whole
            one. Of an addition also those of segments that it merged.
        n_replaced: of an addition: records of the same ids that it has deleted.
        n_segments: that the postings have now.
    """

    n_records: int
    n_terms: int
    n_postings: int
    size_bytes: int
    memory_bytes: int
    n_raised: int = 0
    n_replaced: int = 0
    n_segments: int = 1

    def summary(self) -> str:
        """The report in a line."""
        each = f"{self.size_bytes / self.n_postings:.2f} bytes each" if self.n_postings else "none"
        replaced = (
            f" ({self.n_replaced:,} of them in the place of older ones)" if self.n_replaced else ""
        )
        raised = (
            f"; {self.n_raised:,} weights below half a step, stored as one" if self.n_raised else ""
        )
        return (
            f"{self.n_records:,} records{replaced}, {self.n_terms:,} terms, {self.n_postings:,} "
            f"postings, {each}; {format_size(self.size_bytes)} on storage, "
            f"{format_size(self.memory_bytes)} in memory{raised}"
        )


def warn_of_rounding(directory: str, rounding: Rounding, stacklevel: int) -> None:
    """Warns where many weights are not what they were. `stacklevel` leads to a public function, as
    `warnings.warn` counts it."""
    if rounding.n_raised > _RAISED_SHARE * rounding.n_postings:
        warnings.warn(
            f"{directory}: {rounding.n_raised:,} of {rounding.n_postings:,} weights are below half "
            "a step of their lists, and are stored as a whole one; build with exact=True (--exact) "
            "to keep them as they are",
            stacklevel=stacklevel + 1 + CALL_FRAMES,
        )


class SegmentFile:
    """Writes a segment's file, section after section, in the order of `SECTIONS`. A context
    manager.

    Attributes:
        sections: written so far.

    Every method can raise WriteError, DiskFullError.
    """

    def __init__(self, engine: NativeEngine, directory: str, name: str):
        self._stream = StreamWriter(engine, os.path.join(directory, f"{name}.{SUFFIX}"))
        self.sections: dict[str, Section] = {}

    def section(
        self, name: str, chunks: Iterable[bytes | np.ndarray], *, align_bytes: int = 8
    ) -> None:
        """Appends one, of these bytes, where its place is."""
        begin, sum_ = section_offset(name, self._stream.size_bytes), 0
        self._stream.write(bytes(begin - self._stream.size_bytes))
        for chunk in chunks:
            data = (
                chunk
                if isinstance(chunk, bytes)
                else np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
            )
            sum_ = crc32c(data, sum_)
            self._stream.write(data)
        self.sections[name] = Section(begin, self._stream.size_bytes - begin, sum_)

    def finish(self, contents: Iterable[SectionContent]) -> dict[str, Section]:
        """Appends these, flushes the file, and returns all of its sections."""
        for name, parts in contents:
            self.section(name, parts)
        self._stream.sync()
        return {name: self.sections[name] for name in SECTIONS if name in self.sections}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.__exit__(kind, error, trace)


def open_segment(
    engine: NativeEngine, directory: str, facts: Facts, segment: SegmentFacts
) -> Segment:
    """A segment that a manifest names. Raises as `Segment`, and FormatError where it is not the one
    that the manifest means."""
    found = Segment(engine, segment.regions(directory), first_number=segment.first_number)
    sizes = [file.size_bytes for file in found.files]
    if (
        len(found) != segment.n_records
        or found.dictionary.kind != KINDS[facts.kind]
        or sizes != [segment.size_bytes]
    ):
        got = f"{len(found)} records of kind {found.dictionary.kind}, {sizes[0]} bytes"
        expected = f"{segment.n_records} of {facts.kind}, {segment.size_bytes} bytes"
        found.close()
        raise errors.FormatError(
            f"segment {segment.name} of postings", path=directory, got=got, expected=expected
        )
    return found


def open_segments(
    engine: NativeEngine, directory: str, facts: Facts, segments: Iterable[SegmentFacts]
) -> list[Segment]:
    """All of these. Raises as `open_segment`."""
    found: list[Segment] = []
    try:
        found += (open_segment(engine, directory, facts, segment) for segment in segments)
        return found
    except BaseException:
        for segment in found:
            segment.close()
        raise


def open_all(engine: NativeEngine, directory: str, facts: Facts) -> tuple[list[Segment], Deletions]:
    """All that a manifest names. Raises as `open_segment`."""
    segments = open_segments(engine, directory, facts, facts.segments)
    try:
        deletions = read_deletions(engine, directory, facts)
        deletions.check([each.name for each in facts.segments], segments, directory)
        return segments, deletions
    except BaseException:
        for segment in segments:
            segment.close()
        raise


def read_deletions(engine: NativeEngine, directory: str, facts: Facts) -> Deletions:
    """Raises FormatError, ChecksumError, TruncatedFileError, and what a read raises."""
    if facts.deletions is None:
        return Deletions()
    path = os.path.join(directory, facts.deletions)
    return Deletions.parse(
        np.frombuffer(read_file(engine, path), np.uint8), path, facts.end_number, facts.n_deleted
    )


def documents_of(
    engine: NativeEngine,
    facts: Iterable[SegmentFacts],
    segments: Iterable[Segment],
    deletions: Deletions,
) -> Documents:
    """Ids and texts of segments that are open, and have them."""
    held = [
        (each, segment.lists.file, segment.dictionary.salt)
        for each, segment in zip(facts, segments, strict=True)
    ]
    return Documents(engine, held, deletions)


def report_of(
    engine: NativeEngine, directory: str, facts: Facts, segment: SegmentFacts, rounding: Rounding
) -> PostingsReport:
    """The report of a segment that was written."""
    found = open_segment(engine, directory, facts, segment)
    try:
        held = found.dictionary
        return PostingsReport(
            segment.n_records,
            len(held),
            held.n_postings,
            segment.size_bytes,
            found.memory_bytes,
            rounding.n_raised,
            n_segments=len(facts.segments),
        )
    finally:
        found.close()


def _foreign(directory: str) -> list[str]:
    return [
        name
        for name in names_in(directory)
        if not is_own_file(name) and not (name == WORK and is_own_work(directory))
    ]


KIND = StoreKind(
    MAGIC, VERSION, "posting lists", _foreign, add="espnx.postings.add, espnx postings add"
)


def begin_version(
    engine: NativeEngine, directory: str, *, is_replacement: bool
) -> tuple[Facts | None, int]:
    """What is there of postings, and the number of the version that a build in their place writes,
    its segment's and its generation: no file has it. What an interrupted build has left is removed,
    but its runs; where a manifest is damaged, nothing is: nobody knows what is in force.

    Raises InvalidInputError for a `work` that no build has left; WriteError.
    """
    check_work(directory)
    live = None
    if is_replacement:
        with contextlib.suppress(errors.FormatError):
            live = read_facts(engine, directory)
    if live is not None or not is_replacement:
        named = set() if live is None else live.file_names
        remove_files(directory, (name for name in names_in(directory) - named if is_own_file(name)))
    numbers = [int(found[1]) for name in names_in(directory) if (found := _NUMBERED.match(name))]
    return live, 1 + max(numbers, default=0 if live is None else live.generation)


def remove_others(directory: str, live: Facts) -> None:
    """Removes every file of postings that this version does not name. Raises WriteError."""
    remove_files(
        directory, (name for name in names_in(directory) - live.file_names if is_own_file(name))
    )


def is_own_file(name: str) -> bool:
    """Whether a file's name is one that this package gives."""
    return _OWN.fullmatch(name) is not None


def remove_files(directory: str, names: Iterable[str]) -> None:
    """Raises WriteError."""
    for name in names:
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise write_error(
                "cannot remove a file of postings", os.path.join(directory, name), error
            ) from error
