"""Passages that are read early, of a device that stalls: whoever is interrupted does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from espnx import errors
from espnx.rag.early import EarlyPassages
from espnx.rag.pieces import TextCounter
from espnx.retrieval.search.known import KnownCandidates
from tests.storage.common import interrupted, until

KNOWN = KnownCandidates(0, 0.5, False, ((1, "a text"),))


class Stalled:
    """Reads that wait for a minute, unless they are cancelled."""

    def __init__(self) -> None:
        self.waits, self.cancelled = threading.Event(), threading.Event()

    def want(self, passages: Sequence[Sequence[int]]) -> None:
        self.waits.set()
        self.cancelled.wait(60)

    def cancel(self) -> None:
        self.cancelled.set()


def early_of(start: Callable[[], Stalled]) -> EarlyPassages:
    return EarlyPassages(start, TextCounter(len), 100)


def tell(early: EarlyPassages) -> None:
    assert early.told is not None
    early.told(KNOWN)


def is_over() -> bool:
    return not any(each.name == "espnx-early" for each in threading.enumerate())


def test_ctrl_c_does_not_wait_for_a_read() -> None:
    reads, begun = Stalled(), time.monotonic()
    with pytest.raises(KeyboardInterrupt), early_of(lambda: reads) as early:
        tell(early)
        assert reads.waits.wait(30)
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 30
    assert reads.cancelled.is_set()
    assert until(is_over)


def test_ctrl_c_while_the_reads_are_made() -> None:
    """They are cancelled once they are there."""
    reads, begins, goes_on = Stalled(), threading.Event(), threading.Event()

    def start() -> Stalled:
        begins.set()
        goes_on.wait(60)
        return reads

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), early_of(start) as early:
        tell(early)
        assert begins.wait(30)
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 30
    goes_on.set()
    assert reads.cancelled.wait(30)
    assert until(is_over)


def test_ctrl_c_after_another_error_is_not_swallowed() -> None:
    reads = Stalled()
    early = early_of(lambda: reads)
    with (
        interrupted(lambda: early._is_over and reads.waits.is_set()),
        pytest.raises(KeyboardInterrupt),
        early,
    ):
        tell(early)
        assert reads.waits.wait(30)
        raise errors.ReadError("of a search")
    assert until(is_over)
