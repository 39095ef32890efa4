"""The `gds` engine where cuFile asks for patience, has no batches or fails any call at any time, on
emulated bindings."""

from __future__ import annotations

import errno
import gc
import random
import time
from pathlib import Path

import pytest

from espnx import errors
from espnx.storage import Plan
from espnx.storage.gds import loop as gds_loop
from espnx.storage.gds.cufile import PASSING
from espnx.storage.gds.queue import Done, Flight
from tests.storage.gds.common import KIB, MakeEngine, items_of, make, random_plan, until, write_file
from tests.storage.gds.cufile_stub import CuFileStub, HostMemory, Rule

__all__ = ["make"]  # a fixture is found by its name in this module


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["batch_io_set_up", "batch_io_submit", "batch_io_get_status"])
@pytest.mark.parametrize("code", [5037, 5039, 5040, 5041, 5043, errno.EINTR, errno.EAGAIN])
def test_what_passes_is_asked_again(make: MakeEngine, tmp_path: Path, call: str, code: int) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub()
    if code < 5000 and not stub.shows_errno:
        pytest.skip("[cufile] an errno of this call is shown by no bindings: test_library.py")
    engine = make(stub, batch_size=2)
    file = engine.open(path)
    stub.passing[call] = [code] * 3
    offsets = [i * 12_000 for i in range(8)]
    future = engine.read(Plan.of(file, offsets, [10] * 8))
    assert items_of(future.wait(), future.position_bytes, [10] * 8) == [
        data[o : o + 10] for o in offsets
    ]
    assert stub.passing[call] == []
    until(lambda: engine.stats().in_flight == 0)
    stats = engine.stats()
    assert (stats.failures, stats.quarantined_buffers) == (0, 0)
    assert stats.requests == future.request_count == 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["batch_io_set_up", "batch_io_submit", "batch_io_get_status"])
def test_a_first_read_is_patient_too(make: MakeEngine, tmp_path: Path, call: str) -> None:
    path, _ = write_file(tmp_path, 5000)
    stub = CuFileStub()
    stub.passing[call] = [5039, 5043]
    make(stub).open(path)
    assert stub.passing[call] == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["batch_io_set_up", "batch_io_submit", "batch_io_get_status"])
def test_patience_ends_with_the_deadline(make: MakeEngine, tmp_path: Path, call: str) -> None:
    """The error says what cuFile said, nothing spins meanwhile, and when cuFile comes round nothing
    is left behind."""
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub()
    engine = make(stub)
    file = engine.open(path)
    stub.refuse[call] = 5043
    future = engine.read(Plan.of(file, [8200], [10]), deadline_s=0.2)
    before = stub.count(call)
    with pytest.raises((errors.DeadlineExceededError, errors.ReadError), match="5043") as caught:
        future.wait()
    assert stub.count(call) - before <= 0.4 / gds_loop._PAUSE_S + 50
    assert (caught.value.path, caught.value.offset_bytes) == (str(path), 8192)
    stub.refuse.clear()
    until(lambda: engine.stats().in_flight == 0)
    assert engine.stats().quarantined_buffers == 0
    again = engine.read(Plan.of(file, [41_000], [10]))
    assert items_of(again.wait(), again.position_bytes, [10]) == [data[41_000:41_010]]


def test_reads_that_nobody_waits_for_end_at_their_deadline(
    make: MakeEngine, tmp_path: Path
) -> None:
    path, _ = write_file(tmp_path, 100_000)
    stub = CuFileStub()
    engine = make(stub)
    file = engine.open(path)
    stub.refuse["batch_io_get_status"] = 5041
    future = engine.read(Plan.of(file, [8200], [10]), deadline_s=0.1)
    until(future.done)
    until(lambda: engine.stats().quarantined_buffers == 1)
    stub.refuse.clear()
    until(lambda: engine.stats().quarantined_buffers == 0)


