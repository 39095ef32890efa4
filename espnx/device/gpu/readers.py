"""Where the bytes of a file arrive: in the memory of a torch device, straight from storage or by
way of host memory."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Protocol

import numpy as np
import torch

from ... import errors
from ...storage import Engine, FileHandle, Future, NativeEngine, Plan, open_engine
from ...storage.files import BLOCK_BYTES, aligned_empty
from ...streams import Event, streams_of
from .staging import Slot, Staging, host_memory

log = logging.getLogger(__name__)
GDS_PATHS = ("gds", "gds-compat")
#: What the way straight into a GPU's memory ends with where there is none, where a first read by it
#: fails, and where the GPU has no room for memory that is set aside for it alone.
_GDS_FAILS = (
    errors.PathUnavailableError,
    errors.MissingDependencyError,
    errors.ReadError,
    errors.OutOfMemoryError,
)


class Arrival(Protocol):
    """Reads under way."""

    def wait(self) -> torch.Tensor:
        """uint8 [bytes] on the device: what was asked for, one after the other, for what is queued
        on the current stream from here on; other streams ask again. Raises what the reads
        raised."""

    def advance(self) -> None:
        """Starts what can be started without waiting: a copy of what has been read. Raises
        nothing."""

    def cancel(self) -> None: ...

    @property
    def bytes_moved(self) -> int: ...


class Reader(Protocol):
    """Reads a file into the memory of a device.

    Attributes:
        effective_path: that bytes take.
        fallback_reason: why it is not what ``auto`` tried first; empty if it is.
    """

    effective_path: str
    fallback_reason: str

    def read(self, offset_bytes: np.ndarray, size_bytes: np.ndarray) -> Arrival: ...

    def close(self) -> None: ...


class _Arriving:
    """Rows that arrive in the engine's own memory."""

    def __init__(self, future: Future, size_bytes: torch.Tensor):
        self._future, self._size_bytes = future, size_bytes

    def wait(self) -> torch.Tensor:
        memory, position = self._future.wait(), self._future.position_bytes
        first, total = int(position[0]), int(self._size_bytes.sum())
        if torch.equal(position, self._size_bytes.cumsum(0) - self._size_bytes + first):
            return memory[first : first + total]
        # The engine has put something between them.
        return torch.cat(
            [
                memory[p : p + s]
                for p, s in zip(position.tolist(), self._size_bytes.tolist(), strict=True)
            ]
        )

    def advance(self) -> None:
        """They arrive where they are computed on."""

    def cancel(self) -> None:
        self._future.cancel()

    @property
    def bytes_moved(self) -> int:
        return self._future.bytes_moved


class DirectReader:
    """Reads of an engine whose memory is the device's. Closes the engine with itself where it is
    its own."""

    def __init__(self, engine: Engine, file: FileHandle, deadline_s: float, *, owns_engine: bool):
        self._engine, self._file, self._deadline_s, self._owns_engine = (
            engine,
            file,
            deadline_s,
            owns_engine,
        )
        self.effective_path, self.fallback_reason = file.effective, engine.fallback_reason

    def read(self, offset_bytes: np.ndarray, size_bytes: np.ndarray) -> Arrival:
        plan = Plan.of(self._file, torch.from_numpy(offset_bytes), torch.from_numpy(size_bytes))
        return _Arriving(self._engine.read(plan, deadline_s=self._deadline_s), plan.size_bytes)

    def close(self) -> None:
        if self._owns_engine:
            self._engine.close()


class _Bouncing:
    """Rows that go through host memory. What the device still writes to is kept by the engine."""

    def __init__(self, reader: BounceReader, future: Future, slot: Slot, size_bytes: int):
        self._reader, self._future, self._size_bytes = reader, future, size_bytes
        self._slot: Slot | None = slot
        self._memory: torch.Tensor | None = None
        self._copied: Event | None = None

    def advance(self) -> None:
        if self._slot is not None and self._memory is None and self._future.done():
            # an error is for whoever waits; by then the device may have the room that it lacks
            with contextlib.suppress(errors.EspnxError, torch.OutOfMemoryError):
                self._copy()

    def _copy(self) -> None:
        arrived, slot, reader = self._future.wait(), self._slot, self._reader
        if slot is None:
            return
        streams, copies = reader.streams, reader.copies
        if streams is None or copies is None:
            self._memory = arrived
            return
        with streams.on(copies):
            # of this stream, in whose order it is free
            memory = torch.empty(self._size_bytes, dtype=torch.uint8, device=reader.device)
            memory.copy_(slot.memory[: self._size_bytes], non_blocking=True)
            self._copied = streams.event_behind(copies)
        self._memory, self._slot = memory, None
        reader.staging.give_back(slot, self._copied)

    def wait(self) -> torch.Tensor:
        if self._memory is None:
            self._copy()
        if self._memory is None:  # cancelled
            return self._future.wait()
        streams, memory = self._reader.streams, self._memory
        if streams is not None:
            compute = streams.current(memory.device)
            compute.wait_event(self._copied)
            memory.record_stream(compute)
        return memory

    def cancel(self) -> None:
        self._slot = None  # the device may still write to it
        self._future.cancel()

    @property
    def bytes_moved(self) -> int:
        return self._future.bytes_moved


