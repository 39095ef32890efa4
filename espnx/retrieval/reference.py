"""The in-memory re-ranker that search from SSD must equal: everything loaded, one first-stage call,
plain PyTorch, no overlap."""

from __future__ import annotations

import numpy as np
import torch

from ..device.record_layout import HEADER_BYTES
from ..ops.maxsim import maxsim_reference
from ..storage.documents.ids import id_order
from .encoder import Encoded
from .first_stage.interface import LoadedStage
from .search.filters import Filters
from .store.store import EmbeddingStore


class InMemoryReference:
    """All records of a store in memory. Slow and simple on purpose; for tests, demonstrations and
    doubts.

    Args:
        store: read whole, and checked.
        first_stage: the index's own, called once per query, without a prefetch step.
    """

    def __init__(self, store: EmbeddingStore, first_stage: LoadedStage):
        self.store, self.first_stage = store, first_stage
        parts = [
            np.arange(part.first_number, part.first_number + part.count) for part in store.parts
        ]
        numbers = np.concatenate(parts) if parts else np.empty(0, np.int64)
        future = store.full.read(numbers, gap_bytes=1 << 20)
        self.memory = future.wait()
        store.full.check(self.memory, future.position_bytes, numbers)
        self.positions = torch.zeros(store.manifest.end_number, dtype=torch.int64)
        self.positions[torch.from_numpy(numbers)] = future.position_bytes

    def rank(
        self, query: Encoded, *, candidates: int, nprobe: int, cls_weight: float
    ) -> list[tuple[int, float]]:
        """(record number, ``cls_weight * CLS + MaxSim``) of all candidates, best first; ties by
        id."""
        schema, prepared = self.store.full.schema, self.first_stage.prepare(query)
        tokens = (
            query.tokens if self.store.projection is None else self.store.projection(query.tokens)
        )
        allowed = Filters(self.store).allowed(None, None)
        wanted = min(candidates, self.store.count)
        numbers, _ = self.first_stage.start(
            [prepared], wanted, nprobe, allowed, at_least=wanted
        ).complete()[0]
        at = self.positions[torch.from_numpy(numbers)]
        n_tokens = torch.from_numpy(self.store.n_tokens[numbers].astype(np.int64))
        scores = maxsim_reference(
            schema.query_tokens(tokens),
            self.memory,
            at + schema.fixed_bytes,
            n_tokens,
            schema.format,
            self.store.full.codebook,
        )
        scores = scores.masked_fill(n_tokens == 0, 0.0)
        if schema.d_cls:
            ones = torch.ones_like(n_tokens)
            cls = maxsim_reference(
                schema.query_cls(query.cls.reshape(1, -1)),
                self.memory,
                at + HEADER_BYTES,
                ones,
                schema.cls_format,
            )
            scores = scores + cls_weight * cls
        total = scores.numpy()
        ids = [identifier for identifier, _ in self.store.texts.get(numbers.tolist())]
        order = sorted(range(len(ids)), key=lambda i: (-total[i], id_order(ids[i])))
        return [(int(numbers[i]), float(total[i])) for i in order]
