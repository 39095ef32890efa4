"""Records that are scored by the tensor ops: on a GPU, from an engine that reads into its memory or
by way of pinned host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...storage import Engine, Future
from ...storage.native import host_engine
from ...streams import current_stream, on, streams_of
from ..command import Part
from ..interface import DeviceStats, Pairs, RecordQuery
from ..record_layout import RecordLayout
from ..records.files import RecordFiles
from ..records.score import pair_scores, pairs_of_items, score_pairs
from .findings import Findings
from .staging import Tables, host_memory

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
        """All of a ticket's records were read, or nobody wants them any more."""
        with self._lock:
            if ticket in self._tickets:
                self._tickets.discard(ticket)
                self._stats += ticket.stats

    def computed(self, seconds: float) -> None:
        """What a ticket has taken after that."""
        with self._lock:
            self._stats += DeviceStats(computing_s=seconds)

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
        ticket = TensorRecordTicket(device, future, self._layout, numbers, list(queries), pairs)
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


@dataclass
class _Asked:
    """Records that are scored, as far as the host has to do with it.

    Attributes:
        items: places among the ticket's numbers.
        pairs: places among its pairs.
    """

    items: np.ndarray
    pairs: np.ndarray
    findings: Findings


@dataclass
class _AddedScores:
    """Scores of pairs that were added.

    Attributes:
        chosen: places in `scores` of what `findings` brings; without, they are there.
    """

    scores: np.ndarray
    chosen: np.ndarray
    findings: Findings | None

    def take(self) -> np.ndarray:
        """Once they have been waited for."""
        if self.findings is not None:
            self.scores[self.chosen] = self.findings.take()[1]
        return self.scores


