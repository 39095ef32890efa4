"""A directory of postings that stands alone: what a user builds, opens and searches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from .. import errors
from ..checks import check_path, check_whole
from ..sizes import format_size
from ..storage import FaultRule, NativeEngine
from ..storage.files import StreamWriter, make_given_directory
from ..storage.lock import LOCK_NAME, DirectoryLock
from ..storage.manifest import NAME as MANIFEST
from .analyzer import Analyzer
from .bm25 import BM25
from .builder import MEMORY_BYTES, SegmentBuilder
from .format import KINDS, Facts, SegmentFacts, read_facts, write_facts
from .plan import QueryTerms
from .records import CsrArrays, add_records
from .search import Found, PostingsSearch, PostingsState
from .segment import Segment
from .two_step import search_two_step
from .writer import Progress

Query = str | QueryTerms


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
        self._segments: list[Segment] = []
        try:
            self.facts: Facts = read_facts(self._engine, self.directory)
            for segment in self.facts.segments:
                self._segments.append(open_segment(self._engine, self.directory, self.facts, segment))
            self._search = PostingsSearch(self._engine, self._segments)
        except BaseException:
            self.close()
            raise

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
            builder = SegmentBuilder(
                engine, directory, kind=KINDS[facts.kind], analyzer=facts.analyzer, memory_bytes=memory_bytes, progress=progress
            )
            try:
                add_records(builder, texts=texts, terms=terms, vectors=vectors)
                segment = write_segment(engine, directory, builder, "s1", 0)
            finally:
                builder.close()
            facts = replace(facts, segments=(segment,))
            engine.sync_directory(directory)
            write_facts(engine, directory, facts)
            return report_of(engine, directory, facts, segment)

    def __len__(self) -> int:
        return len(self._search)

    def __repr__(self) -> str:
        return f"<Postings: {len(self):,} records, {self.facts.kind}, {self.directory}>"

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
        rule = self.facts.bm25
        sizes = f"{format_size(self.facts.size_bytes)} on storage, {format_size(self.memory_bytes)} in memory"
        reason = self._engine.fallback_reason
        return "\n".join(
            [
                f"{len(self):,} records, {self.n_terms:,} terms, {self.n_postings:,} postings in {len(self._segments)} segments; {sizes}",
                f"BM25 {rule.variant}, k1 {rule.k1:g}, b {rule.b:g}, where a search does not say",
                f"reads by {self._engine.effective}{f' ({reason})' if reason else ''}",
            ]
        )

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
        given = {"variant": variant, "k1": k1, "b": b, "delta": delta}
        return self._search.search(
            [self._terms(query) for query in _as_queries(queries)], k, bm25=self._rule(given), allowed=self._allowed(include, exclude),
            threads=threads, deadline_s=deadline_s,
        )  # fmt: skip

    def search_two_step(
        self,
        queries: Query | Sequence[Query],
        k: int = 10,
        *,
        query_terms: int = 8,
        candidates: int = 200,
        include: Any = None,
        exclude: Any = None,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ) -> Found:
        """The k best by exact scores among candidates that a few lists have given: of vectors, and lossy.

        Args:
            query_terms: terms of each query that give candidates: those that can weigh most; of long lists, the first layer alone.
            candidates: of each query, k or more; each is a read of its forward record.
            queries, k, include, exclude, threads, deadline_s: see `search`.

        Returns:
            As `search`; scores are the same for each record, bits included. Costs are those of both steps.

        Raises as `search`, and InvalidInputError for BM25.
        """
        return search_two_step(
            self._search, [self._terms(query) for query in _as_queries(queries)], k, query_terms=query_terms, candidates=candidates,
            allowed=self._allowed(include, exclude), threads=threads, deadline_s=deadline_s,
        )  # fmt: skip

    def begin(self, query: Query, k: int = 10, *, include: Any = None, exclude: Any = None, deadline_s: float = 30.0) -> PostingsState:
        """Starts one query's reads; its result, or a first one of some of its terms, is asked for later. Raises as `search`."""
        allowed = self._allowed(include, exclude)
        return self._search.begin(self._terms(query), k, bm25=self.facts.bm25, allowed=allowed, deadline_s=deadline_s)

    def _rule(self, given: Mapping[str, Any]) -> BM25:
        named = {name: value for name, value in given.items() if value is not None}
        if not named:
            return self.facts.bm25
        own = self.facts.bm25
        return BM25(**{"variant": own.variant, "k1": own.k1, "b": own.b, "delta": own.delta, **named})

    def _terms(self, query: Query) -> QueryTerms:
        return self.facts.analyzer.terms(query) if isinstance(query, str) else query

    def _allowed(self, include: Any, exclude: Any) -> list[np.ndarray | None] | None:
        if include is None and exclude is None:
            return None
        allowed = np.ones(self.facts.end_number, bool)
        if include is not None:
            allowed &= self._marked("include", include)
        if exclude is not None:
            allowed &= ~self._marked("exclude", exclude)
        return [
            np.packbits(allowed[segment.first_number : segment.first_number + len(segment)], bitorder="little")
            for segment in self._segments
        ]

    def _marked(self, name: str, given: Any) -> np.ndarray:
        values, total = np.asarray(given), self.facts.end_number
        if values.dtype == bool and values.shape == (total,):
            return values
        if values.size == 0:
            values = values.astype(np.int64)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise errors.InvalidInputError(
                name, got=f"{values.dtype} {list(values.shape)}", expected=f"bool [{total}], or numbers of records"
            )
        if values.size and not 0 <= int(values.min()) <= int(values.max()) < total:
            raise errors.InvalidInputError(name, got=f"numbers from {values.min()} to {values.max()}", expected=f"from 0 to {total - 1}")
        marked = np.zeros(total, bool)
        marked[values] = True
        return marked

    def close(self) -> None:
        """Ends the reads; may be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _as_queries(queries: Query | Sequence[Query]) -> list[Query]:
    if isinstance(queries, (str, Mapping, tuple)):
        return [queries]
    return list(queries)  # type: ignore[arg-type]


def open_segment(engine: NativeEngine, directory: str, facts: Facts, segment: SegmentFacts) -> Segment:
    """A segment that a manifest names. Raises as `Segment`, and FormatError where it is not the one that the manifest means."""
    found = Segment(engine, segment.regions(directory), first_number=segment.first_number)
    if len(found) != segment.n_records or found.dictionary.kind != KINDS[facts.kind]:
        got = f"{len(found)} records of kind {found.dictionary.kind}"
        expected = f"{segment.n_records} of {facts.kind}"
        found.close()
        raise errors.FormatError(f"segment {segment.name} of postings", path=directory, got=got, expected=expected)
    return found


def write_segment(engine: NativeEngine, directory: str, builder: SegmentBuilder, name: str, first_number: int) -> SegmentFacts:
    """The files of a segment, flushed. Raises WriteError, DiskFullError."""
    sizes: dict[str, int] = {}
    for section, parts in builder.sections():
        with StreamWriter(engine, os.path.join(directory, f"{name}.{section}")) as writer:
            for part in parts:
                writer.write(part)
            writer.sync()
            sizes[section] = writer.size_bytes
    return SegmentFacts(name, first_number, builder.n_records, sizes)


def report_of(engine: NativeEngine, directory: str, facts: Facts, segment: SegmentFacts) -> PostingsReport:
    """Of a segment that was written."""
    found = open_segment(engine, directory, facts, segment)
    try:
        held = found.dictionary
        return PostingsReport(segment.n_records, len(held), held.n_postings, sum(segment.sizes.values()), found.memory_bytes)
    finally:
        found.close()


def clear_leftovers(directory: str) -> None:
    """Of an interrupted build. Raises InvalidInputError where postings, or anything else, are there."""
    there = set(os.listdir(directory)) - {LOCK_NAME}
    if MANIFEST in there:
        raise errors.InvalidInputError(f"directory {directory}", got="postings, or another store", expected="a new directory")
    if foreign := sorted(name for name in there if not is_own_file(name)):
        raise errors.InvalidInputError(
            f"directory {directory}", got=foreign[:3], expected="an empty directory, or what an interrupted build has left"
        )
    remove_files(directory, there)


def is_own_file(name: str) -> bool:
    """Whether a file's name is one that this package gives."""
    from .format import SECTIONS

    stem, _, suffix = name.rpartition(".")
    if suffix in SECTIONS:
        return stem[:1] == "s" and stem[1:].isdigit()
    return name == f"{MANIFEST}.new" or (suffix == "tmp" and stem.startswith("spool-")) or (suffix == "removed" and stem[1:].isdigit())


def remove_files(directory: str, names: Iterable[str]) -> None:
    """Raises WriteError."""
    from ..storage.files import write_error

    for name in names:
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise write_error("cannot remove a file of postings", os.path.join(directory, name), error) from error
