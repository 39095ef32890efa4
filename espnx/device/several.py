"""Several devices as one: each is asked for what lies on it, at the same time, and what they give
back comes together.

What is asked for item by item (records, stored items) is put in its places; the best of each are
merged by `top`, attention over rows of each by log-sum-exp (`together`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from .. import errors
from ..ops.attention import merge
from ..storage import Engine, FileHandle
from .command import Command, Watch
from .interface import Capabilities, DeviceStats, FilePath, Pairs, RecordDevice
from .kinds import RECORDS
from .near_storage import NearStorageDevice
from .record_layout import RecordLayout
from .wrapper import topologies_of

_POLL_S = 0.001


def top(far: np.ndarray, numbers: np.ndarray, k: int) -> np.ndarray:
    """Places of the k nearest along the last axis, the nearest first, ties by number; numbers below
    0 are nothing and come last."""
    last = np.iinfo(np.int64).max
    order: np.ndarray = np.lexsort((np.where(numbers < 0, last, numbers), far), axis=-1)
    return order[..., :k]


def together(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the rows of all, of (o, lse) over those of each
    (`espnx.ops.attention.merge`)."""
    first, *others = parts
    for each in others:
        first = merge(*first, *each)
    return first


def stats_of(parts: Iterable[Any]) -> DeviceStats:
    """The stats of several parts, or tickets, together."""
    return sum(
        (part.stats() if callable(part.stats) else part.stats for part in parts), DeviceStats()
    )


def files_of(parts: Iterable[Any]) -> list[FilePath]:
    """The files of several parts, each once."""
    return list({file.path: file for part in parts for file in part.path_report()}.values())


def is_in(path: str, directory: str) -> bool:
    """Whether a path lies in a directory, links resolved; a directory lies in itself."""
    directory = os.path.realpath(directory)
    return os.path.commonpath([directory, os.path.realpath(path)]) == directory


def innermost(path: str, directories: Sequence[str]) -> int | None:
    """Which of some directories a path lies in, the innermost where these lie in one another; None:
    in none."""
    inside = [number for number, directory in enumerate(directories) if is_in(path, directory)]
    return max(inside, key=lambda number: len(os.path.realpath(directories[number])), default=None)


class SeveralParts:
    """Parts of one kind, each of which keeps its own of some items. Made by
    `espnx.device.kinds.PartKind.wrap`.

    Args:
        parts: one of each device.
        owners: by int64 numbers of items, which of the parts keeps each: int64.
    """

    def __init__(self, parts: Sequence[Any], owners: Callable[[np.ndarray], np.ndarray]):
        self._parts, self._owners = parts, owners

    def submit(self, command: Command, watch: Watch | None = None) -> Any:
        """See `Part`. What is not asked for item by item, the first does."""
        if command.items is None:
            return command.ask(self._parts[0], watch)
        owner, shares = self._owners(command.items), list[_Share]()
        try:
            for number, part in enumerate(self._parts):
                items = np.flatnonzero(owner == number)
                if len(items):
                    own, results = command.share(items)
                    shares.append(_Share(own.ask(part, watch), items, results))
        except BaseException:
            for share in shares:
                share.ticket.cancel()
            raise
        return SeveralTickets(shares, command)

    @property
    def topologies(self) -> Sequence[Any]:
        """See `topologies_of`."""
        return topologies_of(*self._parts)

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return files_of(self._parts)

    def stats(self) -> DeviceStats:
        """See `Device`."""
        return stats_of(self._parts)

    def forget(self) -> None:
        """See `Device`."""
        for part in self._parts:
            part.forget()

    def close(self) -> None:
        """See `Device`."""
        for part in self._parts:
            part.close()

    def release(self) -> None:
        """See `KeptRecords`."""
        for part in self._parts:
            part.release()


class _Share:
    """What one device does of a command.

    Attributes:
        items, results: its places among the items asked for, and among the results.
        added: of each further request, its places among the results of that.
    """

    def __init__(self, ticket: Any, items: np.ndarray, results: np.ndarray):
        self.ticket, self.items, self.results, self.added = (
            ticket,
            items,
            results,
            list[np.ndarray](),
        )
        self.is_finished = False

    def next(self, at_least: int, timeout_s: float | None) -> np.ndarray:
        found, self.is_finished = self.ticket.next(at_least, timeout_s)
        return self.items[found]


