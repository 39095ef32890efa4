"""The log of a graph's changes as its one writer has it open: a change is in it before it is
acknowledged."""

from __future__ import annotations

import contextlib
import os
import threading

from ... import errors
from ...storage.files import write_error
from ..format import GraphFacts
from .log import Change, Log, header_of, record_of

#: When a change is acknowledged, see `GraphWriter`.
DURABILITIES = ("each", "group", "none")


class LogWriter:
    """The log of one version of a graph. `append` is called by one thread at a time, `acknowledge`
    by any.

    Args:
        facts: of the graph.
        log: what is in it.
        durability: see `GraphWriter`.

    Attributes:
        broken: the error after which nobody knows what is on the device, or whether a merge has
            taken what is in here; None: there was none.
    """

    def __init__(self, facts: GraphFacts, log: Log, durability: str):
        self._path, self._header, self._durability = log.path, header_of(facts), durability
        self._number, self._synced, self._end_bytes = log.number, 0, log.end_bytes
        self._file: int | None = None
        self._syncing = threading.Lock()
        self.broken: BaseException | None = None

    def check(self) -> None:
        """Raises StateError where it takes no more changes."""
        if self.broken is not None:
            raise errors.StateError(
                "the log or a merge of a graph failed before",
                got=str(self.broken) or type(self.broken).__name__,
                fix="close the graph, and open it again",
            )

    def append(self, change: Change) -> int:
        """Writes a change, and returns its number, for `acknowledge`. Raises WriteError,
        DiskFullError: it is not in the log then, unless that is broken; nor is it where the caller
        is interrupted, as by Ctrl-C, who does not know of it."""
        data = record_of(change, self._number + 1, self._synced)
        before = self._end_bytes, self._number
        try:
            self._write(self._header + data if self._end_bytes == 0 else data)
            self._number += 1
            if self._durability == "each":
                self._sync(self._number)
        except BaseException:
            self._take_back(*before)
            raise
        return self._number

    def _take_back(self, end_bytes: int, number: int) -> None:
        """What is behind `end_bytes`; the next change would take its place anyway."""
        with self._syncing:
            self._end_bytes, self._number = end_bytes, number
            self._synced = min(self._synced, number)
            if self._file is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, end_bytes)

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = _opened(self._path)
            os.ftruncate(self._file, self._end_bytes)  # what was torn
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._end_bytes + done)
        except OSError as error:
            if isinstance(error, errors.EspnxError):
                raise
            raise write_error("cannot write the log of a graph", self._path, error) from error
        self._end_bytes += len(data)

    def acknowledge(self, number: int) -> None:
        """Returns when that change is as safe as it is to be; 0: there was none. Raises
        WriteError."""
        if self._durability == "group" and number:
            self._sync(number)

    def _sync(self, number: int) -> None:
        """Brings the log to the device up to that record, with whatever is behind it by then."""
        with self._syncing:
            if self._synced >= number or self._file is None:
                return  # another thread's did; or a merge has
            last = self._number
            try:
                os.fdatasync(self._file)
            except OSError as error:
                failed = write_error("cannot synchronise the log of a graph", self._path, error)
                self.broken = failed  # nobody knows what is on the device
                raise failed from error
            self._synced = max(self._synced, last)

    def sync_found(self) -> None:
        """Brings what other writers have left in it to the device, so that damage to it is told
        from a change that was not written to its end. Raises WriteError."""
        if self._number:
            try:
                self._file = _opened(self._path)
            except OSError as error:
                raise write_error("cannot open the log of a graph", self._path, error) from error
            self._sync(self._number)

    def close(self) -> None:
        with self._syncing:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _opened(path: str) -> int:
    """A descriptor of the log, whose name is on the device."""
    is_new = not os.path.lexists(path)
    found = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    if is_new:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return found
