"""Rows on their way into a device's file: writes that go on behind, and the places of rows that
nobody wants any more meanwhile."""

from __future__ import annotations

from typing import Protocol

import torch

from ... import errors
from ...storage import NativeEngine, Plan


class Writing(Protocol):
    """Rows under way to a file."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Raises what the write raised; the rows are then written again."""

    def end(self) -> bool | None:
        """Waits, whatever comes of it: True if the rows are in the file, None if they are not, and
        False where the device may still write to the place, so that nothing else may ever be put
        there."""

    def cancel(self) -> None: ...


class Write:
    """Rows under way to a device. Where that fails, whoever waits is told once, and they are
    written again from the same memory: they may be nowhere else."""

    def __init__(self, engine: NativeEngine, plan: Plan, memory: torch.Tensor, deadline_s: float):
        self._engine, self._plan, self._memory, self._deadline_s = engine, plan, memory, deadline_s
        self._future = engine.write(plan, memory, deadline_s=deadline_s)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Raises what the write raised."""
        try:
            self._future.wait()
        except errors.StorageError:
            self._future = self._engine.write(self._plan, self._memory, deadline_s=self._deadline_s)
            raise

    def end(self) -> bool | None:
        """See `Writing`."""
        try:
            self._future.wait()
        except errors.DeadlineExceededError:
            return False
        except errors.EspnxError:
            return None
        return True

    def cancel(self) -> None:
        self._future.cancel()


class PutWrite:
    """The write of one `put`, which its segments share. As long as it may be repeated for one of
    them, the places of those that were released must not be used again: it would be written over
    what came after.

    Args:
        n_segments: that share it.
    """

    def __init__(self, writing: Writing, n_segments: int):
        self._writing, self._waiting = writing, n_segments
        self._left: list[tuple[int, int]] = []
        self._is_written = self._may_land = False

    def done(self) -> bool:
        return self._is_written or self._writing.done()

    def wait(self) -> None:
        """Waits until the rows are in the file. Raises what the write raised; they are then written
        again."""
        if self._is_written:
            return
        try:
            self._writing.wait()
        except errors.DeadlineExceededError:
            self._may_land = True  # the first try, after the second has succeeded
            raise
        self._is_written = True

    def settle(self) -> list[tuple[int, int]]:
        """A segment needs the write no more. Returns places (with their sizes) that may be used
        again."""
        self._waiting -= 1
        return self._free()

    def leave(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """A segment is released, and its place with it, when that may be. Returns as `settle`."""
        self._waiting -= 1
        self._left.append(place)
        if not self._is_written:
            ended = self._writing.end()
            self._is_written, self._may_land = ended is True, self._may_land or ended is False
        return self._free()

    def _free(self) -> list[tuple[int, int]]:
        if self._may_land or not (self._is_written or self._waiting == 0):
            return []
        found, self._left = self._left, []
        return found

    def cancel(self) -> None:
        self._writing.cancel()
