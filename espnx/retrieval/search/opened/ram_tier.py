"""A coarse tier held in RAM: token rows only, one after another, scored in place."""

from __future__ import annotations

import numpy as np
import torch

from ....device.record_layout import RecordSchema
from ...store.tier import Tier

_RECORDS_AT_ONCE = 16384


class RamTier:
    """The token rows of a whole tier, read once, checked, and stripped of headers and padding.

    Args:
        tier: read whole.
        device: where the rows are kept.

    Attributes:
        memory: uint8, the rows.
        size_bytes: what is held in RAM: rows, and where each document's begin.

    Raises:
        what the reads raise, and ChecksumError or StaleDataError.
    """

    def __init__(self, tier: Tier, device: torch.device):
        self.schema = RecordSchema(tier.schema.format, 0, tier.schema.dim)
        self.codebook, self.n_tokens = tier.codebook, tier.n_tokens
        counts = self.n_tokens.astype(np.int64)
        total = int(counts.sum())
        # Computed, as those of records on disk are, they would take longer than the scoring.
        self._first_row = (np.cumsum(counts) - counts).astype(
            np.uint32 if total < 2**32 else np.int64
        )
        memory = np.empty(total * self.schema.row_bytes, dtype=np.uint8)
        for first in range(0, len(counts), _RECORDS_AT_ONCE):
            numbers = np.arange(first, min(first + _RECORDS_AT_ONCE, len(counts)))
            self._copy(tier, numbers[counts[numbers] > 0], memory)
        self.memory = torch.from_numpy(memory).to(device)
        self.size_bytes = memory.nbytes + self._first_row.nbytes

    def _copy(self, tier: Tier, numbers: np.ndarray, memory: np.ndarray) -> None:
        future = tier.read(numbers, gap_bytes=1 << 20)
        source, where = future.wait(), future.position_bytes
        tier.check(source, where, numbers)
        begin = (where + tier.schema.fixed_bytes).numpy()
        sizes = self.n_tokens[numbers].astype(np.int64) * self.schema.row_bytes
        end = np.cumsum(sizes)
        index = np.arange(end[-1] if len(end) else 0) + np.repeat(begin - (end - sizes), sizes)
        at = int(self._rows_begin(numbers[:1])[0]) if len(numbers) else 0
        # records are consecutive, so their rows are
        memory[at : at + len(index)] = source.cpu().numpy()[index]

    def _rows_begin(self, numbers: np.ndarray) -> np.ndarray:
        return self._first_row[numbers].astype(np.int64) * self.schema.row_bytes

    def position_bytes(self, numbers: np.ndarray) -> torch.Tensor:
        """int64 [m]: where a record of `schema` would begin whose rows are here (rows lie
        `schema.fixed_bytes` after it)."""
        return torch.from_numpy(self._rows_begin(numbers) - self.schema.fixed_bytes)
