"""Re-rankers that address all records as memory: the baselines of search from SSD.

They share the first stage, the MaxSim kernel and the final ranking with espnx; only how records
come to be in memory differs:

- ``memory``: all of them were read into RAM beforehand. ``swap``: the same under a memory limit, so
  that most of them are swapped out.
- ``mmap``: the files are mapped; so many threads touch the pages of a query's records, then MaxSim
  scores them where they are.
- ``mmap-willneed``: the files are mapped, and MADV_WILLNEED announces every record before the first
  is scored.

None of them checks records as espnx does (CRC32C). Records are visited in the order they lie in.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from espnx import errors
from espnx.device.record_layout import HEADER_BYTES
from espnx.device.records.score import score
from espnx.ops.maxsim import maxsim_reference
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.first_stage.ivf.search import LoadedIvf
from espnx.retrieval.search.hits import ScoredCandidates, rank
from espnx.retrieval.search.index import Index
from espnx.retrieval.search.opened.scoring import QueryVectors

from .addressable import AddressableStore

WHOLE_STORE = ("memory", "swap", "mmap", "mmap-willneed")


@dataclass
class Ranking:
    """The ranking of one query: (record number, score), best first, and where the time went, in
    seconds."""

    hits: list[tuple[int, float]]
    timings: dict[str, float] = field(default_factory=dict)
    bytes_asked: int = 0


def query_vectors(index: Index, query: Encoded) -> QueryVectors:
    """A query as the scorer needs it, made the way the index makes it."""
    store = index.store
    tokens = query.tokens if store.projection is None else store.projection(query.tokens)
    prepared = index.first_stage.prepare(query)
    return QueryVectors(
        query.cls.reshape(1, -1), tokens.contiguous(), store.manifest.cls_weight, prepared
    )


def lists_of(index: Index) -> LoadedIvf:
    """Its first stage, which these benchmarks know as an IVF."""
    stage = index.first_stage
    if not isinstance(stage, LoadedIvf):
        raise errors.InvalidInputError(
            "first stage of the store",
            got=type(stage).__name__,
            expected="an IVF, whose lists are measured",
        )
    return stage


class WholeStoreRanker:
    """See the module.

    Args:
        index: open; its first stage, metadata and texts are used, its engine reads nothing.
        how: one of `WHOLE_STORE`.
        threads: that touch pages (``mmap``).
    """

    def __init__(self, index: Index, how: str, threads: int = 1):
        self._index, self._how, self._threads = index, how, threads
        self._records = AddressableStore(
            index.store, mapped=how.startswith("mmap"), huge=how == "memory"
        )
        self._helpers = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def search(
        self, queries: list[Encoded], *, k: int, candidates: int, rerank: int | None, nprobe: int
    ) -> list[Ranking]:
        begun = time.perf_counter()
        wanted = [query_vectors(self._index, query) for query in queries]
        found = self._index.first_stage.start(
            [query.prepared for query in wanted], candidates, nprobe
        ).complete()
        first_stage_s = time.perf_counter() - begun
        return [
            self._finish(query, numbers, similarities, k, rerank, first_stage_s)
            for query, (numbers, similarities) in zip(wanted, found, strict=True)
        ]

    def _finish(
        self,
        query: QueryVectors,
        numbers: np.ndarray,
        similarities: np.ndarray,
        k: int,
        rerank: int | None,
        first_stage_s: float,
    ) -> Ranking:
        begun = time.perf_counter()
        head = np.sort(numbers[:rerank])
        positions, sizes = self._records.locate(head)
        if self._how == "mmap":
            self._records.touch(positions.numpy(), sizes.numpy(), self._helpers, self._threads)
        elif self._how == "mmap-willneed":
            self._records.will_need(positions.numpy(), sizes.numpy())
        gathered = time.perf_counter()
        scores = score(self._index.store.full, self._records.memory, positions, head, query)
        scored = time.perf_counter()
        exact = scores[np.searchsorted(head, numbers[:rerank])]
        chosen, values, *_ = rank(
            ScoredCandidates(numbers, similarities, exact, 0.0), k, self._index.store.texts.get
        )
        self._index.store.texts.get(chosen.tolist())
        timings = {
            "first_stage_s": first_stage_s,
            "gather_s": gathered - begun,
            "maxsim_s": scored - gathered,
            "merge_s": time.perf_counter() - scored,
        }
        return Ranking(
            list(zip(chosen.tolist(), values.tolist(), strict=True)), timings, int(sizes.sum())
        )

    def reference(
        self, query: Encoded, *, k: int, candidates: int, rerank: int | None, nprobe: int
    ) -> list[tuple[int, float]]:
        """The ranking by plain PyTorch in one thread of control: (record number, score), best
        first."""
        index = self._index
        vectors = query_vectors(index, query)
        numbers, similarities = index.first_stage.start(
            [vectors.prepared], candidates, nprobe
        ).complete()[0]
        head = numbers[:rerank]
        schema, book = index.store.full.schema, index.store.full.codebook
        positions, _ = self._records.locate(head)
        n_tokens = torch.from_numpy(index.store.n_tokens[head].astype(np.int64))
        memory = self._records.memory
        exact = maxsim_reference(
            vectors.tokens,
            memory,
            positions + schema.fixed_bytes,
            n_tokens,
            schema.format,
            codebook=book,
        )
        if schema.d_cls and vectors.cls_weight:
            ones = torch.ones_like(n_tokens)
            exact += vectors.cls_weight * maxsim_reference(
                vectors.cls, memory, positions + HEADER_BYTES, ones, schema.cls_format
            )
        chosen, values, *_ = rank(
            ScoredCandidates(numbers, similarities, exact.numpy(), 0.0), k, index.store.texts.get
        )
        return list(zip(chosen.tolist(), values.tolist(), strict=True))

    def maxsim_s(self, query: Encoded, numbers: np.ndarray) -> float:
        """Seconds that scoring those records takes from memory."""
        vectors, head = query_vectors(self._index, query), np.sort(numbers)
        positions, _ = self._records.locate(head)
        begun = time.perf_counter()
        score(self._index.store.full, self._records.memory, positions, head, vectors)
        return time.perf_counter() - begun

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()
