"""The files of postings that stand alone: opening what a manifest names, writing a segment's sections, and which names are ours."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .. import errors
from ..sizes import format_size
from ..storage import NativeEngine
from ..storage.files import StreamWriter, names_in, read_file, write_error
from ..storage.lock import LOCK_NAME
from ..storage.manifest import NAME as MANIFEST
from ..storage.work import WORK, check_work
from .build.writer import Section
from .deletions import Deletions
from .format import KINDS, SECTIONS, Facts, SegmentFacts
from .stored.layout import REMOVED
from .stored.segment import Segment


@dataclass(frozen=True)
class PostingsReport:
    """What a build, an addition or a compaction has written.

    Attributes:
        n_records, n_terms, n_postings: of the new segment.
        size_bytes: of it on storage.
        memory_bytes: that a search keeps in memory for it.
    """

    n_records: int
    n_terms: int
    n_postings: int
    size_bytes: int
    memory_bytes: int

    def summary(self) -> str:
        """In a line."""
        each = f"{self.size_bytes / self.n_postings:.2f} bytes each" if self.n_postings else "none"
        return (
            f"{self.n_records:,} records, {self.n_terms:,} terms, {self.n_postings:,} postings, {each}; {format_size(self.size_bytes)} on "
            f"storage, {format_size(self.memory_bytes)} in memory"
        )


def open_segment(engine: NativeEngine, directory: str, facts: Facts, segment: SegmentFacts) -> Segment:
    """A segment that a manifest names. Raises as `Segment`, and FormatError where it is not the one that the manifest means."""
    found = Segment(engine, segment.regions(directory), first_number=segment.first_number)
    if len(found) != segment.n_records or found.dictionary.kind != KINDS[facts.kind]:
        got = f"{len(found)} records of kind {found.dictionary.kind}"
        expected = f"{segment.n_records} of {facts.kind}"
        found.close()
        raise errors.FormatError(f"segment {segment.name} of postings", path=directory, got=got, expected=expected)
    return found


def open_all(engine: NativeEngine, directory: str, facts: Facts) -> tuple[list[Segment], Deletions]:
    """All that a manifest names. Raises as `open_segment`."""
    segments: list[Segment] = []
    try:
        segments += (open_segment(engine, directory, facts, segment) for segment in facts.segments)
        return segments, _deletions(engine, directory, facts, segments)
    except BaseException:
        for segment in segments:
            segment.close()
        raise


def _deletions(engine: NativeEngine, directory: str, facts: Facts, segments: list[Segment]) -> Deletions:
    if facts.deletions is None:
        return Deletions()
    path = os.path.join(directory, facts.deletions)
    data = np.frombuffer(read_file(engine, path), np.uint8)
    salts, n_terms = [each.dictionary.salt for each in segments], [len(each.dictionary) for each in segments]
    found = Deletions.parse(data, path, salts, n_terms, facts.end_number)
    if len(found.numbers) != facts.n_deleted or found.n_present > len(found.numbers):
        raise errors.FormatError("deletions of postings", path=path, got=f"{len(found.numbers)} records", expected=facts.n_deleted)
    return found


def write_sections(engine: NativeEngine, directory: str, name: str, sections: Iterable[Section]) -> dict[str, int]:
    """The files of a segment, flushed: bytes of each section. Raises WriteError, DiskFullError."""
    sizes: dict[str, int] = {}
    for section, parts in sections:
        with StreamWriter(engine, os.path.join(directory, f"{name}.{section}")) as writer:
            for part in parts:
                writer.write(part)
            writer.sync()
            sizes[section] = writer.size_bytes
    return sizes


def report_of(engine: NativeEngine, directory: str, facts: Facts, segment: SegmentFacts) -> PostingsReport:
    """Of a segment that was written."""
    found = open_segment(engine, directory, facts, segment)
    try:
        held = found.dictionary
        return PostingsReport(segment.n_records, len(held), held.n_postings, sum(segment.sizes.values()), found.memory_bytes)
    finally:
        found.close()


def check_new(directory: str) -> None:
    """Raises InvalidInputError where postings, or anything but what an interrupted build has left, are there."""
    there = names_in(directory) - {LOCK_NAME}
    if MANIFEST in there:
        raise errors.InvalidInputError(f"directory {directory}", got="postings, or another store", expected="a new directory")
    check_work(directory)
    if foreign := sorted(name for name in there - {WORK} if not is_own_file(name)):
        raise errors.InvalidInputError(
            f"directory {directory}", got=foreign[:3], expected="an empty directory, or what an interrupted build has left"
        )


def clear_leftovers(directory: str) -> None:
    """Of an interrupted build, but its runs. Raises as `check_new`, and removes nothing then; WriteError."""
    check_new(directory)
    remove_files(directory, (name for name in names_in(directory) if is_own_file(name)))


def is_own_file(name: str) -> bool:
    """Whether a file's name is one that this package gives."""
    stem, _, suffix = name.rpartition(".")
    if suffix in SECTIONS:
        return stem[:1] == "s" and stem[1:].isdigit()
    return (
        name == f"{MANIFEST}.new"
        or (suffix == "tmp" and stem.startswith("spool-"))
        or (suffix == REMOVED and stem[:1] == "d" and stem[1:].isdigit())
    )


def remove_files(directory: str, names: Iterable[str]) -> None:
    """Raises WriteError."""
    for name in names:
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise write_error("cannot remove a file of postings", os.path.join(directory, name), error) from error
