"""What the `gds` engine's reads are submitted through: batches of many small ones, and threads for
large ones.

A batch belongs to one transfer, because cuFile can only cancel whole batches. What was cancelled or
has failed without a completion keeps its memory, its file and its batch context until cuFile
reports it; a context is given up, or used again, only when nothing in it is outstanding.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cufile import COMPLETE, TIMEOUT, Batch, CallFailedError, CuFile
from .transfer import Transfer


@dataclass
class Done:
    """Some reads of one transfer ended.

    Attributes:
        pieces: piece numbers.
        moved_bytes: per piece; negative where it failed: -errno or -CUfileOpError.
        status: per piece, CUfileStatus_t.
        is_after_cancel: the context was cancelled for an earlier flight, and not for this one:
            entries that say so are of no submission of ours.
        why: what a call said that failed without a number; empty: there is nothing but numbers.
    """

    transfer: Transfer
    pieces: np.ndarray
    moved_bytes: np.ndarray
    status: np.ndarray
    is_after_cancel: bool = False
    why: str = ""


class Flight:
    """One submitted batch."""

    def __init__(self, batch: Batch, transfer: Transfer, pieces: np.ndarray):
        self.batch, self.transfer, self.pieces = batch, transfer, pieces
        self.outstanding = np.ones(pieces.size, dtype=bool)
        self.given_up = False
        self.lost = ""  # why cuFile will not report what is outstanding any more
        self.may_wait = True
        self.poll_again_at = self.submitted_at = 0.0

    def submit(self) -> None:
        self.submitted_at = time.monotonic()
        t, p = self.transfer, self.pieces
        self.batch.submit(t.handle[p], t.offset_bytes[p], t.base, t.place_bytes[p], t.left_bytes[p])

    def poll(self, at_least: int, timeout_s: float) -> Done | None:
        """What has ended since the last call. An entry that timed out inside cuFile is reported,
        and stays outstanding."""
        events = self.batch.poll(at_least, timeout_s)
        entry = events["cookie"]
        # An entry that is reported twice, or was never submitted, must not be counted again.
        known = (entry >= 0) & (entry < self.pieces.size)
        known[known] &= self.outstanding[entry[known]]
        events, entry = events[known], entry[known]
        if entry.size == 0:
            return None
        self.outstanding[entry[events["status"] != TIMEOUT]] = False
        return Done(
            self.transfer,
            self.pieces[entry],
            events["ret"].copy(),
            events["status"].copy(),
            self.batch.was_cancelled and not self.given_up,
        )

    def count(self) -> int:
        return int(self.outstanding.sum())


class Flights:
    """Batches in flight; contexts are kept for the next ones. Used by the I/O thread alone.

    Attributes:
        active: those in flight.
        reuses_cancelled: whether contexts whose reads were cancelled serve again when all of them
            have come back, as KvikIO's do: reads are cancelled at every chunk of a prompt, and
            making four contexts and giving them up is eight calls. False once one did not.
    """

    def __init__(self, cufile: CuFile, batch_size: int, batches: int):
        self._cufile, self._batch_size, self._limit = cufile, batch_size, batches
        self._idle: list[Batch] = []
        self.active: list[Flight] = []
        self.reuses_cancelled = True

    def healthy(self) -> list[Flight]:
        return [flight for flight in self.active if not flight.given_up and not flight.lost]

    def room(self) -> int:
        """How many entries the next batch may have; 0 where enough are in flight. Cancelled batches
        do not count: they may never end."""
        return self._batch_size if len(self.healthy()) < self._limit else 0

    def prepare(self, transfer: Transfer, pieces: np.ndarray) -> Flight:
        """A flight that is ready to be submitted. Raises CallFailedError.

        If its submission fails other than by a refusal, nobody knows whether cuFile took some of
        it: the flight stays outstanding.
        """
        batch = self._idle.pop() if self._idle else Batch(self._cufile, self._batch_size)
        flight = Flight(batch, transfer, pieces)
        self.active.append(flight)
        return flight

    def forget(self, flight: Flight) -> None:
        """Takes out a flight of which nothing is outstanding."""
        self.active.remove(flight)
        is_fit = self.reuses_cancelled or not flight.batch.was_cancelled
        # beside as many in flight, as many more may still be coming back cancelled
        if is_fit and len(self._idle) < 2 * self._limit:
            self._idle.append(flight.batch)
        else:
            self._cufile.attempt(flight.batch.destroy)

    def discard(self, flight: Flight) -> None:
        """Takes out a flight that cuFile refused: nothing of it is outstanding. Its context is not
        used again."""
        flight.outstanding[:] = False
        flight.given_up = True
        self.active.remove(flight)
        self._cufile.attempt(flight.batch.destroy)

    def stop_reuse(self) -> None:
        """A context that was cancelled is of no use any more: neither are others."""
        self.reuses_cancelled = False
        for batch in self._idle:
            if batch.was_cancelled:
                self._cufile.attempt(batch.destroy)
        self._idle = [batch for batch in self._idle if not batch.was_cancelled]

    def give_up(self, flight: Flight) -> None:
        """Cancels a flight once. A refusal changes nothing: its entries are waited for either
        way."""
        if flight.given_up:
            return
        flight.given_up = flight.batch.was_cancelled = True
        self._cufile.attempt(flight.batch.cancel)

    def close(self) -> list[Flight]:
        """Gives up every context that has nothing outstanding; returns the flights that have."""
        for batch in self._idle:
            self._cufile.attempt(batch.destroy)
        self._idle.clear()
        return self.active


class Readers:
    """Daemon threads that make one waiting read call each. Those that hang are left behind, and
    others started in their place."""

    def __init__(self, cufile: CuFile, threads: int, landed: Callable[[Done], None]):
        self._cufile, self._threads, self._landed = cufile, threads, landed
        self._work: queue.SimpleQueue[tuple[Transfer, int] | None] = queue.SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()
        self.running: list[tuple[Transfer, int]] = []

    def room(self) -> int:
        """How many more reads can start now. Reads of failed transfers do not count: they may never
        end."""
        with self._lock:
            return self._threads - sum(transfer.failure is None for transfer, _ in self.running)

    def submit(self, transfer: Transfer, piece: int) -> None:
        with self._lock:
            self.running.append((transfer, piece))
            start = self._started < len(self.running)
            self._started += start
        if start:
            threading.Thread(target=self._run, daemon=True, name="espnx-gds-read").start()
        self._work.put((transfer, piece))

    def _run(self) -> None:
        self._cufile.memory.enter_thread()
        while (work := self._work.get()) is not None:
            transfer, piece = work
            handle, place = int(transfer.handle[piece]), int(transfer.place_bytes[piece])
            offset, size = int(transfer.offset_bytes[piece]), int(transfer.left_bytes[piece])
            why = ""
            try:
                moved = self._cufile.read(handle, transfer.base, place, offset, size)
            except CallFailedError as error:
                moved, why = -error.code or -1, "" if error.code else str(error)
            with self._lock:
                self.running.remove(work)
            one = (np.array([piece]), np.array([moved]), np.array([COMPLETE]))
            self._landed(Done(transfer, *one, why=why))
            del transfer, work  # an idle thread must keep no memory alive

    def close(self) -> list[tuple[Transfer, int]]:
        """Ends the idle threads; returns the reads that have not come back."""
        with self._lock:
            for _ in range(self._started):
                self._work.put(None)
            return list(self.running)
