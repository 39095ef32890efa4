"""The I/O thread of the `gds` engine: admits pieces of transfers, reaps what has ended, retries
what came short, fails what failed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import errors
from ..engine import EngineStats
from .cufile import CANCELED, COMPLETE, NO_BATCHES, PASSING, TIMEOUT, CallFailedError, CuFile
from .file import OpenFile
from .piece import advance, failed
from .queue import Done, Flight, Flights, Readers
from .transfer import Transfer

_POLL_S = 0.0005
# How long reads that have just begun are waited for at a time: small ones take about that long, and
# what is asked meanwhile is not submitted before.
_YOUNG_POLL_S, _YOUNG_S = 0.0001, 0.002
_PAUSE_S = 0.0005  # after a call that cuFile wants to be made later
_QUARANTINE_POLL_S = 0.02
# That the last calls of cuFile may take, beside what reads are granted: then one of them hangs.
_LAST_CALLS_S = 2.0

#: Memory and batches of reads that never completed: kept for the life of the process, because the
#: device may still write to them.
left_behind: list[Any] = []


class ReadLoop:
    """Runs transfers until they end.

    Args:
        cufile: makes the calls.
        batch_size: most entries in a batch.
        batches: how many batches are in flight at a time.
        threads: how many large reads are under way at a time.
        batching: whether to try batches.
        release_file: gives up a closed file that nothing reads any more.

    Attributes:
        batching: whether small reads go in batches; where the library turns out to take none, every
            piece is a read of its own.
    """

    def __init__(
        self,
        cufile: CuFile,
        *,
        batch_size: int,
        batches: int,
        threads: int,
        batching: bool,
        release_file: Callable[[OpenFile], None],
    ):
        self._cufile, self._release_file, self.batching = cufile, release_file, batching
        self._flights = Flights(cufile, batch_size, batches)
        self._readers = Readers(cufile, threads, self._read_landed)
        self.lock = threading.Condition()  # guards what is below, and the users of files
        self._active: list[Transfer] = []
        self._landed: deque[Done] = deque()
        self._news = self._resting = False
        self._looked_at, self._submit_again_at = time.monotonic(), 0.0
        self.stopping = False
        self._grace_s = 0.0
        self._counts = dict.fromkeys(
            ("bytes_asked", "bytes_moved", "requests", "retries", "failures"), 0
        )
        self._thread = threading.Thread(target=self._run, daemon=True, name="espnx-gds")
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Starts a transfer. Raises EngineClosedError, InvalidInputError (a file was closed
        meanwhile)."""
        transfer.on_fail, transfer.looked_at = self._on_fail, self._last_look
        files = transfer.used_files()
        with self.lock:
            if self.stopping:
                raise errors.EngineClosedError("the engine was closed during the call")
            if any(file.closed for file in files):
                raise errors.InvalidInputError("a file of the plan was closed during the call")
            for file in files:
                file.users += 1
            self._counts["bytes_asked"] += transfer.asked_bytes
            at = next(
                (i for i, other in enumerate(self._active) if other.priority < transfer.priority),
                len(self._active),
            )
            self._active.insert(at, transfer)
            self._wake()

    def stats(self) -> EngineStats:
        with self.lock:
            held = [
                transfer
                for transfer in self._active
                if transfer.failure is not None and transfer.in_flight > 0
            ]
            return EngineStats(
                **self._counts,
                in_flight=sum(transfer.in_flight for transfer in self._active),
                quarantined_buffers=len(held),
                quarantined_bytes=sum(transfer.held_bytes for transfer in held),
            )

    def close(self, grace_s: float) -> bool:
        """Ends the thread. True if every read has come back. A call of cuFile that does not return
        holds the thread, which is left behind then."""
        with self.lock:
            self.stopping, self._grace_s = True, grace_s
            self._wake()
        self._thread.join(grace_s + _LAST_CALLS_S)
        return not self._thread.is_alive() and not self._active

    def _last_look(self) -> float:
        """When the latest look at what has ended began; now, where there is nothing to look at."""
        return time.monotonic() if self._resting and not self._news else self._looked_at

    def _wake(self) -> None:
        self._news = True
        self.lock.notify_all()

    def _on_fail(self) -> None:
        with self.lock:
            self._counts["failures"] += 1
            self._wake()

    def _read_landed(self, done: Done) -> None:
        with self.lock:
            self._landed.append(done)
            self._wake()

    def _run(self) -> None:
        self._cufile.memory.enter_thread()
        try:
            while not self.stopping:
                self._admit()
                if not self._wait():
                    self._rest(1.0)
        except Exception as error:  # a defect here must reach the callers, who would wait forever
            self.stopping = True
            self._fail_all(f"the engine's I/O thread failed: {error!r}")
            raise
        finally:
            self._release()

    def _rest(self, longest_s: float) -> None:
        now = time.monotonic()
        if any(not flight.lost for flight in self._flights.active):
            longest_s = min(longest_s, _QUARANTINE_POLL_S)
        again = (
            self._submit_again_at,
            *(flight.poll_again_at for flight in self._flights.healthy()),
        )
        longest_s = min([longest_s, *(at - now for at in again if at > now)])
        with self.lock:
            if not self._news:
                self._resting = True
                self.lock.wait(longest_s)
                self._resting = False
            self._news = False

    def _admit(self) -> None:
        with self.lock:
            transfers = list(self._active)
        for transfer in transfers:
            while self._may_submit() and (
                pieces := transfer.take(transfer.small, self._flights.room())
            ):
                self._submit_batch(transfer, np.array(pieces))
            pending = (transfer.large,) if self.batching else (transfer.large, transfer.small)
            for waiting in pending:
                while self._readers.room() > 0 and (pieces := transfer.take(waiting, 1)):
                    self._counts["requests"] += 1
                    self._readers.submit(transfer, pieces[0])
        for flight in self._flights.active:
            if flight.transfer.failure is not None:
                self._flights.give_up(flight)
        self._retire()

    def _may_submit(self) -> bool:
        return (
            self.batching and self._flights.room() > 0 and time.monotonic() >= self._submit_again_at
        )

    def _retire(self) -> None:
        with self.lock:
            over = [transfer for transfer in self._active if transfer.over()]
            self._active = [transfer for transfer in self._active if transfer not in over]
            files = [file for transfer in over for file in transfer.used_files()]
            for file in files:
                file.users -= 1
            unused = {file.number: file for file in files if file.closed and file.users == 0}
        for file in unused.values():
            self._release_file(file)

    def _submit_batch(self, transfer: Transfer, pieces: np.ndarray) -> None:
        self._counts["requests"] += pieces.size
        flight = None
        try:
            flight = self._flights.prepare(transfer, pieces)
            flight.submit()
        except CallFailedError as error:
            was_cancelled = flight is not None and flight.batch.was_cancelled
            # then cuFile has taken nothing
            if flight is None or error.code in (*NO_BATCHES, *PASSING):
                if flight is not None:
                    self._flights.discard(flight)
                self._counts["requests"] -= pieces.size
                transfer.in_flight -= pieces.size
                if self._is_for_later(transfer, error, was_cancelled):
                    transfer.put_back(transfer.small, pieces.tolist())
                    return
            elif was_cancelled:
                self._flights.stop_reuse()
            self._fail_piece(transfer, int(pieces[0]), error)

    def _is_for_later(
        self, transfer: Transfer, error: CallFailedError, was_cancelled: bool
    ) -> bool:
        """Whether what a call refused can be had otherwise, or a moment later."""
        if error.code in NO_BATCHES and was_cancelled:
            self._flights.stop_reuse()
            return True
        if error.code in NO_BATCHES:
            self.batching = False
            return True
        transfer.trouble, self._submit_again_at = str(error), time.monotonic() + _PAUSE_S
        return error.code in PASSING and time.monotonic() < transfer.deadline

    def _wait(self) -> bool:
        """Takes what has ended. False where nothing came and there is nothing to wait for but
        threads and reads that may never end."""
        came, now = bool(self._landed), time.monotonic()
        while self._landed:
            self._complete(self._landed.popleft())
        due = [
            flight
            for flight in self._flights.active
            if not flight.lost and flight.poll_again_at <= now
        ]
        wanted = [flight for flight in due if not flight.given_up]
        waited_for = next((flight for flight in wanted if flight.may_wait), None)
        # of those that somebody wants: cancelled ones may come back when they like
        is_any_young = any(now - flight.submitted_at < _YOUNG_S for flight in wanted)
        wait_s = _YOUNG_POLL_S if is_any_young else _POLL_S
        for flight in due:
            self._poll(flight, wait_s if flight is waited_for else 0.0)
        self._looked_at = now
        return came or bool(wanted)

    def _poll(self, flight: Flight, wait_s: float) -> None:
        try:
            done = flight.poll(1 if wait_s else 0, wait_s)
            flight.may_wait = True
        except CallFailedError as error:
            if error.code in PASSING:
                self._poll_later(flight, str(error))
                return
            flight.lost = str(error)  # its memory stays in quarantine
            self._fail_piece(
                flight.transfer, int(flight.pieces[np.argmax(flight.outstanding)]), error
            )
            return
        if done is not None:
            self._complete(done)
        if flight.count() == 0:
            self._flights.forget(flight)

    def _poll_later(self, flight: Flight, trouble: str) -> None:
        # A library may take "not as many in that time" for an error: the next look does not wait
        # for any.
        flight.may_wait = not flight.may_wait
        flight.poll_again_at = time.monotonic() + _PAUSE_S
        flight.transfer.trouble = trouble
        if time.monotonic() >= flight.transfer.deadline:
            flight.transfer.expire()

    def _complete(self, done: Done) -> None:
        """Every entry's status and byte count is looked at: whole pieces together, others by
        `advance`."""
        transfer, left = done.transfer, done.transfer.left_bytes[done.pieces]
        transfer.in_flight -= int((done.status != TIMEOUT).sum())
        whole = (done.status == COMPLETE) & (done.moved_bytes >= left)
        self._counts["bytes_moved"] += int(
            np.maximum(done.moved_bytes, 0)[done.status == COMPLETE].sum()
        )
        transfer.moved_bytes += int(left[whole].sum())
        for piece, moved, status in zip(
            done.pieces[~whole], done.moved_bytes[~whole], done.status[~whole], strict=True
        ):
            if status == CANCELED and done.is_after_cancel:
                self._flights.stop_reuse()
                transfer.submit_again(int(piece), transfer.piece(int(piece)))
                self._counts["retries"] += 1
            elif done.why:  # and no errno, of which the device were to blame
                transfer.fail(failed(transfer.piece(int(piece)), 0, done.why))
            elif transfer.failure is None:
                self._advance(transfer, int(piece), int(moved), int(status))
        if whole.any():
            transfer.landed(done.pieces[whole])

    def _advance(self, transfer: Transfer, number: int, moved: int, status: int) -> None:
        """A piece that is not whole: goes on, or fails."""
        piece = transfer.piece(number)
        progress = advance(piece, moved, status, self._cufile.describe)
        if progress.failure is not None:
            transfer.fail(progress.failure)
            return
        transfer.moved_bytes += progress.moved_bytes
        transfer.submit_again(number, piece)
        self._counts["retries"] += 1

    def _fail_piece(self, transfer: Transfer, number: int, error: CallFailedError) -> None:
        transfer.fail(failed(transfer.piece(number), error.code, str(error)))

    def _fail_all(self, what: str) -> None:
        with self.lock:
            transfers = list(self._active)
        for transfer in transfers:
            transfer.fail(lambda: errors.EngineClosedError(what))

    def _release(self) -> None:
        self._fail_all("the engine was closed during the call")
        until = time.monotonic() + self._grace_s
        self._admit()
        while self._active and time.monotonic() < until:
            self._wait()
            self._admit()
            if self._active:
                self._rest(_QUARANTINE_POLL_S)
        left = [flight for flight in self._flights.close() if flight.count()]
        stuck = self._readers.close()
        if self._active or left or stuck:
            left_behind.append((self._cufile, self._active, left, stuck))
