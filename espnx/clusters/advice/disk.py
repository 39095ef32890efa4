"""What reads take on the disk at hand, alone and deep in the queue, and what a query takes that
reads so much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ...device.model.disk import batches
from ...storage import NativeEngine

PAGE_BYTES, LARGE_BYTES, TOGETHER = 4096, 32 << 10, 64
_RUN_S = 0.15
#: How much longer a read of 32 KiB takes than one of 4 KiB, at least and at most: outside of it
#: something else was measured.
_LARGER = 1.2, 8.0


@dataclass(frozen=True)
class DiskTimes:
    """Seconds of a read of `n` requests and `b` bytes, with many under way: ``n * request_s + b /
    bytes_per_s``.

    Attributes:
        read_s: of 4 KiB, with nothing else under way.
        effective_path: that the bytes took; with `` (buffered)`` these are the page cache's times.
    """

    read_s: float
    request_s: float
    bytes_per_s: float
    effective_path: str = ""

    @property
    def page_s(self) -> float:
        """A read of 4 KiB, with many under way."""
        return self.merged_s(1, PAGE_BYTES)

    def merged_s(self, requests: float, size_bytes: float) -> float:
        """What so many requests keep the disk busy."""
        return requests * self.request_s + size_bytes / self.bytes_per_s

    def alone_s(self, rounds: float, size_bytes: float) -> float:
        """Time until pages have come that wait for one another in so many rounds, with nothing else
        under way."""
        pages = size_bytes / PAGE_BYTES
        return rounds * max(0.0, self.read_s - self.page_s) + pages * self.page_s

    def query_s(self, rounds: float, size_bytes: float, in_flight: int) -> float:
        """Between the ends of two queries, of which so many are under way: what their pages take
        with as many reads under way as that makes. With 64 or more, as when it was measured, a read
        takes `page_s`, and how long one takes alone does not matter.

        Each page counts as a request of its own: that some lie side by side and come in one
        (`merged_s`) is owed to packing and to what processors take for a request, and hangs on what
        else the machine does."""
        busy_s = size_bytes / PAGE_BYTES * self.page_s
        waiting_s = self.alone_s(rounds, size_bytes) - busy_s
        under_way = in_flight * size_bytes / PAGE_BYTES / max(rounds, 1e-9)
        return busy_s if under_way >= TOGETHER else busy_s + waiting_s / in_flight


def measure_reads(path: str) -> DiskTimes:
    """Reads a file at random places, past the page cache where the file system lets them: one page
    at a time, 64, and 64 pieces of 32 KiB, in turns; the quickest of each kind counts. Raises what
    reading raises."""
    with NativeEngine("auto") as engine:
        file = engine.open(path)
        kinds = [(PAGE_BYTES, 1), (PAGE_BYTES, TOGETHER), (LARGE_BYTES, TOGETHER)]
        kinds = [(size, count) for size, count in kinds if file.size_bytes >= size * 2] or kinds[:1]
        counts = [min(count, file.size_bytes // size) for size, count in kinds]
        # others' work makes a disk look slow, nothing makes it look fast
        found = [min(times) for times in batches(engine, file, kinds, _RUN_S)]
        return times_of(found, counts, file.effective)


def middle_of(times: Sequence[DiskTimes]) -> DiskTimes:
    """The median of each figure."""
    return DiskTimes(
        median(each.read_s for each in times),
        median(each.request_s for each in times),
        median(each.bytes_per_s for each in times),
        times[-1].effective_path,
    )


def times_of(batch_s: Sequence[float], counts: Sequence[int], effective_path: str) -> DiskTimes:
    """Two equations, two unknowns. `batch_s`: of one page, of several, of several large pieces, as
    many as `counts`; where a file was too small for some, the rest is taken from the others."""
    alone_s = batch_s[0]
    small_s = _each(batch_s[1], alone_s, counts[1]) if len(batch_s) > 1 else alone_s
    large_s = _each(batch_s[2], alone_s, counts[2]) if len(batch_s) > 2 else 2 * small_s
    large_s = float(np.clip(large_s, _LARGER[0] * small_s, _LARGER[1] * small_s))
    byte_s = (large_s - small_s) / (LARGE_BYTES - PAGE_BYTES)
    request_s = max(0.0, small_s - PAGE_BYTES * byte_s)
    return DiskTimes(alone_s, request_s, 1 / byte_s, effective_path)


def _each(batch_s: float, alone_s: float, count: int) -> float:
    """What each further read of a batch takes; at least a tenth of the mean, lest noise make a disk
    of any speed of it."""
    return max(batch_s - alone_s, batch_s / 10) / max(1, count - 1)
