"""A part of a device that stands in front of another: traces and emulation add something to its
work, and say of the rest what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from .workers import Clock, clock_of


def topologies_of(*devices: object) -> list[Any]:
    """The topologies (`espnx.device.emulation.topology`) in whose time emulated devices are, each
    once; of other devices none. What stands in front of some has them as ``topologies``."""
    found = list[Any]()
    for each in devices:
        alone = getattr(each, "topology", None)
        found += getattr(each, "topologies", () if alone is None else (alone,))
    return list(dict.fromkeys(found))


class Wrapper:
    """Stands in front of a part or a ticket: what it does not say itself, the inner one says."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # before it is there
            raise AttributeError(name)
        return getattr(self._inner, name)


class PartWrapper(Wrapper):
    """The inner part is closed with it. A class derived from it has a `submit` of its own, and is
    made by `espnx.device.kinds.PartKind.wrap`, so that no call comes past that."""

    @property
    def clock(self) -> Clock | None:
        """See `clock_of`."""
        return clock_of(self._inner)

    @property
    def topologies(self) -> Sequence[Any]:
        """See `topologies_of`."""
        return topologies_of(self._inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
