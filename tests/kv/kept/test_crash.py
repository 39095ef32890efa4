"""kill -9 while a kept cache is filled and saved, at random moments and at every place where a file
changes: whoever opens it then finds the last state that was saved, or nothing, and never a mix."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.integrations.transformers.cache import KVCache
from espnx.kv.kept.library import entries
from tests.forks import Forks
from tests.integrations.transformers.forks import LENGTHS, NEW, go_on, held
from tests.integrations.transformers.tiny import enabled
from tests.kills import killed, moments
from tests.retrieval.common import memory_folder
from tests.sweeps import at_length, in_steps

LONGEST, STEP = max(LENGTHS), 4
#: Lengths of the states that a process saves: after every 4 new tokens, the last of which is not in
#: the cache.
STATES = {0} | {LONGEST - 1 + n for n in range(STEP, NEW + 1, STEP)} | {LONGEST + NEW - 1}


@at_length("times", 3, 8)
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [("llama", 1, {}), ("opt", 2, {"x_rows": 1, "spill_interval": 1})],
)
def test_killed_at_random(
    folder: Path, processes: Forks, name: str, devices: int, options: dict[str, int], times: int
) -> None:
    """Each time going on from what the last one left, until the end is reached; then from the
    beginning again."""
    rng, storage = random.Random(devices), [folder / str(i) for i in range(devices)]
    job = {"model": name, "storage": storage, "step": STEP, **options}
    begun = time.monotonic()
    assert processes.run(**job) == 0
    seen, kills, last, limit_s = set[int](), 0, LONGEST + NEW - 1, time.monotonic() - begun
    for _ in range(60):
        if last == LONGEST + NEW - 1:
            for path in storage:
                shutil.rmtree(path)
            last = 0
        child = processes.start(**job)
        time.sleep(rng.uniform(0, limit_s))
        os.kill(child, signal.SIGKILL)
        code = processes.wait(child)
        assert code in (0, -signal.SIGKILL)
        now = held(name, storage) if all(path.exists() for path in storage) else 0
        assert now in STATES
        assert now >= last, "a saved state is gone"
        # however fast this machine is, most kills come on the way
        limit_s *= 0.6 if code == 0 else 1.2 if now == last else 1
        last = now
        seen.add(now)
        kills += code != 0
        if kills >= times and len(seen) >= 3:
            break
    assert kills >= times
    assert len(seen) >= 3


@pytest.fixture(scope="module")
def begun(processes: Forks) -> Iterator[Path]:
    """A cache with the first state saved."""
    with memory_folder() as path:
        job = {
            "model": "llama",
            "storage": [path],
            "step": STEP,
            "until": STEP,
            "spill_interval": 1,
        }
        assert processes.wait(processes.start(**job)) == 0
        yield path


@in_steps(4)
def test_killed_at_every_change(folder: Path, processes: Forks, begun: Path, step: int) -> None:
    """In about 24 (or 6) of the states that the files pass through. A state was saved: that one is
    found, or a later one; the next process goes on in the same files."""

    def job(name: str) -> dict[str, Any]:
        return {
            "model": "llama",
            "storage": [folder / name],
            "step": STEP,
            "spill_interval": 1,
            "until": 3 * STEP,
        }

    shutil.copytree(begun, folder / "noted")
    reached = moments(processes, folder / "moments", [folder / "noted"], **job("noted"))
    found = []
    for turn, moment in enumerate(reached[:: step * max(1, len(reached) // 24)]):
        name, storage = str(moment), [folder / str(moment)]
        shutil.copytree(begun, storage[0])
        assert killed(processes, moment, **job(name))
        found.append(held("llama", storage))
        if turn % 3 == 0:
            assert processes.run(**job(name)) == 0
            assert held("llama", storage) == LONGEST + 3 * STEP - 1
            assert len(list((storage[0] / "c").glob("state-*"))) == 1
            assert not list((storage[0] / "c").glob("*.new"))
    assert set(found) >= {LONGEST + STEP - 1, LONGEST + 2 * STEP - 1}
    assert set(found) <= STATES - {0}
    assert found == sorted(found), "a saved state is gone"


def test_killed_before_anything_was_saved(folder: Path, processes: Forks) -> None:
    """What it wrote is found, counted, and gone when the name is used again."""
    code = processes.wait(
        processes.start(model="llama", storage=[folder], at=["module", "save", 1, False])
    )
    assert code == -signal.SIGKILL
    (entry,) = entries(folder)
    assert (entry.name, entry.model, entry.is_open) == ("c", "unsaved", False)
    assert entry.size_bytes > 10_000
    with KVCache(enabled("llama").config, folder, name="c", x_rows=0) as cache:
        assert cache.get_seq_length() == 0
        assert not (folder / "c" / "rows.bin").exists()  # a new one comes with the first rows
        go_on("llama", cache)


def test_what_a_killed_process_wrote_later_is_cut_off(folder: Path, processes: Forks) -> None:
    job = {"model": "llama", "storage": [folder]}
    assert processes.wait(processes.start(**job, until=4)) == 0
    size = (folder / "c" / "rows.bin").stat().st_size
    assert (
        processes.wait(processes.start(**job, at=["module", "save", 1, False])) == -signal.SIGKILL
    )
    assert (folder / "c" / "rows.bin").stat().st_size > size
    with KVCache(enabled("llama").config, folder, name="c") as cache:
        cache.store.places.open(torch.device("cpu"))  # as the first rows do
        assert (folder / "c" / "rows.bin").stat().st_size == size
        go_on("llama", cache)
