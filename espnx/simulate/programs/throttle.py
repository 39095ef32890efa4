"""Drives that are slowed down to a rate, as Linux does it: how many bytes may begin by when."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ...errors import InvalidInputError

_ROUNDED = 1e-9


@dataclass(frozen=True)
class Throttle:
    """A limit of a drive's reads, and one of its writes: within any `window_s` no more begin than
    `bytes_per_s` allows in so long. That is what Linux's ``blkio.throttle`` does, whose slices are
    0.1 s: what is left of a grant is read as fast as the drive can.

    Raises InvalidInputError.
    """

    bytes_per_s: float
    window_s: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("bytes_per_s", self.bytes_per_s), ("window_s", self.window_s)):
            if not 0 < value < math.inf:
                raise InvalidInputError(
                    f"{name} of a throttle", got=value, expected="a finite number above 0"
                )

    @property
    def grant_bytes(self) -> float:
        return self.bytes_per_s * self.window_s


class Grants:
    """What has begun within a throttle's window, the oldest first."""

    def __init__(self) -> None:
        self._begun: deque[tuple[float, int]] = deque()  # bytes, and the end of their window
        self._size_bytes = 0.0

    def room(self, size_bytes: float, grant_bytes: float) -> tuple[int, ...]:
        """Whose window has to be over before so many more may begin."""
        last: tuple[int, ...] = ()
        # pieces may fill a grant exactly: what their sum is rounded to is no matter
        most = grant_bytes * (1 + _ROUNDED)
        while self._begun and self._size_bytes + size_bytes > most:
            size, window = self._begun.popleft()
            self._size_bytes -= size
            last = (window,)
        return last

    def add(self, size_bytes: float, window: int) -> None:
        self._begun.append((size_bytes, window))
        self._size_bytes += size_bytes
