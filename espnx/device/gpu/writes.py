"""Rows on their way from a device's memory into a file, by way of pinned host memory: short ones in
one piece, long ones through a few slots."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor
from dataclasses import replace

import torch

from ... import errors
from ...storage import NativeEngine, Plan
from ...storage.native import NativeFuture
from ...streams import Stream, Streams
from ..rows.writes import Write, stuck
from .staging import Slot, Staging, typed_memory_errors

#: Of pinned memory that the pieces of long rows go through: one is filled while others are written.
SLOTS = 4
#: How long until who waits for an earlier try looks whether rows are wanted at all any more.
_SLICE_S = 0.05


class StagedWrite:
    """Rows that are copied to the host, then written from there."""

    def __init__(self, started: futures.Future[Write]):
        self._started = started

    def done(self) -> bool:
        return self._started.done() and (
            self._started.exception() is not None or self._started.result().done()
        )

    def wait(self) -> None:
        self._started.result().wait()

    def end(self) -> bool:
        """See `Writing`."""
        return self._started.exception() is None and self._started.result().end()

    def is_over(self) -> bool:
        """See `Writing`: a write that never began has left the place alone."""
        if not self._started.done():
            return False
        return self._started.exception() is not None or self._started.result().is_over()

    def cancel(self) -> None:
        if self._started.exception() is None:
            self._started.result().cancel()


class PieceCopies:
    """Copies pieces of rows in a device's memory to slots of pinned memory.

    Args:
        blocks: uint8 [bytes], the rows on the device; nothing changes them.
        slots: of pinned memory.
        streams, copies: of the device; the stream that copies are on.
    """

    def __init__(self, blocks: torch.Tensor, slots: Staging, streams: Streams, copies: Stream):
        self._blocks, self._slots, self._streams, self._copies = blocks, slots, streams, copies
        size_bytes, slot_bytes = blocks.numel(), slots.slot_bytes
        self.pieces = [
            range(begin, min(begin + slot_bytes, size_bytes))
            for begin in range(0, size_bytes, slot_bytes)
        ]

    def copy(self, piece: range) -> Slot:
        """Waits until the piece is in the slot. Raises OutOfMemoryError."""
        with typed_memory_errors(self._blocks.device):
            slot = self._slots.take(self._slots.slot_bytes)
            with self._streams.on(self._copies):
                slot.memory[: len(piece)].copy_(
                    self._blocks[piece.start : piece.stop], non_blocking=True
                )
                slot.copied = self._streams.event_behind(self._copies)
            slot.copied.synchronize()
        return slot

    def give_back(self, slot: Slot) -> None:
        """Nothing reads the slot any more."""
        if slot.copied is not None:
            self._slots.give_back(slot, slot.copied)


class WriteInPieces:
    """Rows that stay in the device's memory until all of them are in the file. Where a piece fails,
    whoever waits is told once, and what is missing is copied and written again.

    Args:
        writer: one thread, which the pieces of one after another are written by.
        engine: of the file.
        plan: of one item, where the rows go.
        copies: of the rows.
        deadline_s: of each piece.
        begin: called first, by the thread that writes.
    """

    def __init__(
        self,
        writer: Executor,
        engine: NativeEngine,
        plan: Plan,
        copies: PieceCopies,
        deadline_s: float,
        begin: Callable[[], None],
    ):
        self._writer, self._engine, self._plan, self._deadline_s, self._begin = (
            writer,
            engine,
            plan,
            deadline_s,
            begin,
        )
        self._copies: PieceCopies | None = copies
        self._left = copies.pieces
        self._lock = threading.Lock()  # of what follows
        self._under_way: deque[tuple[range, Slot, NativeFuture]] = deque()
        self._late: list[NativeFuture] = []  # of pieces that failed, and are in flight
        self._is_cancelled = False
        self._submit()

    def _submit(self) -> None:
        self._started = self._writer.submit(self._write)
        self._has_failed = False

    def _is_begun(self) -> bool:
        """Whether a try is under way, or has succeeded: one that has failed is followed by the
        next, if it is over, so that it holds up none of the others in line; one that was cancelled
        by none."""
        if self._has_failed and not self._is_cancelled and self.is_over():
            self._submit()
        return self._is_cancelled or not self._has_failed

    def done(self) -> bool:
        """See `Writing`."""
        return self._is_begun() and self._started.done()

    def wait(self) -> None:
        """See `Writing`."""
        if not self._is_begun():
            self._wait_for_late()
            self._submit()
        try:
            self._started.result()
        except Exception:  # the device's library has errors of its own
            self._has_failed = True
            self._is_begun()
            raise

    def end(self) -> bool:
        """See `Writing`."""
        return not self._has_failed and self._started.exception() is None

    def is_over(self) -> bool:
        """See `Writing`."""
        return self._started.done() and all(each.is_over() for each in self._late)

    def cancel(self) -> None:
        """Waits until nothing more is begun, and lets go of the rows on the device."""
        with self._lock:
            self._is_cancelled = True
            under_way = [future for _, _, future in self._under_way]
        for future in under_way:
            future.cancel()
        futures.wait([self._started])
        self._copies = None

    def _write(self) -> None:
        """Writes what is not written. Raises what a piece raised; DeadlineExceededError where a
        piece of an earlier try stays in flight."""
        copies = self._copies
        if copies is None:
            return
        self._wait_for_late()
        self._begin()
        left, found = deque(self._left), list[Exception]()
        try:
            while left and not found:
                if len(self._under_way) == SLOTS:
                    self._end_one(copies, found)
                    continue
                slot = copies.copy(left[0])
                if not self._start(left.popleft(), slot):
                    found.append(errors.TransferCancelledError("rows are not written any more"))
        except Exception as error:  # what is under way has to end first
            found.append(error)
        while self._under_way:
            self._end_one(copies, found)
        if found:
            raise found[0]
        self._copies = None  # and with it the rows

    def _wait_for_late(self) -> None:
        """Waits until nothing is in flight of the tries before. Raises DeadlineExceededError,
        TransferCancelledError."""
        until = time.monotonic() + self._deadline_s
        while self._late:
            if self._is_cancelled:
                raise errors.TransferCancelledError("rows are not written any more")
            left_s = max(until - time.monotonic(), 0.0)
            if self._late[0].wait_over(min(left_s, _SLICE_S)):
                self._late.pop(0)
            elif not left_s:
                raise stuck(self._deadline_s)

    def _start(self, piece: range, slot: Slot) -> bool:
        """Starts writing a piece, unless nothing is to be written any more."""
        plan = replace(
            self._plan,
            offset_bytes=self._plan.offset_bytes + piece.start,
            size_bytes=torch.tensor([len(piece)]),
        )
        with self._lock:
            if not self._is_cancelled:
                future = self._engine.write(
                    plan, slot.memory[: len(piece)], deadline_s=self._deadline_s
                )
                self._under_way.append((piece, slot, future))
            return not self._is_cancelled

    def _end_one(self, copies: PieceCopies, found: list[Exception]) -> None:
        """Waits for the oldest piece that is under way."""
        piece, slot, future = self._under_way[0]
        try:
            future.wait()
            self._left = [each for each in self._left if each != piece]
            copies.give_back(slot)
        except Exception as error:
            # the device may still read the slot, which its engine keeps
            found.append(error.with_traceback(None))
            self._late.append(future)
        with self._lock:
            self._under_way.popleft()