def test_reads_that_have_just_begun_are_looked_at_more_often(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked meanwhile waits until the look is over."""
    path, _ = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("hold", match=lambda o, s: o > 0)])
    engine = make(stub)
    file = engine.open(path)
    looks: list[tuple[float, float]] = []
    poll = Flight.poll

    def noted(self: Flight, at_least: int, timeout_s: float) -> Done | None:
        looks.append((time.monotonic() - self.submitted_at, timeout_s))
        assert at_least == (timeout_s > 0)
        return poll(self, at_least, timeout_s)

    monkeypatch.setattr(Flight, "poll", noted)
    future = engine.read(Plan.of(file, [8200], [10]))
    until(lambda: any(age_s > 0.05 for age_s, _ in looks))
    stub.release()
    future.wait()
    young = [timeout_s for age_s, timeout_s in looks if age_s < gds_loop._YOUNG_S]
    old = [timeout_s for age_s, timeout_s in looks if age_s > 2 * gds_loop._YOUNG_S]
    assert set(young) <= {gds_loop._YOUNG_POLL_S}
    assert max(old) == gds_loop._POLL_S


def test_cancelled_reads_are_not_looked_at_more_often(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However young: nobody waits for them, and what is wanted beside them is old."""
    path, _ = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("never", match=lambda o, s: o > 0)])
    engine = make(stub)
    file = engine.open(path)
    wanted = engine.read(Plan.of(file, [41_000], [10]))
    until(lambda: stub.busy() == 1)
    looks: list[tuple[bool, float]] = []
    poll = Flight.poll

    def noted(self: Flight, at_least: int, timeout_s: float) -> Done | None:
        now = time.monotonic()
        flights = engine._loop._flights
        is_any_young = any(
            now - each.submitted_at < gds_loop._YOUNG_S / 2 for each in flights.active
        )
        if len(flights.active) == 2 and self is flights.healthy()[0] and len(flights.healthy()) < 2:
            looks.append((is_any_young, timeout_s))
        return poll(self, at_least, timeout_s)

    monkeypatch.setattr(Flight, "poll", noted)
    monkeypatch.setattr(gds_loop, "_YOUNG_S", 0.2)
    until(lambda: time.monotonic() - engine._loop._flights.active[0].submitted_at > 0.2)
    cancelled = engine.read(Plan.of(file, [8200], [10]))
    until(lambda: stub.busy() == 2)
    cancelled.cancel()
    until(lambda: len(looks) > 20)
    assert any(is_any_young for is_any_young, _ in looks)
    assert {timeout_s for _, timeout_s in looks} == {gds_loop._POLL_S}
    stub.release()
    wanted.wait()


def test_a_library_that_calls_too_few_completions_an_error(
    make: MakeEngine, tmp_path: Path
) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("late", 6, match=lambda o, s: o > 0)])
    stub.few_is_error = True
    engine = make(stub)
    offsets = [0, 41_000, 80_000]
    future = engine.read(Plan.of(engine.open(path), offsets, [10] * 3))
    assert items_of(future.wait(), future.position_bytes, [10] * 3) == [
        data[o : o + 10] for o in offsets
    ]
    assert engine.stats().failures == 0


# the library's threads could not end the read while the test holds everything still
@pytest.mark.parametrize("make", ["stub"], indirect=True)
def test_completions_nobody_looked_at_are_in_time(make: MakeEngine, tmp_path: Path) -> None:
    """While the interpreter compiles a kernel, the I/O thread may not get its turn until the
    deadline is over."""
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("hold", match=lambda o, s: o == 8192)])
    engine = make(stub)
    future = engine.read(Plan.of(engine.open(path), [8200], [10]), deadline_s=1e6)
    until(lambda: stub.busy() == 1)
    transfer = future._transfer
    with stub.changed:  # the I/O thread stands still in its status call ...
        until(lambda: engine._loop._looked_at < time.monotonic())
        stub.release()  # ... the bytes arrive ...
        transfer.deadline = time.monotonic()  # ... and then the deadline is over
    assert items_of(future.wait(), future.position_bytes, [10]) == [data[8200:8210]]


