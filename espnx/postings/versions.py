"""Changes to postings that stand alone: each publishes a version, by its manifest, when all of it is on storage. Searches that are open
go on with the one that they have."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..checks import check_path
from ..storage import NativeEngine
from ..storage.files import write_file
from ..storage.lock import LOCK_NAME, DirectoryLock
from ..storage.manifest import NAME as MANIFEST
from ..storage.work import remove_work
from .build.builder import MEMORY_BYTES, SegmentBuilder
from .build.records import CsrArrays, add_records
from .build.writer import Progress
from .compaction import bits_of, merged_sections
from .deletions import Deletions
from .files import PostingsReport, is_own_file, open_all, remove_files, report_of, write_sections
from .format import KINDS, SEGMENTS_MAX, Facts, SegmentFacts, check_whole_collection, read_facts, write_facts
from .queries import marked
from .stored.layout import REMOVED
from .stored.lists import read_lists
from .stored.segment import Segment


@dataclass(frozen=True)
class _Writer:
    """A directory whose lock is held: what it has, and the way to the next version."""

    directory: str
    engine: NativeEngine
    facts: Facts
    segments: list[Segment]
    deletions: Deletions

    def publish(self, facts: Facts) -> None:
        """Makes a version the one that is opened from now on, and removes files of no other use."""
        self.engine.sync_directory(self.directory)
        write_facts(self.engine, self.directory, facts)
        remove_work(self.directory)  # of a build that ended right after it was done
        there = set(os.listdir(self.directory)) - {LOCK_NAME, MANIFEST}
        remove_files(self.directory, (name for name in there - facts.file_names if is_own_file(name)))

    def write_deletions(self, deletions: Deletions, salts: list[int]) -> str:
        """The name of their file."""
        name = f"d{self.facts.generation + 1}.{REMOVED}"
        write_file(self.engine, os.path.join(self.directory, name), deletions.section(salts))
        return name

    def next_name(self) -> str:
        """Of the next segment: no file of this name is of any use."""
        return f"s{self.facts.generation + 1}"


@contextlib.contextmanager
def _changing(path: str | os.PathLike[str]) -> Iterator[_Writer]:
    directory = check_path("directory of postings", path)
    with NativeEngine("auto") as engine:
        read_facts(engine, directory)  # no lock file is left where no postings are
        with DirectoryLock(directory):
            facts = read_facts(engine, directory)
            check_whole_collection(facts, directory)
            segments, deletions = open_all(engine, directory, facts)
            try:
                yield _Writer(directory, engine, facts, segments, deletions)
            finally:
                for segment in segments:
                    segment.close()


def add(
    path: str | os.PathLike[str],
    texts: Iterable[str] | None = None,
    *,
    terms: Iterable[Sequence[str] | Sequence[int]] | None = None,
    vectors: Iterable[Mapping[str, float] | Mapping[int, float]] | CsrArrays | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
) -> PostingsReport:
    """Appends records, numbered from the end, as a segment of their own. Totals are summed over segments when a query is asked, so scores
    of BM25 are those of an index built of all.

    Args:
        texts, terms, vectors, memory_bytes, progress: of `espnx.Postings.build`; of the kind that the index is.

    Raises:
        InvalidInputError: of arguments; more segments than there may be.
        StoreBusyError: another process writes there.
        StoreNotFoundError, FormatError, ChecksumError: no postings, or damaged ones.
        WriteError, DiskFullError: the index is as it was.
    """
    with _changing(path) as writer:
        facts = writer.facts
        given = "vectors" if facts.kind != "bm25" else "texts or terms"
        if (vectors is not None) != (facts.kind != "bm25") or (texts is None) + (terms is None) + (vectors is None) != 2:
            raise errors.InvalidInputError("records to add", got="others, or none", expected=given)
        if len(facts.segments) >= SEGMENTS_MAX:
            raise errors.InvalidInputError("segments", got=len(facts.segments), expected=f"below {SEGMENTS_MAX}", fix="compact the index")
        builder = SegmentBuilder(
            writer.engine, writer.directory, kind=KINDS[facts.kind], analyzer=facts.analyzer, memory_bytes=memory_bytes, progress=progress
        )
        try:
            add_records(builder, texts=texts, terms=terms, vectors=vectors)
            name = writer.next_name()
            sizes = write_sections(writer.engine, writer.directory, name, builder.sections())
        finally:
            builder.close()
        segment = SegmentFacts(name, facts.end_number, builder.n_records, sizes)
        writer.publish(facts.next(segments=(*facts.segments, segment)))
        return report_of(writer.engine, writer.directory, facts, segment)


def delete(path: str | os.PathLike[str], numbers: Any) -> int:
    """Takes records out: they are found no more, and count no more in the totals, so scores of BM25 are those of an index of the others.

    Goes through all lists once, to see which terms they had. Numbers of other records stay; those of deleted ones are not given again.

    Args:
        numbers: of the records; or bool [n], as `espnx.Postings.search` takes ``include``, n the end of the numbers given so far.

    Returns:
        How many were deleted; a number that was deleted before is none.

    Raises as `add`; InvalidInputError for a number that no record has, and for what is no number of a record; nothing is deleted then.
    """
    with _changing(path) as writer:
        facts, held = writer.facts, writer.deletions
        given = np.flatnonzero(marked("numbers to delete", _listed(numbers), facts.end_number))
        fresh = np.setdiff1d(given, held.numbers, assume_unique=True)
        if not len(fresh):
            return 0
        sum_lengths, terms = held.sum_lengths, []
        for i, segment in enumerate(writer.segments):
            here = fresh[(fresh >= segment.first_number) & (fresh < segment.first_number + len(segment))] - segment.first_number
            if segment.lengths is not None:
                sum_lengths += int(segment.length_table[segment.lengths.codes[here]].sum())
            terms.append(removed_terms(writer.engine, segment, here, held.of_segment(i)))
        everything = np.union1d(held.numbers, fresh)
        deletions = Deletions(everything, held.n_present + len(fresh), sum_lengths, tuple(terms))
        name = writer.write_deletions(deletions, [segment.dictionary.salt for segment in writer.segments])
        writer.publish(facts.next(deletions=name, n_deleted=len(everything)))
        return len(fresh)


def _listed(numbers: Any) -> Any:
    """What an iterator gives; anything else as it is."""
    return (
        list(numbers) if isinstance(numbers, Iterable) and not hasattr(numbers, "__array__") and not isinstance(numbers, str) else numbers
    )


def removed_terms(
    engine: NativeEngine, segment: Segment, records: np.ndarray, before: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Terms of deleted records of a segment, and in how many of them each is; those of `before`, deleted earlier, among them. Goes through
    all lists. Raises as `read_lists`."""
    if not len(records):
        return before
    wanted = bits_of(len(segment), records)
    df = np.zeros(len(segment.dictionary), np.int64)
    for part in read_lists(engine, segment, kept=wanted):
        df[part.first : part.first + len(part.names)] = part.counts
    df[before[0]] += before[1]
    found = np.flatnonzero(df)
    return found, df[found]


def compact(path: str | os.PathLike[str], *, memory_bytes: int = MEMORY_BYTES, progress: Progress | None = None) -> PostingsReport | None:
    """Merges all segments into one, without what was deleted. Numbers of records stay.

    Returns:
        What was written; None where nothing was to be done.

    Raises as `add`. Impacts of several segments, each with steps of its own, are rounded once more.
    """
    with _changing(path) as writer:
        facts = writer.facts
        if len(facts.segments) <= 1 and writer.deletions.n_present == 0:
            return None
        salt, name = secrets.randbits(32), writer.next_name()
        content = merged_sections(
            writer.engine, writer.directory, writer.segments, writer.deletions.numbers, salt=salt, kind=KINDS[facts.kind],
            n_records=facts.end_number, memory_bytes=memory_bytes, progress=progress,
        )  # fmt: skip
        sizes = write_sections(writer.engine, writer.directory, name, content)
        segment = SegmentFacts(name, 0, facts.end_number, sizes)
        deletions = None
        if len(writer.deletions.numbers):
            deletions = writer.write_deletions(Deletions(writer.deletions.numbers), [])
        writer.publish(facts.next(segments=(segment,), deletions=deletions))
        return report_of(writer.engine, writer.directory, facts, segment)
