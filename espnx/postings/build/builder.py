"""Builds a segment from records that come one after the other, in memory that is bounded however
many they are, and hands its sections out as streams of bytes."""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np

from ... import errors
from ...sizes import BUILD_BYTES
from ...storage import NativeEngine
from ...suggestions import suggests_keywords
from ..analyzer import Analyzer
from ..stored.layout import COUNT, RECORDS_MAX
from ..stored.terms import term_bytes
from .impacts import LargestWeights
from .resume import InputDigest, KeptRuns, RunFacts
from .spool import Run, TermPostings, join, merge_runs, remove_run, sort_postings
from .writer import Progress, SectionContent, SegmentWriter

# of memory, while a run is sorted; in Python's own dictionaries
BYTES_A_TOKEN, BYTES_A_TERM = 48, 600
_BYTES_A_MERGED_POSTING = 64
T = TypeVar("T")
_STOP = 0  # the id of words that are no terms


class _Vocabulary(dict[str, int]):
    """Maps a word to the id of its term in this run."""

    def __init__(self, term_of: Callable[[str], str | None]):
        super().__init__()
        self._term_of, self.ids = term_of, dict[str, int]()

    def __missing__(self, word: str) -> int:
        term = self._term_of(word)
        found = _STOP if term is None else self.ids.setdefault(term, len(self.ids) + 1)
        self[word] = found
        return found


