"""The memory a build may use: the whole process counts, PyTorch and the encoder's weights
included."""

from __future__ import annotations

import ctypes
import os

from ... import errors
from ...checks import check_whole
from ...sizes import BUILD_BYTES, format_size, parse_size

_MARGIN_BYTES = 56 << 20  # SQLite, Python objects, what the allocator keeps between two trims
_LEAST_BYTES = 32 << 20
_FLOOR_BYTES = 64 << 20
_DEFAULT_BYTES = 1 << 30  # of the process, or more where it holds much already
# Records that are copied are there as they were read, decoded in float32 (up to four times as
# much), and as they are written: an eighth takes most of what is left. More than 32 MiB at a time
# makes nothing faster, and less than 1 MiB makes reads small.
_RECORDS_SHARE, _RECORDS_MOST_BYTES, _RECORDS_LEAST_BYTES = 8, 32 << 20, 1 << 20
# A batch is there as the encoder's own activations, as vectors, checked and packed, with one more
# of each while the next is made; and its size is a guess from the length of texts. A twelfth leaves
# room for a guess that is wrong by two.
_ENCODED_SHARE = 12


def resident_bytes() -> int:
    """Memory of this process that is in RAM now and its own: pages of files, which the system takes
    back when it needs them, are not. A corpus that is read from a memory-mapped file does not
    count."""
    with open("/proc/self/statm") as statm:
        _, resident, shared = statm.read().split()[:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class MemoryBudget:
    """What a build may still take.

    Args:
        total: bytes, or a size such as ``1GiB``; None: `BUILD_BYTES` beside what the process holds
            now, 1 GiB at least. That limit, which nobody gave, steers how much is taken at a time
            and refuses nothing.
    """

    def __init__(self, total: int | str | None):
        self.is_given = total is not None
        if total is None:
            self.trim()
            self.total_bytes = max(_DEFAULT_BYTES, resident_bytes() + BUILD_BYTES)
            return
        if not isinstance(total, str):
            check_whole("memory", total, 0)
        self.total_bytes = parse_size(total)

    def left(self) -> int:
        """Bytes that may be used beside what is in use now. Raises InvalidInputError where a limit
        was given that is too little to go on; without one, it is never less than `_FLOOR_BYTES`."""
        self.trim()
        used = resident_bytes()
        left = self.total_bytes - used - _MARGIN_BYTES
        if not self.is_given:
            return max(left, _FLOOR_BYTES)
        if left < _LEAST_BYTES:
            raise errors.InvalidInputError(
                "memory budget too small",
                got=format_size(self.total_bytes),
                expected=f"at least {format_size(used + _MARGIN_BYTES + _LEAST_BYTES)}",
                fix=(
                    "give more --memory; the process itself (PyTorch, the encoder's weights) is "
                    "part of it"
                ),
            )
        return left

    def record_bytes(self) -> int:
        """Bytes of records that may be held at a time while they are copied or encoded. Raises what
        `left` does."""
        return min(_RECORDS_MOST_BYTES, max(_RECORDS_LEAST_BYTES, self.left() // _RECORDS_SHARE))

    def encoded_bytes(self) -> int:
        """Bytes of an encoder's float32 vectors that may be asked for at a time. Raises what `left`
        does."""
        return self.left() // _ENCODED_SHARE

    def require(self, need_bytes: int, what: str, fix: str) -> None:
        """Raises InvalidInputError where a limit was given that leaves less than that."""
        left = self.left()
        if self.is_given and need_bytes > left:
            raise errors.InvalidInputError(
                what,
                got=f"{format_size(left)} left",
                expected=f"about {format_size(need_bytes)}",
                fix=fix,
            )

    def trim(self) -> None:
        """Returns freed memory to the system. glibc would keep the gaps that batches of changing
        size leave, hundreds of MB in an hour."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from other C libraries
        if trim is not None:
            trim(0)
