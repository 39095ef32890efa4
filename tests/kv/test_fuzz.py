"""Random programs: tokens by ones, by tens and by chunks, crops, beams, new conversations; each
answer is compared with the naive cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.kv.cache import SsdCache
from espnx.kv.options import CacheOptions
from tests.kv.naive import Naive, Shape, assert_right, forward, random_shape

HALF = (torch.float16, torch.bfloat16)


def open_cache(rng: random.Random, folder: Path, shape: Shape) -> tuple[SsdCache, str]:
    directories = [folder / f"disk{i}" for i in range(rng.choice([1, 1, 2, 3]))]
    options: dict[str, Any] = {
        "spill_interval": rng.choice([None, 1, 4, 16, 64, 256]),
        "threads": rng.choice([None, 1, 2]),
        "read_ahead_bytes": rng.choice([4096, 1 << 20, 64 << 20]),
        "capacity_tokens": rng.choice([None, 100]),
    }
    cache = SsdCache(directories, shape.n_layers, CacheOptions(**options))
    if shape.hidden:
        cache.rows.x_rows = rng.choice([0, 1, shape.n_sequences, 99])
    return cache, f"{shape} {len(directories)} devices {options} x_rows {cache.rows.x_rows}"


def selection(rng: random.Random, cache: SsdCache, count: int) -> list[int]:
    """Sequences that the batch may become: those kept as X stay in front, and of both kinds one
    stays."""
    chosen = [rng.randrange(count) for _ in range(rng.randint(1, 5))]
    if 0 < cache.rows.x_rows < count:
        chosen += [rng.randrange(cache.rows.x_rows), rng.randrange(cache.rows.x_rows, count)]
    return sorted(chosen, key=lambda i: i >= cache.rows.x_rows)


def new_tokens(rng: random.Random) -> int:
    return rng.choice([1, 1, 1, 2, 5, 16, 17, rng.randint(18, 70), rng.randint(18, 200)])


def hides(rng: random.Random, naive: Naive, n: int) -> torch.Tensor | None:
    """Padding: on the left of a first chunk, at times anywhere."""
    if naive.count == 0 and rng.random() < 0.4:
        left = torch.tensor([rng.randint(0, n) for _ in range(naive.n_sequences)])
        return torch.arange(n) < left[:, None]
    if rng.random() < 0.1:
        return torch.tensor(
            [[rng.random() < 0.3 for _ in range(n)] for _ in range(naive.n_sequences)]
        )
    return None


def run_program(rng: random.Random, naive: Naive, cache: SsdCache, what: str) -> None:
    done: list[str] = [what]
    for _ in range(rng.randint(4, 14)):
        action = rng.choice(["tokens"] * 6 + ["crop", "select", "clear"])
        if action == "crop" and naive.count:
            count = rng.choice([0, naive.count - 1, rng.randint(0, naive.count), naive.count])
            done.append(f"crop {count}")
            naive.crop(count)
            cache.crop(count)
        elif action == "select" and naive.count:
            chosen = selection(rng, cache, naive.n_sequences)
            done.append(f"select {chosen}")
            naive.select(chosen)
            cache.select(chosen)
        elif action == "clear" and rng.random() < 0.5:
            x_rows, n_sequences = cache.rows.x_rows, rng.randint(1, 4)
            done.append(f"clear {n_sequences}")
            naive.clear(n_sequences)
            cache.clear()
            cache.rows.x_rows = x_rows
        else:
            for n in (
                [1] * rng.randint(1, 40)
                if action == "tokens" and rng.random() < 0.3
                else [new_tokens(rng)]
            ):
                done.append(f"+{n}")
                before = naive.count
                steps = naive.step(n, hides(rng, naive, n))
                assert_right(forward(cache, steps, before), steps, " ".join(done))
        assert [cache.rows.length(layer) for layer in range(naive.shape.n_layers)] == [
            naive.count
        ] * naive.shape.n_layers, done
        assert not naive.count or cache.rows.sequences == naive.n_sequences, done


def check_space_returns(cache: SsdCache) -> None:
    cache.clear()
    cache.striped.flush()
    assert [device.stats().stored_bytes for device in cache.striped.devices] == [0] * len(
        cache.striped.devices
    )
    assert cache.memory_bytes == 0
    assert cache.rows.sequences == 0


def check_programs(kind: str, seeds: range, folder: Path) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        shape = random_shape(
            rng, dtypes=HALF if "half" in kind else (torch.float32,), with_x=kind.startswith("x")
        )
        naive = Naive(shape, torch.Generator().manual_seed(seed))
        cache, what = open_cache(rng, folder, shape)
        try:
            run_program(rng, naive, cache, f"{kind} seed {seed}: {what}:")
            check_space_returns(cache)
        finally:
            cache.close()
        assert not list(folder.rglob("*espnx*"))


@pytest.mark.parametrize("kind", ["fp32", "half"])
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.sweep) for first in (9, 18, 27))]
)
def test_programs(folder: Path, kind: str, first: int) -> None:
    check_programs(kind, range(first, first + 9), folder)
