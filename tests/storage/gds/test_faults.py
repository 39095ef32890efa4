"""The `gds` engine when entries fail, come short, come twice or never come, on emulated bindings
(cufile_stub.py)."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.ops import crc32c_ranges
from espnx.storage import Plan
from espnx.storage.gds import cufile as gds_driver
from espnx.storage.gds import loop, transfer
from espnx.storage.gds.loop import left_behind
from espnx.storage.gds.piece import IDLE_RETRIES
from tests.storage.gds.common import KIB, MakeEngine, items_of, make, stub_of, until, write_file
from tests.storage.gds.cufile_stub import CuFileStub, Rule

__all__ = ["make"]  # a fixture is found by its name in this module


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rule", "number", "words"),
    [
        (Rule("error", errno.EIO, match=lambda o, s: o == 8192), errno.EIO, "Input/output"),
        (Rule("error", 5044, match=lambda o, s: o == 8192), None, "5044"),
        (Rule("status", gds_driver.FAILED, match=lambda o, s: o == 8192), None, "status 64"),
        (Rule("status", gds_driver.INVALID, match=lambda o, s: o == 8192), None, "invalid"),
        (Rule("status", gds_driver.CANCELED, match=lambda o, s: o == 8192), None, "cancelled"),
    ],
)
@pytest.mark.parametrize("batches", [True, False])
def test_failed_entry_is_named(
    make: MakeEngine, tmp_path: Path, rule: Rule, number: int | None, words: str, batches: bool
) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[rule])
    stub.batches = batches
    engine = make(stub)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [0, 8200, 40_000], [10, 10, 10]))
    with pytest.raises(errors.ReadError) as caught:
        future.wait()
    assert (caught.value.path, caught.value.offset_bytes, caught.value.size_bytes) == (
        str(path),
        8192,
        4096,
    )
    if batches:
        assert caught.value.errno == number
        assert words in str(caught.value)
    with pytest.raises(errors.ReadError):  # and it stays failed
        future.next()
    stub.rules.clear()
    until(lambda: engine.stats().in_flight == 0)
    assert engine.stats().failures == 1
    again = engine.read(Plan.of(file, [8200], [10]))
    assert items_of(again.wait(), again.position_bytes, [10]) == [data[8200:8210]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moved", [1, 4095, 4096, 5000, 8192])
@pytest.mark.parametrize("batches", [True, False])
def test_short_reads_go_on_from_the_last_whole_block(
    make: MakeEngine, tmp_path: Path, moved: int, batches: bool
) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("short", moved, match=lambda o, s: s > 8192, count=3)])
    stub.batches = batches
    engine = make(stub)
    file = engine.open(path)
    assert file.direct
    future = engine.read(Plan.of(file, [100, 90_000], [60_000, 10_000]))
    assert items_of(future.wait(), future.position_bytes, [60_000, 10_000]) == [
        data[100:60_100],
        data[90_000:],
    ]
    assert engine.stats().retries == 3
    offsets = [arguments[2] for name, arguments in stub.calls if name == "read"]
    assert all(offset % 4096 == 0 for offset in offsets)
    # each byte once, whatever was read again
    assert future.bytes_moved == 61_440 + 100_000 - 86_016


def test_short_for_ever_is_given_up(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 100_000)
    engine = make(CuFileStub(rules=[Rule("short", 100, match=lambda o, s: o == 4096)]))
    file = engine.open(path)
    with pytest.raises(errors.ShortReadError) as caught:
        engine.read(Plan.of(file, [5000], [50])).wait()
    assert (caught.value.offset_bytes, caught.value.path) == (4096, str(path))
    assert engine.stats().retries == IDLE_RETRIES


def test_interrupted_reads_are_repeated_a_few_times(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 20_000)
    rule = Rule("error", errno.EAGAIN, match=lambda o, s: o == 8192, count=IDLE_RETRIES)
    engine = make(CuFileStub(rules=[rule]))
    file = engine.open(path)
    future = engine.read(Plan.of(file, [9000], [50]))
    assert items_of(future.wait(), future.position_bytes, [50]) == [data[9000:9050]]
    rule.count = -1
    with pytest.raises(errors.ReadError):
        engine.read(Plan.of(file, [9000], [50])).wait()


def test_file_cut_during_the_read(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 100_000)
    engine = make()
    file = engine.open(path)
    cut = Rule("late", 1, match=lambda o, s: path.write_bytes(b"short") >= 0)
    stub_of(engine).rules.append(cut)
    with pytest.raises(errors.TruncatedFileError) as caught:
        engine.read(Plan.of(file, [50_000], [100])).wait()
    assert caught.value.offset_bytes == 49_152


def test_file_cut_inside_a_block(make: MakeEngine, tmp_path: Path) -> None:
    """The reads that follow bring the same few bytes, again and again: the size tells why."""
    path, data = write_file(tmp_path, 100_000)
    engine = make()
    file = engine.open(path)
    cut = Rule("late", 1, match=lambda o, s: path.write_bytes(data[:50_050]) >= 0)
    stub_of(engine).rules.append(cut)
    with pytest.raises(errors.TruncatedFileError) as caught:
        engine.read(Plan.of(file, [50_000], [100])).wait()
    assert (caught.value.offset_bytes, caught.value.got) == (49_152, "a file of 50050 bytes")
    assert engine.stats().retries == 0


def test_checksums(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 50_000)
    engine = make()
    file = engine.open(path)
    offsets, sizes = [0, 8193, 30_000, 5], [10, 9000, 20_000, 0]
    joined = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    crcs = crc32c_ranges(joined, torch.tensor(offsets), torch.tensor(sizes))
    crcs[3] = 12345  # the empty item has no bytes to be wrong
    future = engine.read(Plan.of(file, offsets, sizes, crc32c=crcs))
    assert items_of(future.wait(), future.position_bytes, sizes) == [
        data[o : o + s] for o, s in zip(offsets, sizes, strict=True)
    ]
    stub_of(engine).rules.append(Rule("flip", 8 * 1000 + 3, match=lambda o, s: o == 8192))
    with pytest.raises(errors.ChecksumError) as caught:
        engine.read(Plan.of(file, offsets, sizes, crc32c=crcs)).wait()
    assert (caught.value.offset_bytes, caught.value.size_bytes, caught.value.path) == (
        8193,
        9000,
        str(path),
    )


def test_an_entry_reported_twice_counts_once(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_000)
    engine = make(
        CuFileStub(
            rules=[
                Rule("twice", match=lambda o, s: o == 0, nth=2),
                Rule("late", 5, match=lambda o, s: o == 40_960),
            ]
        )
    )
    file = engine.open(path)
    future = engine.read(Plan.of(file, [0, 41_000], [10, 10]))
    assert items_of(future.wait(), future.position_bytes, [10, 10]) == [
        data[:10],
        data[41_000:41_010],
    ]
    assert engine.stats().in_flight == 0
    assert engine.stats().bytes_moved == future.bytes_moved == 2 * 4096


def test_completions_arrive_while_others_are_out(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_000)
    engine = make(CuFileStub(rules=[Rule("never", match=lambda o, s: o == 40_960)]))
    future = engine.read(Plan.of(engine.open(path), [0, 41_000, 80_000], [10, 10, 10]))
    seen: set[int] = set()
    while len(seen) < 2:
        items, finished = future.next()
        seen |= set(items.tolist())
        assert not finished
    assert seen == {0, 2}
    assert items_of(future.memory, future.position_bytes, [10, 10, 10])[2] == data[80_000:80_010]
    assert not future.done()
    items, finished = future.next(timeout_s=0.01)
    assert (items.numel(), finished) == (0, False)
    stub_of(engine).release()
    assert future.next()[0].tolist() == [1]


def test_deadline_puts_memory_in_quarantine_until_the_read_completes(
    make: MakeEngine, tmp_path: Path
) -> None:
    path, data = write_file(tmp_path, 400_000)
    stub = CuFileStub(rules=[Rule("never", match=lambda o, s: o == 40_960)])
    # three blocks are out: the next read of two cannot lie there
    engine = make(stub, arena_bytes=16 * KIB)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [0, 41_000, 80_000], [10, 10, 10]))
    until(lambda: stub.busy() == 1 and engine.stats().in_flight == 1)
    future._transfer.deadline = time.monotonic()  # two have come
    with pytest.raises(errors.DeadlineExceededError) as caught:
        future.wait()
    assert (caught.value.path, caught.value.offset_bytes) == (str(path), 40_960)
    assert isinstance(caught.value, TimeoutError)
    held = engine.stats()
    assert (held.quarantined_buffers, held.quarantined_bytes, held.in_flight) == (1, 12_288, 1)
    until(lambda: stub.count("batch_io_cancel") == 1)
    pointer = future.memory.data_ptr()
    del future, caught  # the traceback would keep the future alive
    gc.collect()

    # the engine is still usable ...
    again = engine.read(Plan.of(file, [41_000 + 100_000, 300_000], [4000, 4000]))
    memory = again.wait()
    # ... and does not touch what the device may still write to
    assert not pointer <= memory.data_ptr() < pointer + 12_288
    before = bytes(memory.numpy())
    stub.release()
    until(lambda: engine.stats().quarantined_buffers == 0)
    assert bytes(memory.numpy()) == before
    assert items_of(memory, again.position_bytes, [4000, 4000])[1] == data[300_000:304_000]
    assert engine.stats().in_flight == 0
    until(lambda: engine._pool.held_bytes() == memory.numel())


def test_deadline_of_a_large_read(make: MakeEngine, tmp_path: Path) -> None:
    """A call that does not return holds its thread; others are started in its place."""
    path, data = write_file(tmp_path, 500_000)
    stub = CuFileStub(rules=[Rule("never", match=lambda o, s: s == 128 * KIB, count=2)])
    engine = make(stub, batch_bytes=64 * KIB, large_bytes=128 * KIB, threads=2)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [0], [300_000]))
    until(lambda: stub.count("read") == 2)
    future._transfer.deadline = time.monotonic()
    with pytest.raises(errors.DeadlineExceededError):
        future.wait()
    assert engine.stats().quarantined_buffers == 1
    again = engine.read(Plan.of(file, [10], [300_000]))
    assert items_of(again.wait(), again.position_bytes, [300_000]) == [data[10:300_010]]
    stub.release()
    until(lambda: engine.stats().quarantined_buffers == 0)


def test_a_submission_that_does_not_return(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the engine's thread: reads end at their deadline all the same, and closing leaves
    the thread, its memory and its files behind."""
    path, _ = write_file(tmp_path, 100_000)
    monkeypatch.setattr(loop, "_LAST_CALLS_S", 0.2)
    monkeypatch.setattr(transfer, "_LOOK_LIMIT_S", 0.1)
    armed, entered, released = threading.Event(), threading.Event(), threading.Event()

    class Hanging(CuFileStub):
        def batch_io_submit(self, number: int, count: int, pointer: int, flags: int) -> None:
            if armed.is_set():
                entered.set()
                released.wait(60)
            super().batch_io_submit(number, count, pointer, flags)

    stub = Hanging()
    engine = make(stub)
    file, unused = engine.open(path), engine.open(path)
    armed.set()  # opening reads the first bytes, too
    future = engine.read(Plan.of(file, [0], [4096]), deadline_s=0.1)
    assert entered.wait(10)
    with pytest.raises(errors.DeadlineExceededError):
        future.wait()
    waiting = engine.read(Plan.of(file, [8192], [10]), deadline_s=0.1)
    with pytest.raises(errors.DeadlineExceededError):
        waiting.wait()
    begun = time.monotonic()
    engine.close(grace_s=0.1)
    assert time.monotonic() - begun < 10
    assert unused.number != file.number
    assert stub.count("driver_close") == stub.count("handle_deregister") == 0
    released.set()
    engine._loop._thread.join(10)
    assert not engine._loop._thread.is_alive()


