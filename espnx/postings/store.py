"""A directory of postings that stands alone: what a user builds, opens and searches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from .. import errors
from ..checks import check_path, check_whole
from ..sizes import format_size
from ..storage import FaultRule, NativeEngine
from ..storage.files import make_given_directory
from ..storage.lock import DirectoryLock
from ..storage.manifest import open_current
from .analyzer import Analyzer
from .bm25 import BM25
from .build.builder import MEMORY_BYTES, SegmentBuilder
from .build.records import CsrArrays, add_records, source_name
from .build.resume import RUNS_VERSION, KeptRuns
from .build.writer import Progress
from .deletions import Deletions
from .files import PostingsReport, clear_leftovers, open_all, report_of, write_sections
from .format import KINDS, Facts, SegmentFacts, check_whole_collection, read_facts, write_facts
from .inspection import Explanation, VerifyReport, explain, verify
from .queries import Query, mask_of, rule_of, terms_of
from .search.plan import Collection
from .search.search import Found, PostingsSearch, PostingsState
from .search.two_step import search_two_step
from .stored.segment import Segment


class Postings:
    """BM25 over posting lists on storage, open for searches: a bm25s whose index need not fit in memory.

    In memory are the dictionary, at most 24 bytes a term, and the lengths of the records, two bytes each. Every method may be called from
    any thread. A context manager.

    >>> import espnx                                                        # doctest: +SKIP
    >>> espnx.Postings.build("my.bm25", texts)
    >>> with espnx.Postings.open("my.bm25") as postings:
    ...     found = postings.search("who writes to the log?", k=10)
    ...     found.numbers[0], found.scores[0]

    Args:
        path: of a directory that `build` has made.
        engine: path of the reads: ``auto``, ``uring``, ``posix`` or ``memory``, or a file of settings.
        rules, fault_seed: injected faults (tests).

    Raises:
        StoreNotFoundError, FormatError, ChecksumError, TruncatedFileError, FileMissingError: no postings, or damaged ones.
        PathUnavailableError: the named path cannot be had here.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, engine: str | os.PathLike[str] = "auto", rules: Sequence[FaultRule] = (), fault_seed: int = 0
    ):
        self.directory = check_path("directory of postings", path)
        self._engine = NativeEngine(engine, rules=rules, seed=fault_seed)
        try:
            self.facts, self._segments, self._deletions = open_current(self.directory, self._open)
            self._search = PostingsSearch(self._engine, self._collection())
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[Facts, list[Segment], Deletions]:
        facts = read_facts(self._engine, self.directory)
        check_whole_collection(facts, self.directory)
        return facts, *open_all(self._engine, self.directory, facts)

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Postings:
        """As the class itself."""
        return cls(path, **options)

    @classmethod
    def build(
        cls,
        path: str | os.PathLike[str],
        texts: Iterable[str] | None = None,
        *,
        terms: Iterable[Sequence[str] | Sequence[int]] | None = None,
        vectors: Iterable[Mapping[str, float] | Mapping[int, float]] | CsrArrays | None = None,
        exact: bool = False,
        analyzer: Analyzer | None = None,
        bm25: BM25 | None = None,
        memory_bytes: int = MEMORY_BYTES,
        progress: Progress | None = None,
    ) -> PostingsReport:
        """Builds postings in a new directory. Record i is the i-th text.

        A build by way of a spool that was interrupted goes on when it is begun again with the same input and options: the input is read
        anew, and of what is the same as in the attempt before nothing is cut and sorted again. The result is the same, bytes included.

        Args:
            path: made if it is not there; must hold nothing but what an interrupted build has left.
            texts: cut by the analyzer, one at a time: any iterable.
            terms: instead of texts: the terms of each record, as often as it has them.
            vectors: instead of texts: sparse vectors (SPLADE's, or any) as mappings of terms to weights above 0; a number stands for its
                digits. Or `CsrArrays`.
            exact: of vectors: weights stay float32; else one byte each, in steps of a 255th of the largest.
            analyzer: None: `Analyzer()`: lower case, words of two letters or more, no stop words, no stemming.
            bm25: how counts become scores where a search does not say; any search may say otherwise.
            memory_bytes: what the build may take, beyond two bytes a record and the dictionary. A larger corpus goes by way of a spool in
                the directory, of 8 bytes a posting.
            progress: is called with what is being done, how much is done, and of how much (0: nobody knows).

        Raises:
            InvalidInputError: arguments; a directory that holds something else.
            StoreBusyError: another process writes there.
            WriteError, DiskFullError: there are no postings then.
        """
        given = [name for name, value in (("texts", texts), ("terms", terms), ("vectors", vectors)) if value is not None]
        if len(given) != 1:
            raise errors.InvalidInputError("postings", got=" and ".join(given) or "nothing", expected="one of texts, terms and vectors")
        check_whole("memory_bytes", memory_bytes, 1 << 20)
        directory = check_path("directory of postings", path)
        make_given_directory(directory)
        kind = "bm25" if vectors is None else "float" if exact else "impact"
        facts = Facts(kind, analyzer or Analyzer(), bm25 or BM25())
        with DirectoryLock(directory), NativeEngine("auto") as engine:
            clear_leftovers(directory)
            job = {"runs": RUNS_VERSION, "kind": kind, "analyzer": facts.analyzer.digest, "source": source_name(texts, terms, vectors)}
            kept = KeptRuns(engine, directory, job)
            builder = SegmentBuilder(
                engine, directory, kind=KINDS[facts.kind], analyzer=facts.analyzer, memory_bytes=memory_bytes, progress=progress, kept=kept
            )
            try:
                add_records(builder, texts=texts, terms=terms, vectors=vectors)
                sizes = write_sections(engine, directory, "s1", builder.sections())
            finally:
                builder.close()
            segment = SegmentFacts("s1", 0, builder.n_records, sizes)
            facts = replace(facts, segments=(segment,))
            engine.sync_directory(directory)
            write_facts(engine, directory, facts)
            kept.remove()
            return report_of(engine, directory, facts, segment)

    def __len__(self) -> int:
        return len(self._search)

    def __repr__(self) -> str:
        return f"<Postings: {len(self):,} records, {self.facts.kind}, {self.directory}>"

    @property
    def searcher(self) -> PostingsSearch:
        """What searches go by, for callers that bring terms and masks of their own."""
        return self._search

    @property
    def path_of_reads(self) -> str:
        """The engine's effective path."""
        return self._engine.effective

    @property
    def memory_bytes(self) -> int:
        """Of dictionaries and lengths."""
        return sum(segment.memory_bytes for segment in self._segments)

    @property
    def n_terms(self) -> int:
        """Of all segments, each for itself."""
        return sum(len(segment.dictionary) for segment in self._segments)

    @property
    def n_postings(self) -> int:
        return sum(segment.dictionary.n_postings for segment in self._segments)

    def summary(self) -> str:
        """What it is, in a few lines."""
        sizes = f"{format_size(self.facts.size_bytes)} on storage, {format_size(self.memory_bytes)} in memory"
        reason = self._engine.fallback_reason
        return "\n".join(
            [
                f"{len(self):,} records, {self.n_terms:,} terms, {self.n_postings:,} postings in {len(self._segments)} segments; {sizes}",
                self._what(),
                f"reads by {self._engine.effective}{f' ({reason})' if reason else ''}",
            ]
        )

    def _what(self) -> str:
        rule = self.facts.bm25
        if self.facts.kind == "bm25":
            return f"BM25 {rule.variant}, k1 {rule.k1:g}, b {rule.b:g}, where a search does not say"
        return "sparse vectors, weights in one byte" if self.facts.kind == "impact" else "sparse vectors, weights in float32"

    def search(
        self,
        queries: Query | Sequence[Query],
        k: int = 10,
        *,
        variant: str | None = None,
        k1: float | None = None,
        b: float | None = None,
        delta: float | None = None,
        include: Any = None,
        exclude: Any = None,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ) -> Found:
        """The k best records of each query.

        Args:
            queries: a text, which the analyzer cuts, or a list of texts; or terms, or a mapping of terms to weights, or a list of those
                (a list of texts is several queries, a tuple of terms is one).
            k: 1 or more.
            variant, k1, b, delta: of BM25, see `BM25`; None: those of the build.
            include, exclude: records that alone may be found, or may not: bool [n], or numbers.
            threads: at most so many scan; None: as many as torch uses, one for a query alone.
            deadline_s: of each query's reads.

        Returns:
            A row for each query. A record is found only if it has a term of the query; scores are those of bm25s in float32, summed in the
            order of the query's terms, of which one that comes twice counts twice.

        Raises:
            InvalidInputError: of arguments.
            ChecksumError: a list is damaged. ReadError, TruncatedFileError, DeadlineExceededError: of reads. No result is given then.
            EngineClosedError: after `close`.
        """
        rule = rule_of(self.facts.bm25, variant=variant, k1=k1, b=b, delta=delta)
        return self._search.search(
            terms_of(queries, self.facts.analyzer), k, bm25=rule, allowed=self._allowed(include, exclude), threads=threads,
            deadline_s=deadline_s,
        )  # fmt: skip

    def search_two_step(
        self,
        queries: Query | Sequence[Query],
        k: int = 10,
        *,
        query_terms: int = 16,
        candidates: int = 100,
        whole_terms: int = 8,
        include: Any = None,
        exclude: Any = None,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ) -> Found:
        """The k best by exact scores among candidates that a few lists have given: of vectors, and lossy.

        Args:
            query_terms: terms of each query that give candidates: those that can weigh most; of long lists, the first layer alone.
            candidates: of each query, k or more; each is a read of its forward record.
            whole_terms: of these terms, the heaviest, whose lists are read whole.
            queries, k, include, exclude, threads, deadline_s: see `search`.

        Returns:
            As `search`; scores are the same for each record, bits included. Costs are those of both steps; of terms whose lists are not
            read, the first query that asks for one reads its name.

        Raises as `search`, and InvalidInputError for BM25.
        """
        return search_two_step(
            self._search, terms_of(queries, self.facts.analyzer), k, query_terms=query_terms, candidates=candidates,
            whole_terms=whole_terms, allowed=self._allowed(include, exclude), threads=threads, deadline_s=deadline_s,
        )  # fmt: skip

    def begin(self, query: Query, k: int = 10, *, include: Any = None, exclude: Any = None, deadline_s: float = 30.0) -> PostingsState:
        """Starts one query's reads; its result, or a first one of some of its terms, is asked for later. Raises as `search`."""
        allowed = self._allowed(include, exclude)
        (terms,) = terms_of([query], self.facts.analyzer)
        return self._search.begin(terms, k, bm25=self.facts.bm25, allowed=allowed, deadline_s=deadline_s)

    def explain(
        self,
        query: Query,
        number: int,
        *,
        variant: str | None = None,
        k1: float | None = None,
        b: float | None = None,
        delta: float | None = None,
    ) -> Explanation:
        """How a record's score for a query comes about: which terms, and how much of each. Reads the lists of those terms.

        Raises InvalidInputError for a number that no record has; else as `search`.
        """
        check_whole("number of a record", number, 0, max(0, self.facts.end_number - 1))
        (terms,) = terms_of([query], self.facts.analyzer)
        rule = rule_of(self.facts.bm25, variant=variant, k1=k1, b=b, delta=delta)
        if number in self._deletions.numbers:
            return Explanation(number, (), 0.0, None, is_deleted=True)
        return explain(self._engine, self._search.collection, terms, number, rule)

    def verify(self) -> VerifyReport:
        """Reads all that there is, and checks it. Raises ChecksumError, FormatError: the first thing that is not what was written."""
        return verify(self._engine, self._segments)

    def _collection(self) -> Collection:
        held = self._deletions
        removed = [held.of_segment(i) for i in range(len(self._segments))] if held.n_present else None
        return Collection(self._segments, (len(held.numbers), held.sum_lengths), removed)

    def _allowed(self, include: Any, exclude: Any) -> list[np.ndarray | None] | None:
        allowed, deleted = mask_of(include, exclude, self.facts.end_number), self._deletions.numbers
        if self._deletions.n_present:
            allowed = np.ones(self.facts.end_number, bool) if allowed is None else allowed
            allowed[deleted] = False
        if allowed is None:
            return None
        return [
            np.packbits(allowed[segment.first_number : segment.first_number + len(segment)], bitorder="little")
            for segment in self._segments
        ]

    def close(self) -> None:
        """Ends the reads; may be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
