"""The next version of postings, before it is published: segments that are there, segments that were
written, and records that go.

However many segments there are, few of their files are open at a time: those that are merged, or
one by one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from .. import errors
from ..checks import check_path
from ..storage import NativeEngine
from ..storage.documents.ids import DocumentId
from ..storage.documents.rows import write_texts
from ..storage.files import write_file
from ..storage.levels import groups_to_merge
from ..storage.lock import DirectoryLock
from ..storage.work import remove_work
from .build.writer import Progress, SectionContent
from .compaction import Rounding, merged_sections
from .deletions import Deletions, Removed, removed_terms
from .documents import Documents, Row
from .files import SegmentFile, documents_of, open_segments, read_deletions, remove_others
from .format import (
    KINDS,
    SEGMENTS_MAX,
    Facts,
    SegmentFacts,
    check_whole_collection,
    read_facts,
    write_facts,
)
from .stored.layout import REMOVED
from .stored.segment import Segment


class Draft:
    """See the module. Nothing of the version that is there is touched before `publish`.

    Attributes:
        facts: of the version that is there.
        segments: of the next one, ascending by number.
        rounding: of all that was written.
        n_merged: segments that became part of others.
    """

    def __init__(self, engine: NativeEngine, directory: str, facts: Facts):
        self.engine, self.directory, self.facts = engine, directory, facts
        self.segments, self.rounding, self.n_merged = list(facts.segments), Rounding(), 0
        self._generation = facts.generation

    @cached_property
    def _stored_deletions(self) -> Deletions:
        return read_deletions(self.engine, self.directory, self.facts)

    @property
    def deletions(self) -> Deletions:
        """The deletions of the next version."""
        return self._deletions if self._deletions is not None else self._stored_deletions

    _deletions: Deletions | None = None  # where they are others than the version has that is there

    def new_name(self) -> str:
        """A name for a segment: no file of that name is of any use."""
        self._generation += 1
        return f"s{self._generation}"

    @contextlib.contextmanager
    def opened(self, segments: Sequence[SegmentFacts]) -> Iterator[list[Segment]]:
        """Some segments, while they are read."""
        found = open_segments(self.engine, self.directory, self.facts, segments)
        try:
            yield found
        finally:
            for segment in found:
                segment.close()

    @contextlib.contextmanager
    def documents(self, segments: Sequence[SegmentFacts]) -> Iterator[Documents]:
        """Ids and texts of some segments, while they are read."""
        with self.opened(segments) as opened:
            yield documents_of(self.engine, segments, opened, self.deletions)

    def numbers(self, ids: Sequence[DocumentId], segments: Sequence[SegmentFacts]) -> np.ndarray:
        """int64: the record of each id in these segments, -1 where none has it. Opens one after the
        other."""
        found = np.full(len(ids), -1, np.int64)
        for facts in reversed(segments):
            left = np.flatnonzero(found < 0)
            if not len(left):
                break
            with self.documents([facts]) as held:
                found[left] = held.numbers([ids[place] for place in left.tolist()])
        return found

    def delete(self, numbers: np.ndarray) -> int:
        """Records by number, ascending; of those that were deleted before, nothing changes. How
        many there were."""
        held = self.deletions
        fresh = numbers[~held.is_deleted(numbers)]
        if not len(fresh):
            return 0
        removed = dict(held.removed)
        for facts in self.segments:
            begin, end = np.searchsorted(fresh, [facts.first_number, facts.end_number])
            if begin < end:
                with self.opened([facts]) as (segment,):
                    removed[facts.name] = _removed(
                        self.engine,
                        segment,
                        fresh[begin:end] - facts.first_number,
                        removed.get(facts.name),
                    )
        self._deletions = Deletions(np.union1d(held.numbers, fresh), removed)
        return len(fresh)

    def append(self, segment: SegmentFacts, *, memory_bytes: int) -> None:
        """Takes a new segment in, and merges additions where there are too many of a size. Raises
        InvalidInputError where no more fit."""
        if len(self.segments) >= SEGMENTS_MAX:
            raise errors.InvalidInputError(
                "segments",
                got=len(self.segments),
                expected=f"below {SEGMENTS_MAX}",
                fix="`espnx postings compact`",
            )
        self.segments.append(segment)
        for group in reversed(groups_to_merge([each.n_records for each in self.segments[1:]])):
            self.merge(1 + group.start, 1 + group.stop, memory_bytes=memory_bytes, progress=None)

    def merge(
        self, start: int, stop: int, *, memory_bytes: int, progress: Progress | None
    ) -> SegmentFacts:
        """Makes one of the segments from `start` to before `stop`, without what was deleted.
        Numbers stay."""
        chosen = self.segments[start:stop]
        first, end = chosen[0].first_number, chosen[-1].end_number
        deletions, name, salt = self.deletions, self.new_name(), secrets.randbits(32)
        with (
            self.opened(chosen) as segments,
            SegmentFile(self.engine, self.directory, name) as file,
        ):
            if self.facts.has_documents:
                write_texts(file, self._rows(chosen, segments, deletions), first, salt)
            content: Iterator[SectionContent] = merged_sections(
                self.engine,
                self.directory,
                segments,
                deletions.numbers,
                salt=salt,
                kind=KINDS[self.facts.kind],
                n_records=end - first,
                memory_bytes=memory_bytes,
                progress=progress,
                first_number=first,
                rounding=self.rounding,
            )
            merged = SegmentFacts(name, first, end - first, file.finish(content))
        self.segments[start:stop] = [merged]
        self.n_merged += len(chosen)
        if any(each.name in deletions.removed for each in chosen):
            self._deletions = deletions.without([each.name for each in chosen])
        return merged

    def _rows(
        self, chosen: Sequence[SegmentFacts], segments: Sequence[Segment], deletions: Deletions
    ) -> Iterator[Row]:
        """Yields the row of each number; nothing is left of those that were deleted."""
        number = chosen[0].first_number
        for found, row in documents_of(self.engine, chosen, segments, deletions).rows():
            yield from ((gone, "") for gone in range(number, found))
            yield row
            number = found + 1
        yield from ((gone, "") for gone in range(number, chosen[-1].end_number))

    def publish(self) -> Facts:
        """Makes this the version that is opened from now on, and removes files of no other use."""
        facts = replace(self.facts, segments=tuple(self.segments))
        if self._deletions is not None:
            self._generation += 1
            name = f"d{self._generation}.{REMOVED}"
            write_file(self.engine, os.path.join(self.directory, name), self._deletions.section())
            facts = replace(facts, deletions=name, n_deleted=len(self._deletions.numbers))
        facts = replace(facts, generation=max(self._generation, self.facts.generation + 1))
        self.engine.sync_directory(self.directory)
        write_facts(self.engine, self.directory, facts)
        remove_work(self.directory)  # of a build that ended right after it was done
        remove_others(self.directory, facts)
        return facts


@contextlib.contextmanager
def changing(path: str | os.PathLike[str]) -> Iterator[Draft]:
    """The next version of postings whose lock is held. What a change leaves that fails is removed.

    Raises as `read_facts`, and StoreBusyError.
    """
    directory = check_path("directory of postings", path)
    with NativeEngine("auto") as engine:
        read_facts(engine, directory)  # no lock file is left where no postings are
        with DirectoryLock(directory):
            facts = read_facts(engine, directory)
            check_whole_collection(facts, directory)
            draft = Draft(engine, directory, facts)
            try:
                yield draft
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to tell
                    remove_others(directory, read_facts(engine, directory))
                raise


def _removed(
    engine: NativeEngine, segment: Segment, records: np.ndarray, before: Removed | None
) -> Removed:
    """What the lists of a segment have of these records, and of those that were deleted before."""
    n_records, sum_lengths = (before.n_records, before.sum_lengths) if before else (0, 0)
    if segment.lengths is not None:
        sum_lengths += int(segment.length_table[segment.lengths.codes[records]].sum())
    known = before.terms if before else (np.zeros(0, np.int64), np.zeros(0, np.int64))
    return Removed(
        segment.dictionary.salt,
        n_records + len(records),
        sum_lengths,
        removed_terms(engine, segment, records, known),
    )
