"""Scores records where the engine put them, as they arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from ..ops.maxsim import maxsim
from ..storage.engine import Future
from .record import HEADER_BYTES
from .store import EmbeddingStore

# Records per scoring call: enough to amortise the call, few enough that the first are scored while the last are being read.
_BATCH = 64


@dataclass(frozen=True)
class QueryVectors:
    """A query as the scorer needs it: float32, cls [1, d_cls], tokens [n, dim] (projected), and the weight of CLS."""

    cls: torch.Tensor
    tokens: torch.Tensor
    cls_weight: float


@dataclass
class Scored:
    """Scores of the records of one read, and what they cost."""

    numbers: np.ndarray
    scores: np.ndarray
    maxsim_s: float = 0.0
    waited_s: float = 0.0
    finished_at: float = field(default=0.0)


def score_arrivals(store: EmbeddingStore, future: Future, numbers: np.ndarray, query: QueryVectors, device: torch.device) -> Scored:
    """Checks and scores every record of a read in batches, in the order of arrival.

    On a GPU, records that the engine left in host memory cross in one copy when all are there: many small copies would cost more
    than the overlap saves. Raises what the read raises, and ChecksumError or StaleDataError; nothing unchecked is scored.
    """
    result = Scored(numbers, np.full(len(numbers), np.nan, dtype=np.float32))
    moves = device.type != "cpu" and not future.memory.is_cuda
    memory = future.memory
    finished = not len(numbers)
    while not finished:
        begun = time.perf_counter()
        items, finished = future.next(at_least=2**62 if moves else _BATCH)
        arrived = time.perf_counter()
        result.waited_s += arrived - begun
        if moves:
            memory = future.memory.to(device)
        if items.numel():
            chosen = numbers[items.numpy()]
            positions = future.position_bytes[items]
            store.check(memory, positions, chosen)
            result.scores[items.numpy()] = score(store, memory, positions, chosen, query)
        result.maxsim_s += time.perf_counter() - arrived
    result.finished_at = time.perf_counter()
    return result


def score(store: EmbeddingStore, memory: torch.Tensor, positions: torch.Tensor, numbers: np.ndarray, query: QueryVectors) -> np.ndarray:
    """``cls_weight * CLS + MaxSim`` (ESPN, section 3.1) of checked records in place. float32 [m]; a document without tokens has -inf."""
    schema = store.schema
    n_tokens = torch.from_numpy(
        store.n_tokens[numbers].astype(np.int64)
    )  # like positions on the CPU, where bounds are checked without a wait
    total = maxsim(query.tokens, memory, positions + schema.fixed_bytes, n_tokens, format=schema.format)
    if query.cls_weight:
        # A CLS vector is a document of one token, scored by the same kernel.
        total = total + query.cls_weight * maxsim(
            query.cls, memory, positions + HEADER_BYTES, torch.ones_like(n_tokens), format=schema.format
        )
    return total.cpu().numpy()
