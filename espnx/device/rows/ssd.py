"""The plain SSD as a device: rows in one file, a deep queue, attention on this machine's cores as
rows arrive."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ...ops.attention.rows import native_arguments
from ...ops.crc32c import crc32c_ranges
from ...storage import Plan
from ...storage.engine import FileHandle
from ...storage.native import load_native
from ..interface import PIECE, Capabilities, FilePath, Show
from ..row_layout import RowLayout
from .file import UNIT_BYTES, RowFileDevice
from .writes import Writing


class SsdRowDevice(RowFileDevice):
    """See `espnx.device.interface.RowDevice`.

    Args:
        threads: that compute; None: as many as PyTorch uses.
        compute: the CPU.
        directory, **options: of `RowFileDevice`.
    """

    compute = torch.device("cpu")
    capabilities = Capabilities(
        attends_window=True,
        attends_soft_cap=True,
        attends_slopes=True,
        attends_unlike_widths=True,
        attends_latent=True,
        keeps=True,
    )

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        threads: int | None = None,
        compute: torch.device | None = None,
        **options: Any,
    ):
        if compute is not None and compute.type != "cpu":
            raise errors.InvalidInputError(
                "an SSD beside the CPU", got=f"rows computed on {compute}", fix="device='gpu'"
            )
        self._threads = threads or 0
        super().__init__(directory, **options)

    def _begin_reads(self, file: FileHandle) -> None:
        self._native = load_native()
        self._stream = self._native.RowStream(
            self.engine.native, self.read_ahead_bytes, self._deadline_s
        )
        self._path = FilePath(file.path, file.effective, self.engine.fallback_reason)

    def _begin_write(
        self,
        layout: RowLayout,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sums: np.ndarray,
        plan: Plan,
    ) -> Writing:
        memory = self.engine.memory(int(plan.size_bytes[0]))
        layout.pack(k, v, memory.view(*sums.shape, layout.block_bytes))
        sums.reshape(-1)[:] = block_sums(memory, layout.block_bytes).numpy()
        return self._write(plan, memory)

    def push(self, layout: RowLayout, table: np.ndarray, sums: list[np.ndarray]) -> int:
        tensors = [torch.from_numpy(each) for each in sums]
        return int(
            self._stream.push(
                layout.geometry, torch.from_numpy(table.view(np.int64)), tensors, UNIT_BYTES
            )
        )

    def reach(self, size_bytes: int) -> None:
        """See `Reaches`."""
        self._stream.reach(size_bytes)

    def visit(self, ticket: int, show: Show) -> None:
        """See `RowDevice`."""
        self.check_open()
        if (native := getattr(show, "native", None)) is not None:
            self._stream.name_pages(ticket, native)
            return
        self._stream.visit(
            ticket, lambda memory, pieces: show(memory, pieces.numpy().view(PIECE).reshape(-1))
        )

    def attend(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RowDevice`."""
        self.check_open()
        there = queries.q.device
        if there != self.compute:
            queries, tail = (
                queries.to(self.compute),
                tail if tail is None else tail.to(self.compute),
            )
        o, lse = self._native.attend_rows(
            self._stream, ticket, **native_arguments(queries, tail, self._threads)
        )
        return o.to(there), lse.to(there)


def block_sums(memory: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """int64, where the memory is: the CRC32C of each of its blocks."""
    offsets = torch.arange(0, memory.numel(), block_bytes)
    return crc32c_ranges(memory, offsets, torch.full_like(offsets, block_bytes))
