"""Asks devices for what a trace says, with rows and queries of the same shapes, and the host's work
left out or waited for in between.

Commands that ran beside one another do so again: one begins once all have ended that had ended when
it was recorded, and so much later.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import errors
from ...threads import join
from ..kinds import KINDS, PartKind
from ..near_storage import NearStorageDevice
from .reader import Command, Trace

#: How parts are asked for that are not there: (what, others are there, none is, what to do).
_WANTED = {
    "records": (
        "records",
        "an index of other files",
        "no index",
        "name the index that was searched (--index)",
    ),
    "postings": (
        "posting lists",
        "others",
        "none",
        "name the index that was searched (--index), or the collection's directories (--postings)",
    ),
    "walks": (
        "graphs",
        "an index of other files",
        "no index",
        "name the index that was searched (--index)",
    ),
}


@dataclass
class VerbTimes:
    """Times of all commands of one verb. Attributes: count; size_bytes; recorded_s and replayed_s:
    added up."""

    count: int = 0
    size_bytes: int = 0
    recorded_s: float = 0.0
    replayed_s: float = 0.0


@dataclass
class Replayed:
    """What a replay took.

    Attributes:
        recorded_s, replayed_s: from the first command's beginning to the last one's end, then and
            now, in wall seconds.
        host_s: of that, recorded between commands, and waited for again unless it was left out.
        verbs: by verb.
    """

    recorded_s: float
    replayed_s: float
    host_s: float
    verbs: dict[str, VerbTimes] = field(default_factory=lambda: defaultdict(VerbTimes))


def replay(
    trace: Trace,
    devices: Sequence[NearStorageDevice],
    there: Mapping[PartKind, Sequence[Any]] | None = None,
    *,
    with_host: bool = True,
    **row_options: Any,
) -> Replayed:
    """Runs a trace once.

    Args:
        trace: commands that failed when they were recorded are left out.
        devices: one for each of the trace's.
        there: by kind of part (`espnx.device.kinds`), what its commands ask for: records of an open
            index, posting lists, graphs, directories of clusters. They are found by the names of
            their files; all but records are opened on their devices.
        with_host: waits between commands as long as the host worked there.
        row_options: of `NearStorageDevice.open_rows`.

    Raises:
        InvalidInputError: other devices than the trace has, or nothing of what it asks for.
        FormatError: a line that says what cannot be.
        what a device raises.
    """
    if len(devices) != len(trace.devices):
        raise errors.InvalidInputError(
            "devices for a trace",
            got=len(devices),
            expected=f"{len(trace.devices)}, as it was recorded on",
        )
    run = _Replay(trace, devices, there or {}, with_host, row_options)
    return run()


class _Replay:
    """One run: a thread for each device, which asks for that device's commands in order."""

    def __init__(
        self,
        trace: Trace,
        devices: Sequence[NearStorageDevice],
        there: Mapping[PartKind, Sequence[Any]],
        with_host: bool,
        row_options: dict[str, Any],
    ):
        self._commands = [each for each in trace.commands if not each.failed]
        self._devices, self._there, self._with_host, self._row_options = (
            devices,
            there,
            with_host,
            row_options,
        )
        self._recorded_s = trace.wall_s
        by_end = sorted(self._commands, key=lambda each: each.end_s)
        self._ends = [each.end_s for each in by_end]
        self._place_by_end = {each.number: place for place, each in enumerate(by_end)}
        self._is_done = np.zeros(len(by_end), dtype=bool)
        self._leading = 0  # so many of `by_end` are done, without a gap
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._ended_at = 0.0
        # what ran beside another then is not waited for: it does so again
        self._host_s = {
            each.number: each.host_s
            for place, each in enumerate(self._commands)
            if bisect_right(self._ends, each.at_s) >= place
        }
        self.found = Replayed(self._recorded_s, 0.0, sum(self._host_s.values()))

    def __call__(self) -> Replayed:
        players = [_Player(each, self._there, self._row_options) for each in self._devices]
        threads = [
            threading.Thread(target=self._run, args=(number, player), name="espnx-replay")
            for number, player in enumerate(players)
        ]
        begun = time.perf_counter()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                join(thread)
        except BaseException as error:  # Ctrl-C, or no thread could be had
            self._fail(error)
            while any(thread.is_alive() for thread in threads):
                for player in players:
                    player.forget()  # again and again: one may be about to ask
                time.sleep(0.01)
            raise
        if self._failure is not None:
            raise self._failure
        self.found.replayed_s = time.perf_counter() - begun
        return self.found

    def _run(self, device: int, player: _Player) -> None:
        try:
            for command in self._commands:
                if self._failure is not None:
                    return
                if command.device == device:
                    ask = player.prepare(command)
                    self._wait_for(command)
                    begun = time.perf_counter()
                    ask()
                    self._end(command, time.perf_counter() - begun)
        except BaseException as error:
            self._fail(error)
        finally:
            player.close()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _wait_for(self, command: Command) -> None:
        before = bisect_right(self._ends, command.at_s)
        with self._changed:
            self._changed.wait_for(lambda: self._leading >= before or self._failure is not None)
            if self._failure is None and self._with_host:
                until = time.monotonic() + self._host_s.get(command.number, 0.0)
                while self._failure is None and (left_s := until - time.monotonic()) > 0:
                    self._changed.wait(left_s)
            if self._failure is not None:
                raise errors.TransferCancelledError("a replay that failed elsewhere")

    def _end(self, command: Command, took_s: float) -> None:
        with self._changed:
            self._is_done[self._place_by_end[command.number]] = True
            while self._leading < len(self._is_done) and self._is_done[self._leading]:
                self._leading += 1
            times = self.found.verbs[command.verb]
            times.count += 1
            times.size_bytes += command.size_bytes
            times.recorded_s += command.took_s
            times.replayed_s += took_s
            self._changed.notify_all()


