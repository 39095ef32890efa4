"""What a run cost: processor time, and the bytes that the device moved for it, as the kernel counts
them."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Counters:
    """A reading; subtract two.

    Attributes:
        cpu_s: processor time of this process, all threads.
        device_read_bytes, device_written_bytes: what block devices moved for this process and its
            ended children; None where the kernel does not count.
    """

    cpu_s: float
    device_read_bytes: int | None
    device_written_bytes: int | None

    def __sub__(self, other: Counters) -> Counters:
        def less(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else a - b

        return Counters(
            self.cpu_s - other.cpu_s,
            less(self.device_read_bytes, other.device_read_bytes),
            less(self.device_written_bytes, other.device_written_bytes),
        )

    def device_bytes(self, op: str) -> int | None:
        return self.device_read_bytes if op == "read" else self.device_written_bytes


def read_counters() -> Counters:
    """The counters now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    try:
        values = dict(
            re.findall(r"^(\w+): (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
        )
    except OSError:
        values = {}
    read, written = values.get("read_bytes"), values.get("write_bytes")
    return Counters(
        usage.ru_utime + usage.ru_stime,
        None if read is None else int(read),
        None if written is None else int(written),
    )
