"""A recorded program as commands of a walk: the host's own work, one thing after another, and what
its drives read, compute and write for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from ...device.trace.reader import Command, Trace
from ...errors import InvalidInputError
from ..decoding.machine import Machine
from ..decoding.parts import MANY, NETWORK, decoder_system
from ..queues import Outcome, Step, walk
from ..system import ROOT, Leg, PartGroup, System
from .kept import check_fits, shares
from .reads_ahead import Piece, ReadsAhead, Wanted
from .requests import COMPUTED, ENDS_WRITES, FORGET, WRITES, Request, requests_of
from .throttle import Grants, Throttle

#: Of a command in one drive: it goes in so many pieces at most, of so many bytes at least, so that
#: parts overlap.
PIECES_MAX, PIECE_BYTES = 16, 4096
HALF_BYTES = 2
WORK, WAIT, FLASH_WRITE = "program", "wait of a read", "flash write"
_WAYS = ("link", "port", "uplink", *NETWORK)
_OUT = tuple(f"{name} out" for name in _WAYS)
_IN = tuple(f"{name} in" for name in reversed(_WAYS))
#: Of what a throttle grants at once, a piece is so small a part at least.
_PART_OF_GRANT = 16


@dataclass(frozen=True)
class Walked:
    """Attributes:
    asked: the commands that did not fail, and what they ask.
    system, done: the parts, and their walk.
    began_s, ended_s: by the number of a command.
    end_s: of all of it, with what is written in the end.
    host_s: of the host's work between commands.
    host_factor: what a second of the host in the trace is here: of an emulated device's trace a
        stretched one is less.
    """

    asked: list[tuple[Command, Request]]
    system: System
    done: Outcome
    began_s: Mapping[int, float]
    ended_s: Mapping[int, float]
    end_s: float
    host_s: float
    host_factor: float


def walk_program(machine: Machine, trace: Trace, throttle: Throttle | None) -> Walked:
    """Raises InvalidInputError: a trace without commands, with a verb that no part serves, or with
    more rows than drives hold; a machine that keeps rows in memory. FormatError: a line that says
    what cannot be."""
    requests = requests_of(trace)
    asked = [
        (command, request)
        for command, request in zip(trace.commands, requests, strict=True)
        if request is not None
    ]
    if not asked:
        raise InvalidInputError("a trace", got="no command that did not fail", expected="some")
    check_fits(machine, trace, asked)
    graph = _Graph(machine, _system(machine, asked), trace, throttle)
    graph.add_all(asked)
    done = walk(
        graph.system.parts(),
        graph.routes,
        np.array(graph.route),
        np.arange(len(graph.route)),
        after=graph.after,
    )
    return Walked(
        asked,
        graph.system,
        done,
        {number: float(done.ended_s[each]) for number, each in graph.began.items()},
        {
            number: max(float(done.ended_s[each]) for each in last)
            for number, last in graph.ended.items()
        },
        float(np.delete(done.ended_s, graph.windows).max()),
        graph.host_s,
        graph.host_factor,
    )


def _system(machine: Machine, asked: Sequence[tuple[Command, Request]]) -> System:
    """The drives of a machine as they are for decoding, and what a program asks of them."""
    group = max((request.query_heads for _, request in asked), default=1)
    accelerator = machine.device.accelerator
    if machine.is_near_storage and accelerator is not None:
        # of more query heads than the largest kernel takes, there are several passes
        group = min(group, max(accelerator.rates, default=1))
    parts = decoder_system(machine, group)
    # A write does not stand in line behind the reads that its drive was given: it is buffered.
    write = machine.get("device.flash.write_bandwidth") or machine.need(
        "device.flash.read_bandwidth"
    )
    behind = parts.group("flash").behind
    own = (
        PartGroup(WORK, ROOT, 1, MANY, 0.0, 1.0),
        PartGroup(WAIT, ROOT, 1, MANY, 0.0, 1.0),
        PartGroup(FLASH_WRITE, behind, machine.n_drives, 1, 0.0, write),
    )
    known = {each.name for each in parts.groups}
    out, into = (
        tuple(Leg(name, "bytes") for name in names if name in known) for names in (_OUT, _IN)
    )
    calls = (Leg("calls"),) if "calls" in known else ()

    def inside(*legs: tuple[str, str]) -> tuple[Leg, ...]:
        return tuple(Leg(name, size) for name, size in legs if name in known)

    compute = (("drive memory", "twice"), ("accelerator", "flops"))
    verbs = {
        "work": (Leg(WORK, "seconds"),),
        "wait": (Leg(WAIT, "seconds"),),
        "call": (*calls, *into) if calls else into,
        "compute": inside(("flash", "flash bytes"), *compute),
        "take in": inside(("flash", "flash bytes"), ("drive memory", "bytes")),
        "attend": inside(("drive memory", "bytes"), ("accelerator", "flops")),
        "read": (Leg("flash", "flash bytes"),),
        "read out": (Leg("flash", "flash bytes"), *out),
        "write": (*into, Leg(FLASH_WRITE, "bytes")),
    }
    there = {name: legs for name, legs in verbs.items() if legs}
    return System(parts.name, (*parts.groups, *own), there)


@dataclass
class _Graph:
    """Commands of a walk: the program's own work, one after another, and the reads of its
    commands.

    Attributes:
        began, ended: which of them a recorded command begins with, and which have to end.
        ahead: by part and drive, what is read ahead.
        tickets: by the number of a command that reads ahead, where.
        writes: by device, those that nobody has waited for.
        windows: of a throttle, which nobody waits for once all has begun.
        host_s: of the program's own work.
    """

    machine: Machine
    system: System
    trace: Trace
    throttle: Throttle | None
    routes: list[Sequence[Step]] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)
    route: list[int] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    began: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ahead: dict[tuple[int, int], ReadsAhead] = field(default_factory=dict)
    tickets: dict[int, list[ReadsAhead]] = field(default_factory=dict)
    writes: dict[int, list[int]] = field(default_factory=dict)
    grants: dict[tuple[str, int], Grants] = field(default_factory=dict)
    granted: dict[tuple[str, int], int] = field(default_factory=dict)
    windows: list[int] = field(default_factory=list)
    host_s: float = 0.0

    @property
    def computes_inside(self) -> bool:
        return self.machine.is_near_storage and self.machine.device.accelerator is not None

    @property
    def is_emulated(self) -> bool:
        return self.trace.stretch is not None

    @property
    def host_factor(self) -> float:
        """A second of the host here: in traces of emulated devices it is worth as much less as the
        wall was stretched, and nothing where that had no part in their time."""
        stretch = self.trace.stretch
        return 1.0 if stretch is None else 1 / stretch if stretch else 0.0

    def add_all(self, asked: Sequence[tuple[Command, Request]]) -> None:
        """A command begins when all have ended that had when it was recorded, and the host has done
        what it did since; the host's work is one thing after another."""
        by_end = sorted((command for command, _ in asked), key=lambda each: each.end_s)
        joined: list[int] = []
        last_work: tuple[int, ...] = ()
        for command, request in asked:
            # those that had ended, joined one by one
            while len(joined) < len(by_end) and by_end[len(joined)].end_s <= command.at_s:
                number = by_end[len(joined)].number
                if number not in self.ended:
                    break
                before = (joined[-1],) if joined else ()
                joined.append(self._add("work", {"seconds": 0.0}, (*before, *self.ended[number])))
            after = (*last_work, *joined[-1:])
            own_s = 0.0 if command is asked[0][0] else command.host_s * self.host_factor
            self.host_s += own_s
            work = self._add("work", {"seconds": own_s}, after)
            last_work = (work,)
            self.began[command.number] = work
            self.ended[command.number] = self._ask(command, request, work)

    def _inside_s(self, command: Command) -> float:
        """What the host did within a command. Where devices were emulated nobody knows, but for
        what it computed while rows were shown to it: their time passed as slowly as the host's."""
        if "host_in_s" in command.detail:
            return command.detail.real("host_in_s") * self.host_factor
        return 0.0 if self.is_emulated else command.took_s

    def _ask(self, command: Command, request: Request, work: int) -> tuple[int, ...]:
        if request.verb in WRITES:
            written = self._write(command, request, work)
            self.writes.setdefault(command.device, []).extend(written)
            return (self._host(command, (work,)),)
        if request.verb in ENDS_WRITES:
            return (self._host(command, (work, *self.writes.pop(command.device, ()))),)
        if request.is_asynchronous:
            self._read_ahead(command, request, work)
            return (self._host(command, (work,)),)
        if request.verb == FORGET:
            for (part, _), ahead in self.ahead.items():
                if part == command.part:
                    ahead.forget()
        if request.reading is not None or request.verb in ("attend", "visit"):
            return self._rows(command, request, work)
        if request.is_empty:
            # drives have no part in it: the host takes as long as it did
            return (self._host(command, (work,)),)
        inside = self.computes_inside and request.verb in COMPUTED
        read = self._read(command, request, (work,), "compute" if inside else "read out")
        ends = (work, *(each.command for each in read))
        # The host computes as long as the command took, or as long as reads last that it computes
        # beside.
        return ends if inside else (*ends, self._host(command, (work,)))

    def _rows(self, command: Command, request: Request, work: int) -> tuple[int, ...]:
        """Attention over rows, or a look at them, which were asked for before or are now."""
        inside = self.computes_inside and not request.is_shown
        if request.reading is not None:
            tickets = self.tickets.pop(request.reading, [])
            rows = [each for ahead in tickets for each in ahead.take(request.reading, work)]
        else:
            rows = self._read(command, request, (work,), "take in" if inside else "read out")
        there = tuple(each.command for each in rows)
        if inside:
            calls: dict[tuple[tuple[str, int], ...], int] = {}
            ends = [work]
            for each in rows:
                place = tuple(each.members.items())
                if place not in calls:
                    calls[place] = self._add("call", {"bytes": 0.0}, (work,), each.members)
                sizes = {
                    "bytes": each.size_bytes,
                    "flops": each.size_bytes * request.flops_per_byte,
                }
                ends.append(self._add("attend", sizes, (calls[place], each.command), each.members))
            return tuple(ends)
        return (work, *there, self._host(command, (work,)))

    def _host(self, command: Command, after: tuple[int, ...]) -> int:
        return self._add("work", {"seconds": self._inside_s(command)}, after)

    def _read_ahead(self, command: Command, request: Request, work: int) -> None:
        """Puts pieces in line behind what every drive reads ahead already. What it computes on, a
        drive brings into its own memory, all of it."""
        inside = self.computes_inside and not request.is_shown
        verb, window = ("take in", None) if inside else ("read out", request.window_bytes)
        wanted: dict[int, list[Wanted]] = {}
        for each in self._wanted(command, request, (work,), verb):
            wanted.setdefault(each.drive, []).append(each)
        for drive, pieces in wanted.items():
            ahead = self.ahead.setdefault((command.part, drive), ReadsAhead(self._begin))
            ahead.ask(command.number, pieces, window)
            self.tickets.setdefault(command.number, []).append(ahead)

    def _read(
        self, command: Command, request: Request, after: tuple[int, ...], verb: str
    ) -> list[Piece]:
        """Brings a request's reads into the walk, in all drives that have something of it."""
        return [self._begin(each, ()) for each in self._wanted(command, request, after, verb)]

    def _wanted(
        self, command: Command, request: Request, after: tuple[int, ...], verb: str
    ) -> Iterator[Wanted]:
        """The pieces of a request's reads."""
        for drive, share in self._shares(command, request.units):
            members, before = self._members(drive), after
            if verb == "compute":
                before = (self._add("call", {"bytes": 0.0}, before, members),)
            waits_s = request.rounds * (self.machine.get("device.flash.read_latency") or 0.0)
            if waits_s:
                before = (self._add("wait", {"seconds": waits_s}, before),)
            pieces = self._pieces(request.read_bytes * share)
            least = self._least_bytes(request.requests * share) / len(pieces)
            for size in pieces:
                sizes = {
                    "bytes": size,
                    "flash bytes": max(size, least),
                    "twice": 2 * size,
                    "flops": size * request.flops_per_byte,
                }
                yield Wanted(verb, drive, size, sizes, members, before)

    def _begin(self, wanted: Wanted, after: tuple[int, ...]) -> Piece:
        """A piece's read, as soon as all before it and those of `after` have ended, and a throttle
        lets it."""
        granted = self._granted("read", wanted.drive, wanted.size_bytes, (*wanted.before, *after))
        command = self._add(wanted.verb, wanted.sizes, granted, wanted.members)
        return Piece(command, wanted.size_bytes, wanted.members)

    def _write(self, command: Command, request: Request, work: int) -> list[int]:
        """The host's rows, to all drives that keep some of them; of a join, read before."""
        found: list[int] = []
        latency_s = self.machine.get("device.flash.write_latency") or 0.0
        # one wait for all drives, which are ready at once then
        begun = (work,) if request.read_bytes else self._written_after(latency_s, (work,))
        rows: list[list[tuple[int, Mapping[str, int], float, tuple[int, ...]]]] = []
        for drive, share in self._shares(command, request.units):
            members = self._members(drive)
            before = begun
            if request.read_bytes:
                read_before = tuple(
                    self._add("read", {"flash bytes": size}, before, members)
                    for size in self._pieces(request.read_bytes * share)
                )
                before = self._written_after(latency_s, read_before)
            pieces = self._pieces(request.write_bytes * share)
            rows.append([(drive, members, size, before) for size in pieces])
        # drives take their pieces in turn: one is written while the next one's are on their way
        for turn in zip_longest(*rows):
            for drive, members, size, before in filter(None, turn):
                granted = self._granted("write", drive, size, before)
                found.append(self._add("write", {"bytes": size}, granted, members))
        return found

    def _written_after(self, latency_s: float, before: tuple[int, ...]) -> tuple[int, ...]:
        """What a write begins with, after the latency of one."""
        if not latency_s:
            return before
        return (self._add("wait", {"seconds": latency_s}, before),)

    def _granted(
        self, way: str, drive: int, size_bytes: float, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """After what a piece may begin: it waits in line for its part of a grant."""
        if self.throttle is None:
            return after
        place = (way, drive)
        grants = self.grants.setdefault(place, Grants())
        room = grants.room(size_bytes, self.throttle.grant_bytes)
        line = (self.granted[place],) if place in self.granted else ()
        begun = self._add("wait", {"seconds": 0.0}, (*after, *line, *room))
        window = self._add("wait", {"seconds": self.throttle.window_s}, (begun,))
        self.windows.append(window)
        grants.add(size_bytes, window)
        self.granted[place] = begun
        return (begun,)

    def _least_bytes(self, requests: float) -> float:
        """Those that flash reads in the time that so many requests take it."""
        rate = self.machine.get("device.flash.random_reads")
        return 0.0 if rate is None else requests / rate * self._flash_bytes_per_s()

    def _flash_bytes_per_s(self) -> float:
        rate = self.system.group("flash").bytes_per_s
        return math.inf if rate is None else rate

    def _shares(self, command: Command, units: int) -> list[tuple[int, float]]:
        """(drive, its share) of so many rows or pages, one after another over all drives; where
        there are as many as in the trace, each keeps its own."""
        return shares(self.machine.n_drives, len(self.trace.devices), command, units)

    def _members(self, drive: int) -> dict[str, int]:
        per_port = self.machine.device.links.devices_per_port
        port = drive // int(per_port.value) if per_port is not None else 0
        known = {each.name: each.count for each in self.system.groups}
        found = {name: drive for name, count in known.items() if count == self.machine.n_drives > 1}
        return found | {name: port for name in ("port in", "port out") if name in known}

    def _pieces(self, size_bytes: float) -> list[float]:
        n = min(PIECES_MAX, max(1, int(size_bytes // PIECE_BYTES)))
        if self.throttle is not None:
            n = max(n, math.ceil(size_bytes / (self.throttle.grant_bytes / _PART_OF_GRANT)))
        return [size_bytes / n] * n

    def _add(
        self,
        verb: str,
        sizes: Mapping[str, float],
        after: tuple[int, ...],
        members: Mapping[str, int] | None = None,
    ) -> int:
        members = members or {}
        key = (verb, tuple(sizes.values()), tuple(members.items()))
        if key not in self.numbers:
            self.numbers[key] = len(self.routes)
            self.routes.append(self.system.route(verb, sizes, members))
        self.route.append(self.numbers[key])
        self.after.append(after)
        return len(self.route) - 1
