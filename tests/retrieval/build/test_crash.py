"""kill -9 during a build, at random moments and at every place where something changes on disk: the
published store never notices."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import espnx
from tests.forks import Forks
from tests.kills import killed, moments
from tests.retrieval.common import EVERYTHING, build, check_store, corpus, leftovers, queries
from tests.sweeps import at_length, in_steps

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


@at_length("times", 3, 10)
def test_killed_at_random(folder: Path, processes: Forks, times: int) -> None:
    """Each time going on from what the last one left."""
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
        # however fast this machine is now, most kills come on the way
        limit_s *= 0.6 if code == 0 else 1
        if check_either(folder / "s", count, seed):
            build(folder / "s", OLD, replace=True, restart=True)
        if kills == times:
            break
    assert kills == times
    assert processes.wait(processes.start(path=folder / "s", **job)) == 0
    check_store(folder / "s", corpus(count, seed=seed))
    assert len(leftovers(folder / "s")) == 1
    assert_equal(folder / "s", folder / "clean")


@in_steps(4)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside", "elsewhere"])
def test_killed_at_every_change(folder: Path, processes: Forks, elsewhere: bool, step: int) -> None:
    """In every sixth state that the files pass through, or every 24th; other ones where the data
    goes to another directory."""
    count, seed, new = 200, 3, corpus(200, seed=3)

    def job(name: str) -> dict[str, Any]:
        extra = {"directories": [folder / name / "data"]} if elsewhere else {}
        return {"path": folder / name / "s", "count": count, "seed": seed, **extra}

    def begun(name: str) -> Path:
        shutil.copytree(folder / "old", folder / name / "s")
        return folder / name

    build(folder / "old", OLD)
    reached = moments(processes, folder / "moments", [begun("noted")], **job("noted"))
    outcomes = []
    for moment in sorted({*reached[3 * elsewhere :: 6 * step], *reached[-3:]}):
        path = begun(str(moment)) / "s"
        assert killed(processes, moment, **job(str(moment)))
        outcomes.append(check_either(path, count, seed))
        assert processes.run(**job(str(moment))) == 0
        check_store(path, new)
        assert len(leftovers(path)) == 1
        shutil.rmtree(path.parent)
    assert outcomes == sorted(outcomes), "published, and then not"
    assert outcomes.count(False) * step > 10, "too few moments to mean anything"
    assert outcomes.count(True) >= 3
