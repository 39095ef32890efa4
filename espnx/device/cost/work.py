"""What a command costs, as a value: legs of its bytes over the links of a device, and work of its
accelerator, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Things come in groups of so many bytes: large enough for flash, small enough that they come as
#: they are ready.
GROUP_BYTES = 1 << 20
#: A leg that is no route: the accelerator is at work.
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Leg:
    """Attributes:
    route: of bytes (`espnx.device.emulation.links.ROUTES`), or `COMPUTE` over them.
    size_bytes: that pass it.
    after: which legs of the same command have to end before: counted from its first one, or, below
        0, from the newest.
    requests: that read or write the bytes.
    flop: of `COMPUTE`.
    heads: query heads that share a pass of `COMPUTE`.
    """

    route: str
    size_bytes: int
    after: tuple[int, ...] = ()
    requests: int = 1
    flop: float = 0.0
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Places `begin` to `end` of what was asked for, which are there when the leg of that number
    has ended."""

    begin: int
    end: int
    leg: int


@dataclass(frozen=True)
class Work:
    """What a command has a device do.

    Attributes:
        legs: that are known when it is sent.
        groups: of things that come by and by; None: all come together, with the last leg of all.
        step: the legs of a step, of commands whose work comes in steps.
        end: the legs behind all steps, by the result.
    """

    legs: Sequence[Leg]
    groups: Sequence[Group] | None = None
    step: Callable[[Any], Sequence[Leg]] | None = None
    end: Callable[[Any], Sequence[Leg]] | None = None


def groups_of(sizes: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive places whose sizes add up to `GROUP_BYTES`, the last of each beyond it."""
    if not len(sizes):
        return []
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // GROUP_BYTES, append=-1)) + 1
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
