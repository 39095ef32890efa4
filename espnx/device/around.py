"""A device that stands in front of another: traces and emulation add something to its work, and say of the rest what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

import torch

from .crew import Clock, clock_of
from .interface import Capabilities, Device, DeviceStats, FilePath

D = TypeVar("D", bound=Device)


def topologies_of(*devices: object) -> list[Any]:
    """The topologies (`espnx.device.emulation.topology`) in whose time emulated devices are, each once; of other devices none. What stands
    in front of some has them as ``topologies``."""
    found = list[Any]()
    for each in devices:
        alone = getattr(each, "topology", None)
        found += getattr(each, "topologies", () if alone is None else (alone,))
    return list(dict.fromkeys(found))


class DeviceAround(Generic[D]):
    """See `Device`. The inner device is closed with it."""

    def __init__(self, inner: D):
        self._inner = inner

    @property
    def compute(self) -> torch.device:
        """See `Device`."""
        return self._inner.compute

    @property
    def capabilities(self) -> Capabilities:
        """See `Device`."""
        return self._inner.capabilities

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return self._inner.path_report()

    def stats(self) -> DeviceStats:
        """See `Device`."""
        return self._inner.stats()

    @property
    def clock(self) -> Clock | None:
        """See `clock_of`."""
        return clock_of(self._inner)

    @property
    def topologies(self) -> Sequence[Any]:
        """See `topologies_of`."""
        return topologies_of(self._inner)

    def forget(self) -> None:
        """See `Device`."""
        self._inner.forget()

    def close(self) -> None:
        """See `Device`."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
