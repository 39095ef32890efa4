"""A part of an emulated device: another part does the real work on this machine, and a command is
done when the device would have done it.

A device whose accelerator has a command's verb takes the command and gives its result back; of any
other the bytes pass its link, and the host computes (`espnx.device.cost`). Results are those of the
plain device either way, to the bit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import errors
from ..command import Command, Watch
from ..cost.work import COMPUTE, Group, Leg, Work
from ..interface import Capabilities
from ..kinds import Verb
from ..model.spec import Accelerator
from ..workers import Clock
from ..wrapper import PartWrapper, Wrapper
from .faults import DeviceFault, Guard
from .topology import Topology, Transfer


class PacedPart(PartWrapper):
    """What both say of their files is the same, and so are the reads in `stats`; what passed the
    links is the topology's to say.

    Args:
        inner: does the work; closed with this one.
        stored: what it keeps, for costs.
        topology, number: which device of it.
        verbs: of the part's kind.
        near_storage: whether the device's accelerator computes, where it has the verb.
        guard: what goes wrong on it.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        inner: Any,
        stored: Any,
        topology: Topology,
        number: int,
        verbs: Mapping[str, Verb],
        *,
        near_storage: bool = True,
        guard: Guard | None = None,
    ):
        super().__init__(inner)
        self._stored, self._topology, self._number, self._verbs, self._near_storage = (
            stored,
            topology,
            number,
            verbs,
            near_storage,
        )
        self._guard = guard or Guard(topology, number, "")

    def submit(self, command: Command, watch: Watch | None = None) -> Any:
        """See `Part`. `deadline_s` of the command is of the real reads, and in virtual seconds of
        the device's."""
        cost = self._verbs[command.verb].cost
        if cost is None:  # whole records are for whoever checks or copies a store
            return command.ask(self._inner, watch)
        fault, pace = self._guard.begin(command.verb), Pace(self._topology, self._number)
        with pace.lock:  # a step that the real work makes at once comes behind the first legs
            ticket = command.ask(self._inner, pace.step)
            try:
                pace.begin(cost(command, self._stored, self._accelerator(command.verb)))
            except BaseException:
                ticket.cancel()
                raise
        with contextlib.suppress(errors.EspnxError):  # `finish` raises it
            if pace.work.step is None and pace.work.end is not None:
                # What it costs follows from what was found; others are on their way meanwhile.
                pace.end(ticket.finish())
            elif pace.work.step is not None and self._topology.stretch == 0:
                # Only waiting moves this clock: with the work done before anybody waits, virtual
                # times do not depend on this machine's.
                ticket.finish()
        return PacedTicket(ticket, command, pace, self._guard, fault)

    def _accelerator(self, verb: str) -> Accelerator | None:
        accelerator = self._topology.spec.accelerator
        return (
            accelerator
            if self._near_storage and accelerator is not None and verb in accelerator.verbs
            else None
        )

    @property
    def clock(self) -> Clock | None:
        """See `Topology.clock`."""
        return self._topology.clock

    @property
    def topologies(self) -> Sequence[Topology]:
        """See `topologies_of`."""
        return [self._topology]


class Pace:
    """The legs of a command on the links of one device.

    Attributes:
        legs: that have been sent on their way.
        asked_s: the virtual second in which the command was sent.
        lock: guards the legs; steps come from other threads.
    """

    def __init__(self, topology: Topology, device: int):
        self.topology, self._device, self.lock = topology, device, threading.RLock()
        self.asked_s, self._member = topology.now(), topology.member
        self.work, self.legs, self._has_ended = Work(()), list[Transfer](), False
        self._last = set[int]()  # numbers of the legs that no other waits for

    def begin(self, work: Work) -> None:
        self.work = work
        self.add(work.legs)

    def step(self, done: Any) -> None:
        """A step of the work, behind the one before."""
        with self.lock, self.topology.asking_for(self._member):
            if self.work.step is not None:
                self.add(self.work.step(done))

    def end(self, found: Any) -> Sequence[Transfer]:
        """The last legs of all, of a command that has this result."""
        with self.lock:
            if self.work.end is not None and not self._has_ended:
                self.add(self.work.end(found))
            self._has_ended = True
            return self.last

    @property
    def last(self) -> Sequence[Transfer]:
        """Those behind which nothing comes."""
        return [self.legs[number] for number in sorted(self._last)]

    def add(self, legs: Sequence[Leg]) -> Sequence[Transfer]:
        """Sends further legs on their way."""
        topology, device, begin = self.topology, self._device, len(self.legs)
        for leg in legs:
            count = len(self.legs)
            numbers = [number if number >= 0 else count + number for number in leg.after]
            after = [self.legs[number] for number in numbers]
            self._last = (self._last - set(numbers)) | {count}
            if leg.route == COMPUTE:
                self.legs.append(
                    topology.compute(device, leg.flop, leg.size_bytes, group=leg.heads, after=after)
                )
            else:
                self.legs.append(
                    topology.transfer(
                        device, leg.route, leg.size_bytes, after, requests=leg.requests
                    )
                )
        return self.legs[begin:]


