"""How a future hands out what arrives: counts, order, several threads, and who keeps what alive."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from espnx.errors import ChecksumError, StorageError, TransferCancelledError
from espnx.storage import FaultRule, NativeEngine, Plan
from tests.storage.common import (
    BLOCK,
    OpenEngine,
    crc32c,
    make_file,
    open_descriptors,
    patiently,
    random_case,
    raw,
    until,
)

MS = 1_000_000


def spread(engine: NativeEngine, tmp_path: Path, count: int) -> tuple[Plan, bytes]:
    """One item in every second block, so that each is a request of its own."""
    data = make_file(tmp_path / "spread", 2 * BLOCK * count)
    file = engine.open(tmp_path / "spread")
    return Plan.of(file, [2 * BLOCK * i for i in range(count)], [BLOCK] * count), data


def test_next_waits_for_at_least(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """The last two of ten never come: the others do, and nobody waits longer than he said."""
    engine = open_engine(path, [FaultRule("never", begin_bytes=8 * 2 * BLOCK, end_bytes=2**62)])
    plan, _ = spread(engine, tmp_path, 10)
    future = engine.read(plan)
    first, finished = future.next(at_least=8)
    assert sorted(first.tolist()) == list(range(8))
    assert not finished
    assert not future.done()
    before = time.monotonic()
    nothing, finished = future.next(at_least=1, timeout_s=0.05)
    assert (nothing.tolist(), finished) == ([], False)
    assert time.monotonic() - before >= 0.04
    assert until(lambda: engine.stats().in_flight == 2), "the device was not waited for"


def test_next_ends_with_the_last(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """More than there are may be asked for; after the last there is nothing more."""
    engine = open_engine(
        path, [FaultRule("delay", begin_bytes=8 * 2 * BLOCK, end_bytes=2**62, value=50 * MS)]
    )
    plan, _ = spread(engine, tmp_path, 10)
    future = engine.read(plan)
    items, finished = future.next(at_least=100)
    assert sorted(items.tolist()) == list(range(10))
    assert finished
    nothing, finished = future.next()
    assert (nothing.tolist(), finished) == ([], True)
    assert future.next(at_least=5)[0].tolist() == []
    assert future.next()[1] is True
    assert future.done()


@pytest.mark.parametrize("at_least", [0, -5])
def test_asking_for_none_does_not_wait(
    path: str, at_least: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(path, [FaultRule("never")])
    plan, _ = spread(engine, tmp_path, 2)
    future = engine.read(plan)
    # waiting would end at the deadline, with an error
    items, finished = future.next(at_least=at_least)
    assert (items.tolist(), finished) == ([], False)
    items, finished = future.next(timeout_s=-1.0)
    assert (items.tolist(), finished) == ([], False)


def test_waiting_does_not_spin(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(path, [FaultRule("delay", value=100 * MS)])
    plan, _ = spread(engine, tmp_path, 2)
    future = engine.read(plan)
    begun, before = time.monotonic(), time.process_time()
    future.wait()
    used_s, waited_s = time.process_time() - before, time.monotonic() - begun
    assert used_s < waited_s / 2


def test_a_timeout_loses_nothing(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(path, [FaultRule("delay", begin_bytes=0, end_bytes=1, value=80 * MS)])
    plan, _ = spread(engine, tmp_path, 6)
    future = engine.read(plan)
    seen: list[int] = []
    finished = False
    while not finished:
        items, finished = future.next(at_least=6, timeout_s=0.02)
        seen += items.tolist()
    assert sorted(seen) == list(range(6))


def test_the_slow_one_does_not_hold_up_the_others(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """The first item does not come at all: everything else is handed out."""
    engine = open_engine(path, [FaultRule("never", begin_bytes=0, end_bytes=1)])
    plan, data = spread(engine, tmp_path, 20)
    future = engine.read(plan)
    order: list[int] = []
    while len(order) < 19:
        items, finished = future.next()
        assert not finished
        order += items.tolist()
        for i in items.tolist():
            at = int(future.position_bytes[i])
            assert (
                raw(future.memory[at : at + BLOCK]) == data[2 * BLOCK * i : 2 * BLOCK * i + BLOCK]
            )
    assert sorted(order) == list(range(1, 20))
    assert engine.stats().in_flight == 1


def finishing_order(
    engine: NativeEngine, plans: list[tuple[Plan, int]], first_s: float
) -> list[int] | None:
    """Submits while the first, slow read (of `first_s` at least) has the only place at the device;
    the order in which the plans then end. None where a busy machine hid it: they were submitted too
    late, or several ended while nobody looked."""
    futures, begun = [], time.monotonic()
    for plan, priority in plans:
        futures.append(engine.read(plan, priority=priority))
        assert until(lambda: engine.stats().in_flight == 1)
    was_hidden = time.monotonic() - begun >= first_s
    order: list[int] = []
    pending = set(range(len(futures)))
    while pending:
        ended = [i for i in pending if futures[i].done()]
        was_hidden |= len(ended) > 1
        order += ended
        pending -= set(ended)
    return None if was_hidden else order


def test_priority(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """With one request at a time every read is delayed, so the order shows: higher first, equals as
    they came."""
    make_file(tmp_path / "a", 64 * BLOCK)
    for turn in range(20):
        each_ms = 10 * 2 ** min(turn, 4)
        engine = open_engine(
            path,
            [
                FaultRule("delay", count=1, value=6 * each_ms * MS),
                FaultRule("delay", value=each_ms * MS),
            ],
            queue_depth=1,
        )
        file = engine.open(tmp_path / "a")
        plans = [
            (Plan.of(file, [i * 2 * BLOCK], [10]), priority)
            for i, priority in enumerate([0, 0, 5, -1, 5, 2])
        ]
        order = finishing_order(engine, plans, 6e-3 * each_ms)
        if order is not None:
            break
    assert order == [0, 2, 4, 5, 1, 3]  # the first was with the device already


def test_a_plan_is_served_in_its_own_order(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """With one request at a time, items arrive in the order of the plan, not of the file: what is
    listed first is needed first."""
    engine = open_engine(path, [FaultRule("delay", value=5 * MS)], queue_depth=1)
    make_file(tmp_path / "a", 64 * BLOCK)
    file = engine.open(tmp_path / "a")
    blocks = random.Random(1).sample(range(32), 12)
    arrived = [
        i
        for items in engine.read(Plan.of(file, [2 * BLOCK * b for b in blocks], [10] * 12))
        for i in items.tolist()
    ]
    assert arrived == list(range(12))


def test_two_threads_on_one_engine(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(path, queue_depth=16, request_bytes=16 * 1024)
    data = make_file(tmp_path / "a", 300_000)
    files = [(engine.open(tmp_path / "a"), data)]
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            for _ in range(30):
                cases = [random_case(rng, files, 16 * 1024, count=5) for _ in range(3)]
                futures = [engine.read(case.plan, priority=rng.randint(0, 3)) for case in cases]
                for case, future in zip(cases, futures, strict=True):
                    case.check(future.wait(), future.position_bytes)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    stats = engine.stats()
    assert (stats.in_flight, stats.failures, stats.quarantined_buffers) == (0, 0, 0)


def test_two_threads_on_one_future(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """Both wait for the same read into the caller's memory: neither returns before every byte is
    checked and copied."""
    data = make_file(tmp_path / "a", 8 << 20)
    engine = open_engine(path)
    file = engine.open(tmp_path / "a")
    for _ in range(10):
        # unaligned, so the caller's thread copies
        out = torch.zeros(len(data) + 1, dtype=torch.uint8)[1:]
        future = engine.read(Plan.of(file, [1], [len(data) - 1], [1]), out)
        wrong: list[str] = []

        def wait(future=future, out=out, wrong=wrong) -> None:
            future.wait()
            if (
                int(out[-1]) != data[-1]
                or int(out[len(data) // 2]) != data[len(data) // 2]
                or int(out[1]) != data[1]
            ):
                wrong.append("returned before the bytes were there")

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_checksum_found_by_one_thread_reaches_the_other(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    data = make_file(tmp_path / "a", 4 << 20)
    engine = open_engine(path)
    file = engine.open(tmp_path / "a")
    for _ in range(5):
        future = engine.read(Plan.of(file, [0], [len(data)], crc32c=[1]))
        outcomes: list[str] = []

        def wait(future=future, outcomes=outcomes) -> None:
            try:
                future.wait()
                outcomes.append("passed")
            except ChecksumError:
                outcomes.append("refused")

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == ["refused", "refused"]


def test_other_python_threads_run_meanwhile(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """A wait that held the interpreter would end at its deadline, not because this thread calls it
    off."""
    engine = open_engine(path, [FaultRule("never")])
    plan, _ = spread(engine, tmp_path, 2)
    future = engine.read(plan)
    ends: list[type] = []

    def wait() -> None:
        try:
            future.wait()
        except StorageError as error:
            ends.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert until(lambda: engine.stats().in_flight == 2)
    future.cancel()
    thread.join()
    assert ends == [TransferCancelledError]


def test_a_future_outlives_the_engine(path: str, tmp_path: Path) -> None:
    """Nothing but the future refers to the engine, then nothing but a tensor to the memory."""
    engine = NativeEngine(path, rules=[FaultRule("delay", value=50 * MS)], poison=True)
    plan, data = spread(engine, tmp_path, 3)
    future = engine.read(plan)
    del engine
    memory = future.wait()
    places = future.position_bytes.tolist()
    del future
    NativeEngine(path, poison=True).close()
    for i, at in enumerate(places):
        assert raw(memory[at : at + BLOCK]) == data[2 * BLOCK * i : 2 * BLOCK * i + BLOCK]


def test_memory_in_use_is_not_handed_out_again(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(path)
    plan, data = spread(engine, tmp_path, 2)
    kept = [(future, future.wait()) for future in (engine.read(plan) for _ in range(8))]
    assert len({memory.data_ptr() for _, memory in kept}) == 8
    for future, memory in kept:
        assert [raw(memory[at : at + BLOCK]) for at in future.position_bytes.tolist()] == [
            data[:BLOCK],
            data[2 * BLOCK : 3 * BLOCK],
        ]


def test_memory_is_recycled(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(path)
    plan, _ = spread(engine, tmp_path, 2)
    places = set()
    for _ in range(20):
        future = engine.read(plan)
        places.add(future.wait().data_ptr())
        del future
    assert len(places) <= 3  # the I/O thread may still hold the one before


def test_cancel(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    def cancelled(delay_s: float) -> NativeEngine | None:
        """An engine whose read of 40 pieces was called off while the device had the first four;
        None where it was over before."""
        engine = open_engine(
            path, [FaultRule("delay", value=int(delay_s * 1000) * MS, count=4)], queue_depth=4
        )
        future = engine.read(plan_of(engine))
        future.cancel()
        future.cancel()
        try:
            future.wait()
        except TransferCancelledError as error:
            return engine if future.done() and "cancel" in str(error) else pytest.fail(str(error))
        return None

    def plan_of(engine: NativeEngine) -> Plan:
        return Plan.of(
            engine.open(tmp_path / "spread"), [2 * BLOCK * i for i in range(40)], [BLOCK] * 40
        )

    data = make_file(tmp_path / "spread", 2 * BLOCK * 40)
    engine = patiently(cancelled, 0.05)
    assert until(lambda: engine.stats().in_flight == 0)
    assert engine.stats().quarantined_buffers == 0
    assert engine.stats().failures == 1
    done = engine.read(plan_of(engine))
    memory = done.wait()
    done.cancel()  # after the end: nothing to cancel
    assert done.wait() is memory
    assert raw(memory[:BLOCK]) == data[:BLOCK]
    assert engine.stats().failures == 1


def test_a_dropped_future_is_still_served(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(path)
    plan, _ = spread(engine, tmp_path, 50)
    for _ in range(50):
        engine.read(plan)
    assert until(
        lambda: engine.stats().in_flight == 0 and engine.stats().bytes_moved == 50 * 50 * BLOCK
    )


def test_a_future_keeps_only_its_own_files_open(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(path)
    make_file(tmp_path / "a", 100)
    make_file(tmp_path / "b", 100)
    first = engine.open(tmp_path / "a")
    before = open_descriptors()
    other = engine.open(tmp_path / "b")
    future = engine.read(
        Plan.of(first, [0], [10], crc32c=[crc32c((tmp_path / "a").read_bytes()[:10])])
    )
    future.wait()
    engine.close_file(other)
    assert len(open_descriptors()) <= len(before)
