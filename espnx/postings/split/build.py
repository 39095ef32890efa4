"""Builds a collection in several directories: its records split over them, or its terms."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np

from ... import errors
from ...checks import check_whole, plain
from ...sizes import BUILD_BYTES
from ...storage import NativeEngine
from ...storage.files import Section, make_given_directory
from ...storage.replacing import check_target, writing_to
from ...storage.work import remove_work
from ...suggestions import suggests_keywords
from ..analyzer import Analyzer
from ..bm25 import BM25
from ..build.builder import SegmentBuilder
from ..build.impacts import LargestWeights
from ..build.records import CsrArrays, Records
from ..build.spool import TermPostings
from ..build.writer import Progress, SectionContent, SegmentWriter
from ..compaction import Rounding, kept_postings
from ..files import (
    KIND,
    PostingsReport,
    SegmentFile,
    begin_version,
    open_segment,
    remove_files,
    report_of,
    warn_of_rounding,
)
from ..format import KINDS, PLACEMENTS, Facts, SegmentFacts, SplitFacts
from ..queries import analyzer_of, bm25_of, directories_of
from ..stored.segment import Segment
from .publishing import check_replaceable, finish_replacement, publish_parts

T = TypeVar("T")
_WHOLE = "s0"  # name of the segment of all lists, before terms are placed: no version has it
_BYTES_A_MERGED_POSTING = 64


@suggests_keywords
def build_split(
    paths: Iterable[str | os.PathLike[str]],
    texts: Iterable[str] | None = None,
    *,
    terms: Iterable[Sequence[str] | Sequence[int]] | None = None,
    vectors: Iterable[Mapping[str, float] | Mapping[int, float]] | CsrArrays | None = None,
    placement: str = "passages",
    exact: bool = False,
    analyzer: Analyzer | str | None = None,
    bm25: BM25 | str | Mapping[str, Any] | None = None,
    memory_bytes: int = BUILD_BYTES,
    replace: bool = False,
    progress: Progress | None = None,
) -> list[PostingsReport]:
    """Builds postings in several directories, for `SplitPostings`. Record i is the i-th text, as in
    one index.

    Args:
        paths: directories; each is made if it is not there, and must hold nothing but what an
            interrupted build has left, or a part of a collection that `replace` allows to be
            replaced.
        replace: collections that are there, of each all parts; they stay as they are until the new
            one is whole. Anything else is refused.
        texts, terms, vectors, exact, analyzer, bm25, memory_bytes, progress: see
            `espnx.Postings.build`.
        placement: ``passages``: record i lies in directory i modulo their number, with all of its
            postings; a search takes the best of each. ``terms``: each list lies whole in one
            directory, so that all have about as many bytes of lists, and every directory has the
            lengths of all records (RAGX, section 3.2); a search takes every posting's part of the
            score from them.

    Returns:
        What was written in each directory. Impacts have the same steps in all of them.

    Raises what `espnx.Postings.build` raises. Manifests come last: until they are all there, the
    collection cannot be opened. A build that was interrupted begins anew.
    """
    records = Records(texts, terms, vectors)
    if records.has_ids:
        raise errors.InvalidInputError(
            "records of a collection over several directories",
            got="ids",
            expected="records alone",
            fix=(
                "leave the ids out: what is found is named by number, in the order in which the "
                "records came"
            ),
        )
    if placement not in PLACEMENTS:
        raise errors.InvalidInputError(
            "placement", got=repr(placement), expected=" or ".join(map(repr, PLACEMENTS))
        )
    check_whole("memory_bytes", memory_bytes := plain(memory_bytes), 1 << 20)
    directories = directories_of(paths)
    if len({os.path.realpath(each) for each in directories}) < len(directories):
        raise errors.InvalidInputError(
            "directories of a collection", got=directories, expected="each once"
        )
    kind = "bm25" if vectors is None else "float" if exact else "impact"
    facts = Facts(kind, analyzer_of(analyzer), bm25_of(bm25))
    with ExitStack() as held:
        engine = held.enter_context(NativeEngine("auto"))
        for directory in directories:
            make_given_directory(directory)
        check_replaceable(
            engine,
            [
                directory
                for directory in directories
                if check_target(directory, KIND, replace=replace)
            ],
        )
        there = [
            held.enter_context(writing_to(directory, KIND, replace=replace))
            for directory in directories
        ]
        if any(there):
            finish_replacement(engine, directories)
            check_replaceable(
                engine,
                [
                    directory
                    for directory, is_there in zip(directories, there, strict=True)
                    if is_there
                ],
            )
        # All may be used: only now anything is removed.
        pairs = zip(directories, there, strict=True)
        number = max(
            begin_version(engine, directory, is_replacement=is_there)[1]
            for directory, is_there in pairs
        )
        for directory in directories:
            remove_work(directory)  # of a build of one index
        work = _Work(engine, directories, number, facts, memory_bytes, progress)
        return work.by_passage(records) if placement == "passages" else work.by_term(records)


class _Work:
    """A build under way."""

    def __init__(
        self,
        engine: NativeEngine,
        directories: list[str],
        number: int,
        facts: Facts,
        memory_bytes: int,
        progress: Progress | None,
    ):
        self._engine, self._directories, self._facts = engine, directories, facts
        # of the version; name of the segments that stay
        self._number, self._part = number, f"s{number}"
        self._memory_bytes, self._progress = memory_bytes, progress

    def by_passage(self, records: Records) -> list[PostingsReport]:
        """Records in turn; all builders are open at once, each with its share of the memory."""
        share = max(1 << 20, self._memory_bytes // len(self._directories))
        turns = _Turns([self._builder(directory, share) for directory in self._directories])
        try:
            _use_up(records.add_to(turns))
            largest = turns.largest_weights() if self._facts.kind == "impact" else None
            written = [
                SegmentFacts(
                    self._part,
                    0,
                    builder.n_records,
                    self._write(directory, self._part, builder.sections(largest)),
                )
                for directory, builder in zip(self._directories, turns.builders, strict=True)
            ]
            return self._publish(
                "passages",
                written,
                [builder.n_raised for builder in turns.builders],
                turns.n_records,
            )
        finally:
            turns.close()

    def by_term(self, records: Records) -> list[PostingsReport]:
        """All lists in the first directory, then those of each directory from there."""
        first = self._directories[0]
        builder = self._builder(first, self._memory_bytes)
        try:
            _use_up(records.add_to(builder))
            facts = SegmentFacts(
                _WHOLE, 0, builder.n_records, self._write(first, _WHOLE, builder.sections())
            )
        finally:
            builder.close()
        whole = open_segment(self._engine, first, self._facts, facts)
        try:
            homes = _even_homes(whole, len(self._directories))
            written = [
                SegmentFacts(
                    self._part, 0, builder.n_records, self._write_terms(whole, homes == part, part)
                )
                for part in range(len(self._directories))
            ]
        finally:
            whole.close()
        remove_files(first, [facts.file_name])
        # nobody knows of which lists: what is written again is as it was
        raised = [builder.n_raised] + [0] * (len(written) - 1)
        return self._publish("terms", written, raised, builder.n_records)

    def _write(
        self, directory: str, name: str, contents: Iterable[SectionContent]
    ) -> dict[str, Section]:
        with SegmentFile(self._engine, directory, name) as file:
            return file.finish(contents)

    def _builder(self, directory: str, memory_bytes: int) -> SegmentBuilder:
        return SegmentBuilder(
            self._engine,
            directory,
            kind=KINDS[self._facts.kind],
            analyzer=self._facts.analyzer,
            memory_bytes=memory_bytes,
            progress=self._progress,
        )

    def _write_terms(self, whole: Segment, wanted: np.ndarray, part: int) -> dict[str, Section]:
        """The sections of one directory, with the lists of the terms that are wanted."""
        directory, held = self._directories[part], whole.dictionary
        lengths = None if whole.lengths is None else whole.length_table[whole.lengths.codes]
        writer = SegmentWriter(
            self._engine,
            directory,
            salt=secrets.randbits(32),
            kind=held.kind,
            n_records=len(whole),
            n_postings=int(held.df[wanted].sum(dtype=np.int64)),
            memory_bytes=self._memory_bytes,
            progress=self._progress or (lambda _what, _done, _total: None),
        )
        try:
            return self._write(
                directory, self._part, writer.sections(self._chosen(whole, wanted), lengths)
            )
        finally:
            writer.close()

    def _chosen(self, whole: Segment, wanted: np.ndarray) -> Iterator[TermPostings]:
        """Postings of the terms that are wanted, as many at a time as memory has room for; one term
        at least."""
        budget = max(1 << 16, self._memory_bytes // _BYTES_A_MERGED_POSTING)
        total, first = np.cumsum(whole.dictionary.df, dtype=np.int64), 0
        while first < len(whole.dictionary):
            before = int(total[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(total, before + budget, side="right")))
            yield _only(kept_postings(self._engine, whole, first, end, None, 0), wanted[first:end])
            first = end

    def _publish(
        self, placement: str, written: list[SegmentFacts], n_raised: list[int], total: int
    ) -> list[PostingsReport]:
        collection, reports = secrets.token_hex(16), []
        for directory, segment, raised in zip(self._directories, written, n_raised, strict=True):
            self._engine.sync_directory(directory)
            facts = dataclasses.replace(self._facts, segments=(segment,))
            reports.append(report_of(self._engine, directory, facts, segment, Rounding(0, raised)))
        splits = [
            SplitFacts(collection, part, len(written), placement, total)
            for part in range(len(written))
        ]
        parts = [
            dataclasses.replace(
                self._facts, segments=(segment,), generation=self._number, split=split
            )
            for segment, split in zip(written, splits, strict=True)
        ]
        publish_parts(self._engine, self._directories, parts)
        rounding = Rounding(sum(report.n_postings for report in reports), sum(n_raised))
        warn_of_rounding(self._directories[0], rounding, stacklevel=4)
        return reports


def _use_up(records: Iterator[object]) -> None:
    for _ in records:
        pass


class _Turns:
    """Builders that take records in turn; to `Records` it is one."""

    def __init__(self, builders: list[SegmentBuilder]):
        self.builders, self.n_records = builders, 0

    def _next(self) -> SegmentBuilder:
        self.n_records += 1
        return self.builders[(self.n_records - 1) % len(self.builders)]

    def resumed(self, items: Iterator[T], _identity: Callable[[T], bytes]) -> Iterator[T | None]:
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

    def largest_weights(self) -> LargestWeights:
        """The largest weight of each term in the records of all parts."""
        for builder in self.builders:
            builder.sort_rest()
        return functools.reduce(
            LargestWeights.joined, (builder.largest_weights() for builder in self.builders)
        )

    def close(self) -> None:
        for builder in self.builders:
            builder.close()


def _even_homes(whole: Segment, n_parts: int) -> np.ndarray:
    """int64 [terms]: the directory of each list: the longest first, each to the directory that has
    the fewest bytes so far."""
    sizes = np.diff(whole.dictionary.first.astype(np.int64))
    homes, loads = np.empty(len(sizes), np.int64), [(0, part) for part in range(n_parts)]
    for term in np.argsort(-sizes, kind="stable").tolist():
        load, part = loads[0]
        heapq.heapreplace(loads, (load + int(sizes[term]), part))
        homes[term] = part
    return homes


def _only(postings: TermPostings, wanted: np.ndarray) -> TermPostings:
    """The postings of those of these terms that are wanted, bool [n]."""
    of_posting = np.repeat(wanted, postings.counts)
    names = [
        name for name, is_wanted in zip(postings.names, wanted.tolist(), strict=True) if is_wanted
    ]
    return TermPostings(
        names,
        postings.hashes[wanted],
        postings.counts[wanted],
        postings.records[of_posting],
        postings.values[of_posting],
    )
