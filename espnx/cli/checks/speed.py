"""How fast the disk of a directory is, for people: a quick measurement, and whether it is fast
enough. A file of its own: a spec of a disk is made of the same measurement, at length."""

from __future__ import annotations

import functools
from dataclasses import asdict

from ...device.model.disk import DiskSpeed, measure_disk
from ...errors import EspnxError
from . import PASS, WARN, Check
from .disk import storage_module

FILE_BYTES = 64 << 20
RUN_S = 0.25
#: Random reads a second below which a search or a decode step waits for the disk alone: a hard disk
#: does about 150.
SLOW_IOPS = 5000


@functools.cache
def measure(directory: str) -> DiskSpeed:
    """Quickly. Raises OSError, ImportError, EspnxError."""
    storage_module()
    return measure_disk(directory, file_bytes=FILE_BYTES, run_s=RUN_S)


def speed(directory: str) -> Check:
    why = "random reads are what a search waits for, large ones what a decode step waits for"
    try:
        found = measure(directory)
    except (EspnxError, OSError, ImportError) as error:
        return Check(
            WARN, "speed", f"the disk could not be measured: {error}", why, "see the checks above"
        )
    small = f"{found.reads_4k_per_s:,.0f} random reads of 4 KiB a second"
    says = f"{found.read_bytes_per_s / 1e6:,.0f} MB/s read, {small}, by {found.effective_path}"
    if found.reads_4k_per_s < SLOW_IOPS:
        fix = "use an NVMe SSD, or a volume with more IOPS"
        return Check(
            WARN, "speed", says, f"{why}; an SSD makes 100,000 and more", fix, asdict(found)
        )
    return Check(PASS, "speed", says, evidence=asdict(found))
