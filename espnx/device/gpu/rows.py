"""An SSD beside a GPU: rows in one file, read into the GPU's memory (straight, where GPUDirect
Storage works), checked and attended to there. Everything but the kernels also runs on CPU
memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
from ..rows.writes import Write
from .attention import GroupAttention
from .plan import RowReads
from .readers import GDS_PATHS, Reader, open_reader
from .staging import Tables, host_memory
from .stream import SLOT_BYTES, TensorStream, group_bytes

MakeReader = Callable[[NativeEngine, FileHandle], Reader]


@contextmanager
def _typed_memory_errors(device: torch.device) -> Iterator[None]:
    """torch's errors of memory that is used up, on the device or pinned on the host, as ours."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        streams = streams_of(device)
        free_bytes = None if streams is None else streams.free_bytes(device)
        raise errors.OutOfMemoryError(
            f"memory for stored rows on {device}", free_bytes=free_bytes
        ) from error


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
        with _typed_memory_errors(self.compute):
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
        with _typed_memory_errors(self.compute):
            running = GroupAttention(queries, self.compute, self._threads, self._tables.put)
            if tail is not None:
                running.add_rows(tail)
            self._stream.attend(ticket, running.add_group, checks_later=checks_later)
            o, lse = running.result()
            return o.to(queries.q.device), lse.to(queries.q.device)

    def visit(self, ticket: int, show: Show) -> None:
        """See `RowDevice`."""
        self.check_open()
        with _typed_memory_errors(self.compute):
            self._stream.visit(ticket, show)

    def visit_unchecked(self, ticket: int, show: Show) -> None:
        """See `ChecksLater`."""
        self.check_open()
        with _typed_memory_errors(self.compute):
            self._stream.visit(ticket, show, checks_later=True)

    def check_looked_at(self) -> None:
        """See `ChecksLater`."""
        with _typed_memory_errors(self.compute):
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
    ) -> StagedWrite:
        with _typed_memory_errors(self.compute):
            return self._stage(layout, k, v, sums, plan)

    def _stage(
        self,
        layout: RowLayout,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sums: np.ndarray,
        plan: Plan,
    ) -> StagedWrite:
        blocks = layout.pack(k.to(self.compute), None if v is None else v.to(self.compute)).view(-1)
        memory = host_memory(blocks.numel(), self.compute)
        event = None
        if self._streams is None or self._copies is None:
            memory.copy_(blocks)
            found = block_sums(blocks, layout.block_bytes)
        else:
            self._copies.wait_stream(self._streams.current(self.compute))
            with self._streams.on(self._copies):
                memory.copy_(blocks, non_blocking=True)
                # Of the bytes on the GPU: what goes wrong on the way to the disk is noticed too.
                found = self._streams.pinned(8 * sums.size).view(torch.int64)
                found.copy_(block_sums(blocks, layout.block_bytes), non_blocking=True)
                event = self._streams.event_behind(self._copies)
            blocks.record_stream(self._copies)

        def write() -> Write:
            if event is not None:
                event.synchronize()
            sums.reshape(-1)[:] = found.numpy()
            return Write(self.engine, plan, memory, self._deadline_s)

        return StagedWrite(self._writer.submit(write))

    def close(self) -> None:
        """See `RowDevice`."""
        super().close()
        self._writer.shutdown()


class StagedWrite:
    """Rows that are copied to the host, then written from there."""

    def __init__(self, started: Future[Write]):
        self._started = started

    def done(self) -> bool:
        return self._started.done() and (
            self._started.exception() is not None or self._started.result().done()
        )

    def wait(self) -> None:
        self._started.result().wait()

    def end(self) -> bool | None:
        """Ends as `Write` does. A write that never began has left the place alone."""
        if self._started.exception() is not None:
            return None
        return self._started.result().end()

    def cancel(self) -> None:
        if self._started.exception() is None:
            self._started.result().cancel()
