"""Several devices for records as one: each keeps and scores those of the data files in its directory, and the scores come together."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from .. import errors
from ..storage import Engine, FileHandle, Future
from .around import topologies_of
from .interface import Capabilities, DeviceStats, FilePath, KeptRecords, Pairs, RecordDevice, RecordQuery, RecordTicket
from .near_storage import NearStorageDevice
from .record_layout import RecordLayout

_POLL_S = 0.001


def is_in(path: str, directory: str) -> bool:
    """Whether a path lies in a directory, links resolved; a directory lies in itself."""
    directory = os.path.realpath(directory)
    return os.path.commonpath([directory, os.path.realpath(path)]) == directory


class RoutedRecordDevice:
    """See `espnx.device.interface.RecordDevice`. Which device a record lies on changes no score.

    Args:
        engine: of the reads; stays the caller's.
        compute: where records are scored that a device does not score itself.
        devices: each with the directory whose files are its own; they stay the caller's.
    """

    capabilities = Capabilities()

    def __init__(self, engine: Engine, compute: torch.device, devices: Sequence[NearStorageDevice]):
        self.compute, self._paths = compute, [each.path for each in devices]
        with ExitStack() as undo:
            self._devices = list[RecordDevice]()
            for each in devices:
                self._devices.append(each.open_records(engine, compute))
                undo.callback(self._devices[-1].close)
            undo.pop_all()
        #: Where one device reads by itself, it has to open its own files.
        self.engine: Engine | None = engine if all(each.engine is engine for each in self._devices) else None

    @property
    def topologies(self) -> Sequence[Any]:
        """See `topologies_of`."""
        return topologies_of(*self._devices)

    def _owner(self, path: str) -> int:
        """The device in whose directory a file lies; the innermost where these lie in one another. Raises InvalidInputError."""
        inside = [number for number, directory in enumerate(self._paths) if is_in(path, directory)]
        if not inside:
            raise errors.InvalidInputError("a data file on none of the devices", got=path, expected=f"a file in one of {self._paths}")
        return max(inside, key=lambda number: len(os.path.realpath(self._paths[number])))

    def open(self, path: str) -> FileHandle:
        """See `RecordDevice`. Raises InvalidInputError for a file in no device's directory."""
        return self._devices[self._owner(path)].open(path)

    def close_file(self, file: FileHandle) -> None:
        """See `RecordDevice`."""
        self._devices[self._owner(file.path)].close_file(file)

    def keep_records(self, layout: RecordLayout) -> _RoutedRecords:
        """See `RecordDevice`. Raises as `open`."""
        owners = np.array([self._owner(file.path) for file in layout.files], dtype=np.int64)
        return _RoutedRecords(layout, owners, [device.keep_records(layout) for device in self._devices])

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        found = {file.path: file for device in self._devices for file in device.path_report()}
        return list(found.values())

    def stats(self) -> DeviceStats:
        """See `Device`."""
        return sum((device.stats() for device in self._devices), DeviceStats())

    def forget(self) -> None:
        """See `Device`."""
        for device in self._devices:
            device.forget()

    def close(self) -> None:
        """See `Device`."""
        for device in self._devices:
            device.close()


class _RoutedRecords:
    """See `espnx.device.interface.KeptRecords`.

    Args:
        owners: which device keeps each data file.
        kept: the records, as each device keeps them.
    """

    def __init__(self, layout: RecordLayout, owners: np.ndarray, kept: Sequence[KeptRecords]):
        self._layout, self._owners, self._kept = layout, owners, kept

    def maxsim(
        self,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs | None = None,
        *,
        gap_bytes: int = 0,
        is_urgent: bool = True,
        deadline_s: float = 30.0,
    ) -> RecordTicket:
        """See `KeptRecords`."""
        numbers = np.ascontiguousarray(numbers, dtype=np.int64)
        wanted = Pairs(np.arange(len(numbers)), np.zeros(len(numbers), np.int64)) if pairs is None else pairs
        file = self._layout.locate(numbers)[0].numpy()
        owner = self._owners[file] if len(self._owners) else file
        parts = list[_Part]()
        try:
            for number, kept in enumerate(self._kept):
                items = np.flatnonzero(owner == number)
                if len(items):
                    mine = np.flatnonzero(owner[wanted.item] == number)
                    own = Pairs(np.searchsorted(items, wanted.item[mine]), wanted.query[mine])
                    ticket = kept.maxsim(
                        numbers[items], queries, own, gap_bytes=gap_bytes, is_urgent=is_urgent, deadline_s=deadline_s
                    )  # fmt: skip
                    parts.append(_Part(ticket, items, mine))
        except BaseException:
            for part in parts:
                part.ticket.cancel()
            raise
        return _RoutedTicket(parts, owner, len(wanted))

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """See `KeptRecords`."""
        return self._kept[0].read(numbers, gap_bytes=gap_bytes, deadline_s=deadline_s)

    def release(self) -> None:
        """See `KeptRecords`."""
        for kept in self._kept:
            kept.release()


