"""Threads that ask devices together.

A device may have a clock that no wall moves: an emulated one with a stretch of 0, whose time stands
but for those who wait for it. Were it to move for whoever waits first, times would depend on which
thread this machine runs first. So whoever hands work to threads does it through `Workers`: the
clock stands from the moment of handing over until all of them wait. With other devices they are a
thread pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

from ..threads import SIGNAL_CHECK_S

T = TypeVar("T")
P = ParamSpec("P")


class Members(Protocol):
    """Who asks a clock for something, by numbers."""

    def join(self) -> int:
        """A new member, at work: the clock stands."""

    def rest(self, member: int, /) -> None:
        """It waits for another member, and does not hold the clock up."""

    def resume(self, member: int, /) -> None:
        """It is at work again."""

    def leave(self, member: int, /) -> None:
        """It asks for nothing any more."""


class Clock(Protocol):
    """A clock that waits for its members: `Workers` join it."""

    members: Members

    @property
    def member(self) -> int | None:
        """Who asks from this thread; None: nobody that the clock waits for."""

    def bind(self, member: int | None) -> None:
        """Who asks from this thread from now on."""


def clock_of(device: object) -> Clock | None:
    """The ``clock`` of a device that has one which callers move; else None."""
    clock: Clock | None = getattr(device, "clock", None)
    return clock


class Job(Generic[T]):
    """A call in a thread of `Workers`, which made it."""

    def __init__(self, clocks: Sequence[Clock], call: Callable[[], T], pool: Executor):
        self._clocks, self._call = clocks, call
        self._members = [clock.members.join() for clock in clocks]
        self._lock = threading.Lock()  # guards what follows
        self._has_ended = False
        self._resting: list[tuple[Clock, int]] = []  # who waits for it
        try:
            self._future = pool.submit(self._run)
        except BaseException:
            self._end()
            raise

    def _run(self) -> T:
        try:
            for clock, member in zip(self._clocks, self._members, strict=True):
                clock.bind(member)
            return self._call()
        finally:
            for clock in self._clocks:
                clock.bind(None)
            self._end()

    def _end(self) -> None:
        """Whoever waits for it is at work before it leaves: the clock does not move between."""
        with self._lock:
            self._has_ended = True
            self._wake()
            for clock, member in zip(self._clocks, self._members, strict=True):
                clock.members.leave(member)

    def _wake(self) -> None:
        for clock, member in self._resting:
            clock.members.resume(member)
        self._resting = []

    def wait(self) -> None:
        """Waits until it has ended, whatever it raised: what is raised here, as Ctrl-C, came to the
        thread that waits."""
        try:
            with self._lock:
                if not self._has_ended:
                    self._resting = [
                        (clock, clock.member) for clock in self._clocks if clock.member is not None
                    ]
                    for clock, member in self._resting:
                        clock.members.rest(member)
            while not futures.wait([self._future], timeout=SIGNAL_CHECK_S).done:
                pass
        finally:
            with self._lock:
                self._wake()

    def result(self) -> T:
        """Waits for it. Raises what it raised."""
        self.wait()
        return self._future.result()


def wait(jobs: Iterable[Job[Any]]) -> None:
    """Waits until all have ended, whatever they raised."""
    for job in jobs:
        job.wait()


class Workers:
    """A context manager in the thread that hands out work: it is a member itself while the block
    runs.

    Args:
        devices: that will be asked.
    """

    def __init__(self, devices: Iterable[object]):
        clocks = {id(clock): clock for device in devices if (clock := clock_of(device)) is not None}
        self._clocks = list(clocks.values())
        self._joined: list[tuple[Clock, int]] = []

    def __enter__(self) -> Self:
        for clock in self._clocks:
            if clock.member is None:
                self._joined.append((clock, clock.members.join()))
                clock.bind(self._joined[-1][1])
        return self

    def submit(
        self, pool: Executor, call: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> Job[T]:
        """Starts a call in a thread of the pool. It has one for each job that has not ended: a
        clock waits for jobs, not for threads."""
        return Job(self._clocks, lambda: call(*args, **options), pool)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for clock, member in self._joined:
            clock.bind(None)
            clock.members.leave(member)
        self._joined = []
