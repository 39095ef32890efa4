"""The gate through which concurrent callers come to an index: so many at a time, whether one is
alone, and none once the index is closed.

Alone, a search uses the whole machine: it scans with several threads and may read ahead. Beside
others, their work fills what it leaves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ... import errors
from ...forks import check_own


class SearchGate:
    """A context manager for each search; entering gives whether no other is under way. Callers
    beyond `most` wait for their turn. Entering raises what `check_open` does.

    Attributes:
        process: that opened the index.
        is_closed: whether it is closed.
    """

    def __init__(self, most: int):
        self._most, self._slots = most, threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._active = 0
        self._began = 0  # ever
        self._of_thread = threading.local()
        self.process, self.is_closed = os.getpid(), False

    def check_open(self) -> None:
        """Raises EngineClosedError where the index is closed, InvalidInputError in a child of the
        process that opened it."""
        check_own(self.process, "the index")
        if self.is_closed:
            raise errors.EngineClosedError("the index is closed", fix="open it again")

    def __enter__(self) -> bool:
        self.check_open()
        is_in = False
        self._slots.acquire()
        try:
            self.check_open()  # it may have been closed before our turn came
            with self._lock:
                self._active, is_in = self._active + 1, True
                self._began += 1
                self._of_thread.began = self._began
                return self._active == 1
        except BaseException:
            self._leave(1 if is_in else 0)
            raise

    def __exit__(self, *error: object) -> None:
        self._leave(1)

    def _leave(self, searches: int) -> None:
        """Gives back a slot, whatever comes between, as Ctrl-C."""
        try:
            with self._lock:
                self._active -= searches
        finally:
            self._slots.release()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Entered once no search is under way; none begins before it is left. One caller at a
        time."""
        with ExitStack() as slots:
            for _ in range(self._most):
                slots.enter_context(self._slots)
            yield

    @property
    def still_alone(self) -> bool:
        """Whether no other search has begun since this thread's did."""
        return self._of_thread.began == self._began and self._active == 1

    @property
    def active(self) -> int:
        return self._active
