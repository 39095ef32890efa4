"""The engine and mmap as systems: right on good files, never silent on bad ones."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espnx.benchmarks.io.content import DataFile, ensure_file
from espnx.benchmarks.io.engine import EngineSystem
from espnx.benchmarks.io.mmap import MmapSystem
from espnx.benchmarks.io.tune import Setting, smallest_of_the_best, tune
from espnx.benchmarks.io.work import KIB, Point, Work
from espnx.errors import ChecksumError, EspnxError
from espnx.storage import FaultRule, FaultyEngine, Plan
from espnx.storage.native import NativeFuture

ENGINES = ("uring", "posix", "memory")


def work_of(
    data: DataFile,
    pattern: str = "random",
    block: int = 4 * KIB,
    items: int = 100,
    op: str = "read",
    depth: int = 8,
) -> Work:
    return Work(Point(op, pattern, block, depth), data, items=items)


def flip_a_byte(data: DataFile, offset: int) -> None:
    """Damage that the stamp does not show: the time of modification stays."""
    status = data.path.stat()
    with open(data.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(data.path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("pattern", "block", "items"),
    [
        ("random", 4 * KIB, 2048),
        ("random", 12 * KIB, 7),
        ("sequential", 960 * KIB, 8),
        ("random", 4096, 1),
    ],
)
def test_reads_verify_and_run(
    data: DataFile, engine: str, pattern: str, block: int, items: int
) -> None:
    system = EngineSystem(engine, work_of(data, pattern, block, items))
    assert system.verify() is None
    for turn in range(2):
        assert system.prepare(turn) in ("cold", "warm")
        sample = system.run()
        assert sample.bytes_asked == block * items
        assert sample.metrics["own_bytes_moved"] >= sample.bytes_asked
        assert sample.metrics["iops"] == pytest.approx(items / sample.seconds)
        assert sample.seconds > 0
    assert system.effective_path.startswith(engine)
    system.close()


def test_the_kernel_confirms_the_bytes(data: DataFile) -> None:
    system = EngineSystem("posix", work_of(data, items=2048))
    if system.prepare(0) == "warm" or system.effective_path != "posix":
        pytest.skip("the temporary directory is not on a disk with O_DIRECT")
    sample = system.run()
    system.close()
    assert sample.metrics["device_bytes"] == sample.bytes_moved == sample.bytes_asked


def test_a_run_leaves_the_items_in_memory(data: DataFile) -> None:
    """The last window of a run holds the last items: the runs that are timed really read."""
    system = EngineSystem("posix", work_of(data, items=300))
    system.prepare(4)
    system._memory.fill_(0)
    system.run()
    offsets = system.work.offsets(4)
    number, size = (len(offsets) - 1) // system._window, 4096
    place = (
        number % system._windows_in_flight * system._window + (len(offsets) - 1) % system._window
    ) * size
    expected = data.content.blocks(offsets[-1:] // 4096).reshape(-1)
    assert np.array_equal(system._memory.numpy()[place : place + size], expected)
    system.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_file_is_noticed(data: DataFile, engine: str) -> None:
    flip_a_byte(data, 5 * 4096 + 17)
    system = EngineSystem(engine, work_of(data, "sequential", items=64))
    system.work = Work(system.work.point, data, items=2048)
    problem = system.verify()
    system.close()
    assert problem is not None
    assert "20480" in problem


def test_damage_after_verification_is_noticed_by_the_runs(data: DataFile) -> None:
    work = work_of(data, items=2048)
    system, unchecked = EngineSystem("posix", work), EngineSystem("posix", work, checksums=False)
    assert system.verify() is None
    flip_a_byte(data, 1_000_000)
    for one in (system, unchecked):
        one.prepare(0)
    with pytest.raises(ChecksumError, match="999424"):
        system.run()
    # without checksums only verification looks
    assert unchecked.run().bytes_asked == work.bytes_asked
    assert unchecked.verify() is not None
    system.close()
    unchecked.close()


@pytest.mark.parametrize("fault", ["flip", "stale", "error"])
def test_an_engine_that_lies_is_noticed(data: DataFile, fault: str) -> None:
    def faulty(path: str, **options: Any) -> FaultyEngine:
        return FaultyEngine([FaultRule(fault, "read", nth=3, count=1, value=5)], path, **options)

    system = EngineSystem("posix", work_of(data), open_engine=faulty)
    assert system.verify() is not None
    system.close()


def test_verification_does_not_rely_on_the_engine_to_check(data: DataFile) -> None:
    """An engine that forgets the checksums of a plan is caught by the comparison of bytes."""

    class Forgetful(FaultyEngine):
        def read(self, plan: Plan, out: torch.Tensor | None = None, **options: Any) -> NativeFuture:
            return super().read(dataclasses.replace(plan, crc32c=None), out, **options)

    rules = [FaultRule("flip", "read", nth=3, count=1, value=8 * 100)]
    system = EngineSystem(
        "posix",
        work_of(data),
        open_engine=lambda path, **options: Forgetful(rules, path, **options),
    )
    problem = system.verify()
    system.close()
    assert problem is not None
    assert "byte 100 is" in problem


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("pattern", "block", "items"), [("random", 4 * KIB, 100), ("sequential", 960 * KIB, 3)]
)
def test_writes_verify_and_run(
    data: DataFile, engine: str, pattern: str, block: int, items: int
) -> None:
    system = EngineSystem(engine, work_of(data, pattern, block, items, op="write"))
    assert system.verify() is None
    system.prepare(0)
    assert system.run().bytes_asked == block * items
    system.close()


def test_a_write_that_is_lost_is_noticed(data: DataFile) -> None:
    def faulty(path: str, **options: Any) -> FaultyEngine:
        return FaultyEngine([FaultRule("stale", "write", nth=150, count=1)], path, **options)

    system = EngineSystem("posix", work_of(data, items=100, op="write"), open_engine=faulty)
    problem = system.verify()
    system.close()
    assert problem is not None
    assert "expected 2" in problem


@pytest.mark.parametrize(("pattern", "block"), [("random", 4 * KIB), ("sequential", 64 * KIB)])
def test_mmap(data: DataFile, pattern: str, block: int) -> None:
    system = MmapSystem(work_of(data, pattern, block, items=20))
    assert system.verify() is None
    system.prepare(0)
    sample = system.run()
    assert sample.bytes_asked == 20 * block
    system.close()
    flip_a_byte(data, int(system.work.offsets(0)[3]) + block - 1)
    problem = system.verify()
    assert problem is not None
    assert str(system.work.offsets(0)[3]) in problem


def test_the_smallest_of_the_best_settings() -> None:
    rates = {
        Setting("uring", 16, 4096): 90.0,
        Setting("uring", 64, 4096): 98.0,
        Setting("uring", 256, 4096): 100.0,
    }
    assert smallest_of_the_best(rates).queue_depth == 64


def test_tune_prints_configuration(data: DataFile) -> None:
    lines: list[str] = []
    text = tune(data, ["posix"], quick=True, seed=1, say=lines.append)
    settings = tomllib.loads(text)["storage"]
    assert set(settings) == {"path", "queue_depth", "request_bytes"}
    assert settings["path"] == "posix"
    assert settings["request_bytes"] % 4096 == 0
    assert len(lines) == 9


def test_tune_refuses_a_damaged_file(tmp_path: Path) -> None:
    data = ensure_file(tmp_path / "small", 1 << 20, 1, lambda text: None)
    for offset in range(0, data.size_bytes, 4096):
        flip_a_byte(data, offset)
    with pytest.raises(EspnxError, match="nothing is tuned"):
        tune(data, ["posix"], quick=True, seed=1, say=lambda text: None)
