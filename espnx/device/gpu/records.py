"""Records that are scored by the tensor ops: on a GPU, from an engine that reads into its memory or
by way of pinned host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from ...storage import Engine, Future
from ...storage.native import host_engine
from ...streams import current_stream, on
from ..command import Part
from ..interface import DeviceStats, Pairs, RecordQuery
from ..record_layout import RecordLayout
from ..records.files import RecordFiles
from ..records.score import pairs_of_items, score_pairs
from .staging import host_memory

# As in csrc/device/record_stream.cpp.
_LEAST, _PARTS = 16, 16
_WORKERS = 32


class TensorRecordDevice(RecordFiles):
    """See `espnx.device.interface.RecordDevice`.

    Args:
        engine: of the reads; stays the caller's.
        compute: where records are scored: a GPU, or the CPU (tests).
        workers: threads that score what nobody waits for yet.
    """

    def __init__(self, engine: Engine, compute: torch.device, *, workers: int = _WORKERS):
        super().__init__(engine, compute)
        self._workers = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="espnx-records")
        self._lock = threading.Lock()
        self._stats = DeviceStats()
        self._tickets: set[TensorRecordTicket] = set()

    def keep_records(self, layout: RecordLayout) -> _TensorRecords:
        """See `RecordDevice`."""
        self._layouts.add(layout)
        return _TensorRecords(self, self._reads, layout, self._layouts.discard)

    def begin(self, ticket: TensorRecordTicket, *, is_urgent: bool) -> None:
        """A ticket is scored by a worker, unless it is urgent."""
        if ticket.is_finished:
            return
        with self._lock:
            self._tickets.add(ticket)
        if not is_urgent:
            ticket.task = self._workers.submit(ticket.work)

    def ended(self, ticket: TensorRecordTicket) -> None:
        with self._lock:
            self._tickets.discard(ticket)
            self._stats += ticket.stats

    def forget(self) -> None:
        """See `Device`."""
        with self._lock:
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.cancel()

    def stats(self) -> DeviceStats:
        """See `Device`."""
        with self._lock:
            return self._stats

    def close(self) -> None:
        """See `Device`."""
        self.forget()
        self._workers.shutdown(wait=True)

    def read(
        self,
        layout: RecordLayout,
        numbers: np.ndarray,
        *,
        gap_bytes: int,
        priority: int,
        deadline_s: float,
    ) -> Future:
        """Reads records that will be scored. Those that come to a GPU by way of host memory lie
        packed in pinned memory, from which they cross as fast as the link allows."""
        plan = layout.plan(numbers)
        if self.compute.type == "cpu" or host_engine(self._reads) is None:
            return self._reads.read(
                plan, gap_bytes=gap_bytes, priority=priority, deadline_s=deadline_s
            )
        packed = replace(plan, out_offset_bytes=plan.size_bytes.cumsum(0) - plan.size_bytes)
        out = host_memory(int(plan.size_bytes.sum()), self.compute)
        return self._reads.read(
            packed, out, gap_bytes=gap_bytes, priority=priority, deadline_s=deadline_s
        )


class _TensorRecords(Part):
    """See `espnx.device.interface.KeptRecords`."""

    def __init__(
        self,
        device: TensorRecordDevice,
        engine: Engine,
        layout: RecordLayout,
        released: Callable[[RecordLayout], None],
    ):
        self._device, self._engine, self._layout, self._released = device, engine, layout, released

    def maxsim(
        self,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs | None = None,
        *,
        gap_bytes: int = 0,
        is_urgent: bool = True,
        deadline_s: float = 30.0,
    ) -> TensorRecordTicket:
        """See `KeptRecords`."""
        device = self._device
        if pairs is None:
            pairs = Pairs(np.arange(len(numbers)), np.zeros(len(numbers), dtype=np.int64))
        future = device.read(
            self._layout,
            numbers,
            gap_bytes=gap_bytes,
            priority=int(is_urgent),
            deadline_s=deadline_s,
        )
        ticket = TensorRecordTicket(
            future, self._layout, numbers, list(queries), pairs, device.compute, device.ended
        )
        try:
            device.begin(ticket, is_urgent=is_urgent)
        except BaseException:
            future.cancel()
            raise
        return ticket

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """See `KeptRecords`."""
        return self._engine.read(
            self._layout.plan(numbers), gap_bytes=gap_bytes, deadline_s=deadline_s
        )

    def release(self) -> None:
        """See `KeptRecords`."""
        self._released(self._layout)


class TensorRecordTicket:
    """See `espnx.device.interface.RecordTicket`. Whoever holds the lock makes the next step: a
    worker, or the thread that asks."""

    def __init__(
        self,
        future: Future,
        layout: RecordLayout,
        numbers: np.ndarray,
        queries: list[RecordQuery],
        pairs: Pairs,
        compute: torch.device,
        ended: Callable[[TensorRecordTicket], None],
    ):
        self._future, self._layout, self._numbers, self._queries, self._pairs = (
            future,
            layout,
            numbers,
            queries,
            pairs,
        )
        self._compute, self._ended = compute, ended
        self.task: Task[None] | None = None
        self.scores = np.full(len(pairs), np.nan, dtype=np.float32)
        self._memory = future.memory
        # On a GPU, records that the engine left in host memory cross in one copy when all are
        # there: many small copies would cost more than the overlap saves.
        self._moves = self._memory.device != compute
        self._per_batch = 2**62 if self._moves else max(_LEAST, len(numbers) // _PARTS)
        # Workers have current streams of their own: what the caller's has still to do on the
        # queries must come first.
        self._stream = current_stream(compute)
        self._turn = threading.Lock()
        self._arrived: list[np.ndarray] = []
        self.is_finished = not len(numbers)
        self._error: BaseException | None = None
        self._added: list[Pairs] = []
        self._waiting_s = self._computing_s = self.finished_at = 0.0

    def work(self) -> None:
        """All that is left, in a worker."""
        while not self.is_finished:
            with self._turn:
                self._step(is_asked_for=False)

    def _step(self, *, is_asked_for: bool) -> None:
        if self.is_finished:
            return
        try:
            with on(self._stream):
                begun = time.perf_counter()
                items, is_last = self._future.next(self._per_batch)
                here = time.perf_counter()
                self._waiting_s += here - begun if is_asked_for else 0.0
                if self._moves:
                    self._memory = self._future.memory.to(self._compute, non_blocking=True)
                if items.numel():
                    self._score(items)
                self.finished_at = time.perf_counter()
                self._computing_s += self.finished_at - here
            self.is_finished = is_last
        except BaseException as error:
            # its frames would hold the ticket
            self._error, self.is_finished = error.with_traceback(None), True
        if self.is_finished:
            self._ended(self)

    def _score(self, items: torch.Tensor) -> None:
        arrived, positions = items.numpy(), self._future.position_bytes
        self._layout.check(self._memory, positions[items], self._numbers[arrived])
        chosen = pairs_of_items(self._pairs, arrived)
        score_pairs(
            self._layout,
            self._memory,
            positions,
            self._numbers,
            self._pairs,
            chosen,
            self._queries,
            self.scores,
        )
        self._arrived.append(arrived)

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `RecordTicket`."""
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        while True:
            with self._turn:
                if not self.is_finished and sum(map(len, self._arrived)) < at_least:
                    self._step(is_asked_for=True)
                if self._error is not None:
                    raise self._error.with_traceback(None)
                is_over = self.is_finished or (until is not None and time.perf_counter() >= until)
                if is_over or sum(map(len, self._arrived)) >= at_least:
                    found = (
                        np.concatenate(self._arrived)
                        if self._arrived
                        else np.empty(0, dtype=np.int64)
                    )
                    self._arrived = []
                    return found, self.is_finished

    def add(self, pairs: Pairs) -> None:
        """See `RecordTicket`."""
        self._added.append(pairs)

    def finish(self) -> np.ndarray:
        """See `RecordTicket`."""
        while not self.next(2**62)[1]:
            pass
        found = [self.scores]
        for pairs in self._added:
            scores = np.empty(len(pairs), dtype=np.float32)
            chosen = np.argsort(pairs.query, kind="stable")
            with on(self._stream):
                score_pairs(
                    self._layout, *self.records, self._numbers, pairs, chosen, self._queries, scores
                )
            found.append(scores)
        return np.concatenate(found)

    def cancel(self) -> None:
        """See `RecordTicket`."""
        self._future.cancel()

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordTicket`."""
        return self._memory, self._future.position_bytes

    @property
    def stats(self) -> DeviceStats:
        """See `RecordTicket`."""
        future = self._future
        return DeviceStats(
            bytes_asked=future.bytes_asked,
            bytes_moved=future.bytes_moved,
            read_requests=future.request_count,
            waiting_s=self._waiting_s,
            computing_s=self._computing_s,
        )
