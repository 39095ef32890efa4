"""MaxSim of records that lie in memory, by the tensor ops: wherever those run, and over any records
that are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ...ops.maxsim import Codebook, maxsim
from ..interface import Pairs, RecordQuery
from ..record_layout import HEADER_BYTES, RecordSchema


class Scorable(Protocol):
    """What scoring must know of records: how their rows are written, and how many each has, by
    record number."""

    @property
    def schema(self) -> RecordSchema: ...

    @property
    def codebook(self) -> Codebook | None: ...

    @property
    def n_tokens(self) -> np.ndarray: ...


def score(
    records: Scorable,
    memory: torch.Tensor,
    positions: torch.Tensor,
    numbers: np.ndarray,
    query: RecordQuery,
) -> np.ndarray:
    """``cls_weight * CLS + MaxSim`` of checked records in place, float32 [m]; see `RecordQuery`.

    Args:
        memory: uint8, on the query's device.
        positions: int64 [m] on the CPU: where each record begins in it.
        numbers: int64 [m]: which records they are.
    """
    schema = records.schema
    # Like positions on the CPU, where bounds are checked without a wait.
    n_tokens = torch.from_numpy(records.n_tokens[numbers].astype(np.int64))
    tokens, at = schema.query_tokens(query.tokens), positions + schema.fixed_bytes
    total = maxsim(tokens, memory, at, n_tokens, format=schema.format, codebook=records.codebook)
    is_empty = n_tokens == 0
    if bool(is_empty.any()):
        total = total.masked_fill(is_empty.to(total.device), 0.0)
    if query.cls_weight and schema.d_cls:
        # A CLS vector is a document of one token, scored by the same kernel.
        ones = torch.ones_like(n_tokens)
        cls = maxsim(
            schema.query_cls(query.cls),
            memory,
            positions + HEADER_BYTES,
            ones,
            format=schema.cls_format,
        )
        total = total + query.cls_weight * cls
    return total.cpu().numpy()


def pairs_of_items(pairs: Pairs, items: np.ndarray) -> np.ndarray:
    """Places of the pairs of some items, ordered by query."""
    begin, end = (
        np.searchsorted(pairs.item, items, "left"),
        np.searchsorted(pairs.item, items, "right"),
    )
    count = end - begin
    index = (
        np.repeat(begin - np.r_[0, np.cumsum(count)[:-1]], count) + np.arange(count.sum())
        if len(items)
        else begin
    )
    return index[np.argsort(pairs.query[index], kind="stable")]


def score_pairs(
    records: Scorable,
    memory: torch.Tensor,
    positions: torch.Tensor,
    numbers: np.ndarray,
    pairs: Pairs,
    chosen: np.ndarray,
    queries: Sequence[RecordQuery],
    scores: np.ndarray,
) -> None:
    """Fills in `scores` of the pairs `chosen` (places, ordered by query) of checked records."""
    wanted_by = pairs.query[chosen]
    borders = np.r_[0, np.flatnonzero(np.diff(wanted_by)) + 1, len(chosen)]
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if begin == end:
            continue
        part = chosen[begin:end]
        items = pairs.item[part]
        scores[part] = score(
            records,
            memory,
            positions[torch.from_numpy(items)],
            numbers[items],
            queries[wanted_by[begin]],
        )
