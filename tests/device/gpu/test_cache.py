"""KV caches with rows on a `GpuRowDevice`, on CPU memory: random programs against the naive cache,
faults in a pass, and the move to a GPU when the first rows show where the model is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.gpu.rows import GpuRowDevice
from espnx.device.interface import RowDevice
from espnx.device.plain import GpuDevice, PlainDevice
from espnx.device.rows.ssd import SsdRowDevice
from espnx.kv import places
from espnx.kv.cache import SsdCache
from espnx.kv.kept.state import load, save
from espnx.kv.options import CacheOptions
from espnx.storage import FaultRule
from tests.kv import test_fuzz, test_rollback
from tests.kv.naive import Naive, Shape, assert_right, forward


def on_cpu_memory(
    self: PlainDevice, directory: str, *, compute: torch.device, **options: Any
) -> RowDevice:
    """In place of `PlainDevice.open_rows`."""
    return (
        GpuRowDevice(directory, compute="cpu", **options)
        if self.name == "gpu"
        else SsdRowDevice(directory, **options)
    )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainDevice, "open_rows", on_cpu_memory)
    monkeypatch.setattr(
        places, "default_name", lambda engine, compute: "ssd" if compute is None else "gpu"
    )


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", ["fp32", "half", "x", "x half"])
def test_programs(folder: Path, kind: str) -> None:
    test_fuzz.check_programs(kind, range(100, 106), folder)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("shape", test_rollback.SHAPES)
def test_passes_that_fail(folder: Path, shape: str) -> None:
    failed = 0
    for operation, value in (("read", 5), ("write", 5), ("write", 28)):
        for nth in (1, 4, 9):
            rule = FaultRule("error", operation=operation, nth=nth, count=1, value=value)
            failed += test_rollback.run(folder, shape, rule)[0]
    assert failed > 3


@pytest.mark.parametrize("kept", [False, True])
def test_the_first_rows_decide(folder: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """No device is open before it is known where the model is; a kept cache then continues
    with what it holds, on another kind of device."""
    opened: list[str] = []

    def open_rows(self: PlainDevice, directory: str, **options: Any) -> RowDevice:
        opened.append(self.name)
        return on_cpu_memory(self, directory, **options)

    monkeypatch.setattr(PlainDevice, "open_rows", open_rows)
    shape = Shape(n_layers=2, d=128, dv=128)
    naive = Naive(shape, torch.Generator().manual_seed(1))
    if kept:
        cache = SsdCache([folder], shape.n_layers, names=["rows"])
        for n in (60, 1, 5):
            steps = naive.step(n)
            assert_right(forward(cache, steps, naive.count - n), steps)
        save(cache, str(folder), {"model": "any"}, {})
        cache.close()
        assert opened == ["ssd"]
    cache = SsdCache([folder], shape.n_layers, names=["rows"] if kept else None)
    try:
        if kept:
            load(cache, str(folder))
            cache.crop(naive.count - 3)  # rows can go before there is a device
            naive.crop(naive.count - 3)
        assert (cache.rows.length(0), cache.striped.is_open, opened) == (
            naive.count,
            False,
            ["ssd"] * kept,
        )
        cache.places.open(torch.device("cuda"))
        assert opened[kept:] == ["gpu"]
        if not kept:
            assert cache.striped.stats().stored_bytes == 0
        for n in (40, 1, 1):
            steps = naive.step(n)
            assert_right(forward(cache, steps, naive.count - n), steps)
        assert opened[kept:] == ["gpu"]
        if not kept:
            test_fuzz.check_space_returns(cache)
    finally:
        cache.close()


def test_a_path_that_was_named(folder: Path) -> None:
    """`gds` never falls back, whether or not the model is known."""
    if torch.cuda.is_available():
        pytest.skip("[gpu] needs a machine without a CUDA device")
    for options in ({"engine": "gds"}, {"engine": "gds-compat"}, {"compute": "cuda"}):
        with pytest.raises(errors.PathUnavailableError):
            SsdCache(folder, 1, CacheOptions(**options))  # type: ignore[arg-type]
    assert not list(folder.iterdir())


def test_a_seeded_program_is_no_accident(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: rows at the wrong place of a group are seen."""
    from espnx.device.gpu import plan as row_reads

    chains = row_reads.RowReads.chains

    def wrong(self: row_reads.RowReads, group: range) -> row_reads.Chains:
        found = chains(self, group)
        found.blocks[:, 0] = found.blocks[:, -1]
        return found

    monkeypatch.setattr(row_reads.RowReads, "chains", wrong)
    monkeypatch.setattr(
        PlainDevice,
        "open_rows",
        lambda self, *args, **options: on_cpu_memory(GpuDevice(self.path), *args, **options),
    )
    with pytest.raises(AssertionError, match="times the bound"):
        for seed in range(20):
            shape = Shape(n_layers=1, d=128, dv=128)
            naive, rng = Naive(shape, torch.Generator().manual_seed(seed)), random.Random(seed)
            cache = SsdCache([folder], 1)
            try:
                for n in (rng.randint(20, 60), 1, 1):
                    steps = naive.step(n)
                    assert_right(forward(cache, steps, naive.count - n), steps)
            finally:
                cache.close()
