"""What the figures of a spec make reads and writes of its flash cost, and which figures emulated
time takes at all. Pure: no clock.

A file of its own, since docs, `espnx device info` and the topology must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ... import errors
from ..model.reader import Figure
from ..model.spec import DeviceSpec

#: Of reads and writes whose latency a spec gives.
ALONE_BYTES = 4096

#: Figures that move emulated time, or bound what a device may hold. All others inform: whoever
#: counts watts, dollars or blocks.
PACING = frozenset({
    "flash.read_bandwidth", "flash.write_bandwidth", "flash.random_reads", "flash.random_writes",
    "flash.read_latency", "flash.write_latency", "flash.cell_read_time", "links.device",
    "links.switch_port", "links.devices_per_port", "links.uplink", "links.latency", "memory.size",
    "memory.bandwidth", "accelerator.rates", "accelerator.peak", "accelerator.stream_bandwidth",
    "accelerator.block_tokens", "accelerator.head_dim", "accelerator.pad_tokens",
    "accelerator.mask_value",
})  # fmt: skip


class FlashCosts:
    """What reads and writes of one device's flash cost.

    Attributes:
        to_host_s: between a read's command and its first byte, where the bytes go to the host: what
            the host sees of one of 4 KiB alone (`read_latency`), less what that takes to pass flash
            and links. Without that figure, the cells' time.
        inside_s: of a read into the device's memory: the cells' time; without that figure as
            `to_host_s`.
        write_s: before a write of any origin counts: as `to_host_s`, of `write_latency`.
    """

    def __init__(self, spec: DeviceSpec):
        flash, links = spec.flash, spec.links
        self._reads = flash.read_bandwidth.value, value_of(flash.random_reads)
        self._writes = (
            (flash.write_bandwidth or flash.read_bandwidth).value,
            value_of(flash.random_writes),
        )
        wires = [
            each.value
            for each in (links.device, links.switch_port, links.uplink)
            if each is not None
        ]
        on_the_way_s = value_of(links.latency) or 0.0

        def before(latency: Figure | None, per_s: float) -> float | None:
            return (
                None
                if latency is None
                else max(0.0, latency.value - ALONE_BYTES / min([per_s, *wires]) - on_the_way_s)
            )

        cells_s = value_of(flash.cell_read_time)
        to_host_s = before(flash.read_latency, self.read_per_s(ALONE_BYTES, 1))
        self.has_latency = cells_s is not None or to_host_s is not None
        self.to_host_s = (cells_s or 0.0) if to_host_s is None else to_host_s
        self.inside_s = self.to_host_s if cells_s is None else cells_s
        self.write_s = before(flash.write_latency, self.write_per_s(ALONE_BYTES, 1)) or 0.0

    def read_per_s(self, size_bytes: int, requests: int) -> float:
        """Bytes/s at which so many reads of so many bytes together pass the flash: max(bytes /
        bandwidth, requests / random_reads)."""
        return _per_s(*self._reads, size_bytes, requests)

    def write_per_s(self, size_bytes: int, requests: int) -> float:
        """The same of writes."""
        return _per_s(*self._writes, size_bytes, requests)


def _per_s(
    bytes_per_s: float, requests_per_s: float | None, size_bytes: int, requests: int
) -> float:
    if requests_per_s is None or not size_bytes or not requests:
        return bytes_per_s
    return min(bytes_per_s, size_bytes * (requests_per_s / requests))


def check_latency(spec: DeviceSpec) -> None:
    """Raises InvalidInputError for a spec that says nothing of what a read takes that waits for
    another: a walk over a graph is made of them, and would seem to take no time."""
    if not FlashCosts(spec).has_latency:
        raise errors.InvalidInputError(
            f"a walk on device {spec.name!r}",
            got="a spec without flash.read_latency, and without flash.cell_read_time",
            expected="one of them: each round of a walk waits for the one before",
            fix="a spec of your own that has it (drive.yaml)",
        )


def figures_of(spec: DeviceSpec) -> dict[str, str]:
    """Each figure of a spec by its name: its value, how it is known, and whether it paces or
    informs."""
    return {
        name: f"{figure} ({figure.confidence}; {'paces' if is_pacing(name) else 'informs'})"
        for name, figure in _figures("", spec)
    }


def is_pacing(name: str) -> bool:
    """Whether emulation is paced by a figure: ``flash.read_latency``, ``accelerator.rates.4``."""
    return ".".join(name.split(".")[:2]) in PACING


def _figures(prefix: str, value: Any) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, Figure):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _figures(f"{prefix}.{key}", each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _figures(
                f"{prefix}.{field.name}" if prefix else field.name, getattr(value, field.name)
            )


def value_of(figure: Figure | None) -> float | None:
    """The value of a figure; None where it is not known."""
    return None if figure is None else figure.value