class BounceReader:
    """Reads into pinned host memory, then copies, on a stream of its own: as soon as a read has
    ended, beside what is computed.

    Args:
        engine, file: of the data file.
        device: whose memory rows are copied to.
        deadline_s: of a read.
        slot_bytes: of the pinned memory that a read goes through; longer ones get their own.
        why: what was tried before failed.
    """

    def __init__(
        self,
        engine: NativeEngine,
        file: FileHandle,
        device: torch.device,
        deadline_s: float,
        *,
        slot_bytes: int,
        why: str = "",
    ):
        self._engine, self._file, self.device, self._deadline_s = engine, file, device, deadline_s
        self.effective_path, self.fallback_reason = (
            f"{file.effective}+copy",
            why or engine.fallback_reason,
        )
        self.streams = streams_of(device)
        self.copies = None if self.streams is None else self.streams.new(device)
        self.staging = Staging(device, slot_bytes)

    def read(self, offset_bytes: np.ndarray, size_bytes: np.ndarray) -> Arrival:
        total = int(size_bytes.sum())
        if self.streams is None:
            slot = Slot(host_memory(total, self.device))
        else:
            slot = self.staging.take(total)
        plan = Plan.of(
            self._file,
            torch.from_numpy(offset_bytes),
            torch.from_numpy(size_bytes),
            torch.from_numpy(np.cumsum(size_bytes) - size_bytes),
        )
        future = self._engine.read(plan, slot.memory, deadline_s=self._deadline_s)
        return _Bouncing(self, future, slot, total)

    def close(self) -> None:
        """The engine is the device's."""


def open_reader(
    path: str,
    engine: NativeEngine,
    file: FileHandle,
    device: torch.device,
    *,
    window_bytes: int,
    slot_bytes: int,
    deadline_s: float,
) -> Reader:
    """The way into a device's memory that a path names.

    Args:
        path: ``auto`` (``gds`` where that can be had, otherwise through host memory), ``gds`` or
            ``gds-compat``; any other: that of `engine`, through host memory.
        engine, file: of the data file, which still has its name.
        window_bytes: that may be in flight.
        slot_bytes: of `BounceReader`.

    Raises:
        PathUnavailableError, MissingDependencyError: a path that was named cannot be had.
    """
    if device.type == "cpu":
        return DirectReader(engine, file, deadline_s, owns_engine=False)
    why = ""
    if path in (*GDS_PATHS, "auto"):
        try:
            return _open_gds(
                "gds" if path == "auto" else path, engine, file, device, window_bytes, deadline_s
            )
        except _GDS_FAILS as error:
            if path != "auto":
                raise
            why = str(error)
            log.debug("%s through host memory, not by gds: %s", file.path, why)
    return BounceReader(engine, file, device, deadline_s, slot_bytes=slot_bytes, why=why)


def _open_gds(
    path: str,
    engine: NativeEngine,
    file: FileHandle,
    device: torch.device,
    window_bytes: int,
    deadline_s: float,
) -> Reader:
    if os.path.getsize(file.path) == 0:
        # A first read decides how a file is read: there must be something to read.
        page = aligned_empty(BLOCK_BYTES).zero_()
        engine.write(Plan.of(file, [0], [BLOCK_BYTES], [0]), page, deadline_s=deadline_s).wait()
    # results that are still computed on count too
    arena_bytes = -(-(window_bytes + window_bytes // 2) // BLOCK_BYTES) * BLOCK_BYTES
    gds = open_engine(path, device=device, arena_bytes=max(arena_bytes, 32 << 20))
    try:
        return DirectReader(gds, gds.open(file.path), deadline_s, owns_engine=True)
    except BaseException:
        gds.close()
        raise
