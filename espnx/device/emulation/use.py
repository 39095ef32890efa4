"""What a piece of work took emulated devices: the time that may be said of them, the bytes of their
flash and of their links, whose time it was. Searches return it, commands print it.

A time is *virtual* where the wall clock moved it and this machine had no more than a fifth of it
(`report`); *modelled* where nobody waited (a stretch of 0: what this machine did takes no time in
it), or where the spec lacks the latency of a read; else there is none to be said.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ...sizes import format_size
from ..model.spec import DeviceSpec, presets
from ..wrapper import topologies_of
from .costs import FlashCosts
from .report import HOST_SHARE_MAX, Report, report
from .topology import Times, Topology

#: Links of each device whose bytes are told, by the end of their names.
_LINKS = ("flash read", "flash write", "link in", "link out")

_lock = threading.Lock()  # guards `Topology.watches` of all


@dataclass(frozen=True)
class DeviceUse:
    """What the devices of one topology did, all together.

    Attributes:
        name: their spec's.
        devices: how many they are.
        stretch: wall seconds of a virtual second.
        virtual_s: what it took the emulated hardware, all work on the host included; None where
            that cannot be said.
        modelled_s: what the devices alone would take; None unless that is all that can be said.
        host_share: of the wall time, this machine's; None where the wall clock had no part in it.
        flash_bytes, flash_written_bytes: of the devices' flash, whole pages.
        to_devices_bytes, to_host_bytes: over the devices' links.
        why: there is no virtual time, and what to run for one; empty where there is.
    """

    name: str
    devices: int
    stretch: float
    virtual_s: float | None
    modelled_s: float | None
    host_share: float | None
    flash_bytes: int
    flash_written_bytes: int
    to_devices_bytes: int
    to_host_bytes: int
    why: str = ""

    @property
    def time(self) -> str:
        """The time, for people."""
        if self.virtual_s is not None:
            return f"{_shown(self.virtual_s)} virtual, host {self.host_share:.0%}"
        return "untimed" if self.modelled_s is None else f"{_shown(self.modelled_s)} modelled"

    def summary(self) -> str:
        """A line; where there is no virtual time a second one says why."""
        written = (
            f", {format_size(self.flash_written_bytes)} to flash"
            if self.flash_written_bytes
            else ""
        )
        moved = f"{format_size(self.flash_bytes)} from flash{written}"
        links = (
            f"{format_size(self.to_devices_bytes)} to devices, {format_size(self.to_host_bytes)} "
            "to the host"
        )
        many = f"{self.devices} x " if self.devices > 1 else ""
        return f"{many}{self.name}, emulated: {self.time} | {moved} | links: {links}" + (
            f"\n  {self.why}" if self.why else ""
        )


class Watch:
    """Watches topologies while it is open: a context manager. Its `use` is of that time alone.

    Args:
        topologies: that the work may ask; none: `use` is None.
        bench: what times such work as it should be, words behind ``espnx bench device``; empty:
            nothing does.

    Attributes:
        beside_bytes: to be set meanwhile: what was read past the devices. Such reads take virtual
            time by the wall clock alone, as if they had no disk to wait for, so that a time with
            them in it is nobody's.
        beside_why: why they were, in words.
    """

    def __init__(self, topologies: Sequence[Topology], bench: str = ""):
        self._topologies, self._bench = topologies, bench
        self.beside_bytes, self.beside_why = 0, ""
        self._others = False  # had work under way on the same devices
        self._begun = list[tuple[Times, Counter[str]]]()
        self.use: DeviceUse | None = None

    def __enter__(self) -> Self:
        with _lock:
            for each in self._topologies:
                for other in each.watches:
                    self._others = True
                    if isinstance(other, Watch):
                        other._others = True
                each.watches.add(self)
        self._begun = [(each.times(), _passed(each)) for each in self._topologies]
        return self

    def __exit__(self, *_: object) -> None:
        if self._topologies:
            self.use = self._used()
        with _lock:
            for each in self._topologies:
                each.watches.discard(self)

    def _used(self) -> DeviceUse:
        moved = Counter[str]()
        for topology, (_, before) in zip(self._topologies, self._begun, strict=True):
            moved += _passed(topology) - before
        first = self._topologies[0]
        names = list(dict.fromkeys(each.spec.name for each in self._topologies))
        virtual_s, modelled_s, share, why = self._timed(first, self._begun[0][0])
        if not moved:
            virtual_s, modelled_s, why = None, None, "untimed: nothing was asked of the devices"
        return DeviceUse(
            " and ".join(names),
            sum(each.n_devices for each in self._topologies),
            first.stretch,
            virtual_s,
            modelled_s,
            share,
            moved["flash read"],
            moved["flash write"],
            moved["link in"],
            moved["link out"],
            why,
        )

    def _timed(
        self, topology: Topology, begun: Times
    ) -> tuple[float | None, float | None, float | None, str]:
        """(virtual seconds, modelled ones, the host's share, why)."""
        found = report(topology, begun) if topology.stretch else None
        share = found.host_share if found else None
        if len(self._topologies) > 1:
            return (
                None,
                None,
                share,
                "untimed: devices that were opened apart each have a time of their own",
            )
        if self._others:
            return (
                None,
                None,
                share,
                "untimed: others asked the same devices meanwhile, and the bytes are theirs, too",
            )
        if self.beside_bytes:
            return (
                None,
                None,
                share,
                (
                    f"untimed: {format_size(self.beside_bytes)} of first stages were read past the "
                    f"devices{f': {self.beside_why}' if self.beside_why else ''}"
                ),
            )
        if found is not None and not found.is_valid:
            return None, None, share, f"untimed: {_refused(found)}. {self._timing(topology.spec)}"
        whys = list[str]()
        if found is None:
            whys.append(
                "at a stretch of 0 this machine's work takes no time. "
                f"{self._timing(topology.spec)}"
            )
        if not FlashCosts(topology.spec).has_latency:
            whys.append(
                "its spec has no latency of a read (flash.read_latency), and one that waits for "
                "another takes next to none"
            )
        took_s = topology.times().now_s - begun.now_s if found is None else found.virtual_s
        return (
            (None, took_s, share, f"modelled: {'; '.join(whys)}")
            if whys
            else (took_s, None, share, "")
        )

    def _timing(self, spec: DeviceSpec) -> str:
        if not self._bench:
            return (
                "A stretch above 0 times it"
                if not self._topologies[0].stretch
                else "A stretch of 0 models the devices' part"
            )
        name = spec.name if spec.name in presets() else f"{spec.name}.yaml"
        return f"Such work is timed by `espnx bench device {self._bench} --device {name}`"


def watch(*devices: object, bench: str = "") -> Watch:
    """A `Watch` of the topologies of some devices, or of what stands on them: open while they work.

    >>> with watch(*devices) as watched:                                  # doctest: +SKIP
    ...     ticket.finish()
    >>> print(watched.use.summary())                                      # doctest: +SKIP
    """
    return Watch(topologies_of(*devices), bench)


def _refused(found: Report) -> str:
    said = (
        f"{found.host_share:.0%} of {found.wall_s:.3g} s were this machine's at a stretch of "
        f"{found.stretch:g}, of which"
    )
    said += f" {HOST_SHARE_MAX:.0%} may be"
    more = found.stretch_to_use
    return f"{said}; at {more:g} they should" if math.isfinite(more) else said


def _passed(topology: Topology) -> Counter[str]:
    """Bytes so far, by the names of `_LINKS`."""
    passed = Counter[str]()
    for name, use in topology.traffic().items():
        kind = " ".join(name.split()[2:])
        if kind in _LINKS:
            passed[kind] += round(use.amount)
    return passed


def _shown(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
