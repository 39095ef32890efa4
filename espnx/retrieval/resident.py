"""A compact tier held in RAM: token rows only, one after another, scored in place."""

from __future__ import annotations

import numpy as np
import torch

from .record import RecordSchema
from .tier import Tier

_GROUP = 64
_RECORDS_AT_ONCE = 16384


class ResidentTier:
    """The token rows of a whole tier, read once, checked, and stripped of headers and padding.

    Args:
        tier: read whole.
        device: where the rows are kept.

    Attributes:
        memory: uint8, the rows.
        size_bytes: what is held in RAM: rows, and the offset of every 64th record.

    Raises:
        what the reads raise, and ChecksumError or StaleDataError.
    """

    def __init__(self, tier: Tier, device: torch.device):
        self.schema = RecordSchema(tier.schema.format, 0, tier.schema.dim)
        self.codebook, self.n_tokens = tier.codebook, tier.n_tokens
        counts = self.n_tokens.astype(np.int64)
        padded = np.zeros(-(-len(counts) // _GROUP) * _GROUP, dtype=np.int64)
        padded[: len(counts)] = counts
        groups = padded.reshape(-1, _GROUP).sum(axis=1) * self.schema.row_bytes
        self._group_begin = np.concatenate([[0], np.cumsum(groups)])
        memory = np.empty(int(self._group_begin[-1]), dtype=np.uint8)
        for first in range(0, len(counts), _RECORDS_AT_ONCE):
            numbers = np.arange(first, min(first + _RECORDS_AT_ONCE, len(counts)))
            self._copy(tier, numbers[counts[numbers] > 0], memory)
        self.memory = torch.from_numpy(memory).to(device)
        self.size_bytes = memory.nbytes + self._group_begin.nbytes

    def _copy(self, tier: Tier, numbers: np.ndarray, memory: np.ndarray) -> None:
        future = tier.read(numbers, gap_bytes=1 << 20)
        source, where = future.wait(), future.position_bytes
        tier.check(source, where, numbers)
        begin = (where + tier.schema.fixed_bytes).numpy()
        sizes = self.n_tokens[numbers].astype(np.int64) * self.schema.row_bytes
        end = np.cumsum(sizes)
        index = np.arange(end[-1] if len(end) else 0) + np.repeat(begin - (end - sizes), sizes)
        at = int(self._rows_begin(numbers[:1])[0]) if len(numbers) else 0
        memory[at : at + len(index)] = source.cpu().numpy()[index]  # records are consecutive, so their rows are

    def _rows_begin(self, numbers: np.ndarray) -> np.ndarray:
        group = numbers // _GROUP
        inside = numbers % _GROUP
        columns = np.arange(_GROUP)
        members = np.minimum(group[:, None] * _GROUP + columns, len(self.n_tokens) - 1)
        before = np.where(columns < inside[:, None], self.n_tokens[members], 0).sum(axis=1, dtype=np.int64)
        return self._group_begin[group] + before * self.schema.row_bytes

    def position_bytes(self, numbers: np.ndarray) -> torch.Tensor:
        """int64 [m]: where a record of `schema` would begin whose rows are here (rows lie `schema.fixed_bytes` after it)."""
        return torch.from_numpy(self._rows_begin(numbers) - self.schema.fixed_bytes)
