"""Emulated devices that misbehave: chosen commands stall, never complete, come back short or with
what is no number, or end the device.

What the host does about each is what it does about a real device: a reply is looked at before
anybody gets it, and who waits gets a typed error that names the device. Data on the other devices
stays as it is.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from ... import errors
from ...checks import check_whole
from .topology import Topology

Kind = Literal["stall", "drop", "short", "nan", "die"]
VERBS = ("put", "attend", "visit", "maxsim", "distances", "search", "walk", "scan")


@dataclass(frozen=True)
class DeviceFault:
    """Which commands go wrong, and how.

    Attributes:
        kind: ``stall``: the device does nothing for `seconds`; ``drop``: the completion never
            comes; ``short``: half of the reply comes; ``nan``: the reply holds what is no number
            (both of verbs that compute); ``die``: this command and all later ones fail.
        verb: of `VERBS`; None: any.
        nth: the first command that it may strike, counted from 1 among those of this device and
            verb.
        count: how many it strikes; None: all from then on.
        probability: of each of them.
        device: number; None: any.
        seconds: virtual, of a stall.
    """

    kind: Kind
    verb: str | None = None
    nth: int = 1
    count: int | None = 1
    probability: float = 1.0
    device: int | None = None
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise errors.InvalidInputError(
                "fault of a device", got=repr(self.kind), expected=", ".join(get_args(Kind))
            )
        if self.verb is not None and self.verb not in VERBS:
            raise errors.InvalidInputError(
                "verb of a fault", got=repr(self.verb), expected=", ".join(VERBS)
            )
        check_whole("nth", self.nth, 1)
        if not 0 <= self.probability <= 1:
            raise errors.InvalidInputError(
                "probability of a fault", got=self.probability, expected="0 to 1"
            )
        if not self.seconds >= 0:
            raise errors.InvalidInputError(
                "seconds of a stall", got=self.seconds, expected="0 or more"
            )


@dataclass
class _Count:
    seen: int = 0
    struck: int = 0


class Faults:
    """The faults of a topology's devices, the same for the same seed and order of commands. **Any
    thread.**"""

    def __init__(self, rules: Sequence[DeviceFault] = (), seed: int = 0):
        for rule in rules:
            if not isinstance(rule, DeviceFault):
                raise errors.InvalidInputError(
                    "faults of a device", got=repr(rule), expected="DeviceFault(...)"
                )
        self._rules, self._random, self._lock = list(rules), random.Random(seed), threading.Lock()
        self._counts: dict[tuple[int, int, str], _Count] = {}
        self._dead = set[int]()

    def strike(self, device: int, verb: str) -> DeviceFault | None:
        """What happens to a command that begins now; one that ends a device included."""
        with self._lock:
            if device in self._dead:
                return DeviceFault("die")
            for number, rule in enumerate(self._rules):
                if rule.verb not in (None, verb) or rule.device not in (None, device):
                    continue
                count = self._counts.setdefault((number, device, verb), _Count())
                count.seen += 1
                is_due = count.seen >= rule.nth and (
                    rule.count is None or count.struck < rule.count
                )
                if is_due and self._random.random() < rule.probability:
                    count.struck += 1
                    if rule.kind == "die":
                        self._dead.add(device)
                    return rule
            return None


@dataclass
class Guard:
    """The host's side of one device: begins commands, waits for completions that may not come, and
    looks at replies.

    Attributes:
        topology, number: which device. path: of its directory, for errors.
    """

    topology: Topology
    number: int
    path: str
    faults: Faults = field(default_factory=Faults)

    @property
    def name(self) -> str:
        return f"{self.topology.spec.name} {self.number}"

    def begin(self, verb: str) -> DeviceFault | None:
        """A command goes to the device. Raises DeviceFailedError where it is dead."""
        fault = self.faults.strike(self.number, verb)
        if fault is not None and fault.kind == "die":
            raise errors.DeviceFailedError(
                f"device {self.name} does not answer to {verb}",
                path=self.path,
                fix="replace it; what lies on other devices is intact",
            )
        return fault

    def wait(self, fault: DeviceFault | None, verb: str, deadline_s: float) -> None:
        """Waits for a completion that a fault holds up. Raises DeadlineExceededError."""
        if fault is None or fault.kind not in ("stall", "drop"):
            return
        if fault.kind == "stall":
            flash = self.topology.links[f"device {self.number} flash read"]
            self.topology.wait(
                self.topology.transfer(self.number, "flash_read", round(fault.seconds * flash)),
                deadline_s=deadline_s,
            )
            return
        threading.Event().wait(deadline_s if self.topology.stretch else 0.0)
        raise errors.DeadlineExceededError(
            f"device {self.name} has not completed {verb}",
            path=self.path,
            got=f"nothing for {deadline_s:g} s",
            expected="a completion",
        )

    def reply(
        self,
        fault: DeviceFault | None,
        verb: str,
        values: np.ndarray,
        is_finite: Callable[[np.ndarray], np.ndarray] = np.isfinite,
    ) -> np.ndarray:
        """What came back, once it was looked at. Raises ShortReadError, DeviceFailedError.

        Args:
            values: of the reply.
            is_finite: which of them can be.
        """
        whole = values.size
        if fault is not None and fault.kind == "short":
            values = values.reshape(-1)[: whole // 2]
        if fault is not None and fault.kind == "nan" and whole:
            values = values.copy()
            values.reshape(-1)[whole // 2] = np.nan
        if values.size != whole:
            raise errors.ShortReadError(
                f"the reply of device {self.name} to {verb}",
                path=self.path,
                got=f"{values.size} values",
                expected=f"{whole}",
            )
        if not bool(is_finite(values).all()):
            wrong = int((~is_finite(values)).sum())
            raise errors.DeviceFailedError(
                f"the reply of device {self.name} to {verb} is no number",
                path=self.path,
                got=f"{wrong} of {whole}",
                expected="numbers",
                fix="ask again; where it comes back, verify the device (`espnx device verify`)",
            )
        return values
