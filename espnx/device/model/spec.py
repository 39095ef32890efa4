"""What a device is, in figures: bandwidths, latencies, what its accelerator computes and at which
rate, and where each figure is from.

A spec is a YAML file (docs/device-specs.md). Specs of devices that papers measured are here by name
(`presets`); a figure that nobody has published is None, and none is made up. Loading one imports no
torch.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated

from ... import errors
from .reader import (
    NAME,
    SUFFIXES,
    BitEnergy,
    Compute,
    Count,
    Dollars,
    Frequency,
    HourlyDollars,
    Negative,
    Rate,
    Requests,
    Size,
    Time,
    Watts,
    Writes,
    meant,
    missing,
    names_in,
    read_spec,
)
from .reader import Figure as Figure  # who writes a spec finds all that it is made of here
from .spec_file import Keys, read_file

#: What a device may compute beside its data.
VERBS = ("attend", "maxsim", "distances", "search", "walk", "scan", "encode")
SET_UPS = ("synchronous", "asynchronous")


@dataclass(frozen=True)
class Flash:
    """The memory that keeps the bytes.

    Attributes:
        read_bandwidth: of large reads into the device's memory (or, where it has none, its link),
            all channels together.
        write_bandwidth: of large writes.
        page: the unit of reading inside.
        channels, dies_per_channel: of flash.
        channel_bandwidth: of one channel's bus.
        cell_read_time, cell_program_time, cell_erase_time: tR, tPROG, tBERS.
        read_latency, write_latency: of 4 KiB, alone, as the host sees it.
        random_reads, random_writes: of 4 KiB, in a second.
    """

    read_bandwidth: Rate
    write_bandwidth: Rate | None = None
    page: Size | None = None
    channels: Count | None = None
    dies_per_channel: Count | None = None
    channel_bandwidth: Rate | None = None
    cell_read_time: Time | None = None
    cell_program_time: Time | None = None
    cell_erase_time: Time | None = None
    read_latency: Time | None = None
    write_latency: Time | None = None
    random_reads: Requests | None = None
    random_writes: Requests | None = None


@dataclass(frozen=True)
class Links:
    """The way to the host. Bandwidths are of one direction; both are there at once.

    Attributes:
        device: between the device and what it is plugged into.
        switch_port: shared by `devices_per_port` devices, or None.
        uplink: between the switch and the host, shared by all, or None.
        latency: of a request over the device's link.
    """

    device: Rate
    switch_port: Rate | None = None
    devices_per_port: Count | None = None
    uplink: Rate | None = None
    latency: Time | None = None


@dataclass(frozen=True)
class Memory:
    """The device's own.

    Attributes:
        size, bandwidth: of its DRAM.
        on_chip: beside its processor.
    """

    size: Size | None = None
    bandwidth: Rate | None = None
    on_chip: Size | None = None


@dataclass(frozen=True)
class Accelerator:
    """What computes beside the data.

    Attributes:
        verbs: of `VERBS`, what it computes.
        rates: by how many query heads share a pass over K and V (d_group), for each number that
            there is a kernel for.
        peak: of all its units, for what has no rate of its own.
        stream_bandwidth: of bytes that pass through it and are compared on the way.
        block_tokens: that attention takes in at a time.
        head_dim: of K and V rows.
        pad_tokens: sequences are padded to a multiple of so many.
        mask_value: what padding scores.
        clock: its frequency.
        units: that multiply and add.
        set_up: whether a command is prepared while the one before it runs (``asynchronous``), or
            not.
        set_up_time: of a command.
    """

    verbs: tuple[Annotated[str, VERBS], ...]
    rates: Mapping[int, Compute] = field(default_factory=dict)
    peak: Compute | None = None
    stream_bandwidth: Rate | None = None
    block_tokens: Count | None = None
    head_dim: Count | None = None
    pad_tokens: Count | None = None
    mask_value: Negative | None = None
    clock: Frequency | None = None
    units: Count | None = None
    set_up: Annotated[str, SET_UPS] | None = None
    set_up_time: Time | None = None

    @functools.cached_property
    def max_group(self) -> int:
        """The most query heads that share a pass; 0: it does not attend."""
        return max(self.rates, default=0)

    def flops_per_s(self, group: int = 1) -> float:
        """The rate of a pass that `group` query heads share: that of the smallest kernel for so
        many, which takes as long as if all its heads were there. Without kernels it is `peak`, and
        infinite where that is not known either. Raises InvalidInputError."""
        if not self.rates:
            return self.peak.value if self.peak else math.inf
        kernel = min((heads for heads in self.rates if heads >= group), default=None)
        if kernel is None or group < 1:
            raise errors.InvalidInputError(
                "query heads that share a pass", got=group, expected=f"1 to {self.max_group}"
            )
        return self.rates[kernel].value * group / kernel


@dataclass(frozen=True)
class Power:
    """Attributes:
    device: all of it, at work.
    limit: what it may take.
    accelerator: at work, by d_group.
    link_energy: of a bit over its link.
    """

    device: Watts | None = None
    limit: Watts | None = None
    accelerator: Mapping[int, Watts] = field(default_factory=dict)
    link_energy: BitEnergy | None = None


@dataclass(frozen=True)
class Price:
    """Attributes:
    device: to buy.
    hour: to rent.
    """

    device: Dollars | None = None
    hour: HourlyDollars | None = None


@dataclass(frozen=True)
class DeviceSpec:
    """A device. Sections and figures that are not known are None, or empty.

    Attributes:
        name: short; what it is opened by.
        title: what it is, in words.
        capacity: bytes that it keeps.
        endurance: bytes that may be written to it.
    """

    name: Annotated[str, NAME]
    title: str
    flash: Flash
    links: Links
    memory: Memory = field(default_factory=Memory)
    accelerator: Accelerator | None = None
    capacity: Size | None = None
    endurance: Writes | None = None
    power: Power = field(default_factory=Power)
    price: Price = field(default_factory=Price)

    def has(self, verb: str) -> bool:
        """Whether it computes that beside the data."""
        return self.accelerator is not None and verb in self.accelerator.verbs


def presets() -> tuple[str, ...]:
    """Names of the specs that come with the package."""
    return names_in(__package__, "presets")


@functools.cache
def load_preset(name: str) -> DeviceSpec:
    """Raises InvalidInputError for a name that is none of `presets`."""
    if name not in presets():
        raise errors.InvalidInputError(
            f"device spec {name!r}", expected=", ".join(presets()), fix=meant(name, presets())
        )
    file = resources.files(__package__) / "presets" / f"{name}.yaml"
    return parse_spec(file.read_bytes(), str(file))


def load_spec(source: str | os.PathLike[str]) -> DeviceSpec:
    """A preset by its name, or the spec in a file (a name that ends in ``.yaml`` or ``.yml``, or a
    `pathlib.Path`).

    Raises:
        InvalidInputError: a name that is none.
        FileMissingError, ReadError: as it says.
        FormatError: the file is no spec; says which field, what it has, what it should have.
    """
    if isinstance(source, str) and not source.endswith(SUFFIXES):
        return load_preset(source)
    return parse_spec(read_file(source), os.fspath(source))


def parse_spec(data: bytes, path: str) -> DeviceSpec:
    """The spec that a YAML text holds; `path` is for errors. Raises FormatError."""
    spec, tree = read_spec(data, path, DeviceSpec)
    _check_whole_spec(spec, tree)
    return spec


def _check_whole_spec(spec: DeviceSpec, tree: Keys) -> None:
    """What no field can say alone."""
    if spec.links.switch_port is not None and spec.links.devices_per_port is None:
        raise missing(
            tree.place, ("links", "devices_per_port"), "how many devices share a switch port"
        )
    if spec.has("attend"):
        for name in ("rates", "block_tokens", "head_dim", "pad_tokens", "mask_value"):
            if not getattr(spec.accelerator, name):
                raise missing(tree.place, ("accelerator", name), "given, as its verbs name attend")
