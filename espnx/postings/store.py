"""A directory of postings that stands alone: what a user builds, opens and searches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from types import TracebackType
from typing import Any, Self, overload

import numpy as np

from .. import errors
from ..checks import check_path, check_whole, plain
from ..sizes import BUILD_BYTES, format_size
from ..storage import FaultRule, NativeEngine
from ..storage.documents.ids import DocumentId, document_ids
from ..storage.manifest import open_current
from ..storage.replacing import writing_to
from ..suggestions import suggests_keywords
from .adding import built_segment
from .analyzer import Analyzer
from .bm25 import BM25
from .build.builder import SegmentBuilder
from .build.records import CsrArrays, Records
from .build.resume import RUNS_VERSION, KeptRuns
from .build.writer import Progress
from .compaction import Rounding
from .deletions import Deletions
from .files import (
    KIND,
    PostingsReport,
    begin_version,
    documents_of,
    open_all,
    remove_others,
    report_of,
    warn_of_rounding,
)
from .format import KINDS, Facts, check_whole_collection, read_facts, write_facts
from .inspection import Explanation, VerifyReport, explain, verify
from .queries import Query, analyzer_of, bm25_of, ids_or_mask, mask_of, rule_of, terms_of
from .search.plan import Collection, QueryTerms
from .search.search import Found, PostingsSearch, PostingsState
from .search.two_step import search_two_step
from .stored.segment import Segment


class Postings:
    """BM25 over posting lists on storage, open for searches: a bm25s whose index need not fit in
    memory.

    In memory are the dictionary, at most 24 bytes a term, and the lengths of the records, two bytes
    each. Every method may be called from any thread. A context manager.

    >>> import espnx                                                        # doctest: +SKIP
    >>> espnx.Postings.build("my.bm25", [("a", "The log is written."), ("b", "A disk writes.")])
    >>> with espnx.Postings.open("my.bm25") as postings:
    ...     for hit in postings.search("who writes to the log?", k=10)[0]:
    ...         print(hit.id, hit.score)

    Args:
        path: of a directory that `build` has made.
        engine: path of the reads: ``auto``, ``uring``, ``posix`` or ``memory``, or a file of
            settings.
        rules, fault_seed: injected faults (tests).

    Raises:
        StoreNotFoundError, FormatError, ChecksumError, TruncatedFileError, FileMissingError: no
            postings, or damaged ones.
        PathUnavailableError: the named path cannot be had here.
    """

    @suggests_keywords
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        engine: str | os.PathLike[str] = "auto",
        rules: Sequence[FaultRule] = (),
        fault_seed: int = 0,
    ):
        self.directory = check_path("directory of postings", path)
        self._engine = NativeEngine(engine, rules=rules, seed=fault_seed)
        try:
            self.facts, self._segments, self._deletions = open_current(self.directory, self._open)
            self._search = PostingsSearch(self._engine, self._collection())
            self._documents = documents_of(
                self._engine, self.facts.segments, self._segments, self._deletions
            )
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[Facts, list[Segment], Deletions]:
        facts = read_facts(self._engine, self.directory)
        check_whole_collection(facts, self.directory)
        return facts, *open_all(self._engine, self.directory, facts)

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Postings:
        """Opens postings; arguments and errors are those of the class."""
        return cls(path, **options)

    @classmethod
    @suggests_keywords
    def build(
        cls,
        path: str | os.PathLike[str],
        texts: Iterable[Any] | None = None,
        *,
        terms: Iterable[Any] | None = None,
        vectors: Iterable[Any] | CsrArrays | None = None,
        ids: Iterable[DocumentId] | None = None,
        keep_texts: bool = False,
        exact: bool = False,
        analyzer: Analyzer | str | None = None,
        bm25: BM25 | str | Mapping[str, Any] | None = None,
        memory_bytes: int = BUILD_BYTES,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> PostingsReport:
        """Builds postings in a directory. Record i is the i-th text.

        A build by way of a spool that was interrupted goes on when it is begun again with the same
        input and options: the input is read anew, and of what is the same as in the attempt before
        nothing is cut and sorted again. The result is the same, bytes included.

        Args:
            path: made if it is not there; must hold nothing but what an interrupted build has left,
                or postings that `replace` allows to be replaced.
            texts: cut by the analyzer, one at a time: any iterable of texts, of (id, text) pairs,
                or of mappings with ``text``, and perhaps ``id`` (or ``_id``) and ``title``, which
                is put before the text (`espnx.read_corpus`); or a mapping of ids to texts.
            terms: instead of texts: the terms of each record, as often as it has them, or (id,
                terms) pairs; or what ``bm25s.tokenize`` gives.
            vectors: instead of texts: sparse vectors (SPLADE's, or any) as mappings of terms to
                weights above 0; a number stands for its digits. Or (id, mapping) pairs, or
                `CsrArrays`.
            ids: text, or whole numbers of 64 bits, each once: of the records, in their order, where
                they do not bring them. Records have ids either all or none; a store with ids names
                records by them, but for `explain`.
            keep_texts: hits have the texts that were indexed, and `get` finds them.
            exact: of vectors: weights stay float32; else one byte each: 1 to 255 steps, of each
                list the least power of two of which that many reach its largest weight. What is
                below half a step is one, and is counted in the report.
            analyzer: None: `Analyzer()`: lower case, words of two letters or more, no stop words,
                no stemming. A language: `Analyzer.of`.
            bm25: how counts become scores where a search does not say; any search may say
                otherwise. A variant, or some of its fields.
            memory_bytes: what the build may take, beyond two bytes a record (with ids or texts 34)
                and the dictionary. A larger corpus goes by way of a spool in the directory, of 8
                bytes a posting.
            replace: postings that are there, which stay as they are until the new ones are whole.
                Anything else is refused as ever, a part of a collection too.
            progress: is called with what is being done, how much is done, and of how much (0:
                nobody knows).

        Raises:
            InvalidInputError: arguments; an id that comes twice; a directory that holds something
                else, or postings that are not to be replaced.
            StoreBusyError: another process writes there.
            WriteError, DiskFullError: there are no postings then, or those before.
        """
        directory = check_path("directory of postings", path)
        check_whole("memory_bytes", memory_bytes := plain(memory_bytes), 1 << 20)
        how = analyzer_of(analyzer), bm25_of(bm25)
        records = Records(texts, terms, vectors, ids)
        if keep_texts and records.source != "texts":
            raise errors.InvalidInputError(
                "keep_texts", got=f"{records.source} alone", expected="texts to keep"
            )
        kind = "bm25" if vectors is None else "float" if exact else "impact"
        facts = Facts(kind, *how, has_ids=records.has_ids, has_texts=bool(keep_texts))
        return _built(
            directory,
            records,
            facts,
            memory_bytes=memory_bytes,
            is_allowed_to_replace=replace,
            progress=progress,
        )

    def __len__(self) -> int:
        return len(self._search)

    def __contains__(self, identifier: object) -> bool:
        """Whether it has a record of this id; without ids, of this number."""
        try:
            return bool(self.numbers([identifier])[0] >= 0)  # type: ignore[list-item]
        except errors.InvalidInputError:
            return False

    def numbers(self, ids: Iterable[DocumentId]) -> np.ndarray:
        """int64: the number of each id's record, -1 where there is none; without ids, of each
        number that a record has, itself.

        Raises InvalidInputError for what is no collection of ids, and what a read raises.
        """
        wanted = document_ids(ids)
        if self.facts.has_ids:
            return self._documents.numbers(wanted)
        end = self.facts.end_number
        given = np.array(
            [each if isinstance(each, int) and 0 <= each < end else -1 for each in wanted], np.int64
        )
        given[self._deletions.is_deleted(given)] = -1
        return given

    def ids(self) -> Iterator[DocumentId]:
        """Yields the ids of all records, in the order of their numbers; without ids, these. Raises
        what a read raises."""
        if self.facts.has_documents:
            yield from (identifier for _, (identifier, _) in self._documents.rows())
            return
        deleted = set(self._deletions.numbers.tolist())
        yield from (number for number in range(self.facts.end_number) if number not in deleted)

    @overload
    def get(self, ids: DocumentId) -> str | None: ...  # type: ignore[overload-overlap]  # a str is an Iterable too
    @overload
    def get(self, ids: Iterable[DocumentId]) -> list[str | None]: ...

    def get(self, ids: DocumentId | Iterable[DocumentId]) -> str | list[str | None] | None:
        """The text of a record, or of several (a list, in their order), by id, or by number where
        there are no ids; None for an unknown one.

        Raises InvalidInputError where texts are not kept, and for what can be no id; and what a
        read raises.
        """
        if not self.facts.has_texts:
            raise errors.InvalidInputError(
                "texts of postings",
                got="postings without them",
                expected="texts that were kept",
                fix="build with keep_texts=True",
            )
        is_one = isinstance(ids, (str, int)) or getattr(ids, "ndim", None) == 0
        numbers = self.numbers([ids] if is_one else ids)  # type: ignore[list-item, arg-type]
        found = numbers[numbers >= 0]
        texts = dict(
            zip(found.tolist(), (text for _, text in self._documents.get(found)), strict=True)
        )
        held = [texts.get(number) for number in numbers.tolist()]
        return held[0] if is_one else held

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
        """Bytes of dictionaries and lengths."""
        return sum(segment.memory_bytes for segment in self._segments)

    @property
    def n_terms(self) -> int:
        """Terms of all segments, each counted for itself."""
        return sum(len(segment.dictionary) for segment in self._segments)

    @property
    def n_postings(self) -> int:
        return sum(segment.dictionary.n_postings for segment in self._segments)

    def summary(self) -> str:
        """What it is, in a few lines."""
        sizes = (
            f"{format_size(self.facts.size_bytes)} on storage, {format_size(self.memory_bytes)} in "
            "memory"
        )
        reason = self._engine.fallback_reason
        return "\n".join(
            [
                (
                    f"{len(self):,} records, {self.n_terms:,} terms, {self.n_postings:,} postings "
                    f"in {len(self._segments)} segments; {sizes}"
                ),
                self._what(),
                f"reads by {self._engine.effective}{f' ({reason})' if reason else ''}",
            ]
        )

    def _what(self) -> str:
        rule = self.facts.bm25
        if self.facts.kind == "bm25":
            return f"BM25 {rule.variant}, k1 {rule.k1:g}, b {rule.b:g}, where a search does not say"
        return (
            "sparse vectors, weights in one byte"
            if self.facts.kind == "impact"
            else "sparse vectors, weights in float32"
        )

    @suggests_keywords
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
            queries: a text, which the analyzer cuts, or a list of texts; or terms, or a mapping of
                terms to weights, or a list of those (a list of texts is several queries, a tuple of
                terms is one); or what ``bm25s.tokenize`` gives.
            k: 1 or more; of fewer records, as many as there are.
            variant, k1, b, delta: of BM25, see `BM25`; None: those of the build.
            include, exclude: records that alone may be found, or may not: in any collection their
                ids, where the postings have ids (one that no record has, has no effect), else their
                numbers. Or bool [n], by number.
            threads: at most so many scan; None: as many as torch uses, one for a query alone.
            deadline_s: of each query's reads.

        Returns:
            A row for each query, and as a sequence its hits. A record is found only if it has a
            term of the query; scores are those of bm25s in float32, summed in the order of the
            query's terms, of which one that comes twice counts twice.

        Raises:
            InvalidInputError: of arguments.
            ChecksumError: a list is damaged. ReadError, TruncatedFileError, DeadlineExceededError:
                of reads. No result is given then.
            EngineClosedError: after `close`.
        """
        rule = rule_of(self.facts.bm25, variant=variant, k1=k1, b=b, delta=delta)
        return self._with_rows(
            self._search.search(
                terms_of(queries, self.facts.analyzer),
                k,
                bm25=rule,
                allowed=self._allowed(include, exclude),
                threads=threads,
                deadline_s=deadline_s,
            )
        )

    def _with_rows(self, found: Found) -> Found:
        return changed(found, look_up=self._rows) if self.facts.has_documents else found

    def _rows(self, numbers: list[int]) -> list[tuple[DocumentId, str | None]]:
        return [
            (identifier, text if self.facts.has_texts else None)
            for identifier, text in self._documents.get(numbers)
        ]

    @suggests_keywords
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
        """The k best by exact scores among candidates that a few lists have given: of vectors, and
        lossy.

        Args:
            query_terms: terms of each query that give candidates: those that can weigh most; of
                long lists, the first layer alone.
            candidates: of each query, k or more; each is a read of its forward record.
            whole_terms: of these terms, the heaviest, whose lists are read whole.
            queries, k, include, exclude, threads, deadline_s: see `search`.

        Returns:
            As `search`; scores are the same for each record, bits included. Costs are those of both
            steps; of terms whose lists are not read, the first query that asks for one reads its
            name.

        Raises as `search`, and InvalidInputError for BM25.
        """
        return self._with_rows(
            search_two_step(
                self._search,
                terms_of(queries, self.facts.analyzer),
                k,
                query_terms=query_terms,
                candidates=candidates,
                whole_terms=whole_terms,
                allowed=self._allowed(include, exclude),
                threads=threads,
                deadline_s=deadline_s,
            )
        )

    def begin(
        self,
        query: Query,
        k: int = 10,
        *,
        include: Any = None,
        exclude: Any = None,
        deadline_s: float = 30.0,
    ) -> PostingsState:
        """Starts one query's reads; its result, or a first one of some of its terms, is asked for
        later. Raises as `search`."""
        allowed = self._allowed(include, exclude)
        terms = self._one(query)
        return self._search.begin(
            terms, k, bm25=self.facts.bm25, allowed=allowed, deadline_s=deadline_s
        )

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
        """How a record's score for a query comes about: which terms, and how much of each. Reads
        the lists of those terms.

        Args:
            number: of the record, as in ``Found.numbers`` and hits.

        Raises InvalidInputError for a number that no record has; else as `search`.
        """
        check_whole(
            "number of a record", number := plain(number), 0, max(0, self.facts.end_number - 1)
        )
        terms = self._one(query)
        rule = rule_of(self.facts.bm25, variant=variant, k1=k1, b=b, delta=delta)
        if number in self._deletions.numbers:
            return Explanation(number, (), 0.0, None, is_deleted=True)
        return explain(self._engine, self._search.collection, terms, number, rule)

    def verify(self) -> VerifyReport:
        """Reads all that there is, and checks it. Raises ChecksumError, FormatError: the first
        thing that is not what was written."""
        found = verify(self._engine, self._segments)
        if self.facts.has_documents:
            self._documents.check(ids_differ=self.facts.has_ids)
        return found

    def _one(self, query: Query) -> QueryTerms:
        found = terms_of(
            query if isinstance(query, (str, Mapping, tuple)) else [query], self.facts.analyzer
        )
        if len(found) != 1:
            raise errors.InvalidInputError("query", got=f"{len(found)}", expected="one")
        return found[0]

    def _collection(self) -> Collection:
        held = self._deletions
        removed = (
            [held.terms_of(segment.name) for segment in self.facts.segments]
            if held.n_present
            else None
        )
        return Collection(self._segments, (len(held.numbers), held.sum_lengths), removed)

    def _allowed(self, include: Any, exclude: Any) -> list[np.ndarray | None] | None:
        include, exclude = self._by_number("include", include), self._by_number("exclude", exclude)
        allowed, deleted = mask_of(include, exclude, self.facts.end_number), self._deletions.numbers
        if self._deletions.n_present:
            allowed = np.ones(self.facts.end_number, bool) if allowed is None else allowed
            allowed[deleted] = False
        if allowed is None:
            return None
        return [
            np.packbits(
                allowed[segment.first_number : segment.first_number + len(segment)],
                bitorder="little",
            )
            for segment in self._segments
        ]

    def _by_number(self, name: str, records: Any) -> Any:
        """Records that are named by their ids, by their numbers; all others as they are."""
        if records is None or not self.facts.has_ids:
            return records
        named = ids_or_mask(name, records)
        if isinstance(named, np.ndarray):
            return named
        numbers = self._documents.numbers(named)
        return numbers[numbers >= 0]

    def close(self) -> None:
        """Ends the reads; may be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _built(
    directory: str,
    records: Records,
    facts: Facts,
    *,
    memory_bytes: int,
    is_allowed_to_replace: bool,
    progress: Progress | None,
) -> PostingsReport:
    with (
        NativeEngine("auto") as engine,
        writing_to(directory, KIND, replace=is_allowed_to_replace) as is_replacement,
    ):
        live, number = begin_version(engine, directory, is_replacement=is_replacement)
        if live is not None:
            check_whole_collection(live, directory)
        job = {
            "runs": RUNS_VERSION,
            "kind": facts.kind,
            "analyzer": facts.analyzer.digest,
            "source": records.source,
        }
        kept = KeptRuns(engine, directory, job)
        builder = SegmentBuilder(
            engine,
            directory,
            kind=KINDS[facts.kind],
            analyzer=facts.analyzer,
            memory_bytes=memory_bytes,
            progress=progress,
            kept=kept,
        )
        rounding = Rounding()
        segment = built_segment(engine, directory, f"s{number}", records, builder, facts, rounding)
        facts = changed(facts, segments=(segment,), generation=number)
        report = report_of(engine, directory, facts, segment, rounding)
        engine.sync_directory(directory)
        write_facts(engine, directory, facts)
        kept.remove()
        remove_others(directory, facts)
        warn_of_rounding(directory, rounding, stacklevel=3)
        return report
