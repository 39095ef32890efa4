"""KV caches with rows on a `GpuDevice`, on CPU memory: random programs against the naive cache, faults in a pass, and the move to a GPU
when the first rows show where the model is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.gpu import GpuDevice
from espnx.device.ssd import SsdDevice
from espnx.kv import cache as cache_module
from espnx.kv.cache import SsdCache
from espnx.storage import FaultRule
from tests.kv import test_fuzz, test_rollback
from tests.kv.naive import Naive, Shape, assert_right, forward


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_device(directory: str, device: torch.device | None, **options: Any) -> GpuDevice:
        return GpuDevice(directory, device="cpu", **options)

    monkeypatch.setattr(cache_module, "open_device", open_device)


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
            failed += test_rollback.run(folder, test_rollback.SHAPES[shape], rule)[0]
    assert failed > 3


def test_the_first_rows_decide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was opened before anybody knew where the model is; a kept one goes on with what it holds."""
    made: list[torch.device | None] = []

    def open_device(directory: str, device: torch.device | None, **options: Any) -> SsdDevice | GpuDevice:
        made.append(device)
        return SsdDevice(directory, **options) if device is None else GpuDevice(directory, device="cpu", **options)

    monkeypatch.setattr(cache_module, "open_device", open_device)
    shape = Shape(n_layers=2, d=128, dv=128)
    for names in (None, ["rows"]):
        naive = Naive(shape, torch.Generator().manual_seed(1))
        cache = SsdCache([folder], shape.n_layers, names=names)
        try:
            for n in (30, 1, 5):
                steps = naive.step(n)
                assert_right(forward(cache, steps, naive.count - n), steps)
            if names is None:
                with pytest.raises(errors.InvalidInputError, match="several devices"):
                    cache.follow(torch.device("cuda"))
                cache.clear()
                naive.clear(shape.n_sequences)
            used = cache.spread.devices[0].extents.used_bytes
            cache.follow(torch.device("cpu"))
            assert isinstance(cache.spread.devices[0], SsdDevice)
            monkeypatch.setattr(cache_module.LayerRows, "to", lambda self, device: None)
            cache.follow(torch.device("cuda"))
            assert isinstance(cache.spread.devices[0], GpuDevice)
            assert cache.spread.devices[0].extents.used_bytes == used
            cache.follow(torch.device("cuda"))
            for n in (40, 1, 1):
                steps = naive.step(n)
                assert_right(forward(cache, steps, naive.count - n), steps)
            test_fuzz.check_space_returns(cache)
        finally:
            cache.close()
    assert made == [None, torch.device("cuda")] * 2


def test_a_path_that_was_named(folder: Path) -> None:
    """`gds` never falls back, whether or not the model is known."""
    if torch.cuda.is_available():
        pytest.skip("[gpu] needs a machine without a CUDA device")
    for options in ({"engine": "gds"}, {"engine": "gds-compat"}, {"device": "cuda"}):
        with pytest.raises(errors.PathUnavailableError):
            SsdCache(folder, 1, **options)  # type: ignore[arg-type]
    assert not list(folder.iterdir())


def test_a_seeded_program_is_no_accident(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: rows at the wrong place of a group are seen."""
    from espnx.device import row_reads

    chains = row_reads.RowReads.chains

    def wrong(self: row_reads.RowReads, group: range) -> row_reads.Chains:
        found = chains(self, group)
        found.blocks[:, 0] = found.blocks[:, -1]
        return found

    monkeypatch.setattr(row_reads.RowReads, "chains", wrong)
    monkeypatch.setattr(cache_module, "open_device", lambda directory, device, **options: GpuDevice(directory, device="cpu", **options))
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
