"""Points of the disk benchmark: what is moved, in which order; the same for the engine and for
every baseline."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espnx.errors import InvalidInputError
from espnx.sizes import format_size

from .content import BLOCK_BYTES, DataFile

KIB = 1024
# A sequential run is a whole number of these, so that requests of 256, 512 and 960 KiB all cover it
# exactly.
SEQUENTIAL_STEP_BYTES = math.lcm(256, 512, 960) * KIB


@dataclass(frozen=True)
class Point:
    """One setting.

    Attributes:
        op: ``read`` or ``write``.
        pattern: ``random`` or ``sequential``.
        block_bytes: of one item.
        queue_depth: requests with the device at a time.
        throttle_bytes_per_s: of the disk, or None where it runs free.
    """

    op: str
    pattern: str
    block_bytes: int
    queue_depth: int
    throttle_bytes_per_s: int | None = None

    def __str__(self) -> str:
        limit = (
            f", throttled to {self.throttle_bytes_per_s / 1e6:g} MB/s"
            if self.throttle_bytes_per_s
            else ""
        )
        return (
            f"{self.pattern} {self.op}, {format_size(self.block_bytes)}, depth "
            f"{self.queue_depth}{limit}"
        )

    def params(self, data: DataFile, checksums: bool) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"file_bytes": data.size_bytes, "checksums": checksums}


def standard_points(ops: Sequence[str], throttle_bytes_per_s: int | None) -> list[Point]:
    """What is measured unless the caller names blocks, patterns or depths: small random reads by
    depth, larger ones, a long read."""
    shapes = [
        ("random", 4 * KIB, 1),
        ("random", 4 * KIB, 32),
        ("random", 4 * KIB, 128),
        ("random", 16 * KIB, 32),
        ("random", 64 * KIB, 32),
        ("random", 256 * KIB, 32),
        ("sequential", 960 * KIB, 8),
    ]
    points = [Point(op, *shape) for op in ops for shape in shapes]
    if throttle_bytes_per_s:
        # A throttle says nothing about small requests; it makes long transfers repeatable.
        points += [Point(op, "sequential", 960 * KIB, 8, throttle_bytes_per_s) for op in ops]
    return points


def product_points(
    ops: Sequence[str],
    patterns: Sequence[str],
    blocks: Sequence[int],
    depths: Sequence[int],
    throttle: int | None,
) -> list[Point]:
    """Every combination."""
    return [
        Point(op, pattern, block, depth, throttle)
        for op, pattern, block, depth in itertools.product(ops, patterns, blocks, depths)
    ]


@dataclass(frozen=True)
class Work:
    """A point on a file: which items a run moves.

    Attributes:
        point: the setting.
        data: the file (for writes, one that may be overwritten).
        items: of one run.
        seed: of the offsets.
    """

    point: Point
    data: DataFile
    items: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.point.block_bytes % BLOCK_BYTES or not 1 <= self.items <= self.capacity:
            expected = (
                f"a multiple of {BLOCK_BYTES} bytes, and 1 to {self.capacity} of them in a file of "
                f"{self.data.size_bytes} bytes"
            )
            raise InvalidInputError(
                "blocks of the benchmark",
                got=f"{self.items} of {self.point.block_bytes} bytes",
                expected=expected,
            )

    @property
    def capacity(self) -> int:
        """Items in the file."""
        return self.data.size_bytes // self.point.block_bytes

    @property
    def bytes_asked(self) -> int:
        return self.items * self.point.block_bytes

    def with_items(self, items: int) -> Work:
        return dataclasses.replace(self, items=max(1, min(items, self.capacity)))

    def for_seconds(self, seconds: float, bytes_per_s: float) -> Work:
        """The work of as many items as take about that long; sequential runs in whole steps, where
        the file has that many."""
        sized = self.with_items(round(seconds * bytes_per_s / self.point.block_bytes))
        if self.point.pattern == "random":
            return sized
        step = math.lcm(SEQUENTIAL_STEP_BYTES, self.point.block_bytes)
        limit = self.data.size_bytes // step * step
        whole = min(limit, round(sized.bytes_asked / step) * step)
        return sized if whole == 0 else self.with_items(whole // self.point.block_bytes)

    def start_bytes(self, turn: int) -> int:
        """The byte at which a sequential run of that number begins; another place for each, because
        what was read a moment ago may lie in a cache."""
        room = (self.data.size_bytes - self.bytes_asked) // self.point.block_bytes
        return (
            int(np.random.default_rng([self.seed, turn]).integers(room + 1))
            * self.point.block_bytes
        )

    def offsets(self, turn: int) -> np.ndarray:
        """int64 [items]: where the items of the run of that number begin; random ones without
        repetition, as fio's are."""
        if self.point.pattern == "sequential":
            return (
                self.start_bytes(turn)
                + np.arange(self.items, dtype=np.int64) * self.point.block_bytes
            )
        numbers = np.random.default_rng([self.seed, turn]).permutation(self.capacity)[: self.items]
        return numbers.astype(np.int64) * self.point.block_bytes
