"""The page cache of one file: dropped and filled without root, and looked at, because a request to
drop is only advice."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

# Below this part of the file in memory, a run counts as cold.
COLD_FRACTION = 0.01


def drop(path: Path) -> None:
    """Asks the kernel to forget the file's pages (dirty ones are written first)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def fill(path: Path) -> None:
    """Reads the whole file once, so that its pages are in memory where they fit."""
    with open(path, "rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def resident_fraction(path: Path) -> float:
    """The part of the file's pages that is in memory, from 0 to 1, by mincore(2). Raises
    OSError."""
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        return 0.0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area:
        view = np.frombuffer(area, dtype=np.uint8)
        states = np.zeros(-(-size_bytes // mmap.PAGESIZE), dtype=np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(size_bytes),
            ctypes.c_void_p(states.ctypes.data),
        )
        del view  # the mapping cannot be closed while somebody looks at it
        if failed:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        return float((states & 1).mean())


def prepare(path: Path, wanted: str) -> str:
    """Brings the file's pages out of memory (``cold``) or into it (``warm``) and returns what is
    true afterwards."""
    if wanted == "warm":
        fill(path)
    else:
        drop(path)
    return "cold" if resident_fraction(path) < COLD_FRACTION else "warm"
