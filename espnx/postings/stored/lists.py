"""All lists of a segment, one part after the other: for changes, which go through everything, and
for checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ... import errors
from ...storage import NativeEngine
from ...storage.native import load_native
from .layout import GROUP_TERMS, LIST_ALIGN_BYTES
from .segment import Segment
from .terms import name_of

_READ_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class ListsPart:
    """Terms [first, first + n) of a segment.

    Attributes:
        first: number of the first term.
        names: bytes of each.
        counts: int64 [n]: postings of each that were kept.
        records, values: uint32: of those, ascending by record within a layer.
    """

    first: int
    names: list[bytes]
    counts: np.ndarray
    records: np.ndarray
    values: np.ndarray


def read_lists(
    engine: NativeEngine,
    segment: Segment,
    first: int = 0,
    end: int | None = None,
    *,
    kept: np.ndarray | None = None,
) -> Iterator[ListsPart]:
    """The lists of terms [first, end), checked whole: checksums, names, order, and that there are
    as many postings as the dictionary says.

    Args:
        kept: uint8 [ceil(n / 8)]: bit i % 8 of byte i / 8 says whether postings of record i are
            wanted; None: all are.

    Raises ChecksumError, FormatError, and what a read raises.
    """
    end = len(segment.dictionary) if end is None else end
    while first < end:
        # Whole groups of terms, unless the range ends; as many as make up a read, one group at
        # least.
        begin = int(segment.dictionary.first[first])
        most = (
            int(
                np.searchsorted(
                    segment.dictionary.first, begin + _READ_BYTES // LIST_ALIGN_BYTES, side="right"
                )
            )
            - 1
        )
        stop = min(
            end, max(most // GROUP_TERMS * GROUP_TERMS, (first // GROUP_TERMS + 1) * GROUP_TERMS)
        )
        yield _read_part(engine, segment, first, stop, kept)
        first = stop


def _read_part(
    engine: NativeEngine, segment: Segment, first: int, end: int, kept: np.ndarray | None
) -> ListsPart:
    held = segment.dictionary
    names = _names(segment, first, end)
    terms = np.arange(first, end)
    offsets, sizes = held.place(terms)
    layers = (
        np.zeros(len(terms), np.int64)
        if held.first_layer is None
        else held.first_layer[terms].astype(np.int64) * LIST_ALIGN_BYTES
    )
    data = segment.lists.read(engine, int(offsets[0]), int(offsets[-1] + sizes[-1] - offsets[0]))
    stored = [name_of(name) for name in names]
    counts, records, values, bad, why = load_native().read_lists(
        torch.from_numpy(data),
        torch.from_numpy(offsets - offsets[0]),
        torch.from_numpy(sizes),
        torch.from_numpy(layers),
        torch.frombuffer(
            bytearray(b"".join(name for name, _ in stored) + b"\0"), dtype=torch.uint8
        ),
        torch.from_numpy(np.cumsum([0, *(len(name) for name, _ in stored)])),
        torch.tensor([is_digest for _, is_digest in stored], dtype=torch.uint8),
        first,
        held.salt,
        held.kind,
        held.n_records,
        torch.from_numpy(held.df[first:end].astype(np.int64)),
        None if kept is None else torch.from_numpy(kept),
    )
    if bad >= 0:
        raise errors.ChecksumError(
            f"the posting list of term {first + bad} is damaged: {why}",
            path=segment.lists.file.path,
            offset_bytes=segment.lists.offset_bytes + int(offsets[bad]),
            size_bytes=int(sizes[bad]),
            fix="restore the index from a copy, or build it again",
        )
    return ListsPart(first, names, counts.numpy(), records.numpy(), values.numpy())


def _names(segment: Segment, first: int, end: int) -> list[bytes]:
    groups = range(first // GROUP_TERMS, -(-end // GROUP_TERMS))
    names = [name for group in groups for name in segment.group(group)]
    skip = first - groups.start * GROUP_TERMS
    return names[skip : skip + end - first]