class _Part:
    """What one device does of a request.

    Attributes:
        items, pairs: its places among the numbers and the pairs asked for.
        added: of each further request, its places among those pairs.
    """

    def __init__(self, ticket: RecordTicket, items: np.ndarray, pairs: np.ndarray):
        self.ticket, self.items, self.pairs, self.added = ticket, items, pairs, list[np.ndarray]()
        self.is_finished = False

    def next(self, at_least: int, timeout_s: float | None) -> np.ndarray:
        found, self.is_finished = self.ticket.next(at_least, timeout_s)
        return self.items[found]


class _RoutedTicket:
    """See `espnx.device.interface.RecordTicket`."""

    def __init__(self, parts: Sequence[_Part], owner: np.ndarray, n_pairs: int):
        self._parts, self._owner, self._n_pairs = parts, owner, n_pairs
        self._added = list[int]()

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `RecordTicket`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        found, count = list[np.ndarray](), 0
        try:
            while True:
                waiting = [part for part in self._parts if not part.is_finished]
                for part in waiting:
                    # The last device that is not done is waited for; else each is looked at, so that none holds up what another has.
                    left = 0.0 if until is None else max(until - time.monotonic(), 0.0)
                    alone = len(waiting) == 1
                    wait_s = (None if until is None else left) if alone else _POLL_S if until is None else min(_POLL_S, left)
                    items = part.next(max(at_least - count, 1) if alone else 1, wait_s)
                    found.append(items)
                    count += len(items)
                is_finished = all(part.is_finished for part in self._parts)
                if is_finished or count >= at_least or (until is not None and time.monotonic() >= until):
                    return np.concatenate([np.empty(0, np.int64), *found]), is_finished
        except BaseException:
            self.cancel()
            raise

    @property
    def scores(self) -> np.ndarray:
        """See `RecordTicket`."""
        scores = np.zeros(self._n_pairs, np.float32)
        for part in self._parts:
            scores[part.pairs] = part.ticket.scores
        return scores

    def add(self, pairs: Pairs) -> None:
        """See `RecordTicket`."""
        self._added.append(len(pairs))
        for part in self._parts:
            mine = np.flatnonzero(np.isin(pairs.item, part.items))
            part.added.append(mine)
            part.ticket.add(Pairs(np.searchsorted(part.items, pairs.item[mine]), pairs.query[mine]))

    def finish(self) -> np.ndarray:
        """See `RecordTicket`."""
        every = [np.zeros(count, np.float32) for count in (self._n_pairs, *self._added)]
        for part in self._parts:
            found, begin = part.ticket.finish(), 0
            for into, places in zip(every, (part.pairs, *part.added), strict=True):
                into[places] = found[begin : begin + len(places)]
                begin += len(places)
        return np.concatenate(every)

    def cancel(self) -> None:
        """See `RecordTicket`."""
        for part in self._parts:
            part.ticket.cancel()

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordTicket`."""
        raise errors.InvalidInputError("records of several devices", got="scores alone", expected="a device that hands out records")

    @property
    def stats(self) -> DeviceStats:
        """See `RecordTicket`."""
        return sum((part.ticket.stats for part in self._parts), DeviceStats())

    @property
    def finished_at(self) -> float:
        """See `RecordTicket`."""
        return max((part.ticket.finished_at for part in self._parts), default=time.perf_counter())
