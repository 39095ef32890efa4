"""A device that answers late or never: the caller is told in time, the memory waits for the device,
and the engine goes on and closes."""

from __future__ import annotations

import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx.errors import DeadlineExceededError, EngineClosedError, StorageError, WriteError
from espnx.storage import FaultRule, FileHandle, NativeEngine, Plan
from espnx.storage.native import NativeFuture
from tests.storage.common import BLOCK, OpenEngine, make_file, patiently, raw, read_bytes, until

MS = 1_000_000
HALF_MIB = 512 * 1024


def too_late(engine: NativeEngine, future: NativeFuture, requests: int = 1) -> bool:
    """Waits until the deadline has passed. Whether the device had all requests of the transfer by
    then."""
    reached = (
        until(lambda: engine.stats().in_flight == requests or future.done())
        and engine.stats().in_flight == requests
    )
    with pytest.raises(DeadlineExceededError):
        future.wait()
    return reached


def test_a_read_that_never_completes(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 6 * BLOCK)

    def begun(limit_s: float) -> tuple[NativeEngine, NativeFuture]:
        """A read of which two of three pieces have arrived in time."""
        engine = open_engine(
            path,
            [
                FaultRule(
                    "never", operation="read", begin_bytes=2 * BLOCK, end_bytes=3 * BLOCK, count=1
                )
            ],
        )
        future = engine.read(plan_of(engine), deadline_s=limit_s)
        arrived, finished = future.next(at_least=2)
        assert sorted(arrived.tolist()) == [0, 2]
        assert not finished
        return engine, future

    def plan_of(engine: NativeEngine) -> Plan:
        return Plan.of(engine.open(tmp_path / "a"), [0, 2 * BLOCK, 4 * BLOCK], [BLOCK] * 3)

    before = time.monotonic()
    engine, future = patiently(begun, 0.1)
    with pytest.raises(DeadlineExceededError) as caught:
        future.wait()
    assert time.monotonic() - before > 0.09
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert (error.path, error.offset_bytes, error.size_bytes) == (
        str(tmp_path / "a"),
        2 * BLOCK,
        BLOCK,
    )
    assert "1 of 3" in str(error)
    with pytest.raises(DeadlineExceededError):
        future.next()
    assert future.done()

    stats = engine.stats()
    assert (stats.in_flight, stats.quarantined_buffers, stats.failures) == (1, 1, 1)
    assert stats.quarantined_bytes >= 3 * BLOCK
    held = future.memory.data_ptr()
    del future, error, caught
    assert engine.stats().quarantined_buffers == 1
    for _ in range(10):  # other reads go on, and none gets that memory
        again = engine.read(plan_of(engine))
        memory = again.wait()
        assert memory.data_ptr() != held
        assert [raw(memory[at : at + BLOCK]) for at in again.position_bytes.tolist()] == [
            data[i * BLOCK : i * BLOCK + BLOCK] for i in (0, 2, 4)
        ]

    before = time.monotonic()
    engine.close(grace_s=0.1)
    assert time.monotonic() - before > 0.08
    stats = engine.stats()
    assert (stats.quarantined_buffers, stats.in_flight) == (1, 1)
    assert 3 * BLOCK <= stats.quarantined_bytes <= HALF_MIB


