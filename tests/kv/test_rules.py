"""Caches of models that do more to scores than products (soft caps, slopes, windows, sinks): on
devices that can, else on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.plain import PlainDevice
from espnx.kv.attention import Step
from espnx.kv.cache import SsdCache
from espnx.kv.options import CacheOptions
from espnx.kv.scores import PLAIN, ScoreRules
from tests.device.gpu.test_cache import on_cpu_memory
from tests.kv.naive import Naive, Shape, assert_right, forward

RAM = "espnx.device.example.ram_device:RamDevice"
HEADS, GROUP = 2, 2
EVERY: dict[str, Any] = {
    "soft_cap": 2.0,
    "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "window": 37,
    "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
}
SETS = [*(names for count in (1, 2) for names in combinations(EVERY, count)), tuple(EVERY)]


def program(cache: SsdCache, naive: Naive, dtype: torch.dtype = torch.float32) -> None:
    """Prompts in chunks, with padding; single tokens and a few; a chunk in the middle; back, and
    on."""
    for n in (40, 1, 5, 30, 1, 1):
        hides = None
        if naive.count == 0:
            hides = torch.zeros(naive.n_sequences, n, dtype=torch.bool)
            hides[0, :7] = True
        steps = naive.step(n, hides)
        assert_right(forward(cache, steps, naive.count - n), steps, n)
    cache.crop(50)
    naive.crop(50)
    for n in (1, 2):
        steps = naive.step(n)
        assert_right(forward(cache, steps, naive.count - n), steps, n)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("names", SETS, ids="+".join)
@pytest.mark.parametrize("kind", ["ssd", "three ssds", "gpu", RAM])
def test_programs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, names: tuple[str, ...]
) -> None:
    if kind == "gpu":
        monkeypatch.setattr(PlainDevice, "open_rows", on_cpu_memory)
    rules = ScoreRules(**{name: EVERY[name] for name in names})
    shape = Shape(n_heads=HEADS, group=GROUP, d=128, dv=64, rules=rules)
    naive = Naive(shape, torch.Generator().manual_seed(1))
    storage = [folder / str(i) for i in range(3)] if kind == "three ssds" else [folder]
    device, compute = "ssd" if kind == "three ssds" else kind, "cpu" if kind == "gpu" else None
    cache = SsdCache(
        storage, shape.n_layers, CacheOptions(device=device, spill_interval=8, compute=compute)
    )
    try:
        program(cache, naive)
        said = cache.attention.stats()
        needed = ", ".join(
            f"attends_{name}" for name in ("window", "soft_cap", "slopes") if name in names
        )
        if kind != RAM or not needed:
            assert said == {"layers_attended_on_host": 0, "devices_lack": ""}
        else:
            assert said == {"layers_attended_on_host": shape.n_layers, "devices_lack": needed}
    finally:
        cache.close()


def untold(attend: Callable[..., torch.Tensor], layer: int, step: Step) -> torch.Tensor:
    return attend(layer, replace(step, rules=PLAIN))


def test_a_rule_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs above can fail: a cache that is not told of a rule is caught."""
    for name, value in EVERY.items():
        shape = Shape(n_heads=HEADS, group=GROUP, d=128, rules=ScoreRules(**{name: value}))
        naive = Naive(shape, torch.Generator().manual_seed(1))
        cache = SsdCache([folder], shape.n_layers)
        told = partial(untold, cache.attend)
        monkeypatch.setattr(cache, "attend", told)
        try:
            with pytest.raises(AssertionError, match="times the bound"):
                program(cache, naive)
        finally:
            cache.close()


def test_x_rows_are_refused(folder: Path) -> None:
    """Where scores are more than products; the cache can be used as it was."""
    shape = Shape(n_heads=HEADS, group=1, d=16, hidden=32, rules=ScoreRules(soft_cap=2.0))
    naive = Naive(shape, torch.Generator().manual_seed(1))
    cache = SsdCache([folder], shape.n_layers)
    try:
        cache.rows.x_rows = 1
        with pytest.raises(errors.InvalidInputError, match="soft cap") as caught:
            forward(cache, naive.step(4), 0)
        assert caught.value.fix == "x_rows=0"
        assert cache.rows.length(0) == 0
    finally:
        cache.close()


def test_a_device_that_keeps_nothing(folder: Path) -> None:
    """Is no place for a kept cache: told before the first rows are lost."""
    shape = Shape(n_layers=1)
    naive = Naive(shape, torch.Generator().manual_seed(1))
    cache = SsdCache([folder], 1, CacheOptions(device=RAM), names=["rows"])
    try:
        with pytest.raises(errors.InvalidInputError, match="a kept cache"):
            forward(cache, naive.step(4), 0)
        assert not cache.striped.is_open
    finally:
        cache.close()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rotates", [False, True], ids=["absorbed", "recomputed"])
def test_x_rows_with_sinks(folder: Path, rotates: bool, has_bias: bool) -> None:
    """They join what all sequences gave, kept as X or not."""
    shape = Shape(
        n_heads=HEADS,
        group=GROUP,
        d=16,
        hidden=48,
        rotates=rotates,
        has_bias=has_bias,
        rules=ScoreRules(sinks=EVERY["sinks"]),
    )
    naive = Naive(shape, torch.Generator().manual_seed(1))
    cache = SsdCache([folder], shape.n_layers)
    try:
        cache.rows.x_rows = 1
        program(cache, naive)
    finally:
        cache.close()
