"""What emulated devices were asked for from one moment on, and how long that took them: what a program shows beside its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .report import report
from .topology import LinkUse, Topology


@dataclass(frozen=True)
class DeviceUse:
    """Of all devices of a topology together.

    Attributes:
        name, devices, stretch: of the spec; how many; wall seconds of a virtual one.
        virtual_s: how long it took them. With a stretch of 0 as if this machine's own work took no time. None: not to be quoted, and `why`.
        host_share: of the time, this machine's own work; None with a stretch of 0, which leaves it out.
        flash_bytes, to_host_bytes: read from flash; sent over the devices' links to the host.
        why: there is no time; empty where there is.
    """

    name: str
    devices: int
    stretch: float
    virtual_s: float | None
    host_share: float | None
    flash_bytes: int
    to_host_bytes: int
    why: str

    def summary(self) -> str:
        """One line."""
        moved = f"{self.flash_bytes / 1e6:.2f} MB from flash, {self.to_host_bytes / 1e6:.2f} MB to the host"
        if self.virtual_s is None:
            time = f"not timed: {self.why}"
        elif self.host_share is None:
            time = f"{self.virtual_s * 1e3:.3f} ms of their own, with this machine's work in no time (a stretch of 0)"
        else:
            time = f"{self.virtual_s * 1e3:.3f} ms, of them {self.host_share:.0%} this machine's"
        return f"{self.devices} x {self.name}, emulated: {moved}; {time}"


def watch(topology: Topology) -> Callable[..., DeviceUse]:
    """From here on: what says how the devices were used.

    It takes `beside_bytes`, of what was read past the devices: such reads take virtual time by the wall clock alone, as if they had no disk
    to wait for, so that a time with them in it is nobody's.
    """
    before, times = topology.traffic(), topology.times()

    def use(beside_bytes: int = 0) -> DeviceUse:
        after, virtual_s = topology.traffic(), topology.times().now_s - times.now_s
        found = report(topology, times) if topology.stretch else None
        why = ""
        if beside_bytes:
            why = f"{beside_bytes / 1e6:.2f} MB of first stages were read past the devices"
        elif found is not None and (refusal := found.refusal) is not None:
            why = f"{refusal.got}, expected {refusal.expected}; {refusal.fix}"
        return DeviceUse(
            topology.spec.name, topology.n_devices, topology.stretch, None if why else virtual_s,
            None if found is None else found.host_share, _passed(before, after, " flash read"), _passed(before, after, " link out"), why,
        )  # fmt: skip

    return use


def _passed(before: Mapping[str, LinkUse], after: Mapping[str, LinkUse], link: str) -> int:
    """Bytes over the links of that kind, one a device."""
    return round(sum(use.amount - before[name].amount for name, use in after.items() if name.endswith(link)))