def test_batches_are_tried_whatever_the_feature_flags_say(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_000)
    for bit in (False, True):
        stub = CuFileStub()
        stub.batch_bit = bit
        engine = make(stub)
        future = engine.read(Plan.of(engine.open(path), [1, 20_000], [10, 10]))
        assert items_of(future.wait(), future.position_bytes, [10, 10]) == [
            data[1:11],
            data[20_000:20_010],
        ]
        assert stub.count("read") == 0
        assert "no batches" not in engine.fallback_reason


@pytest.mark.parametrize(
    "call",
    [
        "batch_io_destroy",
        "batch_io_cancel",
        "handle_deregister",
        "buf_deregister",
        "driver_close",
        "get_stats_level",
    ],
)
def test_refused_clean_up_harms_nobody(make: MakeEngine, tmp_path: Path, call: str) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("hold", match=lambda o, s: o == 8192)])
    stub.refuse[call] = 5030
    engine = make(stub)
    file = engine.open(path)
    held = engine.read(Plan.of(file, [8192], [10]))
    until(lambda: stub.busy() == 1)
    held.cancel()
    stub.release()
    until(lambda: engine.stats().in_flight == 0)
    future = engine.read(Plan.of(file, [41_000], [10]))
    assert items_of(future.wait(), future.position_bytes, [10]) == [data[41_000:41_010]]
    engine.close_file(file)
    engine.close()


CALLS = (
    "batch_io_set_up",
    "batch_io_submit",
    "batch_io_get_status",
    "batch_io_cancel",
    "batch_io_destroy",
    "read",
    "buf_register",
)
CODES = (*PASSING, 5008, 5022, 5030, 5044, 5049, errno.EIO)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_any_call_fails_at_any_time(make: MakeEngine, tmp_path: Path, seed: int) -> None:
    """Random programs: right bytes or a typed error, no deadlock, memory given back or counted as
    in quarantine."""
    rng = random.Random(seed)
    path, data = write_file(tmp_path, 200_000, seed)
    stub = CuFileStub(order=rng.choice(["fifo", "lifo", "random"]), seed=seed)
    codes = [code for code in CODES if code >= 5000 or stub.shows_errno]
    memory = HostMemory()
    engine = make(
        stub,
        memory=memory,
        batch_size=3,
        batches=2,
        threads=2,
        batch_bytes=16 * KIB,
        large_bytes=16 * KIB,
        arena_bytes=64 * KIB,
    )
    file = engine.open(path)
    ended = 0
    for step in range(40):
        stub.passing[rng.choice(CALLS)] = [rng.choice(codes) for _ in range(rng.randrange(4))]
        fault = rng.choice(["error", "short", "late", "twice", "none"])
        stub.rules[:] = [
            Rule(fault, rng.choice([errno.EIO, errno.EAGAIN, 3]), nth=rng.randrange(1, 4), count=1)
        ]
        offsets, sizes = random_plan(100 * seed + step, len(data), rng.randrange(1, 12), 40_000)
        try:
            future = engine.read(
                Plan.of(file, offsets, sizes),
                gap_bytes=rng.choice([0, 8192]),
                deadline_s=rng.choice([0.02, 5.0]),
            )
            if rng.random() < 0.2:
                future.cancel()
            found = items_of(future.wait(), future.position_bytes, sizes)
        except errors.EspnxError:
            continue
        assert found == [data[o : o + s] for o, s in zip(offsets, sizes, strict=True)]
        ended += 1
        del future
    assert ended > 0
    stub.passing.clear()
    stub.rules.clear()
    # What remains is what calls failed for good of, whose entries may be with the device, or not.
    flights = engine._loop._flights.active
    until(
        lambda: (
            engine.stats().in_flight == sum(flight.count() for flight in flights)
            and stub.busy() <= engine.stats().in_flight
        )
    )
    assert all(flight.given_up for flight in flights)
    assert engine.stats().quarantined_buffers <= len(flights)
    future = engine.read(Plan.of(file, [5], [50_000]))  # the engine is still usable
    assert items_of(future.wait(), future.position_bytes, [50_000]) == [data[5:50_005]]
    held = engine.stats().quarantined_bytes
    del future
    gc.collect()
    until(lambda: engine._pool.held_bytes() == held)
    engine.close(grace_s=0.05)
