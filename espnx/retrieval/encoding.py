"""What a build makes of spooled vectors: projected, and in the format of each tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..ops.maxsim import Codebook, token_format
from .projection import Projection
from .record import HEADER_BYTES, RecordSchema, cls_rows, cls_values

_ROWS_AT_ONCE = 4096  # decoded, projected and encoded: a document of any length takes no more memory than that

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


def format_until_coded(stored: str, has_compact: bool, is_projected: bool) -> str:
    """What the encoder's vectors are kept in until records are made of them: as they came wherever something lossy is made of them."""
    return stored if token_format(stored).is_lossless_float and not has_compact and not is_projected else "fp32"


def tokens_of(spool: Spooled, arrivals: np.ndarray, projection: Projection | None) -> Iterator[torch.Tensor]:
    """Token vectors of some documents as records will hold them, float32 [n, dim], a few thousand rows at a time."""
    memory, positions = spool.read(arrivals)
    rows, counts = _rows(spool, memory, positions, arrivals)
    yield from _values(spool, rows, counts, projection)


def fills(spool: Spooled, arrivals: np.ndarray, projection: Projection | None, targets: list[Target]) -> list[Fill]:
    """Reads the spooled records now; returns for each tier the function that fills a block with their vectors."""
    memory, positions = spool.read(arrivals)
    rows, counts = _rows(spool, memory, positions, arrivals)
    old = spool.schema

    def fill(target: Target, block: np.ndarray, offsets: np.ndarray) -> None:
        schema = target.schema
        if schema.d_cls:
            for source, at in zip(positions.tolist(), offsets.tolist(), strict=True):
                kept = memory[source + HEADER_BYTES : source + old.fixed_bytes]
                if schema.cls_format != old.cls_format:
                    kept = cls_rows(cls_values(kept.copy()[None], old), schema)[0]
                block[at + HEADER_BYTES : at + schema.fixed_bytes] = kept
        if schema.format == old.format and projection is None:
            encoded = rows
        else:
            encoded = np.empty(int(counts.sum()) * schema.row_bytes, dtype=np.uint8)
            begin = 0
            for values in _values(spool, rows, counts, projection):
                end = begin + len(values) * schema.row_bytes
                encoded[begin:end] = schema.encode(values, target.codebook).numpy()
                begin = end
        begin = 0
        for at, size in zip((offsets + schema.fixed_bytes).tolist(), (counts * schema.row_bytes).tolist(), strict=True):
            block[at : at + size] = encoded[begin : begin + size]
            begin += size

    return [lambda block, offsets, target=target: fill(target, block, offsets) for target in targets]  # type: ignore[misc]


def _rows(spool: Spooled, memory: np.ndarray, positions: np.ndarray, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(token rows of all documents one after another, uint8; int64: tokens of each)."""
    counts = spool.n_tokens[arrivals].astype(np.int64)
    sizes = counts * spool.schema.row_bytes
    rows = np.empty(int(sizes.sum()), dtype=np.uint8)
    begin = 0
    for source, size in zip((positions + spool.schema.fixed_bytes).tolist(), sizes.tolist(), strict=True):
        rows[begin : begin + size] = memory[source : source + size]
        begin += size
    return rows, counts


def _values(spool: Spooled, rows: np.ndarray, counts: np.ndarray, projection: Projection | None) -> Iterator[torch.Tensor]:
    """The rows decoded, and projected if asked, float32 [m, dim] at a time."""
    schema, begin = spool.schema, 0
    for lengths in _groups(counts):
        end = begin + sum(lengths) * schema.row_bytes
        values = schema.decode(torch.from_numpy(rows[begin:end]), spool.codebook)
        if projection is not None:
            # Document by document, so that no stored bit depends on which documents happen to come together.
            values = torch.cat([projection(tokens) for tokens in values.split(lengths)])
        yield values
        begin = end


def _groups(counts: np.ndarray) -> Iterator[list[int]]:
    """Token counts of documents that are handled together; a long document in pieces."""
    group: list[int] = []
    held = 0
    for count in counts.tolist():
        if group and held + count > _ROWS_AT_ONCE:
            yield group
            group, held = [], 0
        while count > _ROWS_AT_ONCE:
            yield [_ROWS_AT_ONCE]
            count -= _ROWS_AT_ONCE
        if count:
            group.append(count)
            held += count
    if group:
        yield group
