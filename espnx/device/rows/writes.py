"""Rows on their way into a device's file: writes that go on behind, and the places of rows that
nobody wants any more meanwhile. A write that has failed may still land: nothing else is written to
its place, its own second try included, until nothing of it is in flight."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

import torch

from ... import errors
from ...storage import NativeEngine, Plan

#: How long until it is asked again whether writes are over.
_NAP_S = 0.005


class Writing(Protocol):
    """Rows under way to a file."""

    def done(self) -> bool:
        """Whether `wait` will not wait. Never blocks."""

    def wait(self) -> None:
        """Raises what the write raised; the rows are then written again, as soon as nothing of that
        write is in flight. Raises DeadlineExceededError where it stays there."""

    def end(self) -> bool:
        """Waits, whatever comes of it, and begins nothing: whether the rows are in the file."""

    def is_over(self) -> bool:
        """Whether nothing of it is in flight, so that the place may be another's."""

    def cancel(self) -> None: ...


def stuck(deadline_s: float) -> errors.DeadlineExceededError:
    """What is raised where a write that has failed stays in flight for so long."""
    return errors.DeadlineExceededError(
        "rows cannot be written again",
        got="their first write, which has failed, is still with the device",
        expected=f"its end within {deadline_s} s",
        fix="check the device (dmesg, smartctl), then try again",
    )


class Write:
    """Rows under way to a device. Where that fails, whoever waits is told once, and they are
    written again from the same memory: they may be nowhere else."""

    def __init__(self, engine: NativeEngine, plan: Plan, memory: torch.Tensor, deadline_s: float):
        self._engine, self._plan, self._memory, self._deadline_s = engine, plan, memory, deadline_s
        self._begin()

    def _begin(self) -> None:
        self._future = self._engine.write(self._plan, self._memory, deadline_s=self._deadline_s)
        self._has_failed = False

    def _is_begun(self) -> bool:
        """Whether a try is under way, or has succeeded: one that has failed is followed by the
        next, if it is over."""
        if self._has_failed and self._future.is_over():
            self._begin()
        return not self._has_failed

    def done(self) -> bool:
        """See `Writing`."""
        return self._is_begun() and self._future.done()

    def wait(self) -> None:
        """See `Writing`."""
        if not self._is_begun():
            if not self._future.wait_over(self._deadline_s):
                raise stuck(self._deadline_s)
            self._begin()
        try:
            self._future.wait()
        except errors.StorageError:
            self._has_failed = True
            self._is_begun()
            raise

    def end(self) -> bool:
        """See `Writing`."""
        if self._has_failed:  # who still needs the rows begins the next try
            return False
        try:
            self._future.wait()
        except errors.EspnxError:
            return False
        return True

    def is_over(self) -> bool:
        """See `Writing`."""
        return self._future.is_over()

    def cancel(self) -> None:
        """See `Writing`."""
        self._future.cancel()


class PutWrite:
    """The write of one `put`, which its segments share. As long as it may be repeated for one of
    them, or may land, the places of those that were released must not be used again: it would be
    written over what came after.

    Args:
        n_segments: that share it.
    """

    def __init__(self, writing: Writing, n_segments: int):
        self._writing, self._waiting = writing, n_segments
        self._left: list[tuple[int, int]] = []
        self._is_written = False

    def done(self) -> bool:
        return self._is_written or self._writing.done()

    def wait(self) -> None:
        """Waits until the rows are in the file. Raises what the write raised; they are then written
        again."""
        if not self._is_written:
            self._writing.wait()
            self._is_written = True

    def settle(self) -> list[tuple[int, int]]:
        """A segment needs the write no more. Returns places (with their sizes) that may be used
        again."""
        self._waiting -= 1
        return self.free()

    def leave(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """A segment is released, and its place with it, when that may be. Returns as `settle`."""
        self._waiting -= 1
        self._left.append(place)
        if not self._is_written:
            self._is_written = self._writing.end()
        if not self._is_written and self._waiting == 0:
            self._writing.cancel()  # nobody needs the rows, which may take memory
        return self.free()

    def is_over(self) -> bool:
        """Whether nothing of it can land any more."""
        return self._is_written or self._writing.is_over()

    @property
    def is_late(self) -> bool:
        """Whether no segment needs the write any more, and it still holds places: `free` gives them
        back when nothing of it is in flight."""
        return bool(self._left) and self._waiting == 0

    def free(self) -> list[tuple[int, int]]:
        """Places (with their sizes) that may be used again from here on."""
        if not (self._is_written or (self._waiting == 0 and self._writing.is_over())):
            return []
        found, self._left = self._left, []
        return found

    def cancel(self) -> None:
        self._writing.cancel()


def wait_over(writes: Collection[PutWrite], timeout_s: float) -> bool:
    """Waits until nothing of these writes can land any more; False: something can, after so many
    seconds."""
    until = time.monotonic() + timeout_s
    while not all(each.is_over() for each in writes):
        if time.monotonic() >= until:
            return False
        time.sleep(_NAP_S)
    return True
