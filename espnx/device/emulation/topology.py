"""Virtual time of several emulated devices: when what passes their links (`links`) ends, and who
waits for it.

Bytes flow through all links of their route at once, what one device sends on one route goes in the
order of the calls, and routes and devices share what they have in common fairly
(csrc/device/link_clock.hpp).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ... import errors
from ...checks import check_whole
from ...storage.native import load_native
from ..cost.work import COMPUTE
from ..model.spec import DeviceSpec
from ..workers import Members
from .links import ROUTES, Links, Passage

if TYPE_CHECKING:
    from ..._C import LinkTicket

#: Of one transfer: no drive is larger, and times of it are still exact to the nanosecond.
SIZE_MAX_BYTES = 1 << 60
#: Virtual seconds, of a wall second each, that emulation takes on a machine which is this much
#: slower than the devices.
DEFAULT_STRETCH = 100.0
DEFAULT_DEADLINE_S = 600.0
_LANES = (*ROUTES, COMPUTE)  # of each device
_NOBODY = -1


@dataclass(frozen=True, eq=False, slots=True)
class Transfer:
    """A ticket of a `Topology`: work that passes its links.

    Attributes:
        device: whose.
        route: one of `ROUTES`, or `COMPUTE`.
        size_bytes: of it.
    """

    device: int
    route: str
    size_bytes: int
    native: LinkTicket

    def __str__(self) -> str:
        return f"{self.route} of {self.size_bytes} bytes on device {self.device}"


@dataclass(frozen=True)
class LinkUse:
    """What has passed a link.

    Attributes:
        amount: bytes; of an accelerator FLOPs, or bytes where it compares them in passing.
        busy_s: virtual seconds.
        transfers: that have passed it wholly.
    """

    amount: float
    busy_s: float
    transfers: int


@dataclass(frozen=True)
class Times:
    """How much time went where, in virtual seconds since the start.

    Attributes:
        now_s: all of it.
        waited_s: while somebody waited, and nobody for what the devices had done already. Moments
            that several waited count once.
        late_s: while somebody waited for what the devices had done already: for the real work, or
            for this machine to notice.
    """

    now_s: float
    waited_s: float
    late_s: float


class Topology:
    """**Any thread** may call any method at any time.

    Args:
        spec: of every device.
        n_devices: of them, from 1.
        stretch: wall seconds that a virtual second takes. 0: the wall clock has no part in it; time
            stands where waiting has moved it, and results do not depend on the machine.

    Attributes:
        members: of its clock, for `Workers`.
        watches: whoever measures what passes now, kept by `espnx.device.emulation.use`.

    Raises:
        InvalidInputError: an argument is out of range.
    """

    def __init__(self, spec: DeviceSpec, n_devices: int, *, stretch: float = DEFAULT_STRETCH):
        check_whole("n_devices", n_devices, 1, 4096)
        _check_number("stretch", stretch, 0.0)
        self.spec, self.n_devices, self.stretch = spec, n_devices, float(stretch)
        self.watches = set[object]()
        self._links = Links(spec, n_devices)
        self._clock = load_native().LinkClock(
            list(self._links.latency_s.items()), n_devices * len(_LANES), self.stretch
        )
        self.members: Members = self._clock
        self._thread = threading.local()

    @property
    def links(self) -> dict[str, float]:
        """Bytes/s of each link by its name. An accelerator's rate is its spec's, by how many query
        heads share a pass: here it has 1.0."""
        return self._links.bounded()

    def transfer(
        self,
        device: int,
        route: str,
        size_bytes: int,
        after: Transfer | Sequence[Transfer] | None = None,
        *,
        requests: int = 1,
    ) -> Transfer:
        """Bytes on one of `ROUTES`, from now on, or when `after` (all of it) has ended if that is
        later.

        Args:
            size_bytes: in all; of none, nothing is read or written.
            requests: that read or write them, of any size, all sent at once: each takes its share
                of what flash does in a second, and together they wait once for the first byte.

        Raises:
            InvalidInputError: no such device or route, a size or a number that is none, or an
                `after` of another topology.
            TransferCancelledError: `after` was cancelled.
            EngineClosedError: `close` was called.
        """
        check_whole("device", device, 0, self.n_devices - 1)
        check_whole("size_bytes", size_bytes, 0, SIZE_MAX_BYTES)
        check_whole("requests", requests, 0, SIZE_MAX_BYTES)
        if route not in ROUTES:
            raise errors.InvalidInputError("a route", got=repr(route), expected=", ".join(ROUTES))
        legs, before_s = self._links.transfer(device, route, size_bytes, requests)
        return self._start(device, route, legs, size_bytes, after, before_s)

    def compute(
        self,
        device: int,
        flop: float,
        size_bytes: int,
        *,
        group: int = 1,
        after: Transfer | Sequence[Transfer] | None = None,
    ) -> Transfer:
        """Work of a device's accelerator over `size_bytes` of its memory, which it takes in as it
        computes.

        Args:
            device: whose.
            flop: floating-point operations, of all `group` query heads together.
            size_bytes: read from the device's memory.
            group: how many query heads share the pass.
            after: as in `transfer`.

        Raises:
            InvalidInputError: the spec has no accelerator, or no kernel for so many heads; and as
                `transfer` does.
            TransferCancelledError, EngineClosedError: as `transfer` does.
        """
        check_whole("device", device, 0, self.n_devices - 1)
        check_whole("size_bytes", size_bytes, 0, SIZE_MAX_BYTES)
        check_whole("group", group, 1)
        _check_number("flop", flop, 0.0)
        legs = self._links.compute(device, flop, size_bytes, group)
        return self._start(device, COMPUTE, legs, size_bytes, after, 0.0)

    def _start(
        self,
        device: int,
        route: str,
        legs: list[Passage],
        size_bytes: int,
        after: Transfer | Sequence[Transfer] | None,
        before_s: float,
    ) -> Transfer:
        before = [after] if isinstance(after, Transfer) else list(after or ())
        lane = device * len(_LANES) + _LANES.index(route)
        native = self._clock.transfer(
            legs, lane, size_bytes, before_s, [each.native for each in before], self._asking
        )
        return Transfer(device, route, size_bytes, native)

    def wait(
        self,
        transfers: Transfer | Sequence[Transfer],
        *,
        asked_s: float | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> float:
        """Returns when the transfer has ended, or the last of several, with the virtual second of
        that. The GIL is free meanwhile.

        Args:
            transfers: of this topology. Whoever needs several waits for them in one call: one that
                ends early is not late meanwhile.
            asked_s: since when (`now`) the caller has needed them, where that is before this call:
                the real work was done between.
            deadline_s: wall seconds from now.

        Raises:
            DeadlineExceededError: one has not ended by then. It goes on. With a `stretch` of 0:
                somebody who takes part (`Workers`) has neither asked for anything nor left, so that
                the clock stands.
            TransferCancelledError: `cancel` was called for one, or for what it comes after.
            EngineClosedError: `close` was called.
        """
        several = [transfers] if isinstance(transfers, Transfer) else transfers
        ended_s = self._clock.wait(
            [each.native for each in several], asked_s, deadline_s, self._asking
        )
        if ended_s is None:
            going = next((each for each in several if not self.done(each)), several[-1])
            busy = self._clock.at_work() - (self._asking != _NOBODY) if not self.stretch else 0
            raise errors.DeadlineExceededError(
                f"an emulated transfer has not ended: {going} of {self.spec.name}",
                got=f"{deadline_s:g} s of waiting"
                + (f" for {busy} others that take part, and ask for nothing" if busy else ""),
                expected=f"its end, in time stretched {self.stretch:g} times",
                fix="threads of `Workers` ask, wait or end"
                if busy
                else "lower the stretch, or wait longer",
            )
        return ended_s

    def done(self, transfer: Transfer) -> bool:
        """Whether it has ended by now. Raises TransferCancelledError."""
        return self._clock.done(transfer.native)

    def cancel(self, transfer: Transfer) -> None:
        """Wakes whoever waits for it, or for what comes after it, with TransferCancelledError. What
        has begun passes its links all the same, as commands that a drive has taken do."""
        self._clock.cancel(transfer.native)

    def now(self) -> float:
        """The virtual second that it is."""
        return self._clock.now()

    def advance(self, to_s: float) -> None:
        """Moves a clock with `stretch` 0 on to that virtual second."""
        self._clock.advance(to_s)

    # --- who takes part ---

    @property
    def clock(self) -> Self | None:
        """The clock for `Workers`: this, where callers move it; None where the wall does."""
        return None if self.stretch else self

    @property
    def member(self) -> int | None:
        """See `Clock`."""
        return None if self._asking == _NOBODY else self._asking

    @property
    def _asking(self) -> int:
        member: int = getattr(self._thread, "member", _NOBODY)
        return member

    def bind(self, member: int | None) -> None:
        """See `Clock`."""
        self._thread.member = _NOBODY if member is None else member

    @contextmanager
    def asking_for(self, member: int | None) -> Iterator[None]:
        """What this thread asks for meanwhile is asked for in the name of a member, who waits for
        it elsewhere."""
        own = self.member
        self.bind(member)
        try:
            yield
        finally:
            self.bind(own)

    def traffic(self) -> dict[str, LinkUse]:
        """What has passed each link so far, by its name."""
        return {
            name: LinkUse(amount, busy_s, transfers)
            for name, amount, busy_s, transfers in self._clock.traffic()
        }

    def times(self) -> Times:
        """How much time went where so far. Waits that have not ended are not in it."""
        return Times(*self._clock.times())

    def close(self) -> None:
        """Wakes whoever waits, with EngineClosedError. May be called again."""
        self._clock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_number(name: str, value: object, least: float) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < least
    ):
        raise errors.InvalidInputError(
            name, got=repr(value), expected=f"a finite number, at least {least:g}"
        )
