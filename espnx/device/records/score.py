"""MaxSim of records that lie in memory, by the tensor ops: wherever those run, and over any records
that are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ...ops.maxsim import Codebook, maxsim
from ..interface import Pairs, RecordQuery
from ..record_layout import HEADER_BYTES, Put, RecordSchema


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
    found: np.ndarray = score_there(records, memory, positions, numbers, query).cpu().numpy()
    return found


def score_there(
    records: Scorable,
    memory: torch.Tensor,
    positions: torch.Tensor,
    numbers: np.ndarray,
    query: RecordQuery,
    put: Put = torch.from_numpy,
) -> torch.Tensor:
    """`score` on the query's device. The host waits for nothing if tables, which `put` makes of
    arrays, can be copied without."""
    schema, begin = records.schema, positions.numpy()
    counts = records.n_tokens[numbers].astype(np.int64)
    # Like positions on the CPU, where bounds are checked without a wait.
    total = maxsim(
        schema.query_tokens(query.tokens),
        memory,
        put(begin + schema.fixed_bytes),
        put(counts),
        format=schema.format,
        codebook=records.codebook,
    )
    if not counts.all():
        is_empty = put(counts == 0).to(total.device, non_blocking=True)
        total = total.masked_fill(is_empty, 0.0)
    if query.cls_weight and schema.d_cls:
        # A CLS vector is a document of one token, scored by the same kernel.
        cls = maxsim(
            schema.query_cls(query.cls),
            memory,
            put(begin + HEADER_BYTES),
            put(np.ones_like(counts)),
            format=schema.cls_format,
        )
        total = total + query.cls_weight * cls
    return total


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
    found = pair_scores(records, memory, positions, numbers, pairs, chosen, queries)
    if len(chosen):
        scores[chosen] = torch.cat(found).cpu().numpy()


def pair_scores(
    records: Scorable,
    memory: torch.Tensor,
    positions: torch.Tensor,
    numbers: np.ndarray,
    pairs: Pairs,
    chosen: np.ndarray,
    queries: Sequence[RecordQuery],
    put: Put = torch.from_numpy,
) -> list[torch.Tensor]:
    """Scores of the pairs `chosen`, in that order, in pieces on the queries' device. See
    `score_there`."""
    wanted_by, found = pairs.query[chosen], []
    borders = np.r_[0, np.flatnonzero(np.diff(wanted_by)) + 1, len(chosen)]
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if begin == end:
            continue
        items = pairs.item[chosen[begin:end]]
        at, query = positions[torch.from_numpy(items)], queries[wanted_by[begin]]
        found.append(score_there(records, memory, at, numbers[items], query, put))
    return found
