"""Scores records where they lie: in an I/O buffer as they arrive, or in memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from .. import errors
from ..ops.maxsim import Codebook, maxsim
from ..storage.engine import Future
from ..storage.native import NativeFuture, load_native
from .record import HEADER_BYTES, RecordSchema
from .tier import Tier

# Records per scoring call: enough to amortise the call, few enough that the first are scored while the last are being read. `_PARTS` of
# a read, but not fewer than `_LEAST`.
_LEAST, _PARTS = 16, 16


@dataclass(frozen=True)
class QueryVectors:
    """A query as the scorer needs it: float32, cls [1, d_cls], tokens [n, dim] (projected), the weight of CLS, and on the CPU the first
    stage's vector [dim of the first stage]. Compact records have no CLS vector: `similarity_weight` is what the first stage's similarity
    counts beside their MaxSim (that of CLS; 0 where the first stage's vector is another)."""

    cls: torch.Tensor
    tokens: torch.Tensor
    cls_weight: float
    vector: np.ndarray
    similarity_weight: float = 0.0


@dataclass(frozen=True)
class Pairs:
    """Which query wants which item of a read: int64 [p] each, ordered by item. One item may be wanted by several queries."""

    item: np.ndarray
    query: np.ndarray

    def __len__(self) -> int:
        return len(self.item)

    def of_items(self, items: np.ndarray) -> np.ndarray:
        """Indices of the pairs of some items, ordered by query."""
        begin, end = np.searchsorted(self.item, items, "left"), np.searchsorted(self.item, items, "right")
        count = end - begin
        index = np.repeat(begin - np.r_[0, np.cumsum(count)[:-1]], count) + np.arange(count.sum()) if len(items) else begin
        return index[np.argsort(self.query[index], kind="stable")]


class Records(Protocol):
    """What scoring must know of records."""

    @property
    def schema(self) -> RecordSchema: ...

    @property
    def codebook(self) -> Codebook | None: ...

    @property
    def n_tokens(self) -> np.ndarray: ...


@dataclass
class Scored:
    """Scores of the pairs of one read, and what they cost in seconds. `memory`: the records, where they were scored."""

    scores: np.ndarray
    memory: torch.Tensor
    maxsim_s: float = 0.0
    waited_s: float = 0.0
    finished_at: float = field(default=0.0)


def score_arrivals(
    tier: Tier, future: Future, numbers: np.ndarray, pairs: Pairs, queries: list[QueryVectors], device: torch.device
) -> Scored:
    """Checks every record of a read and scores it for the queries that want it, in batches, in the order of arrival.

    Raises what the read raises, and ChecksumError or StaleDataError; nothing unchecked is scored.
    """
    if device.type == "cpu" and isinstance(future, NativeFuture):
        return _score_natively(tier, future, numbers, pairs, queries)
    return _score_on_device(tier, future, numbers, pairs, queries, device)


def _score_natively(tier: Tier, future: NativeFuture, numbers: np.ndarray, pairs: Pairs, queries: list[QueryVectors]) -> Scored:
    """In C++, without the GIL: Python's share of a batch would take longer than its arithmetic, and hold up the first stage's thread."""
    schema = tier.schema
    rules = {
        "salt": tier.salt, "format_number": schema.format_number, "fixed_bytes": schema.fixed_bytes, "row_bytes": schema.row_bytes,
        "format": schema.format, "cls_format": schema.cls_format, "dim": schema.stored_dim, "d_cls": schema.stored_d_cls,
    }  # fmt: skip
    item = of_query = None
    if len(queries) > 1:
        item, of_query = torch.from_numpy(pairs.item), torch.from_numpy(pairs.query)
    wanted = [(schema.query_tokens(query.tokens), schema.query_cls(query.cls), query.cls_weight) for query in queries]
    at_least = max(_LEAST, len(numbers) // _PARTS)
    book = tier.codebook
    tables = (None, None) if book is None else (book.centroids, book.bucket_weights)
    scores, maxsim_s, waited_s, damaged = load_native().score_arrivals(
        future.native, torch.from_numpy(numbers), torch.from_numpy(tier.n_tokens), rules, *tables, wanted, item, of_query, at_least
    )
    if damaged >= 0:
        one = torch.tensor([damaged])
        tier.check(future.memory, future.position_bytes[one], numbers[one.numpy()])
        raise errors.ChecksumError(f"record {numbers[damaged]} was found damaged, then whole", fix="search again; check the memory")
    return Scored(scores.numpy(), future.memory, maxsim_s, waited_s, time.perf_counter())


def _score_on_device(
    tier: Tier, future: Future, numbers: np.ndarray, pairs: Pairs, queries: list[QueryVectors], device: torch.device
) -> Scored:
    """By the tensor ops. On a GPU, records that the engine left in host memory cross in one copy when all are there: many small copies
    would cost more than the overlap saves."""
    memory = future.memory
    result = Scored(np.full(len(pairs), np.nan, dtype=np.float32), memory)
    moves = memory.device != device
    finished = not len(numbers)
    at_least = 2**62 if moves else max(_LEAST, len(numbers) // _PARTS)
    while not finished:
        begun = time.perf_counter()
        items, finished = future.next(at_least)
        arrived = time.perf_counter()
        result.waited_s += arrived - begun
        if moves:
            result.memory = memory = future.memory.to(device, non_blocking=True)
        if items.numel():
            arrivals = items.numpy()
            positions = future.position_bytes
            tier.check(memory, positions[items], numbers[arrivals])
            score_pairs(tier, memory, positions, numbers, pairs, pairs.of_items(arrivals), queries, result.scores)
        result.maxsim_s += time.perf_counter() - arrived
    result.finished_at = time.perf_counter()
    return result


def score_pairs(
    records: Records,
    memory: torch.Tensor,
    positions: torch.Tensor,
    numbers: np.ndarray,
    pairs: Pairs,
    chosen: np.ndarray,
    queries: list[QueryVectors],
    scores: np.ndarray,
) -> None:
    """Fills in `scores` of the pairs `chosen` (indices, ordered by query) of checked records."""
    wanted_by = pairs.query[chosen]
    borders = np.r_[0, np.flatnonzero(np.diff(wanted_by)) + 1, len(chosen)]
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if begin == end:
            continue
        part = chosen[begin:end]
        items = pairs.item[part]
        scores[part] = score(records, memory, positions[torch.from_numpy(items)], numbers[items], queries[wanted_by[begin]])


def score(records: Records, memory: torch.Tensor, positions: torch.Tensor, numbers: np.ndarray, query: QueryVectors) -> np.ndarray:
    """``cls_weight * CLS + MaxSim`` (ESPN, section 3.1) of checked records in place, float32 [m]. MaxSim of a document without tokens is 0.

    Records without a CLS vector are scored by MaxSim alone.
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
        total = total + query.cls_weight * maxsim(query.cls, memory, positions + HEADER_BYTES, ones, format=schema.cls_format)
    return total.cpu().numpy()
