"""The disk of a directory in the figures of a spec: reads alone and many at once, large and small,
past the page cache.

What is measured is what emulated time is made of (docs/device-specs.md), so each figure is freed of
the others: a batch of reads takes what one takes alone, and of what it takes longer each further
read, or byte, has its part. Medians of many short batches; those of small reads take turns. Large
ones are apart: behind tens of megabytes a lone read takes three times as long as behind another
one.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from .reader import Figure
from .spec import DeviceSpec, Flash, Links

if TYPE_CHECKING:
    from ...storage import Engine, FileHandle

FILE_BYTES, RUN_S = 256 << 20, 1.0
SMALL_BYTES, SMALL_TOGETHER = 4096, 64
LARGE_BYTES, LARGE_TOGETHER = 960 << 10, 32
_WRITE_BYTES = 4 << 20
_FIGURES = 3  # of a number: two runs do not agree in more
_BATCHES_LEAST = 5


@dataclass(frozen=True)
class DiskSpeed:
    """What was measured.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: of large reads, several at a time, and of a file that
            is written and synced.
        reads_4k_per_s: of reads of 4 KiB at random places, many at a time.
        read_4k_s: that one takes alone.
        effective_path: that the bytes took; with `` (buffered)`` the numbers are the page cache's.
        ranges: of those figures that were measured several times, by name, from the least to the
            most of the fifths of the run.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    reads_4k_per_s: float
    read_4k_s: float
    effective_path: str
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def measure_disk(
    directory: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES, run_s: float = RUN_S
) -> DiskSpeed:
    """Measures a directory's disk on a file that is gone afterwards. `run_s`: of each of three
    kinds of reads. Raises OSError, ImportError, EspnxError."""
    import torch

    from ...storage import NativeEngine
    from ...storage.files import StreamWriter

    with (
        tempfile.NamedTemporaryFile(prefix=".espnx-probe-", dir=directory) as scratch,
        NativeEngine("auto") as engine,
    ):
        content = torch.randint(0, 256, (_WRITE_BYTES,), dtype=torch.uint8).numpy()
        begun = time.perf_counter()
        with StreamWriter(engine, scratch.name) as writer:
            for _ in range(max(1, file_bytes // content.size)):
                writer.write(content)
            writer.sync()
        write_s = time.perf_counter() - begun
        file = engine.open(scratch.name)
        alone, small = batches(
            engine, file, [(SMALL_BYTES, 1), (SMALL_BYTES, SMALL_TOGETHER)], run_s
        )
        [large] = batches(engine, file, [(LARGE_BYTES, LARGE_TOGETHER)], run_s)
        count = min(SMALL_TOGETHER, file.size_bytes // SMALL_BYTES)
        large_bytes = min(LARGE_TOGETHER, file.size_bytes // LARGE_BYTES) * LARGE_BYTES

        def speeds(alone: list[float], small: list[float], large: list[float]) -> dict[str, float]:
            alone_s = median(alone)
            return {
                "read_bytes_per_s": large_bytes / _beyond(median(large), alone_s),
                "reads_4k_per_s": (count - 1) / _beyond(median(small), alone_s),
                "read_4k_s": alone_s,
            }

        whole = speeds(alone, small, large)
        parts = [speeds(*each) for each in zip(*map(_fifths, (alone, small, large)), strict=True)]
        ranges = {
            name: (
                min(value, *(part[name] for part in parts)),
                max(value, *(part[name] for part in parts)),
            )
            for name, value in whole.items()
        }
        return DiskSpeed(
            whole["read_bytes_per_s"],
            file.size_bytes / write_s,
            whole["reads_4k_per_s"],
            whole["read_4k_s"],
            file.effective,
            ranges,
        )


def _fifths(times: list[float]) -> list[list[float]]:
    """A run in five parts, one after another; there are `_BATCHES_LEAST` or more."""
    return [times[len(times) * i // 5 : len(times) * (i + 1) // 5] for i in range(5)]


def _beyond(batch_s: float, alone_s: float) -> float:
    """What a batch takes longer than one read alone; at least a tenth of it, lest noise make a disk
    of any speed of it."""
    return max(batch_s - alone_s, batch_s / 10)


def batches(
    engine: Engine, file: FileHandle, kinds: Sequence[tuple[int, int]], run_s: float
) -> list[list[float]]:
    """Seconds of batches of reads at random places of a file, a list for each kind (size in bytes,
    how many at once). They take turns, for so many seconds each."""
    import torch

    from ...storage import Plan

    found: list[list[float]] = [[] for _ in kinds]
    until = time.perf_counter() + run_s * len(kinds)
    while time.perf_counter() < until or len(found[-1]) < _BATCHES_LEAST:
        for (size_bytes, together), times in zip(kinds, found, strict=True):
            places = torch.randperm(file.size_bytes // size_bytes)[:together] * size_bytes
            plan = Plan.of(file, places, torch.full_like(places, size_bytes))
            begun = time.perf_counter()
            engine.read(plan).wait()
            times.append(time.perf_counter() - begun)
    return found


def disk_spec(
    name: str, title: str, found: DiskSpeed, *, measured: str, capacity_bytes: int = 0
) -> DeviceSpec:
    """The spec of a measured disk. `measured`: by whom and when, for the sources of its figures."""

    def rounded(value: float, per_unit: float) -> float:
        return float(f"{value / per_unit:.{_FIGURES}g}")

    def figure(
        value: float,
        unit: str,
        per_unit: float,
        how: str,
        confidence: str = "measured",
        bounds: tuple[float, float] | None = None,
    ) -> Figure:
        number = rounded(value, per_unit)
        low, high = (
            (None, None)
            if bounds is None
            else (rounded(each, per_unit) * per_unit for each in bounds)
        )
        return Figure(number * per_unit, number, unit, how, confidence, low, high)

    def of_reads(how: str) -> str:
        return f"{measured}: {how}, by {found.effective_path}"

    shorter = "less what one takes alone"
    read = figure(
        found.read_bytes_per_s,
        "MB/s",
        1e6,
        of_reads(f"reads of 960 KiB at random places, {LARGE_TOGETHER} at a time, {shorter}"),
        bounds=found.ranges.get("read_bytes_per_s"),
    )
    write = figure(found.write_bytes_per_s, "MB/s", 1e6, of_reads("a file, written and synced"))
    flash = Flash(
        read_bandwidth=read,
        write_bandwidth=write,
        read_latency=figure(
            found.read_4k_s,
            "us",
            1e-6,
            of_reads("reads of 4 KiB at random places, one at a time"),
            bounds=found.ranges.get("read_4k_s"),
        ),
        random_reads=figure(
            found.reads_4k_per_s,
            "IOPS",
            1.0,
            of_reads(f"reads of 4 KiB at random places, {SMALL_TOGETHER} at a time, {shorter}"),
            bounds=found.ranges.get("reads_4k_per_s"),
        ),
    )
    faster = max(read, write, key=lambda each: each.value)
    link = Figure(
        faster.value,
        faster.number,
        faster.unit,
        "what passed it when the disk was measured; it may be wider",
        "derived",
    )
    capacity = (
        figure(capacity_bytes, "GB", 1e9, "the size of the file system", "measured")
        if capacity_bytes
        else None
    )
    return DeviceSpec(name, title, flash, Links(device=link), capacity=capacity)