class SegmentBuilder:
    """A segment that is being built: records first, then `sections`.

    Args:
        engine: that writes and reads the spool; stays the caller's.
        directory: for the spool, where the corpus does not fit into `memory_bytes`; must exist, and
            is left as it was.
        kind: `espnx.postings.stored.layout.COUNT`, `IMPACT` or `FLOAT`.
        analyzer: of texts.
        memory_bytes: about so much is used, beyond two bytes a record and what the dictionary
            takes.
        progress: is told how many records were read and how many postings were merged.
        kept: where runs are kept for an attempt that follows one that was killed; None: they go
            with this object.
        salt: of the segment; None: a random one.

    Attributes:
        n_postings: once the sections are written.
        n_raised: of impacts, then: weights below half a step, which are stored as one.
    """

    @suggests_keywords
    def __init__(
        self,
        engine: NativeEngine,
        directory: str,
        *,
        kind: int = COUNT,
        analyzer: Analyzer | None = None,
        memory_bytes: int = BUILD_BYTES,
        progress: Progress | None = None,
        kept: KeptRuns | None = None,
        salt: int | None = None,
    ):
        self._engine, self._directory, self._kind = engine, directory, kind
        self._analyzer = analyzer or Analyzer()
        self._memory_bytes, self._progress = (
            memory_bytes,
            progress or (lambda _what, _done, _total: None),
        )
        self._kept = kept
        self.salt = (
            kept.salt if kept is not None else secrets.randbits(32) if salt is None else salt
        )
        self._runs: list[Run] = []
        self._lengths: list[np.ndarray] = []
        self._first_of_run = self._expected = self.n_postings = self.n_raised = 0
        self._rest: TermPostings | None = None
        self._begin_run()

    def _begin_run(self) -> None:
        self._vocabulary = _Vocabulary(self._analyzer.term)
        self._tokens, self._counts, self._weights = array("I"), array("I"), array("f")
        self._input = InputDigest()

    @property
    def n_records(self) -> int:
        """Records that were added."""
        return self._first_of_run + len(self._counts)

    def resumed(self, items: Iterator[T], identity: Callable[[T], bytes]) -> Iterator[T | None]:
        """Yields what must be added of the input: all but what runs of an attempt before hold,
        which are taken as they are: None for each.

        Args:
            items: each is the argument of one call of an `add_...`; those of a run are held in
                memory until they are known to be its own.
            identity: bytes by which an item differs from any other.
        """
        if self._kept is None:
            yield from items
            return
        for facts in self._kept.facts():
            begun = list(islice(items, facts.n_items))
            is_same = (
                facts.first_record == self._first_of_run
                and InputDigest.of(map(identity, begun)) == facts.digest
            )
            run = self._kept.open(facts) if is_same else None
            if run is None:
                self._kept.forget(facts.number)
                items = chain(begun, items)
                break
            self._take(run, facts)
            self._progress("records of the attempt before", self.n_records, 0)
            yield None
        for item in items:
            self._input.add(identity(item))
            yield item

    def _take(self, run: Run, facts: RunFacts) -> None:
        self._runs.append(run)
        if facts.lengths is not None:
            self._lengths.append(facts.lengths)
        self._first_of_run += facts.n_records
        self._expected += run.n_postings

    def add_text(self, text: str) -> None:
        """The next record, cut by the analyzer. Raises InvalidInputError."""
        words = self._analyzer.words(text)
        self._tokens.extend(map(self._vocabulary.__getitem__, words))
        self._end_record(len(words))

    def add_terms(self, terms: Sequence[str | int]) -> None:
        """The next record, as its terms, each as often as it has it. Raises InvalidInputError."""
        if isinstance(terms, (str, bytes)):
            raise errors.InvalidInputError(
                "terms of a record",
                got=type(terms).__name__,
                expected="a list of them",
                fix="give it in texts",
            )
        ids = self._vocabulary.ids
        self._tokens.extend([ids.setdefault(_text(term), len(ids) + 1) for term in terms])
        self._end_record(len(terms))

    def add_vector(self, vector: Mapping[Any, float]) -> None:
        """The next record of impacts: a weight above 0 for each of its terms; 0 is as good as none.

        Raises InvalidInputError for a weight that cannot be stored, and for a term that it has
        twice, as a number and as its digits.
        """
        ids = self._vocabulary.ids
        rounded = _rounded(np.fromiter(vector.values(), np.float64, len(vector)))
        kept = rounded > 0
        numbers = [
            ids.setdefault(_text(term), len(ids) + 1)
            for term, keep in zip(vector, kept.tolist(), strict=True)
            if keep
        ]
        if len(set(numbers)) < len(numbers):
            raise errors.InvalidInputError(
                "vector",
                got="a term that it has twice",
                expected="each once, as text or as a number",
            )
        self._tokens.extend(numbers)
        self._weights.frombytes(rounded[kept].tobytes())
        self._end_record(int(kept.sum()))

    def add_rows(self, terms: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> None:
        """The next records of impacts, many at once: `counts` terms each, by number. As
        `add_vector` of each. Raises InvalidInputError."""
        rounded = _rounded(weights)
        kept = rounded > 0
        record = np.repeat(np.arange(len(counts)), counts)
        if len(np.unique(record << 32 | terms)) < len(terms):
            raise errors.InvalidInputError(
                "CSR arrays", got="a term that a record has twice", expected="each once"
            )
        known, place = np.unique(terms[kept], return_inverse=True)
        ids = self._vocabulary.ids
        numbers = np.array(
            [ids.setdefault(str(term), len(ids) + 1) for term in known.tolist()], np.uint32
        )
        self._tokens.frombytes(numbers[place].tobytes())
        self._weights.frombytes(rounded[kept].tobytes())
        self._counts.frombytes(
            np.bincount(record[kept], minlength=len(counts)).astype(np.uint32).tobytes()
        )
        self._look_at_size()

    def _end_record(self, count: int) -> None:
        self._counts.append(count)
        self._look_at_size()

    def _look_at_size(self) -> None:
        """Ends the run where memory is used up."""
        if self.n_records > RECORDS_MAX:
            raise errors.InvalidInputError(
                "records of a segment",
                got=f"more than {RECORDS_MAX}",
                expected="fewer; build several indexes",
            )
        vocabulary = self._vocabulary
        words = max(len(vocabulary), len(vocabulary.ids))
        if len(self._tokens) * BYTES_A_TOKEN + words * BYTES_A_TERM > self._memory_bytes:
            self._end_run()
        if self.n_records % 1000 == 0:
            self._progress("records", self.n_records, 0)

    def _sorted(self) -> TermPostings:
        """The run that is in memory; another one begins."""
        names = [b"", *(term_bytes(term) for term in self._vocabulary.ids)]
        ids = np.frombuffer(self._tokens, np.uint32) if self._tokens else np.zeros(0, np.uint32)
        counts = (
            np.frombuffer(self._counts, np.uint32).astype(np.int64)
            if self._counts
            else np.zeros(0, np.int64)
        )
        records = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        weights = None if self._kind == COUNT else np.frombuffer(self._weights, np.float32)
        if weights is None:
            kept = ids != _STOP
            ids, records = ids[kept], records[kept]
            self._lengths.append(np.bincount(records, minlength=len(counts)).astype(np.uint32))
        found = sort_postings(names, ids, records + np.uint32(self._first_of_run), weights)
        self._first_of_run += len(counts)
        self._expected += len(found.records)
        self._begin_run()
        return found

    def _end_run(self) -> None:
        first, n_records, seen = self._first_of_run, len(self._counts), self._input
        found = self._sorted()
        if self._kept is None:
            path = os.path.join(self._directory, f"spool-{self.salt:08x}-{len(self._runs)}.tmp")
            self._runs.append(Run.write(self._engine, path, found)[0])
        else:
            lengths = self._lengths[-1] if self._kind == COUNT else None
            facts = RunFacts(
                len(self._runs),
                first,
                seen.n_items,
                seen.digest,
                n_records,
                len(found.names),
                lengths,
            )
            self._runs.append(self._kept.keep(facts, found))
        self._progress("bytes of the spool", sum(run.size_bytes for run in self._runs), 0)

    def sort_rest(self) -> None:
        """Sorts what is in memory, after the last record."""
        if not self._runs:
            self._rest = self._rest or join([self._sorted()])
        elif self._counts:
            self._end_run()

    def largest_weights(self) -> LargestWeights:
        """The largest weight of each term in any record; reads the spool once more. After
        `sort_rest`."""
        found = LargestWeights(np.zeros(0, np.uint64), np.zeros(0, np.float32))
        for part in self._merged():
            found = found.joined(LargestWeights.in_postings(part))
        return found

    def _merged(self) -> Iterator[TermPostings]:
        if self._rest is not None:
            return iter([self._rest])
        return merge_runs(
            self._engine, self._runs, max(1 << 16, self._memory_bytes // _BYTES_A_MERGED_POSTING)
        )

    def sections(self, largest: LargestWeights | None = None) -> Iterator[SectionContent]:
        """Name and content of each section, as uint8 arrays one after the other. Each content must
        be used up before the next section is asked for; all of them once.

        Args:
            largest: of impacts: weights that the steps of each list have to reach; None: those of
                the records themselves.

        Raises what reads and writes of the spool raise, and InvalidInputError for too many records,
        terms or lengths.
        """
        self.sort_rest()
        lengths = (
            np.concatenate([np.zeros(0, np.int64), *self._lengths]) if self._kind == COUNT else None
        )
        writer = SegmentWriter(
            self._engine,
            self._directory,
            salt=self.salt,
            kind=self._kind,
            n_records=self.n_records,
            n_postings=self._expected,
            largest=largest,
            memory_bytes=self._memory_bytes,
            progress=self._progress,
        )
        try:
            yield from writer.sections(self._merged(), lengths)
        finally:
            self.n_postings, self.n_raised = writer.n_postings, writer.n_raised
            writer.close()
            self.close()

    def close(self) -> None:
        """Removes the spool, but for kept runs: they go when what is built of them is published, by
        `KeptRuns.remove`."""
        while self._runs and self._kept is None:
            remove_run(self._runs.pop())


def _rounded(weights: np.ndarray) -> np.ndarray:
    """float32, of float64; a weight above 0 stays above 0, for a record is found by whatever it
    has. Raises InvalidInputError."""
    fits = (weights >= 0) & (weights <= np.finfo(np.float32).max)
    if not fits.all():
        raise errors.InvalidInputError(
            "weight of a term",
            got=float(weights[~fits][0]),
            expected="0 or more, that float32 can hold",
        )
    rounded = weights.astype(np.float32)
    rounded[(rounded == 0) & (weights > 0)] = np.finfo(np.float32).smallest_subnormal
    return rounded


def _text(term: str | int) -> str:
    if isinstance(term, str):
        return term
    return term_bytes(term).decode()