def test_cancel_drops_what_waits_and_keeps_what_is_out(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 600 * 4096)
    stub = CuFileStub(rules=[Rule("hold", match=lambda o, s: o > 0)])
    engine = make(stub, batch_size=4, batches=2)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [2 * (i + 1) * 4096 for i in range(100)], [4096] * 100))
    until(lambda: stub.busy() == 8)
    future.cancel()
    with pytest.raises(errors.TransferCancelledError, match="cancelled"):
        future.wait()
    until(lambda: engine.stats().in_flight == 0)
    assert engine.stats().requests == 8
    assert engine.stats().quarantined_buffers == 0
    assert future.done()


@pytest.mark.parametrize("after_cancel", ["works", "refused", "stale"])
def test_contexts_serve_again_after_they_were_cancelled(
    make: MakeEngine, tmp_path: Path, after_cancel: str
) -> None:
    """Once all their reads have come back: no context is made or given up, however often reads are
    forgotten. Where a library does not do that, nobody notices but that others are made from the
    first time on."""
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("hold", match=lambda o, s: o == 8192)])
    stub.after_cancel = after_cancel
    engine = make(stub, batch_size=1, batches=2)
    file = engine.open(path)
    made = 0
    for turn in range(4):
        held = [engine.read(Plan.of(file, [8200], [10])) for _ in range(2)]
        until(lambda: stub.busy() == 2)
        if turn == 1:
            made = stub.count("batch_io_set_up")
        for each in held:
            each.cancel()
        until(lambda: engine.stats().in_flight == 0 and not engine._loop._flights.active)
        future = engine.read(Plan.of(file, [41_000, 50_000, 5], [10] * 3))
        assert items_of(future.wait(), future.position_bytes, [10] * 3) == [
            data[o : o + 10] for o in (41_000, 50_000, 5)
        ]
    works = after_cancel == "works"
    assert engine._loop._flights.reuses_cancelled is works
    assert (stub.count("batch_io_set_up") == made) is works
    assert stub.count("batch_io_cancel") == 8
    assert engine._loop.batching
    assert stub.count("read") == 0
    stats = engine.stats()
    assert (stats.failures, stats.quarantined_buffers) == (8, 0)
    assert stats.retries <= (2 if after_cancel == "stale" else 0)