class SeveralTickets:
    """See `espnx.device.interface.RecordTicket`."""

    def __init__(self, shares: Sequence[_Share], command: Command):
        self._shares, self._command = shares, command
        self._counts = [command.n_results]

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `RecordTicket`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        found, count = list[np.ndarray](), 0
        try:
            while True:
                waiting = [share for share in self._shares if not share.is_finished]
                for share in waiting:
                    # The last device that is not done is waited for; else each is looked at, so
                    # that none holds up what another has.
                    left = 0.0 if until is None else max(until - time.monotonic(), 0.0)
                    alone = len(waiting) == 1
                    wait_s = (
                        (None if until is None else left)
                        if alone
                        else _POLL_S
                        if until is None
                        else min(_POLL_S, left)
                    )
                    items = share.next(max(at_least - count, 1) if alone else 1, wait_s)
                    found.append(items)
                    count += len(items)
                is_finished = all(share.is_finished for share in self._shares)
                if (
                    is_finished
                    or count >= at_least
                    or (until is not None and time.monotonic() >= until)
                ):
                    return np.concatenate([np.empty(0, np.int64), *found]), is_finished
        except BaseException:
            self.cancel()
            raise

    @property
    def scores(self) -> np.ndarray:
        """See `RecordTicket`."""
        return self._in_places(0, [(share.results, share.ticket.scores) for share in self._shares])

    def add(self, pairs: Pairs) -> None:
        """See `RecordTicket`."""
        self._counts.append(len(pairs))
        for share in self._shares:
            mine = np.flatnonzero(np.isin(pairs.item, share.items))
            share.added.append(mine)
            share.ticket.add(
                Pairs(np.searchsorted(share.items, pairs.item[mine]), pairs.query[mine])
            )

    def finish(self) -> np.ndarray:
        """Waits for the results of all, in the order in which they were asked for, then those that
        were added."""
        found = [(share, share.ticket.finish()) for share in self._shares]
        every = list[np.ndarray]()
        for turn in range(len(self._counts)):
            pieces = list[tuple[np.ndarray, np.ndarray]]()
            for share, results in found:
                places = [share.results, *share.added]
                begin = sum(map(len, places[:turn]))
                pieces.append((places[turn], results[begin : begin + len(places[turn])]))
            every.append(self._in_places(turn, pieces))
        return np.concatenate(every)

    def _in_places(self, turn: int, pieces: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        into = np.zeros(self._counts[turn], self._command.result_dtype)
        for places, values in pieces:
            into[places] = values
        return into

    def cancel(self) -> None:
        """See `RecordTicket`."""
        for share in self._shares:
            share.ticket.cancel()

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordTicket`."""
        raise errors.InvalidInputError(
            "records of several devices",
            got="scores alone",
            expected="a device that hands out records",
        )

    @property
    def stats(self) -> DeviceStats:
        """See `RecordTicket`."""
        return stats_of(share.ticket for share in self._shares)

    @property
    def finished_at(self) -> float:
        """See `RecordTicket`."""
        return max(
            (share.ticket.finished_at for share in self._shares), default=time.perf_counter()
        )


class SeveralRecordDevices(SeveralParts):
    """See `espnx.device.interface.RecordDevice`: each keeps and scores the records of the data
    files in its directory. Which device a record lies on changes no score.

    Args:
        engine: of the reads; stays the caller's.
        compute: where records are scored that a device does not score itself.
        devices: each with the directory whose files are its own; they stay the caller's.
    """

    capabilities = Capabilities()

    def __init__(self, engine: Engine, compute: torch.device, devices: Sequence[NearStorageDevice]):
        self.compute, self._paths = compute, [each.path for each in devices]
        with ExitStack() as undo:
            opened = list[RecordDevice]()
            for each in devices:
                opened.append(each.open_records(engine, compute))
                undo.callback(opened[-1].close)
            undo.pop_all()
        super().__init__(opened, lambda numbers: numbers)
        #: Where one device reads by itself, it has to open its own files.
        self.engine: Engine | None = (
            engine if all(each.engine is engine for each in opened) else None
        )

    def _owner(self, path: str) -> int:
        """The device in whose directory a file lies, see `innermost`. Raises InvalidInputError."""
        found = innermost(path, self._paths)
        if found is None:
            raise errors.InvalidInputError(
                "a data file on none of the devices",
                got=path,
                expected=f"a file in one of {self._paths}",
            )
        return found

    def open(self, path: str) -> FileHandle:
        """See `RecordDevice`. Raises InvalidInputError for a file in no device's directory."""
        found: FileHandle = self._parts[self._owner(path)].open(path)
        return found

    def close_file(self, file: FileHandle) -> None:
        """See `RecordDevice`."""
        self._parts[self._owner(file.path)].close_file(file)

    def keep_records(self, layout: RecordLayout) -> Any:
        """See `RecordDevice`. Raises as `open`."""
        of_file = np.array([self._owner(file.path) for file in layout.files], dtype=np.int64)

        def owners(numbers: np.ndarray) -> np.ndarray:
            file = layout.locate(numbers)[0].numpy()
            found: np.ndarray = of_file[file] if len(of_file) else file
            return found

        return RECORDS.wrap(
            SeveralParts, [device.keep_records(layout) for device in self._parts], owners
        )
