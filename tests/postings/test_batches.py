"""Batches of queries whose scans take longer than their reads: deadlines are of reads, and Ctrl-C
is heard."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from espnx import errors
from espnx.postings import CsrArrays, Postings
from espnx.storage import FaultRule

N, TERMS = 150_000, 6
QUERY = dict.fromkeys(range(TERMS), 1.0)


@pytest.fixture(scope="module")
def long_lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every record has every term: a query scans for milliseconds what a disk reads in one."""
    path = tmp_path_factory.mktemp("batches") / "x"
    weights = np.random.default_rng(0).random(N * TERMS) + 0.01
    Postings.build(
        path,
        vectors=CsrArrays(
            np.arange(0, N * TERMS + 1, TERMS), np.tile(np.arange(TERMS), N), weights
        ),
    )
    return path


@pytest.mark.parametrize("engine", ["auto", "posix", "memory"])
def test_a_deadline_is_of_a_querys_own_reads(long_lists: Path, engine: str) -> None:
    """The clock of reads that run ahead does not run while queries before them are scanned."""
    with Postings.open(long_lists, engine=engine) as postings:
        alone = postings.search([QUERY], threads=1)
        begun = time.perf_counter()
        postings.search([QUERY] * 4, threads=1)
        each_s = (time.perf_counter() - begun) / 4
        for last in (False, False, False, False, True):
            begun = time.perf_counter()
            try:
                found = postings.search([QUERY] * 96, threads=1, deadline_s=8 * each_s)
                break
            except errors.DeadlineExceededError:  # a machine that stood still for these 20 ms
                if last:
                    raise
        assert time.perf_counter() - begun > 16 * each_s
    assert (found.scores == alone.scores).all()
    assert (found.requests == alone.requests).all()


def test_a_read_ahead_that_never_ends_meets_the_deadline_of_its_query(long_lists: Path) -> None:
    rules = [FaultRule(fault="never", operation="read", path="*.postings", nth=42, count=1)]
    with Postings.open(long_lists, rules=rules) as postings:
        with pytest.raises(errors.DeadlineExceededError, match="postings"):
            postings.search([QUERY] * 20, threads=1, deadline_s=0.3)
        assert postings.search([QUERY] * 20, threads=1).numbers.shape == (20, 10)


def test_reads_that_are_late_are_waited_for(long_lists: Path) -> None:
    rules = [
        FaultRule(
            fault="delay", operation="read", path="*.postings", nth=27, count=5, value=60_000_000
        )
    ]
    with Postings.open(long_lists) as postings:
        expected = postings.search([QUERY] * 12, threads=1)
    with Postings.open(long_lists, rules=rules) as postings:
        found = postings.search([QUERY] * 12, threads=1, deadline_s=5.0)
    assert found.scores.tolist() == expected.scores.tolist()


@pytest.mark.parametrize("engine", ["auto", "memory"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_can_be_interrupted(long_lists: Path, engine: str, threads: int) -> None:
    with Postings.open(long_lists, engine=engine) as postings:
        begun = time.perf_counter()
        expected = postings.search([QUERY] * 4, threads=1)
        n = int(8 / ((time.perf_counter() - begun) / 4)) * threads  # eight seconds' work
        # a shell that starts its children in the background has it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        begun = time.perf_counter()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            postings.search([QUERY] * n, threads=threads)
        assert time.perf_counter() - begun < 4
        assert postings.search([QUERY] * 4, threads=1).scores.tolist() == expected.scores.tolist()
