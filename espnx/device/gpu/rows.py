"""An SSD beside a GPU: rows in one file, read into the GPU's memory (straight, where GPUDirect
Storage works), checked and attended to there. Everything but the kernels also runs on CPU
memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ...storage import NativeEngine, Plan
from ...storage.engine import FileHandle
from ...streams import streams_of
from ..interface import Capabilities, FilePath, Show
from ..row_layout import RowLayout
from ..rows.file import UNIT_BYTES, RowFileDevice
from ..rows.ssd import block_sums
from ..rows.writes import Write, Writing
from .attention import GroupAttention
from .plan import RowReads
from .readers import GDS_PATHS, Reader, open_reader
from .staging import Staging, Tables, host_memory, typed_memory_errors
from .stream import SLOT_BYTES, TensorStream, group_bytes
from .writes import PieceCopies, StagedWrite, WriteInPieces

MakeReader = Callable[[NativeEngine, FileHandle], Reader]


class GpuRowDevice(RowFileDevice):
    """See `espnx.device.interface.RowDevice`. Queries and tails may lie anywhere; results are where
    the queries are.

    Args:
        compute: in whose memory rows are computed on: ``cuda``, ``cuda:N``; ``cpu`` (tests); None:
            the current CUDA device.
        engine: ``auto``: ``gds``, or else (`fallback_reason` says why) reads into pinned host
            memory, which are copied; ``gds`` or ``gds-compat``: that and nothing else, while writes
            go through host memory; ``uring``, ``posix``, or an engine: reads and writes through
            host memory.
        make_reader: makes what reads the data file (tests).
        threads: that compute, on a CPU.
        directory, **options: of `RowFileDevice`.

    Raises:
        PathUnavailableError, MissingDependencyError: a path that was named cannot be had.

    Every call raises OutOfMemoryError where the memory of the device, or pinned memory of the host,
    is used up.
    """

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
        compute: str | torch.device | None = None,
        engine: NativeEngine | str = "auto",
        make_reader: MakeReader | None = None,
        threads: int | None = None,
        **options: Any,
    ):
        self.compute = torch.device(compute or "cuda")
        self._streams = streams_of(self.compute)
        if self._streams is not None and not self._streams.is_available():
            raise errors.PathUnavailableError(
                "no CUDA device here", got=str(self.compute), fix="compute='cpu'"
            )
        if self._streams is not None and self.compute.index is None:
            self.compute = torch.device(self.compute.type, self._streams.current_index())
        if self.compute.type == "cpu" and engine in GDS_PATHS:
            raise errors.InvalidInputError(
                "rows would lie in GPU memory",
                got=f"engine={engine!r} and {compute}",
                fix="compute='cuda'",
            )
        self._asked_path = engine if isinstance(engine, str) else "uring"
        self._make_reader, self._threads = make_reader, threads
        self._reader: Reader | None = None
        self._tables = Tables(self.compute)
        # Copies to the host and then to the disk, beside what the model computes.
        self._copies = None if self._streams is None else self._streams.new(self.compute)
        # What is longer than one goes through several: pinned memory stays for good.
        self._slots = Staging(self.compute, SLOT_BYTES)
        self._writer = ThreadPoolExecutor(1, "espnx-writeback")
        try:
            super().__init__(
                directory,
                engine="auto" if isinstance(engine, str) and engine in GDS_PATHS else engine,
                **options,
            )
        except BaseException:
            self._writer.shutdown()
            raise

    def _begin_reads(self, file: FileHandle) -> None:
        window_bytes = self.read_ahead_bytes
        if self._make_reader is not None:
            self._reader = self._make_reader(self.engine, file)
        else:
            self._reader = open_reader(
                self._asked_path,
                self.engine,
                file,
                self.compute,
                window_bytes=window_bytes,
                slot_bytes=SLOT_BYTES,
                deadline_s=self._deadline_s,
            )
        self._path = FilePath(file.path, self._reader.effective_path, self._reader.fallback_reason)
        self._stream = TensorStream(self._reader, file.path, window_bytes, self.compute)

    def _end_reads(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def push(self, layout: RowLayout, table: np.ndarray, sums: list[np.ndarray]) -> int:
        with typed_memory_errors(self.compute):
            rows = RowReads(layout, table, sums, group_bytes(self.read_ahead_bytes), UNIT_BYTES)
            return int(self._stream.push(rows))

    def attend(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RowDevice`."""
        return self._attend(ticket, queries, tail, checks_later=False)

    def attend_unchecked(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ChecksLater`."""
        return self._attend(ticket, queries, tail, checks_later=True)

    def _attend(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None, *, checks_later: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_open()
        with typed_memory_errors(self.compute):
            running = GroupAttention(queries, self.compute, self._threads, self._tables.put)
            if tail is not None:
                running.add_rows(tail)
            self._stream.attend(ticket, running.add_group, checks_later=checks_later)
            o, lse = running.result()
            return o.to(queries.q.device), lse.to(queries.q.device)

    def visit(self, ticket: int, show: Show) -> None:
        """See `RowDevice`."""
        self.check_open()
        with typed_memory_errors(self.compute):
            self._stream.visit(ticket, show)

    def visit_unchecked(self, ticket: int, show: Show) -> None:
        """See `ChecksLater`."""
        self.check_open()
        with typed_memory_errors(self.compute):
            self._stream.visit(ticket, show, checks_later=True)

    def check_looked_at(self) -> None:
        """See `ChecksLater`."""
        with typed_memory_errors(self.compute):
            self._stream.check()

    def forget_checks(self) -> None:
        """See `ChecksLater`."""
        self._stream.forget_checks()

    def _begin_write(
        self,
        layout: RowLayout,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sums: np.ndarray,
        plan: Plan,
    ) -> Writing:
        with typed_memory_errors(self.compute):
            return self._stage(layout, k, v, sums, plan)

    def _stage(
        self,
        layout: RowLayout,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sums: np.ndarray,
        plan: Plan,
    ) -> Writing:
        blocks = layout.pack(k.to(self.compute), None if v is None else v.to(self.compute)).view(-1)
        if self._streams is None or self._copies is None:
            memory = host_memory(blocks.numel(), self.compute).copy_(blocks)
            sums.reshape(-1)[:] = block_sums(blocks, layout.block_bytes).numpy()
            return StagedWrite(
                self._writer.submit(Write, self.engine, plan, memory, self._deadline_s)
            )
        is_long = blocks.numel() > self._slots.slot_bytes
        memory = host_memory(0 if is_long else blocks.numel(), self.compute)
        self._copies.wait_stream(self._streams.current(self.compute))
        with self._streams.on(self._copies):
            if not is_long:
                memory.copy_(blocks, non_blocking=True)
            # Of the bytes on the GPU: what goes wrong on the way to the disk is noticed too.
            found = self._streams.pinned(8 * sums.size).view(torch.int64)
            found.copy_(block_sums(blocks, layout.block_bytes), non_blocking=True)
            event = self._streams.event_behind(self._copies)
        blocks.record_stream(self._copies)

        def take_sums() -> None:
            event.synchronize()
            sums.reshape(-1)[:] = found.numpy()

        def write() -> Write:
            take_sums()
            return Write(self.engine, plan, memory, self._deadline_s)

        if is_long:
            copies = PieceCopies(blocks, self._slots, self._streams, self._copies)
            return WriteInPieces(
                self._writer, self.engine, plan, copies, self._deadline_s, take_sums
            )
        return StagedWrite(self._writer.submit(write))

    def close(self) -> None:
        """See `RowDevice`."""
        super().close()
        self._writer.shutdown()
