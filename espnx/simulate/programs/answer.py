"""What a recorded program would take on another machine: its commands in the order in which they
waited for one another, with the host's work between them as it was, its rows spread anew over the
machine's drives by sequence and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...device.trace.reader import Command, Trace
from ...errors import InvalidInputError
from ..decoding.machine import Machine
from ..decoding.parts import MANY, decoder_system
from ..queues import Step, walk
from ..system import ROOT, Leg, PartGroup, System
from .requests import COMPUTED, WRITES, Request, requests_of

#: Of a command in one drive: it goes in so many pieces at most, of so many bytes at least, so that
#: parts overlap.
PIECES_MAX, PIECE_BYTES = 16, 1 << 20
HALF_BYTES = 2
_WORK, _WAIT = "program", "wait of a read"
_OUT, _IN = ("link out", "port out", "uplink out"), ("uplink in", "port in", "link in")


@dataclass(frozen=True)
class VerbTimes:
    """All commands of a verb. Attributes: count; read_bytes; write_bytes; recorded_s and
    predicted_s: added up, from a command's beginning to its end."""

    count: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    recorded_s: float = 0.0
    predicted_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """Attributes:
    system, program: by name, and as the trace names it.
    commands: that were asked for.
    recorded_s, predicted_s: from the first command's beginning to the last one's end.
    host_s: of the host's work between commands, which is as it was.
    bound: the group of parts that has most to do, the program's own work among them.
    busy_s: of each group of parts that does something, a part of it.
    verbs: by verb.
    written_bytes: to flash.
    runs_until_worn: of the program; None: no endurance is known, or nothing is written.
    """

    system: str
    program: str
    commands: int
    recorded_s: float
    predicted_s: float
    host_s: float
    bound: str
    busy_s: Mapping[str, float]
    verbs: Mapping[str, VerbTimes]
    written_bytes: int
    runs_until_worn: float | None


def answer(machine: Machine, trace: Trace) -> Answer:
    """Raises InvalidInputError: a trace without commands, or with a verb that no part serves;
    FormatError: a line that says what cannot be."""
    requests = requests_of(trace)
    asked = [
        (command, request)
        for command, request in zip(trace.commands, requests, strict=True)
        if request is not None
    ]
    if not asked:
        raise InvalidInputError("a trace", got="no command that did not fail", expected="some")
    graph = _Graph(machine, _system(machine, asked))
    graph.add_all(asked)
    system = graph.system
    done = walk(
        system.parts(),
        graph.routes,
        np.array(graph.route),
        np.arange(len(graph.route)),
        after=graph.after,
    )
    verbs: dict[str, VerbTimes] = {}
    for command, request in asked:
        first, last = graph.began[command.number], graph.ended[command.number]
        took_s = max(float(done.ended_s[each]) for each in last) - float(done.ended_s[first])
        before = verbs.get(request.verb, VerbTimes())
        verbs[request.verb] = VerbTimes(
            before.count + 1,
            before.read_bytes + request.read_bytes,
            before.write_bytes + request.write_bytes,
            before.recorded_s + command.took_s,
            before.predicted_s + took_s,
        )
    names = np.array(system.names())
    busy_s = {}
    for name in dict.fromkeys(system.names()):
        served_s = [done.accounts[i].served_s for i in np.flatnonzero(names == name)]
        if name != _WAIT and any(served_s):
            busy_s[name] = float(np.mean(served_s))
    begun_s = float(done.ended_s[graph.began[asked[0][0].number]])
    written = sum(request.write_bytes for _, request in asked)
    endurance = machine.get("device.endurance")
    return Answer(
        machine.system.name,
        trace.program,
        len(asked),
        trace.wall_s,
        float(done.ended_s.max()) - begun_s,
        graph.host_s,
        max(busy_s, key=lambda name: busy_s[name]) if busy_s else _WORK,
        busy_s,
        verbs,
        written,
        endurance * machine.n_drives / written if endurance and written else None,
    )


def _system(machine: Machine, asked: Sequence[tuple[Command, Request]]) -> System:
    """The drives of a machine as they are for decoding, and what a program asks of them."""
    group = max((request.query_heads for _, request in asked), default=1)
    accelerator = machine.device.accelerator
    if machine.is_near_storage and accelerator is not None:
        # of more query heads than the largest kernel takes, there are several passes
        group = min(group, max(accelerator.rates, default=1))
    parts = decoder_system(machine, group)
    own = (PartGroup(_WORK, ROOT, 1, MANY, 0.0, 1.0), PartGroup(_WAIT, ROOT, 1, MANY, 0.0, 1.0))
    known = {each.name for each in parts.groups}
    out, into = (
        tuple(Leg(name, "bytes") for name in names if name in known) for names in (_OUT, _IN)
    )
    calls = (Leg("calls"),) if "calls" in known else ()
    inside = tuple(
        Leg(name, size)
        for name, size in (
            ("flash", "bytes"), ("drive memory", "twice"), ("accelerator", "flops")
        )
        if name in known
    )  # fmt: skip
    return System(
        parts.name,
        (*parts.groups, *own),
        {
            "work": (Leg(_WORK, "seconds"),),
            "wait": (Leg(_WAIT, "seconds"),),
            "call": (*calls, *into) if calls else into,
            "compute": inside,
            "pass on": out,
            "read": (Leg("flash", "bytes"),),
            "read out": (Leg("flash", "bytes"), *out),
            "write": (*into, Leg("flash", "flash time")),
        },
    )