class TensorRecordTicket:
    """See `espnx.device.interface.RecordTicket`. Whoever holds the lock makes the next step: a
    worker, or the thread that asks.

    On a GPU a step queues the checks and the scores of what has arrived, and waits for none of it.
    Whoever asks for scores waits once, behind all that is queued, and judges the records.
    """

    def __init__(
        self,
        device: TensorRecordDevice,
        future: Future,
        layout: RecordLayout,
        numbers: np.ndarray,
        queries: list[RecordQuery],
        pairs: Pairs,
    ):
        self._future, self._layout, self._numbers, self._queries, self._pairs = (
            future,
            layout,
            numbers,
            queries,
            pairs,
        )
        self._device, self._compute = device, device.compute
        self.task: Task[None] | None = None
        self.scores = np.full(len(pairs), np.nan, dtype=np.float32)
        self._memory = future.memory
        # On a GPU, records that the engine left in host memory cross in one copy when all are
        # there: many small copies would cost more than the overlap saves.
        self._moves = self._memory.device != self._compute
        self._per_batch = 2**62 if self._moves else max(_LEAST, len(numbers) // _PARTS)
        # Workers have current streams of their own: what the caller's has still to do on the
        # queries must come first.
        self._stream = current_stream(self._compute)
        self._waits_later = streams_of(self._compute) is not None
        self._tables = Tables(self._compute)
        self._turn = threading.Lock()
        self._asked: list[_Asked] = []
        self._last_asked: Findings | None = None  # behind all others
        self._arrived: list[np.ndarray] = []
        self.is_finished = not len(numbers)
        self._error: BaseException | None = None
        self._added: list[Pairs] = []
        self._added_scores: list[_AddedScores] = []
        self._waiting_s = self._computing_s = self.finished_at = 0.0

    def work(self) -> None:
        """All that is left, in a worker."""
        while not self.is_finished:
            with self._turn:
                self._step(is_asked_for=False)

    def _step(self, *, is_asked_for: bool) -> None:
        if self.is_finished:
            return
        is_last = True
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
                if is_last and self._waits_later:
                    self._score_added()
                self.finished_at = time.perf_counter()
                self._computing_s += self.finished_at - here
        except BaseException as error:
            self._fail(error)
        self.is_finished = self.is_finished or is_last
        if self.is_finished:
            self._device.ended(self)

    def _fail(self, error: BaseException) -> None:
        """What was asked of the device before is still judged (`_settle`): damage that is found
        there came first."""
        # its frames would hold the ticket
        self._error, self.is_finished = error.with_traceback(None), True

    def _score(self, items: torch.Tensor) -> None:
        arrived, positions = items.numpy(), self._future.position_bytes
        chosen = pairs_of_items(self._pairs, arrived)
        records = self._memory, positions, self._numbers, self._pairs, chosen, self._queries
        at, numbers = positions[items], self._numbers[arrived]
        if not self._waits_later:
            self._layout.check(self._memory, at, numbers)
            score_pairs(self._layout, *records, self.scores)
            self._arrived.append(arrived)
            return
        put = self._tables.put
        evidence = self._layout.evidence(self._memory, at, numbers, put)
        findings = Findings(evidence, pair_scores(self._layout, *records, put))
        self._asked.append(_Asked(arrived, chosen, findings))
        self._last_asked = findings

    def _settle(self) -> None:
        """Waits for what was asked of the device, in one piece, and judges it."""
        last, self._last_asked = self._last_asked, None
        if last is None:
            return
        asked, self._asked = self._asked, []
        begun, was_finished = time.perf_counter(), self.is_finished
        try:
            last.wait()
            for each in asked:
                evidence, scores = each.findings.take()
                if evidence is not None:
                    self._layout.judge(evidence, self._numbers[each.items])
                self.scores[each.pairs] = scores
                self._arrived.append(each.items)
        except BaseException as error:
            self._fail(error)
        self.finished_at = time.perf_counter()
        self._computing_s += self.finished_at - begun
        if was_finished:
            self._device.computed(self.finished_at - begun)
        elif self.is_finished:
            self._device.ended(self)

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `RecordTicket`."""
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        while True:
            with self._turn:
                if not self.is_finished and self._count() < at_least:
                    self._step(is_asked_for=True)
                is_over = self.is_finished or (until is not None and time.perf_counter() >= until)
                if is_over or self._count() >= at_least:
                    self._settle()
                    self._raise_error()
                    found = (
                        np.concatenate(self._arrived)
                        if self._arrived
                        else np.empty(0, dtype=np.int64)
                    )
                    self._arrived = []
                    return found, self.is_finished

    def _count(self) -> int:
        """Records that nobody was told of."""
        asked = sum(len(each.items) for each in self._asked)
        return asked + sum(map(len, self._arrived))

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def add(self, pairs: Pairs) -> None:
        """See `RecordTicket`."""
        self._added.append(pairs)
        # What can be asked of the device now is there when somebody waits.
        if self._waits_later and self.is_finished and self._turn.acquire(blocking=False):
            try:
                with on(self._stream):
                    self._score_added()
            finally:
                self._turn.release()

    def finish(self) -> np.ndarray:
        """See `RecordTicket`."""
        while not self.is_finished:
            with self._turn:
                self._step(is_asked_for=True)
        with self._turn:
            with on(self._stream):
                self._score_added()
            self._settle()
            self._raise_error()
        return np.concatenate([self.scores, *(each.take() for each in self._added_scores)])

    def _score_added(self) -> None:
        """Scores of the pairs that were added since."""
        while self._error is None and len(self._added_scores) < len(self._added):
            pairs = self._added[len(self._added_scores)]
            scores = np.empty(len(pairs), dtype=np.float32)
            chosen = np.argsort(pairs.query, kind="stable")
            records = *self.records, self._numbers, pairs, chosen, self._queries
            findings = None
            if self._waits_later and len(pairs):
                found = pair_scores(self._layout, *records, self._tables.put)
                self._last_asked = findings = Findings(None, found)
            else:
                score_pairs(self._layout, *records, scores)
            self._added_scores.append(_AddedScores(scores, chosen, findings))

    def cancel(self) -> None:
        """See `RecordTicket`."""
        self._future.cancel()
        if self.task is None:  # nobody might come to its end
            self._device.ended(self)

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
