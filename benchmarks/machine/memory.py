"""How much memory a process has."""

from __future__ import annotations

import re
from pathlib import Path


def status_bytes() -> dict[str, int]:
    """Sizes that the kernel states of this process, by its names."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {name: 1024 * int(size) for name, size in found}


def available_bytes() -> int:
    """Bytes of the machine's memory for new processes: without what others hold, with the page
    cache."""
    found = re.search(
        r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE
    )
    return 1024 * int(found[1]) if found else 0


def rss_bytes() -> int:
    """Resident memory of this process that no file backs: what it allocated, not the page cache
    that it has mapped."""
    sizes = status_bytes()
    return sizes["RssAnon"] + sizes["RssShmem"]
