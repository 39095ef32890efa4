"""kill -9 during a build, at random moments and at every place where something changes on disk: the published store never notices."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

import espnx
from tests.forks import Forks
from tests.retrieval.common import EVERYTHING, build, check_store, corpus, leftovers, queries

OLD = corpus(40, seed=1)


def check_either(path: Path, count: int, seed: int) -> bool:
    """Whether the new generation is there; the store is whole either way."""
    with espnx.open(path) as index:
        published = index.store.count == count
    check_store(path, corpus(count, seed=seed) if published else OLD)
    return published


def assert_equal(path: Path, clean: Path) -> None:
    """The same hits, numbers and scores."""
    options = {"k": EVERYTHING, "candidates": EVERYTHING, "nprobe": EVERYTHING}
    with espnx.open(path) as index, espnx.open(clean) as other:
        for query in queries(3):
            assert index.search(query, **options).hits == other.search(query, **options).hits


def test_killed_at_random(folder: Path, processes: Forks) -> None:
    """Ten times, each time going on from what the last one left."""
    count, seed, rng = 1200, 2, random.Random(7)
    job = {"count": count, "seed": seed}
    begun = time.monotonic()
    assert processes.wait(processes.start(path=folder / "clean", **job)) == 0
    limit_s = 0.5 * (time.monotonic() - begun)
    build(folder / "s", OLD)
    kills = 0
    for _ in range(60):
        child = processes.start(path=folder / "s", **job)
        time.sleep(rng.uniform(0, limit_s))
        os.kill(child, signal.SIGKILL)
        code = processes.wait(child)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        limit_s *= 0.6 if code == 0 else 1  # however fast this machine is now, most kills come on the way
        if check_either(folder / "s", count, seed):
            build(folder / "s", OLD, replace=True, restart=True)
        if kills == 10:
            break
    assert kills == 10
    assert processes.wait(processes.start(path=folder / "s", **job)) == 0
    check_store(folder / "s", corpus(count, seed=seed))
    assert len(leftovers(folder / "s")) == 1
    assert_equal(folder / "s", folder / "clean")


POINTS = [
    *[("engine", "rename", nth) for nth in range(1, 8)],
    *[("engine", "sync", nth) for nth in (1, 6, 12)],
    *[("engine", "sync_directory", nth) for nth in (1, 6)],
    *[("texts", "commit", nth) for nth in (1, 2)],
    *[("file", "section", nth) for nth in (1, 4)],
    ("file", "finish", 2),
    ("part", "write_texts", 1),
    ("arrange", "assign", 1),
    ("writer", "append", 3),
    ("writer", "finish_segment", 2),
    ("publish", "write_manifest", 1),
    *[("remove", "remove_directory", nth) for nth in (1, 2, 3)],
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_change(folder: Path, processes: Forks, after: bool) -> None:
    count, seed = 200, 3
    killed = 0
    job = {"count": count, "seed": seed}
    for owner, name, nth in POINTS:
        path = folder / f"{name}-{nth}"
        extra = {"directories": [folder / "data"]} if name in ("remove_directory", "finish_segment") else {}
        build(path, OLD)
        code = processes.wait(processes.start(path=path, at=(owner, name, nth, after), **job, **extra))
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        published = check_either(path, count, seed)
        assert published or code != 0
        assert not (published and name == "write_manifest" and not after)
        assert processes.wait(processes.start(path=path, **job, **extra)) == 0
        check_store(path, corpus(count, seed=seed))
        assert len(leftovers(path)) == 1
    assert killed > 15, f"only {killed} of {len(POINTS)} places were reached"
