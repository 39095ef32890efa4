"""How far the disk reads ahead for a pass while the drafts for it are made: so many bytes as it
brings in that time, and no more than may be in memory.

Rows do not depend on the query, so that the reads of the next pass are wanted whatever the drafts
say. The usual window bridges milliseconds between reads; drafts take many times as long, and the
processor that makes them leaves the disk alone. What the window holds when they end the pass need
not wait for.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

#: Of what the disk brings in the expected seconds: drafts may go on for longer.
_ROOM = 1.25
#: What a rate that was measured counts after each further pass.
_KEPT_RATE = 0.9
#: Of the memory that is free when drafts begin, that reads ahead take at most unless one says how
#: much.
_OF_FREE = 0.25
#: The window is as wide as the longest draft of the last so many passes wants it: its memory goes
#: round, and costs a good deal to be had anew after one pass without a draft.
_REMEMBERED = 32
#: Of the deadline of a read, that the window may take to be read: reads at its end wait for all
#: that come before them.
_OF_DEADLINE = 0.25


class Reach:
    """How many bytes are read ahead while drafts are made, of all devices together.

    Args:
        limit_bytes: at most; None: as many as the rows for drafts take, and a quarter of the memory
            that is free at first.

    Attributes:
        limit_bytes: as it came out the last time.
        window_bytes: chosen the last time.
        read_bytes: that arrived for passes while drafts were made.
    """

    def __init__(self, limit_bytes: int | None = None):
        self.asked_bytes = limit_bytes
        self.limit_bytes = limit_bytes or 0
        self.window_bytes = self.read_bytes = 0
        self._rate: float | None = None  # bytes a second
        self._free: int | None = None
        self._wanted = deque[float](maxlen=_REMEMBERED)  # bytes, for the last drafts

    def begin(self) -> None:
        """A text begins: nothing of the window is left, and how much memory is free is asked
        anew."""
        self._wanted.clear()
        self._free = None

    def note(self, bytes_asked: int, ahead_bytes: int, seconds: float) -> None:
        """A pass has ended that asked for so many bytes, of which `ahead_bytes` were in memory when
        it began. The rate is the disk's where passes wait for it, and below it where they do not:
        there nothing is to be gained."""
        rate = max(0, bytes_asked - ahead_bytes) / max(seconds, 1e-9)
        self._rate = rate if self._rate is None else max(rate, _KEPT_RATE * self._rate)

    def choose(self, draft_s: float, tier_bytes: int, deadline_s: float) -> int:
        """Bytes that may be read ahead of the next pass; 0: no more than always. It does not become
        less for a pass whose drafts are short, or that has none.

        Args:
            draft_s: that the drafts are expected to take.
            tier_bytes: of rows for drafts in memory.
            deadline_s: of each read.
        """
        if self.asked_bytes is None:
            if self._free is None and tier_bytes:  # before reads ahead have taken any of it
                free_bytes = free_memory_bytes()
                self._free = tier_bytes if free_bytes is None else round(_OF_FREE * free_bytes)
            self.limit_bytes = min(tier_bytes, self._free or 0)
        rate = self._rate or 0.0
        self._wanted.append(_ROOM * rate * draft_s)
        wanted = min(max(self._wanted), _OF_DEADLINE * rate * deadline_s)
        self.window_bytes = min(self.limit_bytes, int(wanted))
        return self.window_bytes


def free_memory_bytes(root: str | os.PathLike[str] = "/") -> int | None:
    """Memory that this process can have now: what the machine has available, and no more than is
    left of the limits of its control group and of those above it. None where nothing says so.
    `root`: of the file system that says it."""
    found = list[int]()
    for line in _lines(Path(root, "proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    for line in _lines(Path(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = Path(root, "sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = Path(root, "sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            limit, used = (
                "".join(_lines(top.joinpath(*parts[:depth], name))[:1]) for name in names
            )
            if limit.isdigit() and used.isdigit():  # "max": none
                found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
