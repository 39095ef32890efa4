"""The memory a build may use: the whole process counts, PyTorch and the encoder's weights included."""

from __future__ import annotations

import ctypes
import os

from .. import errors
from ..checks import check_whole
from ..sizes import format_size, parse_size

_MARGIN_BYTES = 56 << 20  # SQLite, Python objects, what the allocator keeps between two trims
_LEAST_BYTES = 32 << 20
_DEFAULT_BYTES = 1 << 30


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemoryBudget:
    """What a build may still take.

    Args:
        total: bytes, or a size such as ``1GiB``; None: 1 GiB, or what the process holds now and half a GiB where that is more.
    """

    def __init__(self, total: int | str | None):
        if total is None:
            self.trim()
            self.total_bytes = max(_DEFAULT_BYTES, resident_bytes() + _DEFAULT_BYTES // 2)
            return
        if not isinstance(total, str):
            check_whole("memory", total, 0)
        self.total_bytes = parse_size(total)

    def left(self) -> int:
        """Bytes that may be used beside what is in use now. Raises InvalidInputError where that is too little to go on."""
        self.trim()
        used = resident_bytes()
        left = self.total_bytes - used - _MARGIN_BYTES
        if left < _LEAST_BYTES:
            raise errors.InvalidInputError(
                "memory budget too small",
                got=format_size(self.total_bytes),
                expected=f"at least {format_size(used + _MARGIN_BYTES + _LEAST_BYTES)}",
                fix="give more --memory; the process itself (PyTorch, the encoder's weights) is part of it",
            )
        return left

    def record_bytes(self) -> int:
        """Of records that are held at a time while they are copied or encoded. Raises what `left` does."""
        return min(32 << 20, max(1 << 20, self.left() // 8))

    def trim(self) -> None:
        """Returns freed memory to the system. glibc would keep the gaps that batches of changing size leave, hundreds of MB in an hour."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from other C libraries
        if trim is not None:
            trim(0)
