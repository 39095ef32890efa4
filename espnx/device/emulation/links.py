"""The links of emulated devices as their spec has them: which of them bytes pass, and at which
rates. Nothing here knows what time it is.

Each device has flash to read and to program, memory, an accelerator and a link of its own; a switch
port is shared by as many as the spec says, the uplink by all. Links carry both directions at once.
A figure that the spec does not have bounds nothing.
"""

from __future__ import annotations

from ... import errors
from ..cost.work import COMPUTE
from ..model.spec import DeviceSpec
from .costs import FlashCosts, value_of

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

#: Of a link on somebody's way: its number, the amount of work there, and the rate per second.
Passage = tuple[int, float, float]


class Links:
    """Those of all devices of a topology.

    Args:
        spec: of every device.
        n_devices: of them.

    Attributes:
        rates: bytes/s of each link by its name, or more than anything. An accelerator's is its
            spec's, by how many query heads share a pass: here it has 1.0.
        latency_s: of each, by its name.
    """

    def __init__(self, spec: DeviceSpec, n_devices: int):
        self._spec, self._flash = spec, FlashCosts(spec)
        self._flops_per_s = dict[int, float]()  # by query heads that share a pass
        self.rates: dict[str, float] = {}
        self.latency_s: dict[str, float] = {}
        self._routes = [self._lay_out(device) for device in range(n_devices)]
        self._numbers = {name: number for number, name in enumerate(self.rates)}

    def _lay_out(self, device: int) -> dict[str, tuple[str, ...]]:
        """Names of the links of each route of one device. Links that the spec gives no bandwidth
        are left out."""
        flash, links, accelerator = self._spec.flash, self._spec.links, self._spec.accelerator
        per_port = int(links.devices_per_port.value) if links.devices_per_port else 1
        own, port = f"device {device}", f"port {device // per_port}"
        write = flash.write_bandwidth or flash.read_bandwidth
        latency_s = links.latency.value if links.latency else 0.0
        kinds: dict[str, tuple[str, float | None, float]] = {
            "flash_read": (f"{own} flash read", value_of(flash.read_bandwidth), 0.0),
            "flash_write": (f"{own} flash write", value_of(write), 0.0),
            "memory": (f"{own} memory", value_of(self._spec.memory.bandwidth), 0.0),
            "accelerator": (f"{own} accelerator", 1.0 if accelerator else None, 0.0),
        }
        for way in ("in", "out"):
            kinds[f"link_{way}"] = (f"{own} link {way}", value_of(links.device), latency_s)
            kinds[f"port_{way}"] = (f"{port} {way}", value_of(links.switch_port), 0.0)
            kinds[f"uplink_{way}"] = (f"uplink {way}", value_of(links.uplink), 0.0)
        for name, per_s, latency in kinds.values():
            if per_s is not None:
                self.rates[name], self.latency_s[name] = per_s, latency
        routes = ROUTES | {COMPUTE: ("memory", "accelerator")}
        return {
            route: tuple(kinds[kind][0] for kind in legs if kinds[kind][1] is not None)
            for route, legs in routes.items()
        }

    def bounded(self) -> dict[str, float]:
        """The rates of those that bound anything."""
        return {name: per_s for name, per_s in self.rates.items() if per_s < _UNBOUND}

    def _passages(self, device: int, route: str, size_bytes: int) -> list[Passage]:
        return [
            (self._numbers[name], float(size_bytes), self.rates[name])
            for name in self._routes[device][route]
        ]

    def transfer(
        self, device: int, route: str, size_bytes: int, requests: int
    ) -> tuple[list[Passage], float]:
        """(the links that bytes of one of `ROUTES` pass, seconds before the first byte). Flash
        serves `requests` at its own rate."""
        legs, flash = self._passages(device, route, size_bytes), self._flash
        if not size_bytes:
            return legs, 0.0
        if route.startswith("flash_to"):
            legs[0] = (*legs[0][:2], flash.read_per_s(size_bytes, requests))
            return legs, flash.to_host_s
        if route == "flash_read":
            legs[0] = (*legs[0][:2], flash.read_per_s(size_bytes, requests))
            return legs, flash.inside_s
        if route.endswith(("to_flash", "_write")):
            legs[-1] = (*legs[-1][:2], flash.write_per_s(size_bytes, requests))
            return legs, flash.write_s
        return legs, 0.0

    def compute(self, device: int, flop: float, size_bytes: int, group: int) -> list[Passage]:
        """The links that work of an accelerator passes: its memory and itself.

        Args:
            flop: floating-point operations, of all `group` query heads together.
            size_bytes: read from the device's memory.

        Raises InvalidInputError: the spec has no accelerator, or no kernel for so many heads.
        """
        accelerator = self._spec.accelerator
        if accelerator is None:
            raise errors.InvalidInputError(
                f"compute on {self._spec.name}",
                got="no accelerator in its spec",
                expected="a spec with one",
            )
        legs = self._passages(device, COMPUTE, size_bytes)
        work, per_s = float(flop), self._flops_per_s.get(group)
        if per_s is None:
            per_s = self._flops_per_s[group] = min(accelerator.flops_per_s(group), _UNBOUND)
        if stream := accelerator.stream_bandwidth:
            least_s = size_bytes / stream.value
            if not work:
                work, per_s = float(size_bytes), stream.value
            elif least_s > work / per_s:
                per_s = work / least_s
        legs[-1] = (legs[-1][0], work, per_s)
        return legs
