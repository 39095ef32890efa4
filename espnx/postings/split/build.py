"""Builds a collection in several directories: its records split over them, or its terms."""

from __future__ import annotations

import heapq
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np

from ... import errors
from ...checks import check_path, check_whole
from ...storage import NativeEngine
from ...storage.files import make_given_directory
from ...storage.lock import DirectoryLock
from ...storage.work import remove_work
from ..analyzer import Analyzer
from ..bm25 import BM25
from ..build.builder import MEMORY_BYTES, SegmentBuilder
from ..build.records import CsrArrays, add_records
from ..build.spool import TermPostings
from ..build.writer import Progress, SegmentWriter
from ..compaction import kept_postings
from ..files import PostingsReport, check_new, clear_leftovers, open_segment, remove_files, report_of, write_sections
from ..format import KINDS, PARTS_MAX, PLACEMENTS, Facts, SegmentFacts, SplitFacts, write_facts
from ..stored.segment import Segment

T = TypeVar("T")
_WHOLE, _PART = "s0", "s1"  # names of segments: of all lists, before terms are placed; of what stays
_BYTES_A_MERGED_POSTING = 64


def build_split(
    paths: Sequence[str | os.PathLike[str]],
    texts: Iterable[str] | None = None,
    *,
    terms: Iterable[Sequence[str] | Sequence[int]] | None = None,
    vectors: Iterable[Mapping[str, float] | Mapping[int, float]] | CsrArrays | None = None,
    placement: str = "passages",
    exact: bool = False,
    analyzer: Analyzer | None = None,
    bm25: BM25 | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
) -> list[PostingsReport]:
    """Builds postings in several new directories, for `SplitPostings`. Record i is the i-th text, as in one index.

    Args:
        paths: directories; each is made if it is not there, and must hold nothing but what an interrupted build has left.
        texts, terms, vectors, exact, analyzer, bm25, memory_bytes, progress: see `espnx.Postings.build`.
        placement: ``passages``: record i lies in directory i modulo their number, with all of its postings; a search takes the best of
            each. ``terms``: each list lies whole in one directory, so that all have about as many bytes of lists, and every directory has
            the lengths of all records (RAGX, section 3.2); a search takes every posting's part of the score from them.

    Returns:
        What was written in each directory. Impacts have the same steps in all of them.

    Raises what `espnx.Postings.build` raises. Manifests come last: until they are all there, the collection cannot be opened. A build that
    was interrupted begins anew.
    """
    given = [name for name, value in (("texts", texts), ("terms", terms), ("vectors", vectors)) if value is not None]
    if len(given) != 1:
        raise errors.InvalidInputError("postings", got=" and ".join(given) or "nothing", expected="one of texts, terms and vectors")
    if placement not in PLACEMENTS:
        raise errors.InvalidInputError("placement", got=repr(placement), expected=" or ".join(map(repr, PLACEMENTS)))
    check_whole("memory_bytes", memory_bytes, 1 << 20)
    directories = _directories(paths)
    kind = "bm25" if vectors is None else "float" if exact else "impact"
    facts = Facts(kind, analyzer or Analyzer(), bm25 or BM25())
    with ExitStack() as held:
        for directory in directories:
            make_given_directory(directory)
            held.enter_context(DirectoryLock(directory))
            check_new(directory)
        for directory in directories:  # all may be used: only now anything is removed
            clear_leftovers(directory)
            remove_work(directory)  # of a build of one index
        engine = held.enter_context(NativeEngine("auto"))
        work = _Work(engine, directories, facts, memory_bytes, progress)
        source = {"texts": texts, "terms": terms, "vectors": vectors}
        return work.by_passage(source) if placement == "passages" else work.by_term(source)


