"""A file that cuFile reads."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class OpenFile:
    """A file registered with cuFile: one descriptor, one handle.

    Attributes:
        alignment_bytes: what reads are widened to; 1 where the file is read through the page cache.
        users: transfers that may still read it; the handle is given up when a closed file has none.
    """

    number: int
    path: str
    descriptor: int
    handle: int
    size_bytes: int
    direct: bool
    alignment_bytes: int
    effective: str
    users: int = 0
    closed: bool = False

    def refresh_size(self) -> int:
        """The size now, from the descriptor."""
        self.size_bytes = os.fstat(self.descriptor).st_size
        return self.size_bytes