class PacedTicket(Wrapper):
    """Hands out what the real ticket has, group by group in the order in which it was asked for, or
    all at the end."""

    def __init__(
        self, inner: Any, command: Command, pace: Pace, guard: Guard, fault: DeviceFault | None
    ):
        super().__init__(inner)
        self._command, self._pace, self._guard, self._fault = command, pace, guard, fault
        self._topology, self._is_held = pace.topology, fault is not None
        self._deadline_s = command.deadline_s * max(self._topology.stretch, 1.0)
        self._groups = deque(pace.work.groups or ())
        self._is_done = np.zeros(max((each.end for each in self._groups), default=0), dtype=bool)
        self._has_ended = False  # the real work
        self.finished_at = time.perf_counter()

    def _hold(self, limit_s: float) -> None:
        """Waits for a completion that a fault holds up."""
        if self._is_held:
            self._is_held = False
            self._guard.wait(self._fault, self._command.verb, limit_s)

    def _looked_at(self, found: Any) -> Any:
        self._guard.reply(
            self._fault, self._command.verb, self._command.values(found), self._command.can_be
        )
        return found

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `espnx.device.interface.RecordTicket`."""
        asked_s, until = (
            self._topology.now(),
            None if timeout_s is None else time.monotonic() + timeout_s,
        )
        found, count = list[np.ndarray](), 0
        try:
            self._hold(self._deadline_s)
            while self._groups and count < max(at_least, 1):
                group = self._groups[0]
                if not self._do(group, until) or not self._arrive(group, asked_s, until):
                    break
                self._groups.popleft()
                self.finished_at = time.perf_counter()
                found.append(np.arange(group.begin, group.end))
                count += group.end - group.begin
            if not self._groups and not self._has_ended:
                self._has_ended = self._inner.next(
                    1, None if until is None else max(until - time.monotonic(), 0.0)
                )[1]
        except BaseException:
            self.cancel()
            raise
        return np.concatenate([np.empty(0, np.int64), *found]), not self._groups and self._has_ended

    def _do(self, group: Group, until: float | None) -> bool:
        """Whether this machine has done the whole group by then."""
        while not self._is_done[group.begin : group.end].all():
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s < 0:
                return False
            items, self._has_ended = self._inner.next(1, left_s)
            self._is_done[items] = True
        return True

    def _arrive(self, group: Group, asked_s: float, until: float | None) -> bool:
        """Whether the device has it on the host by then."""
        transfer = self._pace.legs[group.leg]
        if until is None:
            self._topology.wait(transfer, asked_s=asked_s, deadline_s=self._deadline_s)
            return True
        if self._topology.done(transfer):
            return True
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        try:
            self._topology.wait(transfer, asked_s=asked_s, deadline_s=left_s)
        except errors.DeadlineExceededError:
            return False
        return True

    def finish(self, timeout_s: float | None = None) -> Any:
        """Waits for the real work, and then for the device. The timeout is of each, in wall
        seconds."""
        work = self._pace.work
        if work.groups is not None:
            while not self.next(2**62)[1]:
                pass
            return self._looked_at(self._inner.finish())
        asked_s = self._topology.now() if work.step is None else self._pace.asked_s
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        try:
            found = self._inner.finish() if timeout_s is None else self._inner.finish(timeout_s)
            self._hold(limit_s)
            self._topology.wait(self._pace.end(found), asked_s=asked_s, deadline_s=limit_s)
            return self._looked_at(found)
        except BaseException:
            if timeout_s is None:
                self.cancel()
            raise

    def partial(self, amount: int) -> Any:
        """See `espnx.graph.devices.walks.WalksTicket`. What a device is asked for it gives back
        when all of it is done: this is all that the walks have found."""
        self.finish()
        return self._inner.partial(amount)

    def cancel(self) -> None:
        """Whoever waits, or will, gets TransferCancelledError."""
        self._inner.cancel()
        if self._pace.work.groups is None:
            for leg in self._pace.last:
                self._topology.cancel(leg)
        for group in self._groups:
            self._topology.cancel(self._pace.legs[group.leg])

    # --- what is looked at before anybody gets it ---

    @property
    def scores(self) -> np.ndarray:
        """See `espnx.device.interface.RecordTicket`."""
        scores: np.ndarray = self._looked_at(self._inner.scores)
        return scores

    def reply(self, item: int) -> Any:
        """See `espnx.device.vectors.interface.DistanceTicket`."""
        return self._looked_at(self._inner.reply(item))

    @property
    def records(self) -> Any:
        """See `espnx.device.interface.RecordTicket`."""
        raise errors.InvalidInputError(
            "records of an emulated device",
            got="scores alone",
            expected="a device that hands out records",
        )
