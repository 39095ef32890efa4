"""What a build makes of spooled vectors: projected, and in the format of each tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...device.record_layout import HEADER_BYTES, RecordSchema
from ...ops.maxsim import Codebook, token_format
from .projection import Projection
from .record import cls_rows, cls_values

# decoded, projected and encoded: a document of any length takes no more memory than that
_ROWS_AT_ONCE = 4096

#: Puts the vectors of some records into a zeroed block, at the records' offsets.
Fill = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Target:
    """A tier that is being written."""

    schema: RecordSchema
    codebook: Codebook | None = None


class Spooled(Protocol):
    """Vectors of documents as records in arrival order: a `Spool`, or a batch in memory."""

    schema: RecordSchema
    n_tokens: np.ndarray

    @property
    def codebook(self) -> Codebook | None: ...

    def read(self, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Memory, uint8, and where in it the record of each document lies."""
        ...


def format_until_coded(stored: str, has_coarse: bool, is_projected: bool) -> str:
    """What the encoder's vectors are kept in until records are made of them: as they came wherever
    something lossy is made of them."""
    return (
        stored
        if token_format(stored).is_lossless_float and not has_coarse and not is_projected
        else "fp32"
    )


def tokens_of(
    spool: Spooled, arrivals: np.ndarray, projection: Projection | None
) -> Iterator[torch.Tensor]:
    """Token vectors of some documents as records will hold them, float32 [n, dim], a few thousand
    rows at a time."""
    memory, positions = spool.read(arrivals)
    for _, values in _values(spool, memory, positions, spool.n_tokens[arrivals], projection):
        yield values


def fills(
    spool: Spooled, arrivals: np.ndarray, projection: Projection | None, targets: list[Target]
) -> list[Fill]:
    """Reads the spooled records now; returns for each tier the function that fills a block with
    their vectors."""
    memory, positions = spool.read(arrivals)
    counts, old = spool.n_tokens[arrivals], spool.schema

    def fill(target: Target, block: np.ndarray, offsets: np.ndarray) -> None:
        schema = target.schema
        if schema.d_cls:
            for source, at in zip(positions.tolist(), offsets.tolist(), strict=True):
                kept = memory[source + HEADER_BYTES : source + old.fixed_bytes]
                if schema.cls_format != old.cls_format:
                    kept = cls_rows(cls_values(kept.copy()[None], old), schema)[0]
                block[at + HEADER_BYTES : at + schema.fixed_bytes] = kept
        begins = (offsets + schema.fixed_bytes).tolist()
        if schema.format == old.format and projection is None:
            for source, at, count in zip(
                (positions + old.fixed_bytes).tolist(), begins, counts.tolist(), strict=True
            ):
                block[at : at + count * schema.row_bytes] = memory[
                    source : source + count * schema.row_bytes
                ]
            return
        for group, values in _values(spool, memory, positions, counts, projection):
            encoded, begin = schema.encode(values, target.codebook).numpy(), 0
            for number, first, count in group:
                at, size = begins[number] + first * schema.row_bytes, count * schema.row_bytes
                block[at : at + size] = encoded[begin : begin + size]
                begin += size

    return [
        lambda block, offsets, target=target: fill(target, block, offsets)  # type: ignore[misc]
        for target in targets
    ]


#: Rows of one document: its place among the documents, the first of them, how many.
Piece = tuple[int, int, int]


def _values(
    spool: Spooled,
    memory: np.ndarray,
    positions: np.ndarray,
    counts: np.ndarray,
    projection: Projection | None,
) -> Iterator[tuple[list[Piece], torch.Tensor]]:
    """Rows of documents in `memory`, decoded, and projected if asked: which, and their values,
    float32 [m, dim] at a time."""
    schema = spool.schema
    begins = (positions + schema.fixed_bytes).tolist()
    for group in _groups(counts):
        places = [
            (begins[number] + first * schema.row_bytes, count * schema.row_bytes)
            for number, first, count in group
        ]
        rows = np.concatenate([memory[at : at + size] for at, size in places])
        values = schema.decode(torch.from_numpy(rows), spool.codebook)
        if projection is not None:
            # Document by document, so that no stored bit depends on which documents happen to come
            # together.
            values = torch.cat(
                [projection(tokens) for tokens in values.split([count for _, _, count in group])]
            )
        yield group, values


def _groups(counts: np.ndarray) -> Iterator[list[Piece]]:
    """Rows that are handled together: of several documents, or a part of a long one."""
    group: list[Piece] = []
    held = 0
    for number, count in enumerate(counts.tolist()):
        if group and held + count > _ROWS_AT_ONCE:
            yield group
            group, held = [], 0
        first = 0
        while count - first > _ROWS_AT_ONCE:
            yield [(number, first, _ROWS_AT_ONCE)]
            first += _ROWS_AT_ONCE
        if count > first:
            group.append((number, first, count - first))
            held += count - first
    if group:
        yield group
