"""What a recorded program would take on another machine: its commands in the order in which they
waited for one another, with the host's work between them as it was, its rows spread anew over the
machine's drives by sequence and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...device.trace.reader import Trace
from ..decoding.answer import unknown_of_drives
from ..decoding.machine import Machine
from ..decoding.parts import DELAYS
from .graph import WAIT, WORK, Walked, walk_program
from .requests import VerbTimes
from .throttle import Throttle


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
    runs_until_worn: of the program; None: no endurance is known (`unknown`), or nothing is written.
    unknown: what of its drives is not known.
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
    unknown: tuple[str, ...]


def answer(machine: Machine, trace: Trace, *, throttle: Throttle | None = None) -> Answer:
    """Raises InvalidInputError: a trace without commands, with a verb that no part serves, or with
    more rows than drives hold; a machine that keeps rows in memory. FormatError: a line that says
    what cannot be."""
    found = walk_program(machine, trace, throttle)
    verbs: dict[str, VerbTimes] = {}
    for command, request in found.asked:
        times = verbs.get(request.verb, VerbTimes())
        took_s = found.ended_s[command.number] - found.began_s[command.number]
        verbs[request.verb] = times.with_one(request, command.took_s, took_s)
    busy_s = _busy_s(found)
    written = sum(request.write_bytes for _, request in found.asked)
    endurance = machine.get("device.endurance")
    begun_s = found.began_s[found.asked[0][0].number]
    return Answer(
        machine.system.name,
        trace.program,
        len(found.asked),
        trace.wall_s,
        found.end_s - begun_s,
        found.host_s,
        max(busy_s, key=lambda name: busy_s[name]) if busy_s else WORK,
        busy_s,
        verbs,
        written,
        endurance * machine.n_drives / written if endurance and written else None,
        tuple(unknown_of_drives(machine)),
    )


def _busy_s(found: Walked) -> dict[str, float]:
    """What a part of each group that does something is busy, on average."""
    names, busy_s = np.array(found.system.names()), {}
    for name in dict.fromkeys(found.system.names()):
        served_s = [found.done.accounts[i].served_s for i in np.flatnonzero(names == name)]
        if name != WAIT and name not in DELAYS and any(served_s):
            busy_s[name] = float(np.mean(served_s))
    return busy_s


def step_times(
    machine: Machine,
    trace: Trace,
    steps: Sequence[tuple[float, float]],
    *,
    throttle: Throttle | None = None,
) -> list[float]:
    """Seconds of parts of a program, each from one moment of the trace's time to another: before
    its first command begins, and after its last one has ended, the host works as long as it did.

    Raises as `answer` does.
    """
    found = walk_program(machine, trace, throttle)
    times = []
    for begin_s, end_s in steps:
        own = [each for each, _ in found.asked if begin_s <= each.at_s < end_s]
        if not own:
            times.append((end_s - begin_s) * found.host_factor)
            continue
        ended = [each for each in own if each.end_s <= end_s]
        last_s = max((each.end_s for each in ended), default=own[-1].at_s)
        until_s = max(
            *(found.ended_s[each.number] for each in ended), found.began_s[own[-1].number], -1.0
        )
        of_host_s = (own[0].at_s - begin_s) + max(end_s - max(last_s, own[-1].at_s), 0.0)
        times.append(of_host_s * found.host_factor + until_s - found.began_s[own[0].number])
    return times
