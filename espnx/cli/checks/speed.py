"""How fast the disk of a directory is: a file of known size, read in large pieces and in many small ones, past the page cache."""

from __future__ import annotations

import functools
import importlib
import time
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import EspnxError
from . import PASS, WARN, Check
from .disk import BLOCK_BYTES, scratch_file, storage_module

FILE_BYTES = 64 << 20
RUN_S = 0.25
_LARGE_BYTES, _LARGE_AHEAD = 960 << 10, 8
_SMALL_TOGETHER = 1024
#: Random reads a second below which a search or a decode step waits for the disk alone: a hard disk does about 150.
SLOW_IOPS = 5000


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: of large reads, several at a time, and of a file that is written and synced.
        reads_4k_per_s: of reads of 4 KiB at random places, many at a time.
        read_4k_s: that one takes alone.
        effective_path: that the bytes took; with `` (buffered)`` the numbers are the page cache's.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    reads_4k_per_s: float
    read_4k_s: float
    effective_path: str


@functools.cache
def measure(directory: str, *, file_bytes: int | None = None, run_s: float | None = None) -> Speed:
    """Of a file that is gone afterwards. `run_s`: of each of three kinds of reads. Raises OSError, ImportError, EspnxError."""
    file_bytes, run_s = file_bytes or FILE_BYTES, run_s or RUN_S
    storage, torch = storage_module(), importlib.import_module("torch")
    with scratch_file(directory) as name, storage.open_engine("auto") as engine:
        content = torch.randint(0, 256, (4 << 20,), dtype=torch.uint8).numpy()
        begun = time.perf_counter()
        with importlib.import_module("espnx.storage.files").StreamWriter(engine, name) as writer:
            for _ in range(file_bytes // content.size):
                writer.write(content)
            writer.sync()
        write = file_bytes / (time.perf_counter() - begun)
        file = engine.open(name)
        rate = functools.partial(_rate, engine, storage, file, run_s=run_s)
        large = rate(_LARGE_BYTES, _LARGE_AHEAD)
        small, alone = rate(BLOCK_BYTES, _SMALL_TOGETHER), rate(BLOCK_BYTES, 1)
        return Speed(large * _LARGE_BYTES, write, small, 1 / alone, file.effective)


def _rate(engine: Any, storage: Any, file: Any, size_bytes: int, together: int, *, run_s: float) -> float:
    """Reads a second, of that size, at random places, so many at a time."""
    torch = importlib.import_module("torch")
    places = torch.randperm(file.size_bytes // size_bytes) * size_bytes
    done, begun = 0, time.perf_counter()
    while not done or time.perf_counter() - begun < run_s:
        first = done % max(1, len(places) - together)
        some = places[first : first + together]
        engine.read(storage.Plan.of(file, some, torch.full_like(some, size_bytes))).wait()
        done += len(some)
    return done / (time.perf_counter() - begun)


def speed(directory: str) -> Check:
    why = "random reads are what a search waits for, large ones what a decode step waits for"
    try:
        found = measure(directory)
    except (EspnxError, OSError, ImportError) as error:
        return Check(WARN, "speed", f"the disk could not be measured: {error}", why, "see the checks above")
    small = f"{found.reads_4k_per_s:,.0f} random reads of 4 KiB a second"
    says = f"{found.read_bytes_per_s / 1e6:,.0f} MB/s read, {small}, by {found.effective_path}"
    if found.reads_4k_per_s < SLOW_IOPS:
        fix = "use an NVMe SSD, or a volume with more IOPS"
        return Check(WARN, "speed", says, f"{why}; an SSD makes 100,000 and more", fix, asdict(found))
    return Check(PASS, "speed", says, evidence=asdict(found))
