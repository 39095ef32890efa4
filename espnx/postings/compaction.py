"""Merges segments into one: lists of the same term become one list, without the postings of deleted
records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..storage import NativeEngine
from .build.spool import TermPostings, join
from .build.writer import Progress, SectionContent, SegmentWriter
from .stored.layout import COUNT, IMPACT
from .stored.lists import read_lists
from .stored.segment import Segment

_BUCKETS = 1024
_BYTES_A_MERGED_POSTING = 64


@dataclass
class Rounding:
    """How weights were rounded to one byte so far: postings that were written, and how many of them
    were below half a step, and are one."""

    n_postings: int = 0
    n_raised: int = 0


def merged_sections(
    engine: NativeEngine,
    directory: str,
    segments: list[Segment],
    deleted: np.ndarray,
    *,
    salt: int,
    kind: int,
    n_records: int,
    memory_bytes: int,
    progress: Progress | None,
    first_number: int = 0,
    places: np.ndarray | None = None,
    rounding: Rounding | None = None,
) -> Iterator[SectionContent]:
    """The sections of a segment that holds what `segments` do, but the records that were deleted;
    as `SegmentBuilder.sections` gives them.

    Args:
        deleted: int64, ascending: numbers of records.
        n_records, first_number: of the new segment.
        places: int64, by number: which of its records a record is from now on; None: numbers stay.
        rounding: is told of it, once the sections are written.

    Raises ChecksumError, FormatError: damaged lists; what reads and writes raise.
    """
    kept = [_kept(segment, deleted) for segment in segments]
    lengths = None
    if kind == COUNT:
        lengths = np.zeros(n_records, np.int64)
        for segment in segments:
            if segment.lengths is not None:
                left = np.setdiff1d(
                    np.arange(len(segment)), _here(segment, deleted), assume_unique=True
                )
                numbers = left + segment.first_number
                lengths[numbers - first_number if places is None else places[numbers]] = (
                    segment.length_table[segment.lengths.codes[left]]
                )
    out = SegmentWriter(
        engine,
        directory,
        salt=salt,
        kind=kind,
        n_records=n_records,
        n_postings=sum(segment.dictionary.n_postings for segment in segments),
        memory_bytes=memory_bytes,
        progress=progress or (lambda _what, _done, _total: None),
    )
    try:
        budget = max(1 << 16, memory_bytes // _BYTES_A_MERGED_POSTING)
        yield from out.sections(
            _merge(engine, segments, kept, budget, first_number, places), lengths
        )
    finally:
        out.close()
    if rounding is not None:
        rounding.n_postings, rounding.n_raised = (
            rounding.n_postings + out.n_postings,
            rounding.n_raised + out.n_raised,
        )


def _kept(segment: Segment, deleted: np.ndarray) -> np.ndarray:
    return ~bits_of(len(segment), _here(segment, deleted))


def _here(segment: Segment, numbers: np.ndarray) -> np.ndarray:
    """The segment's own records among these numbers, ascending."""
    begin, end = np.searchsorted(
        numbers, [segment.first_number, segment.first_number + len(segment)]
    )
    found: np.ndarray = numbers[begin:end] - segment.first_number
    return found


def _merge(
    engine: NativeEngine,
    segments: list[Segment],
    kept: list[np.ndarray],
    budget: int,
    first_number: int,
    places: np.ndarray | None,
) -> Iterator[TermPostings]:
    """Postings of all segments by hash, about `budget` of them at a time."""
    edges = np.arange(1, _BUCKETS, dtype=np.uint64) << np.uint64(64 - 10)
    begins = [
        np.concatenate(
            [[0], np.searchsorted(each.dictionary.hashes, edges), [len(each.dictionary)]]
        ).astype(int)
        for each in segments
    ]
    sums = [
        np.concatenate([[0], np.cumsum(each.dictionary.df, dtype=np.int64)]) for each in segments
    ]
    # of buckets
    totals = np.cumsum(
        sum(np.diff(total[begin]) for total, begin in zip(sums, begins, strict=True))
    )
    first = before = 0
    while first < _BUCKETS and before < totals[-1]:
        end = max(first + 1, int(np.searchsorted(totals, before + budget, side="right")))
        parts = [
            kept_postings(
                engine,
                segment,
                int(begin[first]),
                int(begin[end]),
                bits,
                segment.first_number - first_number,
            )
            for segment, begin, bits in zip(segments, begins, kept, strict=True)
        ]
        yield join(parts) if places is None else _renumbered(join(parts), places)
        first, before = end, int(totals[end - 1])


def _renumbered(postings: TermPostings, places: np.ndarray) -> TermPostings:
    """The postings with other numbers of records, ascending again within a term."""
    records = places[postings.records].astype(np.uint32)
    of_term = np.repeat(np.arange(len(postings.counts), dtype=np.uint64), postings.counts)
    order = np.argsort(of_term << np.uint64(32) | records, kind="stable")
    return replace(postings, records=records[order], values=postings.values[order])


def kept_postings(
    engine: NativeEngine, segment: Segment, first: int, end: int, kept: np.ndarray | None, base: int
) -> TermPostings:
    """Postings of terms [first, end) as a build has them: by record within a term, weights as the
    bits of float32; records plus `base`."""
    parts = list(read_lists(engine, segment, first, end, kept=kept))
    none = np.zeros(0, np.uint32)
    counts = np.concatenate([np.zeros(0, np.int64), *(part.counts for part in parts)])
    records = np.concatenate([none, *(part.records for part in parts)])
    values = np.concatenate([none, *(part.values for part in parts)])
    held = segment.dictionary
    if held.kind != COUNT:  # the layers of a list are one after the other
        order = np.argsort(
            np.repeat(np.arange(len(counts), dtype=np.uint64), counts) << np.uint64(32) | records,
            kind="stable",
        )
        records, values = records[order], values[order]
    if held.kind == IMPACT:
        values = (
            (values * np.repeat(held.steps(np.arange(first, end)), counts))
            .astype(np.float32)
            .view(np.uint32)
        )
    used = counts > 0
    names = [
        name
        for name, is_used in zip(
            (name for part in parts for name in part.names), used.tolist(), strict=True
        )
        if is_used
    ]
    return TermPostings(
        names, held.hashes[first:end][used].copy(), counts[used], records + np.uint32(base), values
    )


def bits_of(n_records: int, records: np.ndarray) -> np.ndarray:
    """uint8 [ceil(n / 8)]: bit i % 8 of byte i / 8 says whether record i is among these."""
    marked = np.zeros(n_records, bool)
    marked[records] = True
    return np.packbits(marked, bitorder="little")
