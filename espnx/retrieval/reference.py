"""The in-memory re-ranker that search from SSD must equal: everything loaded, one first-stage call, plain PyTorch, no overlap."""

from __future__ import annotations

import numpy as np
import torch

from ..ops.maxsim import maxsim_reference
from .encoder import Encoded
from .first_stage import FirstStage
from .record import HEADER_BYTES
from .store import EmbeddingStore


class InMemoryReference:
    """All records of a store in memory. Slow and simple on purpose; for tests, demonstrations and doubts.

    Args:
        store: read whole, and checked.
        first_stage: the index's own, called once per query, without a prefetch step.
    """

    def __init__(self, store: EmbeddingStore, first_stage: FirstStage):
        self.store, self.first_stage = store, first_stage
        numbers = np.arange(store.count)
        future = store.full.read(numbers, gap_bytes=1 << 20)
        self.memory, self.positions = future.wait(), future.position_bytes
        store.full.check(self.memory, self.positions, numbers)

    def rank(self, query: Encoded, *, candidates: int, nprobe: int, cls_weight: float) -> list[tuple[int, float]]:
        """(record number, ``cls_weight * CLS + MaxSim``) of all candidates, best first; ties by record number."""
        schema = self.store.schema
        tokens = query.tokens if self.store.projection is None else self.store.projection(query.tokens)
        numbers, _ = self.first_stage.start(query.cls.numpy()[None], min(candidates, self.store.count), nprobe).complete()[0]
        at = self.positions[torch.from_numpy(numbers)]
        n_tokens = torch.from_numpy(self.store.n_tokens[numbers].astype(np.int64))
        scores = maxsim_reference(tokens, self.memory, at + schema.fixed_bytes, n_tokens, schema.format)
        cls = maxsim_reference(query.cls.reshape(1, -1), self.memory, at + HEADER_BYTES, torch.ones_like(n_tokens), schema.format)
        total = (scores + cls_weight * cls).numpy()
        order = np.lexsort((numbers, -total))
        return [(int(numbers[i]), float(total[i])) for i in order]
