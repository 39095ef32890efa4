"""How much memory a process has."""

from __future__ import annotations

from pathlib import Path


def rss_bytes() -> int:
    """Resident memory of this process that no file backs: what it allocated, not the page cache that it has mapped."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
