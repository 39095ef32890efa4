"""The hardware of several emulated devices and of the way between them and the host, in virtual time.

Each device has flash to read and to program, memory, an accelerator and a link of its own; a switch port is shared by as many as the spec
says, the uplink by all. Links carry both directions at once. What passes them is cut into chunks, and each link takes chunks in the order
in which they come to it (csrc/device/link_clock.hpp). A figure that the spec does not have bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ... import errors
from ...checks import check_whole
from ...storage.native import load_native
from ..model.spec import DeviceSpec, Figure

if TYPE_CHECKING:
    from ..._C import LinkTicket

CHUNK_BYTES = 256 << 10
#: Virtual seconds, of a wall second each, that emulation takes on a machine which is this much slower than the devices.
DEFAULT_STRETCH = 100.0
DEFAULT_DEADLINE_S = 600.0
_UNBOUND = 1e300  # a second, of anything

#: A route's legs, each a kind of link, in the order in which bytes pass them.
ROUTES = {
    "flash_sense": ("cells",),
    "flash_read": ("flash_read", "memory"),
    "flash_write": ("flash_write",),
    "host_to_device": ("uplink_in", "port_in", "link_in", "memory"),
    "device_to_host": ("memory", "link_out", "port_out", "uplink_out"),
    "host_to_flash": ("uplink_in", "port_in", "link_in", "flash_write"),
    "flash_to_host": ("flash_read", "link_out", "port_out", "uplink_out"),
}


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
    """Where time went, in virtual seconds since the start.

    Attributes:
        now_s: all of it.
        waited_s: while somebody waited, and nobody for what the devices had done already. Moments that several waited count once.
        late_s: while somebody waited for what the devices had done already: for the real work, or for this machine to notice.
    """

    now_s: float
    waited_s: float
    late_s: float


class Topology:
    """**Any thread** may call any method at any time.

    Args:
        spec: of every device.
        n_devices: of them, from 1.
        stretch: wall seconds that a virtual second takes. 0: the wall clock has no part in it; time stands where waiting has moved it, and
            results do not depend on the machine.
        chunk_bytes: what passes a link in one piece.

    Raises:
        InvalidInputError: an argument is out of range.
    """

    def __init__(self, spec: DeviceSpec, n_devices: int, *, stretch: float = DEFAULT_STRETCH, chunk_bytes: int = CHUNK_BYTES):
        check_whole("n_devices", n_devices, 1, 4096)
        check_whole("chunk_bytes", chunk_bytes, 1)
        _check_number("stretch", stretch, 0.0)
        self.spec, self.n_devices, self.stretch, self.chunk_bytes = spec, n_devices, float(stretch), chunk_bytes
        self._rates: dict[str, float] = {}
        self._latency_s: dict[str, float] = {}
        self._routes = [self._lay_out(device) for device in range(n_devices)]
        self._numbers = {name: number for number, name in enumerate(self._rates)}
        self._clock = load_native().LinkClock(list(self._latency_s.items()), self.stretch)

    def _lay_out(self, device: int) -> dict[str, tuple[str, ...]]:
        """Names of the links of each route of one device. Links that the spec gives no bandwidth are left out."""
        flash, links, accelerator = self.spec.flash, self.spec.links, self.spec.accelerator
        per_port = int(links.devices_per_port.value) if links.devices_per_port else 1
        own, port = f"device {device}", f"port {device // per_port}"
        write = flash.write_bandwidth or flash.read_bandwidth
        latency_s = links.latency.value if links.latency else 0.0
        kinds: dict[str, tuple[str, float | None, float]] = {
            "flash_read": (f"{own} flash read", _value(flash.read_bandwidth), 0.0),
            "flash_write": (f"{own} flash write", _value(write), 0.0),
            # For reads that wait for one another; of many at once, dies sense while others send, and the bandwidth has it.
            "cells": (f"{own} cells", _UNBOUND, _value(flash.cell_read_time) or 0.0),
            "memory": (f"{own} memory", _value(self.spec.memory.bandwidth), 0.0),
            "accelerator": (f"{own} accelerator", 1.0 if accelerator else None, 0.0),
        }
        for way in ("in", "out"):
            kinds[f"link_{way}"] = (f"{own} link {way}", _value(links.device), latency_s)
            kinds[f"port_{way}"] = (f"{port} {way}", _value(links.switch_port), 0.0)
            kinds[f"uplink_{way}"] = (f"uplink {way}", _value(links.uplink), 0.0)
        for name, per_s, latency in kinds.values():
            if per_s is not None:
                self._rates[name], self._latency_s[name] = per_s, latency
        routes = ROUTES | {"compute": ("memory", "accelerator")}
        return {route: tuple(kinds[kind][0] for kind in legs if kinds[kind][1] is not None) for route, legs in routes.items()}

    @property
    def links(self) -> dict[str, float]:
        """Bytes/s of each link by its name. An accelerator's rate is its spec's, by how many query heads share a pass: here it has 1.0."""
        return {name: per_s for name, per_s in self._rates.items() if per_s < _UNBOUND}

    def transfer(self, device: int, route: str, size_bytes: int, after: Transfer | Sequence[Transfer] | None = None) -> Transfer:
        """Bytes on one of `ROUTES`, from now on, or when `after` (all of it) has ended if that is later.

        Raises:
            InvalidInputError: no such device or route, a negative size, or an `after` of another topology.
            TransferCancelledError: `after` was cancelled.
            EngineClosedError: `close` was called.
        """
        check_whole("device", device, 0, self.n_devices - 1)
        check_whole("size_bytes", size_bytes, 0)
        if route not in ROUTES:
            raise errors.InvalidInputError("a route", got=repr(route), expected=", ".join(ROUTES))
        legs = [(self._numbers[name], float(size_bytes), self._rates[name]) for name in self._routes[device][route]]
        return self._start(device, route, legs, size_bytes, after)

    def compute(
        self, device: int, flop: float, size_bytes: int, *, group: int = 1, after: Transfer | Sequence[Transfer] | None = None
    ) -> Transfer:
        """Work of a device's accelerator over `size_bytes` of its memory, which it takes in as it computes.

        Args:
            device: whose.
            flop: floating-point operations, of all `group` query heads together.
            size_bytes: read from the device's memory.
            group: how many query heads share the pass.
            after: as in `transfer`.

        Raises:
            InvalidInputError: the spec has no accelerator, or no kernel for so many heads; and as `transfer` does.
            TransferCancelledError, EngineClosedError: as `transfer` does.
        """
        check_whole("device", device, 0, self.n_devices - 1)
        check_whole("size_bytes", size_bytes, 0)
        check_whole("group", group, 1)
        _check_number("flop", flop, 0.0)
        accelerator = self.spec.accelerator
        if accelerator is None:
            raise errors.InvalidInputError(f"compute on {self.spec.name}", got="no accelerator in its spec", expected="a spec with one")
        legs = [(self._numbers[name], float(size_bytes), self._rates[name]) for name in self._routes[device]["compute"]]
        work, per_s = float(flop), min(accelerator.flops_per_s(group), _UNBOUND)
        if stream := accelerator.stream_bandwidth:
            least_s = size_bytes / stream.value
            if not work:
                work, per_s = float(size_bytes), stream.value
            elif least_s > work / per_s:
                per_s = work / least_s
        legs[-1] = (legs[-1][0], work, per_s)
        return self._start(device, "compute", legs, size_bytes, after)

    def _start(
        self, device: int, route: str, legs: list[tuple[int, float, float]], size_bytes: int, after: Transfer | Sequence[Transfer] | None
    ) -> Transfer:
        before = [after] if isinstance(after, Transfer) else list(after or ())
        native = self._clock.transfer(legs, size_bytes, self.chunk_bytes, [each.native for each in before])
        return Transfer(device, route, size_bytes, native)

    def wait(
        self, transfers: Transfer | Sequence[Transfer], *, asked_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> float:
        """Returns when the transfer has ended, or the last of several, with the virtual second of that. The GIL is free meanwhile.

        Args:
            transfers: of this topology. Whoever needs several waits for them in one call: one that ends early is not late meanwhile.
            asked_s: since when (`now`) the caller has needed them, where that is before this call: the real work was done between.
            deadline_s: wall seconds from now.

        Raises:
            DeadlineExceededError: one has not ended by then. It goes on.
            TransferCancelledError: `cancel` was called for one, or for what it comes after.
            EngineClosedError: `close` was called.
        """
        several = [transfers] if isinstance(transfers, Transfer) else transfers
        ended_s = self._clock.wait([each.native for each in several], asked_s, deadline_s)
        if ended_s is None:
            going = next((each for each in several if not self.done(each)), several[-1])
            raise errors.DeadlineExceededError(
                f"an emulated transfer has not ended: {going} of {self.spec.name}",
                got=f"{deadline_s:g} s of waiting", expected=f"its end, in time stretched {self.stretch:g} times",
                fix="lower the stretch, or wait longer",
            )  # fmt: skip
        return ended_s

    def done(self, transfer: Transfer) -> bool:
        """Whether it has ended by now. Raises TransferCancelledError."""
        return self._clock.done(transfer.native)

    def cancel(self, transfer: Transfer) -> None:
        """Wakes whoever waits for it, or for what comes after it, with TransferCancelledError. What has begun passes its links all the
        same, as commands that a drive has taken do."""
        self._clock.cancel(transfer.native)

    def now(self) -> float:
        """The virtual second that it is."""
        return self._clock.now()

    def advance(self, to_s: float) -> None:
        """Moves a clock with `stretch` 0 on to that virtual second."""
        self._clock.advance(to_s)

    def traffic(self) -> dict[str, LinkUse]:
        """What has passed each link so far, by its name."""
        return {name: LinkUse(amount, busy_s, transfers) for name, amount, busy_s, transfers in self._clock.traffic()}

    def times(self) -> Times:
        """Where time went so far. Waits that have not ended are not in it."""
        return Times(*self._clock.times())

    def close(self) -> None:
        """Wakes whoever waits, with EngineClosedError. May be called again."""
        self._clock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value


def _check_number(name: str, value: object, least: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        raise errors.InvalidInputError(name, got=repr(value), expected=f"a finite number, at least {least:g}")
