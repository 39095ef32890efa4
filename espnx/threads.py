"""Waits for threads that Ctrl-C ends. Python looks for signals when a wait begins and is woken by
those that come during it: one that comes just between is seen at the wait's end alone, so no wait
is longer than `SIGNAL_CHECK_S`."""

from __future__ import annotations

from threading import Thread

#: Ctrl-C is seen at least this often.
SIGNAL_CHECK_S = 0.05


def join(thread: Thread) -> None:
    """Waits until a thread has ended. Raises KeyboardInterrupt, which ends the wait alone."""
    while thread.is_alive():
        thread.join(SIGNAL_CHECK_S)
