"""The baseline fio: what it is asked to do, how its answer is read, and what happens without it."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from espnx.benchmarks.io import fio
from espnx.benchmarks.io.content import DataFile
from espnx.benchmarks.io.fio import FioSystem, Variant, parse, require_fio, variants
from espnx.benchmarks.io.work import KIB, Point, Work
from espnx.errors import EspnxError, MissingDependencyError

PROGRAM = "/usr/bin/fio"


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: PROGRAM)


def answer(op: str = "read", io_bytes: int = 40960, error: int = 0) -> dict[str, Any]:
    side = {
        "io_bytes": io_bytes,
        "runtime": 250,
        "total_ios": 10,
        "clat_ns": {"percentile": {"50.000000": 1500, "99.000000": 90_000}},
    }
    return {"error": error, "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 250, op: side}


def system(
    data: DataFile, op: str = "read", pattern: str = "random", variant: Variant | None = None
) -> FioSystem:
    point = Point(op, pattern, 4096, 32)
    return FioSystem(Work(point, data, items=10, seed=2), variant or variants(point)[0])


def test_long_sequential_transfers_are_compared_with_the_best_of_three() -> None:
    for op in ("read", "write"):
        found = variants(Point(op, "sequential", 960 * KIB, 32))
        assert [(item.block_bytes // KIB, item.queue_depth) for item in found] == [
            (256, 32),
            (512, 16),
            (960, 8),
        ]


def test_small_random_transfers_are_compared_with_batches_too() -> None:
    assert [item.suffix for item in variants(Point("read", "random", 4 * KIB, 128))] == [
        "plain",
        "batched",
    ]
    for point in (
        Point("read", "random", 4 * KIB, 1),
        Point("read", "random", 64 * KIB, 32),
        Point("read", "sequential", 4 * KIB, 128),
    ):
        assert variants(point) == [Variant("plain", point.block_bytes, point.queue_depth)]


@pytest.mark.usefixtures("present")
def test_fio_does_the_same_work(data: DataFile) -> None:
    random = system(data)
    random._turn = 1
    command = random.command()
    assert {
        "--rw=randread",
        "--bs=4096",
        "--iodepth=32",
        "--direct=1",
        "--ioengine=io_uring",
        "--io_size=40960",
        "--readonly",
    } <= set(command)
    assert f"--size={data.size_bytes}" in command
    seeds = set()
    for turn in (0, 1):
        random._turn = turn
        seeds |= {word for word in random.command() if word.startswith("--randseed=")}
    assert len(seeds) == 2
    sequential = system(data, "write", "sequential")
    command = sequential.command()
    assert {"--rw=write", "--size=40960", f"--offset={sequential.work.start_bytes(0)}"} <= set(
        command
    )
    assert "--readonly" not in command


@pytest.mark.usefixtures("present")
def test_a_sample_of_its_answer(data: DataFile) -> None:
    sample = system(data).sample(answer(), 50_000)
    assert (sample.seconds, sample.bytes_asked, sample.bytes_moved) == (0.25, 40960, 40960)
    assert sample.metrics["cpu_s"] == pytest.approx(0.4 * 0.25)
    assert (sample.metrics["latency_us_p50"], sample.metrics["latency_us_p99"]) == (1.5, 90.0)
    assert sample.metrics["device_bytes"] == 50_000


@pytest.mark.usefixtures("present")
def test_other_work_than_ours_is_no_baseline(data: DataFile) -> None:
    with pytest.raises(EspnxError, match="not do the same work"):
        system(data).sample(answer(io_bytes=4096), None)


@pytest.mark.parametrize("text", ["", "fio: no", "{}", '{"jobs": []}', "{"])
def test_answers_without_a_job(text: str) -> None:
    assert parse(text) is None


def test_warnings_may_come_first() -> None:
    job = parse(
        "note: both iodepth >= 1 and synchronous I/O engine are selected\n"
        + json.dumps({"jobs": [answer()]})
    )
    assert job == answer()


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr"),
    [
        (1, "", "io_uring: operation not permitted"),
        (0, json.dumps({"jobs": [answer(error=5)]}), ""),
    ],
)
def test_a_failed_run_is_an_error(
    data: DataFile, monkeypatch: pytest.MonkeyPatch, returncode: int, stdout: str, stderr: str
) -> None:
    monkeypatch.setattr(
        fio.subprocess,
        "run",
        lambda *args, **options: subprocess.CompletedProcess(args, returncode, stdout, stderr),
    )
    with pytest.raises(EspnxError, match="fio failed") as caught:
        system(data).run()
    assert stderr in str(caught.value)


def test_without_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="apt install fio"):
        require_fio()
    assert fio.version() is None


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio (apt install fio)")
@pytest.mark.parametrize("pattern", ["random", "sequential"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_the_real_program(data: DataFile, op: str, pattern: str) -> None:
    before = data.path.read_bytes()
    for variant in variants(Point(op, pattern, 4096, 32)):
        real = system(data, op, pattern, variant)
        assert real.verify() is None
        real.prepare(0)
        sample = real.run()
        assert sample.bytes_asked == 40960
        assert sample.metrics["requests"] == 10
        real.close()
    assert (data.path.read_bytes() == before) == (op == "read")
    assert data.path.stat().st_size == data.size_bytes
