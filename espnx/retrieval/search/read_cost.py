"""What a read costs on the device at hand, measured: a fixed latency, so much a request, so much a
byte.

Two things follow from it: how large a hole between two records is cheaper to read than to skip
(`gap_bytes`), and when reading will be done (`read_s`), from which a search decides what to do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ...storage.engine import Future
from ..store.tier import Tier

_RECORDS, _LONG_BYTES = 512, 8 << 20
_LEAST_BYTES = 64 << 20  # a smaller store says little, and needs it little
_GAP_MAX_BYTES = 64 << 10
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class DeviceCost:
    """Seconds of a read of `n` requests and `b` bytes, deep in the queue: ``latency_s + n *
    request_s + b / bytes_per_s``.

    The defaults are those of a plain NVMe drive behind a hypervisor: 80,000 requests of 4 KiB a
    second, 1.3 GB/s.
    """

    latency_s: float = 150e-6
    request_s: float = 9.4e-6
    bytes_per_s: float = 1.3e9

    @property
    def gap_bytes(self) -> int:
        """A hole of this size takes as long to read as another request, in whole blocks, at most 64
        KiB."""
        return min(
            _GAP_MAX_BYTES, int(self.request_s * self.bytes_per_s) // _BLOCK_BYTES * _BLOCK_BYTES
        )

    def read_s(self, requests: int, size_bytes: int) -> float:
        return (
            self.latency_s + requests * self.request_s + size_bytes / self.bytes_per_s
            if requests
            else 0.0
        )


def measure(tier: Tier, count: int, seed: int = 0) -> DeviceCost:
    """Reads a few records alone, 512 scattered ones and 8 MiB in one piece, the latter two twice
    (40 to 80 ms in all).

    Small stores get the defaults. `count`: records 0 to count - 1 are there; numbers after them may
    be nobody's.

    Raises what a read raises.
    """
    if tier.size_bytes < _LEAST_BYTES or count < 2 * _RECORDS:
        return DeviceCost()
    rng = np.random.default_rng(seed)
    latency_s = min(_timed(tier, rng.integers(count, size=1), 0)[0] for _ in range(5))
    records = min(count, max(1, _LONG_BYTES * count // tier.size_bytes))

    def scattered() -> tuple[float, Future]:
        return _timed(tier, np.sort(rng.choice(count, size=_RECORDS, replace=False)), 0)

    def in_one_piece() -> tuple[float, Future]:
        first = int(rng.integers(count - records + 1))
        return _timed(tier, np.arange(first, first + records), 1 << 20)

    # The faster of two: a neighbour's burst makes a device look slow, nothing makes it look fast.
    (scattered_s, some), (long_s, long) = (
        min(read(), read(), key=lambda timed: timed[0]) for read in (scattered, in_one_piece)
    )
    # Two equations, two unknowns: n r + b / B = t. A negative solution means that the device does
    # not tell the two apart.
    system = np.array([[s.request_count, s.bytes_moved] for s in (some, long)], dtype=np.float64)
    times = np.maximum([scattered_s - latency_s, long_s - latency_s], 1e-6)
    request_s, byte_s = (
        np.linalg.solve(system, times) if np.linalg.cond(system) < 1e12 else (0.0, 0.0)
    )
    if request_s > 0 and byte_s > 0:
        return DeviceCost(latency_s, float(request_s), 1 / float(byte_s))
    # The device did not keep to one speed, or does not tell the two apart: the usual proportion, at
    # the speed seen.
    usual = DeviceCost()
    slower = scattered_s / usual.read_s(some.request_count, some.bytes_moved)
    return DeviceCost(latency_s, usual.request_s * slower, usual.bytes_per_s / slower)


def _timed(tier: Tier, numbers: np.ndarray, gap_bytes: int) -> tuple[float, Future]:
    begun = time.perf_counter()
    future = tier.read(numbers, gap_bytes=gap_bytes)
    future.wait()
    return time.perf_counter() - begun, future