def _directories(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        raise errors.InvalidInputError("directories of a collection", got=repr(paths), expected="several, in a list")
    check_whole("directories of a collection", len(paths), 1, PARTS_MAX)
    found = [check_path("directory of postings", path) for path in paths]
    if len({os.path.realpath(each) for each in found}) < len(found):
        raise errors.InvalidInputError("directories of a collection", got=found, expected="each once")
    return found


class _Work:
    """A build under way."""

    def __init__(self, engine: NativeEngine, directories: list[str], facts: Facts, memory_bytes: int, progress: Progress | None):
        self._engine, self._directories, self._facts = engine, directories, facts
        self._memory_bytes, self._progress = memory_bytes, progress

    def by_passage(self, source: Mapping[str, Any]) -> list[PostingsReport]:
        """Records in turn; all builders are open at once, each with its share of the memory."""
        share = max(1 << 20, self._memory_bytes // len(self._directories))
        turns = _Turns([self._builder(directory, share) for directory in self._directories])
        try:
            add_records(turns, **source)  # type: ignore[arg-type]
            turns.align()
            sizes = [
                write_sections(self._engine, directory, _PART, builder.sections())
                for directory, builder in zip(self._directories, turns.builders, strict=True)
            ]
            return self._publish("passages", sizes, [builder.n_records for builder in turns.builders], turns.n_records)
        finally:
            turns.close()

    def by_term(self, source: Mapping[str, Any]) -> list[PostingsReport]:
        """All lists in the first directory, then those of each directory from there."""
        first = self._directories[0]
        builder = self._builder(first, self._memory_bytes)
        try:
            add_records(builder, **source)
            sizes = write_sections(self._engine, first, _WHOLE, builder.sections())
        finally:
            builder.close()
        facts = SegmentFacts(_WHOLE, 0, builder.n_records, sizes)
        whole = open_segment(self._engine, first, self._facts, facts)
        try:
            homes = _even_homes(whole, len(self._directories))
            written = [self._write_terms(whole, builder.largest, homes == part, part) for part in range(len(self._directories))]
        finally:
            whole.close()
        remove_files(first, (facts.file_name(section) for section in sizes))
        return self._publish("terms", written, [builder.n_records] * len(written), builder.n_records)

    def _builder(self, directory: str, memory_bytes: int) -> SegmentBuilder:
        return SegmentBuilder(
            self._engine, directory, kind=KINDS[self._facts.kind], analyzer=self._facts.analyzer, memory_bytes=memory_bytes,
            progress=self._progress,
        )  # fmt: skip

    def _write_terms(self, whole: Segment, largest: float, wanted: np.ndarray, part: int) -> dict[str, int]:
        """The sections of one directory, with the lists of the terms that are wanted: bytes of each."""
        directory, held = self._directories[part], whole.dictionary
        lengths = None if whole.lengths is None else whole.length_table[whole.lengths.codes]
        writer = SegmentWriter(
            self._engine, directory, salt=secrets.randbits(32), kind=held.kind, n_records=len(whole),
            n_postings=int(held.df[wanted].sum(dtype=np.int64)), largest=largest, memory_bytes=self._memory_bytes,
            progress=self._progress or (lambda _what, _done, _total: None),
        )  # fmt: skip
        try:
            return write_sections(self._engine, directory, _PART, writer.sections(self._chosen(whole, wanted), lengths))
        finally:
            writer.close()

    def _chosen(self, whole: Segment, wanted: np.ndarray) -> Iterator[TermPostings]:
        """Postings of the terms that are wanted, as many at a time as memory has room for; one term at least."""
        budget = max(1 << 16, self._memory_bytes // _BYTES_A_MERGED_POSTING)
        total, first = np.cumsum(whole.dictionary.df, dtype=np.int64), 0
        while first < len(whole.dictionary):
            before = int(total[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(total, before + budget, side="right")))
            yield _only(kept_postings(self._engine, whole, first, end, None, 0), wanted[first:end])
            first = end

    def _publish(self, placement: str, sizes: list[dict[str, int]], n_records: list[int], total: int) -> list[PostingsReport]:
        collection, reports = secrets.token_hex(16), []
        written = [SegmentFacts(_PART, 0, n, each) for n, each in zip(n_records, sizes, strict=True)]
        for directory, segment in zip(self._directories, written, strict=True):
            self._engine.sync_directory(directory)
            reports.append(report_of(self._engine, directory, self._facts, segment))
        for part, (directory, segment) in enumerate(zip(self._directories, written, strict=True)):
            split = SplitFacts(collection, part, len(written), placement, total)
            write_facts(self._engine, directory, Facts(
                self._facts.kind, self._facts.analyzer, self._facts.bm25, (segment,), split=split
            ))  # fmt: skip
        return reports


class _Turns:
    """Builders that take records in turn; to `add_records` it is one."""

    def __init__(self, builders: list[SegmentBuilder]):
        self.builders, self.n_records = builders, 0

    def _next(self) -> SegmentBuilder:
        self.n_records += 1
        return self.builders[(self.n_records - 1) % len(self.builders)]

    def resumed(self, items: Iterator[T], _identity: Callable[[T], bytes]) -> Iterator[T]:
        return items  # nothing is kept of a build that was interrupted

    def add_text(self, text: str) -> None:
        self._next().add_text(text)

    def add_terms(self, terms: Sequence[str | int]) -> None:
        self._next().add_terms(terms)

    def add_vector(self, vector: Mapping[Any, float]) -> None:
        self._next().add_vector(vector)

    def add_rows(self, terms: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> None:
        turn = (self.n_records + np.arange(len(counts))) % len(self.builders)
        of_entry = np.repeat(turn, counts)
        for part, builder in enumerate(self.builders):
            here = of_entry == part
            builder.add_rows(terms[here], weights[here], counts[turn == part])
        self.n_records += len(counts)

    def align(self) -> None:
        """The steps of impacts are those of all records."""
        largest = max(builder.largest for builder in self.builders)
        for builder in self.builders:
            builder.largest = largest

    def close(self) -> None:
        for builder in self.builders:
            builder.close()


def _even_homes(whole: Segment, n_parts: int) -> np.ndarray:
    """int64 [terms]: the directory of each list: the longest first, each to the directory that has the fewest bytes so far."""
    sizes = np.diff(whole.dictionary.first.astype(np.int64))
    homes, loads = np.empty(len(sizes), np.int64), [(0, part) for part in range(n_parts)]
    for term in np.argsort(-sizes, kind="stable").tolist():
        load, part = loads[0]
        heapq.heapreplace(loads, (load + int(sizes[term]), part))
        homes[term] = part
    return homes


def _only(postings: TermPostings, wanted: np.ndarray) -> TermPostings:
    """Of these terms those that are wanted, bool [n]."""
    of_posting = np.repeat(wanted, postings.counts)
    names = [name for name, is_wanted in zip(postings.names, wanted.tolist(), strict=True) if is_wanted]
    return TermPostings(names, postings.hashes[wanted], postings.counts[wanted], postings.records[of_posting], postings.values[of_posting])
