"""The plain SSD as a device: rows in one file, a deep queue, attention on this machine's cores as rows arrive."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from ..ops.crc32c import crc32c_ranges
from ..storage import Plan
from ..storage.engine import FileHandle
from ..storage.native import load_native
from .interface import Queries, Tail
from .layout import RowLayout
from .store import UNIT_BYTES, RowStore
from .writes import Write


class SsdDevice(RowStore):
    """See `espnx.device.interface.Device`.

    Args:
        threads: that compute; None: as many as PyTorch uses.
        directory, **options: of `RowStore`.
    """

    device = torch.device("cpu")

    def __init__(self, directory: str | os.PathLike[str], *, threads: int | None = None, **options: Any):
        self._threads = threads or 0
        super().__init__(directory, **options)

    def _begin_reads(self, file: FileHandle) -> None:
        self._stream = load_native().RowStream(self.engine.native, self._read_ahead_bytes, self._deadline_s)
        self.effective_path = file.effective
        self.fallback_reason = self.engine.fallback_reason

    def _begin_write(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, sums: np.ndarray, plan: Plan) -> Write:
        memory = self.engine.memory(int(plan.size_bytes[0]))
        layout.pack(k, v, memory.view(*sums.shape, layout.block_bytes))
        sums.reshape(-1)[:] = block_sums(memory, layout.block_bytes).numpy()
        return Write(self.engine, plan, memory, self._deadline_s)

    def _push(self, layout: RowLayout, table: np.ndarray, sums: list[np.ndarray]) -> int:
        tensors = [torch.from_numpy(each) for each in sums]
        return int(self._stream.push(layout.geometry(), torch.from_numpy(table), tensors, UNIT_BYTES))

    def attend(self, ticket: int, queries: Queries, tail: Tail | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Device`. Ticket -1: over the rows in memory alone."""
        self._check_open()
        return attend_rows(self._stream, ticket, queries, tail, self._threads)


def attend_rows(stream: Any, ticket: int, queries: Queries, tail: Tail | None, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over stored rows (`ticket` of a compiled stream; -1: none) and over those in memory."""
    k, v, skip, n_rows, first = (tail.k, tail.v, tail.skip, tail.n_rows, tail.first_position) if tail else (None, None, 0, 0, 0)
    o, lse = load_native().attend_rows(
        stream, ticket, queries.q, queries.dv, k, v, skip, n_rows, first, queries.last_position, queries.first_visible, queries.visible,
        threads,
    )  # fmt: skip
    return o, lse


def block_sums(memory: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """int64, where the memory is: the CRC32C of each of its blocks."""
    offsets = torch.arange(0, memory.numel(), block_bytes)
    return crc32c_ranges(memory, offsets, torch.full_like(offsets, block_bytes))