def test_timeout_inside_cufile_is_no_completion(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("status", gds_driver.TIMEOUT, match=lambda o, s: o == 8192)])
    engine = make(stub)
    with pytest.raises(errors.ReadError, match="timed out"):
        engine.read(Plan.of(engine.open(path), [8192], [10])).wait()
    assert engine.stats().quarantined_buffers == 1
    engine.close(grace_s=0.05)
    assert engine.stats().quarantined_buffers == 1
    assert any(engine._cufile is kept[0] for kept in left_behind if isinstance(kept, tuple))
    assert stub.count("driver_close") == 0
    assert stub.count("batch_io_destroy") == 1  # the first read's, at open


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["batch_io_set_up", "batch_io_submit", "batch_io_get_status"])
def test_failing_calls_fail_the_read_and_spare_the_engine(
    make: MakeEngine, tmp_path: Path, call: str
) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub()
    engine = make(stub)
    file = engine.open(path)
    stub.refuse[call] = 5030
    with pytest.raises(errors.ReadError, match="5030") as caught:
        engine.read(Plan.of(file, [8200], [10])).wait()
    assert (caught.value.path, caught.value.offset_bytes) == (str(path), 8192)
    stub.refuse.clear()
    again = engine.read(Plan.of(file, [41_000], [10]))
    assert items_of(again.wait(), again.position_bytes, [10]) == [data[41_000:41_010]]
    # nobody knows what became of these: their memory is never used again
    stuck = 0 if call == "batch_io_set_up" else 1
    assert engine.stats().quarantined_buffers == stuck
    engine.close(grace_s=0.05)


def test_a_read_that_fails_without_a_number_says_why(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bindings that are too old, or a library without the function: the device is not to blame."""
    path, _ = write_file(tmp_path, 3_000_000)
    engine = make(CuFileStub(), batch_bytes=64 * KIB)
    file = engine.open(path)
    monkeypatch.setattr(type(stub_of(engine)), "read", lambda *arguments: None)
    with pytest.raises(errors.ReadError, match=r"do not return how many bytes.*13\.0\.3") as caught:
        engine.read(Plan.of(file, [0], [2_000_000])).wait()
    assert caught.value.errno is None
    assert os.strerror(errno.EIO) not in str(caught.value)
    assert (caught.value.path, caught.value.offset_bytes) == (str(path), 0)
