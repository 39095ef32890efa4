"""Closing while anything else goes on: every caller is told, nobody hangs, whoever comes later is
told too."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import FaultRule, NativeEngine, Plan
from tests.storage.common import (
    BLOCK,
    OpenEngine,
    make_file,
    open_descriptors,
    raw,
    read_bytes,
    until,
)

MS = 1_000_000


def test_everything_is_refused_afterwards(path: str, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 100)
    with NativeEngine(path) as engine:
        file = engine.open(tmp_path / "a", "r+", direct=False)
        done = engine.read(Plan.of(file, [0], [10]))
        done.wait()
    memory = torch.zeros(10, dtype=torch.uint8)
    for call in (
        lambda: engine.read(Plan.of(file, [0], [10])),
        lambda: engine.write(Plan.of(file, [0], [10], [0]), memory),
        lambda: engine.open(tmp_path / "a"),
        lambda: engine.sync_directory(tmp_path),
        lambda: engine.rename(tmp_path / "a", tmp_path / "b"),
    ):
        with pytest.raises(errors.EngineClosedError):
            call()
    for call in (
        lambda: engine.sync(file),
        lambda: engine.truncate(file, 1),
        lambda: engine.allocate(file, 1),
        lambda: engine.close_file(file),
    ):
        with pytest.raises(errors.EngineClosedError):
            call()
    engine.close()
    engine.close(grace_s=0)
    assert (tmp_path / "a").stat().st_size == 100
    assert raw(done.wait()[:10]) == data[:10]
    assert engine.stats().bytes_asked == 10


@pytest.mark.parametrize("fault", ["never", "delay"])
def test_a_waiting_reader_is_told(
    path: str, fault: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    make_file(tmp_path / "a", 4 * BLOCK)
    engine = open_engine(
        path, [FaultRule(fault, operation="read", value=10_000 * MS)], queue_depth=1
    )
    file = engine.open(tmp_path / "a")
    futures = [engine.read(Plan.of(file, [0, 2 * BLOCK], [10, 10])) for _ in range(3)]
    outcomes: list[str] = []

    def wait(future) -> None:
        try:
            future.wait()
            outcomes.append("arrived")
        except errors.EngineClosedError:
            outcomes.append("closed")

    threads = [threading.Thread(target=wait, args=(future,)) for future in futures]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    engine.close(grace_s=0.02)
    for thread in threads:
        thread.join()
    assert outcomes == ["closed"] * 3


def test_submitting_while_closing(path: str, tmp_path: Path) -> None:
    """Whatever the moment: a read that got in ends, with its bytes or with EngineClosedError, long
    before its deadline."""
    data = make_file(tmp_path / "a", 1 << 16)
    plan_items = [i * 8 for i in range(2000)]
    for turn in range(40):
        engine = NativeEngine(path)
        file = engine.open(tmp_path / "a")
        plan = Plan.of(file, plan_items, [8] * len(plan_items))
        outcomes: list[object] = []

        def submit(engine=engine, plan=plan, outcomes=outcomes) -> None:
            try:
                while True:
                    future = engine.read(plan, deadline_s=60)
                    memory = future.wait()
                    at = int(future.position_bytes[-1])
                    assert (
                        memory[at : at + 8].numpy().tobytes()
                        == data[plan_items[-1] : plan_items[-1] + 8]
                    )
            except BaseException as error:
                outcomes.append(error)

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.0002 * turn)
        engine.close()
        for thread in threads:
            thread.join()  # at the latest at the deadline, which is another error
        assert all(isinstance(outcome, errors.EngineClosedError) for outcome in outcomes), outcomes
        assert len(outcomes) == 2


def test_two_threads_close(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    make_file(tmp_path / "a", BLOCK)
    for _ in range(3):
        engine = open_engine(path, [FaultRule("delay", operation="read", value=50 * MS)])
        engine.read(Plan.of(engine.open(tmp_path / "a"), [0], [10]))
        assert until(lambda engine=engine: engine.stats().requests == 1)
        problems: list[BaseException] = []
        left: list[int] = []

        def close(engine=engine, problems=problems, left=left) -> None:
            try:
                engine.close()
                left.append(engine.stats().in_flight)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert left == [0, 0, 0], "each returns when the engine is closed, not before"


def test_many_engines_leave_nothing_behind(path: str, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 3 * BLOCK)
    before = open_descriptors()
    threads_before = threading.active_count()
    for turn in range(30):
        engine = NativeEngine(path, queue_depth=4)
        for _ in range(3):
            assert read_bytes(engine, engine.open(tmp_path / "a"), 1, 9000) == data[1:9001]
        if turn % 2:
            engine.close()  # else the last reference closes it
        del engine
    assert until(lambda: len(open_descriptors()) <= len(before)), open_descriptors() - before
    assert threading.active_count() == threads_before


def test_closing_one_file_while_it_is_read(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """What is under way keeps its file open; its descriptor goes when it is done."""
    data = make_file(tmp_path / "a", 2 * BLOCK)
    engine = open_engine(path, [FaultRule("delay", operation="read", value=100 * MS)])
    before = open_descriptors()
    file = engine.open(tmp_path / "a")
    future = engine.read(Plan.of(file, [0], [BLOCK + 5]))
    engine.close_file(file)
    assert future.wait()[: BLOCK + 5].numpy().tobytes() == data[: BLOCK + 5]
    del future
    assert until(lambda: len(open_descriptors()) <= len(before))