class _Player:
    """Turns lines into commands of one device."""

    def __init__(
        self,
        device: NearStorageDevice,
        there: Mapping[PartKind, Sequence[Any]],
        row_options: dict[str, Any],
    ):
        self._device, self._there, self._row_options = device, there, row_options
        self._kinds = tuple(dict.fromkeys((*KINDS, *device.kinds, *there)))
        # parts: what they store, and their memo
        self._parts, self._own = dict[int, tuple[Any, Any, dict[Any, Any]]](), list[Any]()

    def prepare(self, line: Command) -> Callable[[], Any]:
        """Makes what a command needs of the host, and returns the call."""
        for kind in self._kinds:
            if kind.says == line.verb:
                self._open(kind, line)
                return lambda: None
            if verb := kind.verbs.get(line.verb):
                part, stored, memo = self._part(kind, line)
                command = verb.command.of_line(line.detail, stored, memo)
                return lambda: command.replayed(line.detail, command.ask(part).finish(), memo)
        return line.detail.refuse(
            "verb",
            " or ".join(name for kind in self._kinds for name in (kind.says, *kind.verbs) if name),
        )

    def forget(self) -> None:
        """Wakes whoever waits for one of the parts."""
        for part, _, _ in list(self._parts.values()):
            part.forget()

    def close(self) -> None:
        for part in self._own:
            part.close()

    def _part(self, kind: PartKind, line: Command) -> tuple[Any, Any, dict[Any, Any]]:
        if line.part not in self._parts:
            if kind.says:
                line.detail.refuse("part", f"one that `{kind.says}` names")
            self._keep(kind, line, kind.open_on(self._device, **self._row_options))
        return self._parts[line.part]

    def _keep(self, kind: PartKind, line: Command, part: Any) -> None:
        self._own.append(part)
        self._parts[line.part] = part, kind.stored(part), {}

    def _open(self, kind: PartKind, line: Command) -> None:
        """The part that a line says there was, of what there is."""
        files, there = sorted(line.detail.texts("files", count=1 << 20)), self._there.get(kind, ())
        said = line.detail.values()

        def is_it(names: Sequence[str], stored: Any) -> bool:
            """Whether it lies in the same files, and what the line says holds of it."""
            return sorted(names) == files and all(
                said.get(name, fact) == fact for name, fact in kind.facts(stored).items()
            )

        for each in there:
            if kind.files is not None and not is_it(kind.files(each), each):
                continue
            if kind.is_open:
                self._parts[line.part] = each, each, {}
                return
            part = kind.open_on(self._device, each)
            names = [file.path for file in part.path_report()]
            if kind.files is not None or is_it(names, kind.stored(part)):
                self._keep(kind, line, part)
                return
            part.close()
        what, others, none, fix = _WANTED.get(kind.name, (kind.keeps, "others", "none", None))
        raise errors.InvalidInputError(
            f"{what} that a trace asks for",
            got=others if there else none,
            expected=", ".join(files[:3]),
            fix=fix,
        )