@dataclass
class _Graph:
    """Commands of a walk: the program's own work, one after another, and the reads of its
    commands.

    Attributes:
        began, ended: which of them a recorded command begins with, and which have to end.
        host_s: of the program's own work.
    """

    machine: Machine
    system: System
    routes: list[Sequence[Step]] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)
    route: list[int] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    began: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    host_s: float = 0.0

    @property
    def computes_inside(self) -> bool:
        return self.machine.is_near_storage and self.machine.device.accelerator is not None

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
            own_s = 0.0 if command is asked[0][0] else command.host_s
            self.host_s += own_s
            work = self._add("work", {"seconds": own_s}, after)
            last_work = (work,)
            self.began[command.number] = work
            self.ended[command.number] = self._ask(command, request, work)

    def _ask(self, command: Command, request: Request, work: int) -> tuple[int, ...]:
        if request.verb in WRITES:
            return tuple(self._write(request, work))
        if request.is_asynchronous:
            self.reads[command.number] = self._read(request, work, inside=self.computes_inside)
            return (work,)
        inside = self.computes_inside and request.verb in COMPUTED
        if request.reading is not None:
            reads = self.reads.get(request.reading, ())
            return self._taken_in(command, request, work, reads, inside)
        if request.is_empty:
            # drives have no part in it: the host takes as long as it did
            return (self._add("work", {"seconds": command.took_s}, (work,)),)
        reads = self._read(request, work, inside=inside)
        return self._taken_in(command, request, work, reads, inside)

    def _taken_in(
        self, command: Command, request: Request, work: int, reads: tuple[int, ...], inside: bool
    ) -> tuple[int, ...]:
        """What computes takes in what was read. The host computes as long as the command took, or
        as long as reads last that it computes beside."""
        if inside:
            return (work, *reads)
        return (work, *reads, self._add("work", {"seconds": command.took_s}, (work,)))

    def _read(self, request: Request, work: int, *, inside: bool) -> tuple[int, ...]:
        """A request's reads, in all drives that have something of it."""
        found: list[int] = []
        for drive, share in self._shares(request.units):
            members = self._members(drive)
            before: tuple[int, ...] = (work,)
            size = request.read_bytes * share
            if inside:
                before = (self._add("call", {"bytes": 0.0}, before, members),)
            waits_s = request.rounds * (self.machine.get("device.flash.read_latency") or 0.0)
            if waits_s:
                before = (self._add("wait", {"seconds": waits_s}, before),)
            flops = size / HALF_BYTES * 2 * request.query_heads
            sizes = {"bytes": size, "twice": 2 * size, "flops": flops}
            verb = "compute" if inside else "read out"
            found += self._pieces(verb, sizes, before, members)
        return tuple(found)

    def _write(self, request: Request, work: int) -> list[int]:
        """The host's rows, to all drives that keep some of them; of a join, read before."""
        found = []
        read = self.machine.need("device.flash.read_bandwidth")
        write = self.machine.get("device.flash.write_bandwidth") or read
        for drive, share in self._shares(request.units):
            members = self._members(drive)
            before: tuple[int, ...] = (work,)
            if request.read_bytes:
                size = request.read_bytes * share
                before = tuple(self._pieces("read", {"bytes": size}, before, members))
            size = request.write_bytes * share
            # flash is written at another rate than it is read
            flash = size * self._flash_bytes_per_s() / write
            found += self._pieces("write", {"bytes": size, "flash time": flash}, before, members)
        return found

    def _flash_bytes_per_s(self) -> float:
        rate = self.system.group("flash").bytes_per_s
        return math.inf if rate is None else rate

    def _shares(self, units: int) -> list[tuple[int, float]]:
        """(drive, its share) of so many rows or pages, one after another over all drives."""
        n = self.machine.n_drives
        counts = [(units + n - 1 - drive) // n for drive in range(n)]
        return [(drive, count / units) for drive, count in enumerate(counts) if count]

    def _members(self, drive: int) -> dict[str, int]:
        per_port = self.machine.device.links.devices_per_port
        port = drive // int(per_port.value) if per_port is not None else 0
        known = {each.name: each.count for each in self.system.groups}
        found = {name: drive for name, count in known.items() if count == self.machine.n_drives > 1}
        return found | {name: port for name in ("port in", "port out") if name in known}

    def _pieces(
        self,
        verb: str,
        sizes: Mapping[str, float],
        after: tuple[int, ...],
        members: Mapping[str, int],
    ) -> list[int]:
        n = min(PIECES_MAX, max(1, int(sizes["bytes"] // PIECE_BYTES)))
        part = {name: size / n for name, size in sizes.items()}
        return [self._add(verb, part, after, members) for _ in range(n)]

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
