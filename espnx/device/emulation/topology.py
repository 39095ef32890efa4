"""The hardware of several emulated devices and of the way between them and the host, in virtual
time.

Each device has flash to read and to program, memory, an accelerator and a link of its own; a switch
port is shared by as many as the spec says, the uplink by all. Links carry both directions at once.
Bytes flow through all links of their route at once, what one device sends on one route goes in the
order of the calls, and routes and devices share what they have in common fairly
(csrc/device/link_clock.hpp). A figure that the spec does not have bounds nothing.
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
from ..model.spec import DeviceSpec
from .costs import FlashCosts, value_of

if TYPE_CHECKING:
    from ..._C import LinkTicket

#: Of one transfer: no drive is larger, and times of it are still exact to the nanosecond.
SIZE_MAX_BYTES = 1 << 60
#: Virtual seconds, of a wall second each, that emulation takes on a machine which is this much
#: slower than the devices.
DEFAULT_STRETCH = 100.0
DEFAULT_DEADLINE_S = 600.0
_UNBOUND = 1e300  # a second, of anything

#: A route's legs, each a kind of link, in the order in which bytes pass them.
ROUTES = {
    "flash_read": ("flash_read", "memory"),
    "flash_write": ("flash_write",),
    "host_to_device": ("uplink_in", "port_in", "link_in", "memory"),
    "device_to_host": ("memory", "link_out", "port_out", "uplink_out"),
    "host_to_flash": ("uplink_in", "port_in", "link_in", "flash_write"),
    "flash_to_host": ("flash_read", "link_out", "port_out", "uplink_out"),
}
_COMPUTE = "compute"
_LANES = (*ROUTES, _COMPUTE)  # of each device
_NOBODY = -1


@dataclass(frozen=True, eq=False, slots=True)
class Transfer:
    """A ticket of a `Topology`: work that passes its links.

    Attributes:
        device: whose.
        route: one of `ROUTES`, or ``compute``.
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
        watches: whoever measures what passes now, kept by `espnx.device.emulation.use`.

    Raises:
        InvalidInputError: an argument is out of range.
    """

    def __init__(self, spec: DeviceSpec, n_devices: int, *, stretch: float = DEFAULT_STRETCH):
        check_whole("n_devices", n_devices, 1, 4096)
        _check_number("stretch", stretch, 0.0)
        self.spec, self.n_devices, self.stretch = spec, n_devices, float(stretch)
        self.watches = set[object]()
        self._flash = FlashCosts(spec)
        self._rates: dict[str, float] = {}
        self._latency_s: dict[str, float] = {}
        self._routes = [self._lay_out(device) for device in range(n_devices)]
        self._numbers = {name: number for number, name in enumerate(self._rates)}
        self._clock = load_native().LinkClock(
            list(self._latency_s.items()), n_devices * len(_LANES), self.stretch
        )
        self._thread = threading.local()

    def _lay_out(self, device: int) -> dict[str, tuple[str, ...]]:
        """Names of the links of each route of one device. Links that the spec gives no bandwidth
        are left out."""
        flash, links, accelerator = self.spec.flash, self.spec.links, self.spec.accelerator
        per_port = int(links.devices_per_port.value) if links.devices_per_port else 1
        own, port = f"device {device}", f"port {device // per_port}"
        write = flash.write_bandwidth or flash.read_bandwidth
        latency_s = links.latency.value if links.latency else 0.0
        kinds: dict[str, tuple[str, float | None, float]] = {
            "flash_read": (f"{own} flash read", value_of(flash.read_bandwidth), 0.0),
            "flash_write": (f"{own} flash write", value_of(write), 0.0),
            "memory": (f"{own} memory", value_of(self.spec.memory.bandwidth), 0.0),
            "accelerator": (f"{own} accelerator", 1.0 if accelerator else None, 0.0),
        }
        for way in ("in", "out"):
            kinds[f"link_{way}"] = (f"{own} link {way}", value_of(links.device), latency_s)
            kinds[f"port_{way}"] = (f"{port} {way}", value_of(links.switch_port), 0.0)
            kinds[f"uplink_{way}"] = (f"uplink {way}", value_of(links.uplink), 0.0)
        for name, per_s, latency in kinds.values():
            if per_s is not None:
                self._rates[name], self._latency_s[name] = per_s, latency
        routes = ROUTES | {_COMPUTE: ("memory", "accelerator")}
        return {
            route: tuple(kinds[kind][0] for kind in legs if kinds[kind][1] is not None)
            for route, legs in routes.items()
        }

    @property
    def links(self) -> dict[str, float]:
        """Bytes/s of each link by its name. An accelerator's rate is its spec's, by how many query
        heads share a pass: here it has 1.0."""
        return {name: per_s for name, per_s in self._rates.items() if per_s < _UNBOUND}

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
        legs = [
            (self._numbers[name], float(size_bytes), self._rates[name])
            for name in self._routes[device][route]
        ]
        flash, before_s = self._flash, 0.0
        if size_bytes and route.startswith("flash_to"):
            legs[0], before_s = (
                (*legs[0][:2], flash.read_per_s(size_bytes, requests)),
                flash.to_host_s,
            )
        elif size_bytes and route == "flash_read":
            legs[0], before_s = (
                (*legs[0][:2], flash.read_per_s(size_bytes, requests)),
                flash.inside_s,
            )
        elif size_bytes and route.endswith(("to_flash", "_write")):
            legs[-1], before_s = (
                (*legs[-1][:2], flash.write_per_s(size_bytes, requests)),
                flash.write_s,
            )
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
        accelerator = self.spec.accelerator
        if accelerator is None:
            raise errors.InvalidInputError(
                f"compute on {self.spec.name}",
                got="no accelerator in its spec",
                expected="a spec with one",
            )
        legs = [
            (self._numbers[name], float(size_bytes), self._rates[name])
            for name in self._routes[device][_COMPUTE]
        ]
        work, per_s = float(flop), min(accelerator.flops_per_s(group), _UNBOUND)
        if stream := accelerator.stream_bandwidth:
            least_s = size_bytes / stream.value
            if not work:
                work, per_s = float(size_bytes), stream.value
            elif least_s > work / per_s:
                per_s = work / least_s
        legs[-1] = (legs[-1][0], work, per_s)
        return self._start(device, _COMPUTE, legs, size_bytes, after, 0.0)

    def _start(
        self,
        device: int,
        route: str,
        legs: list[tuple[int, float, float]],
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

    def join(self) -> int:
        """See `Clock`."""
        return self._clock.join()

    def rest(self, member: int) -> None:
        """See `Clock`."""
        self._clock.rest(member)

    def resume(self, member: int) -> None:
        """See `Clock`."""
        self._clock.resume(member)

    def leave(self, member: int) -> None:
        """See `Clock`."""
        self._clock.leave(member)

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