def test_quarantine_counts_buffers_and_not_requests(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Eight requests of one read hang: one buffer, before and after the engine is closed."""
    make_file(tmp_path / "a", HALF_MIB)

    def hangs(limit_s: float) -> NativeEngine | None:
        engine = open_engine(
            path, [FaultRule("never", operation="read")], request_bytes=HALF_MIB // 8
        )
        plan = Plan.of(engine.open(tmp_path / "a"), [0], [HALF_MIB])
        return engine if too_late(engine, engine.read(plan, deadline_s=limit_s), 8) else None

    engine = patiently(hangs)
    stats = engine.stats()
    assert (stats.in_flight, stats.quarantined_buffers) == (8, 1)
    assert HALF_MIB <= stats.quarantined_bytes < 2 * HALF_MIB
    engine.close(grace_s=0.0)
    after = engine.stats()
    assert (after.quarantined_buffers, after.quarantined_bytes) == (1, stats.quarantined_bytes)


def test_a_late_completion_ends_the_quarantine(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    data = make_file(tmp_path / "a", BLOCK)

    def late(limit_s: float) -> tuple[NativeEngine, FileHandle, NativeFuture] | None:
        """A read that takes four times its limit."""
        engine = open_engine(
            path, [FaultRule("delay", operation="read", count=1, value=int(4_000 * limit_s) * MS)]
        )
        file = engine.open(tmp_path / "a")
        future = engine.read(Plan.of(file, [0], [BLOCK]), deadline_s=limit_s)
        return (
            (engine, file, future)
            if too_late(engine, future) and engine.stats().quarantined_buffers == 1
            else None
        )

    engine, file, future = patiently(late)
    assert until(lambda: engine.stats().quarantined_buffers == 0)
    stats = engine.stats()
    assert (stats.in_flight, stats.quarantined_bytes) == (0, 0)
    with pytest.raises(DeadlineExceededError):  # late is still too late
        future.wait()
    assert read_bytes(engine, file, 0, BLOCK) == data


def test_a_write_that_never_completes(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    source = torch.zeros(BLOCK, dtype=torch.uint8)

    def hangs(limit_s: float) -> tuple[NativeEngine, FileHandle] | None:
        engine = open_engine(path, [FaultRule("never", operation="write", count=1)])
        file = engine.open(tmp_path / "w", "w", direct=False)
        future = engine.write(Plan.of(file, [0], [BLOCK], [0]), source, deadline_s=limit_s)
        return (engine, file) if too_late(engine, future) else None

    engine, file = patiently(hangs)
    assert (engine.stats().quarantined_buffers, engine.stats().quarantined_bytes) == (1, BLOCK)
    engine.write(Plan.of(file, [0], [BLOCK], [0]), source).wait()


def numpy_backed(size_bytes: int) -> tuple[torch.Tensor, weakref.ref[np.ndarray]]:
    array = np.zeros(size_bytes, dtype=np.uint8)
    return torch.from_numpy(array), weakref.ref(array)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["dropped", "data replaced"])
@pytest.mark.parametrize("reading", [True, False])
def test_the_callers_memory_waits_for_the_device(
    path: str, reading: bool, how: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """The caller gives up and lets go of everything: the memory stays until the request has
    completed, then goes."""
    make_file(tmp_path / "a", BLOCK)

    def given_up(delay_s: float) -> tuple[NativeEngine, weakref.ref[np.ndarray]] | None:
        """None where the request had completed before anybody looked."""
        engine = open_engine(
            path,
            [
                FaultRule(
                    "delay",
                    value=int(delay_s * 1000) * MS,
                    count=1,
                    operation="read" if reading else "write",
                )
            ],
        )
        file = engine.open(tmp_path / "a", "r+", direct=False)
        tensor, alive = numpy_backed(BLOCK)
        plan = Plan.of(file, [0], [BLOCK], [0])
        future = (engine.read if reading else engine.write)(plan, tensor)
        assert until(lambda: engine.stats().requests == 1)
        future.cancel()
        if how == "data replaced":
            tensor.data = torch.empty(0, dtype=torch.uint8)
        del future, tensor
        is_held = alive() is not None
        if engine.stats().quarantined_buffers == 0:
            return None
        assert is_held, "freed under a running request"
        return engine, alive

    engine, alive = patiently(given_up, 0.05)
    assert until(lambda: engine.stats().quarantined_buffers == 0)
    # What the engine has let go of is freed at the next call.
    assert until(lambda: engine.stats().quarantined_buffers == 0 and alive() is None), "never freed"


def test_the_deadline_counts_from_the_call(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Also for a read that has not reached the device: the one place is taken."""
    make_file(tmp_path / "a", 4 * BLOCK)
    engine = open_engine(path, [FaultRule("never", operation="read", count=1)], queue_depth=1)
    file = engine.open(tmp_path / "a")
    first = engine.read(Plan.of(file, [0], [10]))
    assert until(lambda: engine.stats().in_flight == 1)
    with pytest.raises(DeadlineExceededError):
        engine.read(Plan.of(file, [2 * BLOCK], [10]), deadline_s=0.05).wait()
    assert engine.stats().quarantined_buffers == 0  # the device never heard of it
    assert not first.done()
    assert engine.stats().requests == 1


def test_what_arrived_in_time_is_handed_out_after_the_deadline(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    data = make_file(tmp_path / "a", BLOCK)
    engine = open_engine(path)
    file = engine.open(tmp_path / "a")

    def arrived(limit_s: float) -> torch.Tensor:
        future = engine.read(Plan.of(file, [0], [100]), deadline_s=limit_s)
        assert until(future.done)
        time.sleep(1.1 * limit_s)
        return future.wait()

    assert raw(patiently(arrived, 0.03)[:100]) == data[:100]


def test_closing_waits_for_the_late_ones(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Within the grace: nothing is abandoned. The caller of the read is told at once."""
    make_file(tmp_path / "a", BLOCK)
    engine = open_engine(path, [FaultRule("delay", operation="read", value=150 * MS)])
    before = time.monotonic()
    future = engine.read(Plan.of(engine.open(tmp_path / "a"), [0], [100]))
    assert until(lambda: engine.stats().requests == 1)
    engine.close(grace_s=60.0)
    assert time.monotonic() - before >= 0.15
    with pytest.raises(EngineClosedError):
        future.wait()
    stats = engine.stats()
    assert (stats.in_flight, stats.quarantined_buffers, stats.quarantined_bytes) == (0, 0, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grace_s", [0.0, -1.0, float("nan")])
def test_odd_graces(path: str, grace_s: float, open_engine: OpenEngine, tmp_path: Path) -> None:
    make_file(tmp_path / "a", BLOCK)
    engine = open_engine(path, [FaultRule("never", operation="read")])
    engine.read(Plan.of(engine.open(tmp_path / "a"), [0], [100]))
    assert until(lambda: engine.stats().requests == 1)
    engine.close(grace_s=grace_s)
    assert engine.stats().quarantined_buffers == 1


def test_an_endless_grace_ends_with_the_last_request(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    make_file(tmp_path / "a", BLOCK)
    engine = open_engine(path, [FaultRule("delay", operation="read", value=100 * MS)])
    engine.read(Plan.of(engine.open(tmp_path / "a"), [0], [100]))
    assert until(lambda: engine.stats().requests == 1)
    engine.close(grace_s=float("inf"))
    assert engine.stats().quarantined_buffers == 0


@pytest.mark.parametrize("ends", ["deadline", "cancel"])
def test_a_write_that_was_given_up_may_land(
    path: str, open_engine: OpenEngine, tmp_path: Path, ends: str
) -> None:
    """`is_over` says until when."""
    before = make_file(tmp_path / "a", 3 * BLOCK)

    def attempt(limit_s: float) -> bool | None:
        rule = FaultRule("delay", operation="write", count=1, value=int(5_000 * limit_s) * MS)
        engine = open_engine(path, [rule])
        file = engine.open(tmp_path / "a", "r+")
        was = read_bytes(engine, file, BLOCK, BLOCK)
        source = engine.memory(BLOCK).fill_(7)
        deadline_s = limit_s if ends == "deadline" else 1e3
        future = engine.write(Plan.of(file, [BLOCK], [BLOCK], [0]), source, deadline_s=deadline_s)
        assert not future.is_over()
        assert until(lambda: engine.stats().in_flight == 1)
        if ends == "cancel":
            future.cancel()
        with pytest.raises(DeadlineExceededError if ends == "deadline" else StorageError):
            future.wait()
        assert future.done()
        now = read_bytes(engine, file, BLOCK, BLOCK)
        if future.is_over():
            return None  # this machine was slow
        assert now == was == before[BLOCK : 2 * BLOCK]
        assert not future.wait_over(limit_s / 10) or engine.stats().in_flight == 0
        assert future.wait_over(1e3)
        assert read_bytes(engine, file, BLOCK, BLOCK) == bytes([7]) * BLOCK
        return True

    patiently(attempt, 0.03)


def test_what_ends_well_is_over_and_what_never_ends_is_not(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Nor is it when the engine is closed: the device may have it forever."""
    make_file(tmp_path / "a", 3 * BLOCK)
    engine = open_engine(path, [FaultRule("never", operation="write", begin_bytes=BLOCK)])
    file = engine.open(tmp_path / "a", "r+")
    source = engine.memory(BLOCK).fill_(7)
    good = engine.write(Plan.of(file, [0], [BLOCK], [0]), source)
    good.wait()
    lost = engine.write(Plan.of(file, [BLOCK], [BLOCK], [0]), source)
    assert until(lambda: engine.stats().in_flight == 1)
    lost.cancel()
    assert good.is_over()
    assert not lost.wait_over(0.05)
    engine.close(grace_s=0.05)
    assert (good.is_over(), lost.is_over()) == (True, False)


def test_a_piece_is_in_flight_when_another_has_failed(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    make_file(tmp_path / "a", 2 * BLOCK)
    rules = [
        FaultRule("error", operation="write", end_bytes=1, count=1),
        FaultRule("never", operation="write", begin_bytes=BLOCK, count=1),
    ]
    engine = open_engine(path, rules, request_bytes=BLOCK)
    file = engine.open(tmp_path / "a", "r+")
    future = engine.write(Plan.of(file, [0], [2 * BLOCK], [0]), engine.memory(2 * BLOCK).fill_(7))
    assert until(lambda: engine.stats().fault_hits == 2)
    with pytest.raises(WriteError):
        future.wait()
    assert not future.is_over()
    engine.close(grace_s=0.05)
