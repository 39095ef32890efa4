"""Looking into postings: what of a query a record's score comes from, and whether everything on
storage is what was written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .. import errors
from ..storage import NativeEngine, Plan
from ..storage.native import load_native
from .bm25 import BM25
from .search.plan import Collection, QueryPlan, QueryTerms
from .stored.layout import FLOAT
from .stored.lists import read_lists
from .stored.segment import Segment
from .stored.terms import hashes_of, term_text

_RECORDS_AT_ONCE = 8192


@dataclass(frozen=True)
class TermScore:
    """A term of a query in a record.

    Attributes:
        term: as text.
        weight: idf of BM25, or the query's weight.
        value: how often the record has it, or what it weighs there; 0: it has it not.
        score: what comes of it, float32's value; of ``bm25l`` and ``bm25+`` beyond what every
            record gets.
    """

    term: str
    weight: float
    value: float
    score: float


@dataclass(frozen=True)
class Explanation:
    """A record's score.

    Attributes:
        number: of the record.
        terms: of the query that any record has, in its order.
        constant: what every record gets (``bm25l``, ``bm25+``).
        score: as a search gives it; None: the record has no term of the query, or was deleted, and
            is not found.
        is_deleted: whether it was; nothing else is said of it then.
    """

    number: int
    terms: tuple[TermScore, ...]
    constant: float
    score: float | None
    is_deleted: bool = False

    def summary(self) -> str:
        """A line for each term, the most important first."""
        lines = [
            f"{each.score:10.4f}  {each.term}: {each.value:g} here, weight {each.weight:.4f}"
            for each in sorted(self.terms, key=lambda each: -each.score)
        ]
        if self.constant:
            lines.append(f"{self.constant:10.4f}  for every record")
        why = "deleted" if self.is_deleted else "no term of the query"
        total = f"{why}: not found" if self.score is None else f"{self.score:.4f}"
        return "\n".join([f"record {self.number}: {total}", *lines])


def explain(
    engine: NativeEngine, collection: Collection, query: QueryTerms, number: int, bm25: BM25
) -> Explanation:
    """How a record's score comes about. Reads the lists of the query's terms, and no other.

    Raises InvalidInputError for a number that no segment has; ChecksumError, and what a read
    raises.
    """
    plan = QueryPlan(collection, [query], bm25, None)
    plan.check_names(0)  # a term that is not in the lists may have the hash of one that is
    for i, segment in enumerate(collection.segments):
        if segment.first_number <= number < segment.first_number + len(segment):
            return _explain(engine, plan, i, segment, number)
    raise errors.InvalidInputError("number of a record", got=number, expected="that of a record")


def _explain(
    engine: NativeEngine, plan: QueryPlan, i: int, segment: Segment, number: int
) -> Explanation:
    record = number - segment.first_number
    found, total, has = [], np.float32(0), False
    for term, data, weight, absent in plan.weighted(0, i):
        value = 0.0 if term < 0 else _value(engine, segment, term, data, record)
        score = np.float32(0)
        if value:
            if segment.lengths is not None:
                length = segment.length_table[segment.lengths.codes[record : record + 1]]
                norms = plan.bm25.norms(length, plan.collection.average_length)
                score = np.float32(weight * plan.bm25.part(np.array([value]), norms)[0] - absent)
            else:
                score = np.float32(np.float32(weight) * np.float32(value))
            total, has = np.float32(total + score), True
        found.append(TermScore(term_text(data), weight, value, float(score)))
    constant = np.float32(plan.constant(0))
    return Explanation(
        number, tuple(found), float(constant), float(np.float32(total + constant)) if has else None
    )


def _value(engine: NativeEngine, segment: Segment, term: int, data: bytes, record: int) -> float:
    """The value of a record in a list: a count, an impact or a float; 0: it is not there."""
    wanted = np.zeros(-(-len(segment) // 8), np.uint8)
    wanted[record // 8] = 1 << (record % 8)
    part = next(read_lists(engine, segment, term, term + 1, kept=wanted))
    if not len(part.values):
        return 0.0
    if segment.dictionary.kind == FLOAT:
        return float(part.values.view(np.float32)[0])
    return float(part.values[0] * segment.dictionary.steps(np.array([term]))[0])


@dataclass(frozen=True)
class VerifyReport:
    """What was read and found whole.

    Attributes:
        segments, terms, postings, forward_records: how many.
        size_bytes: of what was read.
    """

    segments: int
    terms: int
    postings: int
    forward_records: int
    size_bytes: int


def verify(engine: NativeEngine, segments: list[Segment]) -> VerifyReport:
    """Reads everything: each list's checksums, name, order and count, each term's hash, each
    forward record.

    Raises ChecksumError, FormatError: the first thing that is not what was written; and what a read
    raises.
    """
    terms = postings = records = size_bytes = 0
    for segment in segments:
        held = segment.dictionary
        for part in read_lists(engine, segment):
            stored = held.hashes[part.first : part.first + len(part.names)]
            if not np.array_equal(hashes_of(part.names), stored):
                raise errors.FormatError(
                    "terms of postings",
                    path=segment.terms.file.path,
                    got="a term",
                    expected="one of its hash",
                )
            if (
                len(part.records)
                and segment.lengths is not None
                and bool((segment.lengths.codes[part.records] == 0).any())
            ):
                raise errors.FormatError(
                    "lengths of postings",
                    path=segment.lists.file.path,
                    got="none",
                    expected="one or more terms",
                )
            terms, postings = terms + len(part.names), postings + len(part.records)
        if segment.rows is not None:
            records += _verify_records(engine, segment)
            size_bytes += segment.forward.size_bytes
        size_bytes += segment.lists.size_bytes + segment.terms.size_bytes
    return VerifyReport(len(segments), terms, postings, records, size_bytes)


def _verify_records(engine: NativeEngine, segment: Segment) -> int:
    none, rows = torch.zeros(0, dtype=torch.int64), segment.rows
    if rows is None:
        return 0
    for first in range(0, len(segment), _RECORDS_AT_ONCE):
        numbers = np.arange(first, min(first + _RECORDS_AT_ONCE, len(segment)))
        offsets, sizes = rows.place(numbers)
        lies = Plan.of(
            segment.forward.file,
            torch.from_numpy(offsets + segment.forward.offset_bytes),
            torch.from_numpy(sizes),
        )
        future = engine.read(lies, gap_bytes=4096)
        _, bad, why = load_native().score_forward(
            future.wait(),
            future.position_bytes,
            torch.from_numpy(sizes),
            torch.from_numpy(numbers),
            segment.dictionary.salt,
            segment.dictionary.kind,
            segment.forward_term_bytes,
            none.to(torch.uint32),
            none,
        )
        if bad >= 0:
            raise errors.ChecksumError(
                f"forward record {first + bad} is damaged: {why}",
                path=segment.forward.file.path,
                offset_bytes=segment.forward.offset_bytes + int(offsets[bad]),
                size_bytes=int(sizes[bad]),
                fix="restore the index from a copy, or build it again",
            )
    return len(segment)
