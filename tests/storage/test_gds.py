"""The `gds` engine on emulated bindings (cufile_stub.py): the same structures and calls, in host memory, with faults on demand."""

from __future__ import annotations

import errno
import gc
import random
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.storage import FileHandle, NativeEngine, Plan, gds_driver, open_engine
from espnx.storage.gds import GdsEngine
from espnx.storage.gds_loop import IDLE_RETRIES, abandoned
from tests.storage.cufile_stub import CuFileStub, HostMemory, Rule

KIB = 1024
MakeEngine = Callable[..., GdsEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeEngine]:
    """Builds engines on a stub; afterwards nothing forbidden may have been done and nothing may be left behind."""
    built: list[GdsEngine] = []

    def build(stub: CuFileStub | None = None, path: str = "gds-compat", **options: Any) -> GdsEngine:
        options.setdefault("arena_bytes", 1024 * KIB)
        engine = GdsEngine(path, bindings=stub or CuFileStub(), memory=options.pop("memory", None) or HostMemory(), poison=True, **options)
        built.append(engine)
        return engine

    yield build
    for engine in built:
        stub = engine._cufile._bindings
        stub.release()
        engine.close()
        assert stub.violations == []


def write_file(folder: Path, size_bytes: int, seed: int = 0, name: str = "data") -> tuple[Path, bytes]:
    data = random.Random(seed).randbytes(size_bytes)
    path = folder / name
    path.write_bytes(data)
    return path, data


def stub_of(engine: GdsEngine) -> CuFileStub:
    return engine._cufile._bindings


def items_of(memory: torch.Tensor, position: torch.Tensor, sizes: list[int]) -> list[bytes]:
    return [bytes(memory[p : p + s].cpu().numpy()) if s else b"" for p, s in zip(position.tolist(), sizes, strict=True)]


def random_plan(seed: int, file_bytes: int, count: int, largest: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 7, 512, 4096, 4097, rng.randrange(largest + 1)]) for _ in range(count)]
    offsets = [rng.randrange(file_bytes - size + 1) for size in sizes]
    if count > 3:
        offsets[0], sizes[0] = file_bytes - 13, 13  # the end of the file
        offsets[1], sizes[1] = 0, 4096
    return offsets, sizes


def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


@pytest.mark.parametrize("order", ["fifo", "lifo", "random"])
@pytest.mark.parametrize("gap_bytes", [0, 16 * KIB])
@pytest.mark.parametrize("batch_size", [3, 128])
def test_reads_are_exact(make: MakeEngine, tmp_path: Path, order: str, gap_bytes: int, batch_size: int) -> None:
    """Unaligned items, empty ones, the file's odd end, more entries than one batch holds, completions in any order."""
    path, data = write_file(tmp_path, 700_001)
    engine = make(CuFileStub(order=order, seed=gap_bytes), batch_size=batch_size, batch_bytes=64 * KIB, large_bytes=32 * KIB)
    file = engine.open(path)
    offsets, sizes = random_plan(batch_size, len(data), 150, 100_000 if gap_bytes else 9000)
    future = engine.read(Plan.of(file, offsets, sizes), gap_bytes=gap_bytes)
    seen = torch.cat(list(future)).tolist()
    assert sorted(seen) == list(range(150))
    assert items_of(future.memory, future.position_bytes, sizes) == [data[o : o + s] for o, s in zip(offsets, sizes, strict=True)]
    assert future.done()
    assert future.bytes_asked == sum(sizes)
    assert engine.stats().in_flight == 0


def test_planning_is_the_native_engine_s(make: MakeEngine, tmp_path: Path) -> None:
    """Same requests, same places, same bytes as the C++ engine's for the same plan."""
    path, data = write_file(tmp_path, 300_000)
    offsets, sizes = random_plan(5, len(data), 80, 5000)
    engine = make(batch_bytes=64 * KIB)
    with NativeEngine("posix", request_bytes=64 * KIB) as native:
        theirs = native.read(Plan.of(native.open(path, direct=False), offsets, sizes), gap_bytes=4096)
        ours = engine.read(Plan.of(engine.open(path, direct=False), offsets, sizes), gap_bytes=4096)
        theirs.wait()
        ours.wait()
        assert torch.equal(ours.position_bytes, theirs.position_bytes)
        assert ours.request_count == theirs.request_count
        assert ours.bytes_moved == theirs.bytes_moved
        assert items_of(ours.memory, ours.position_bytes, sizes) == items_of(theirs.memory, theirs.position_bytes, sizes)


def test_exactly_the_submitted_reads_are_made(make: MakeEngine, tmp_path: Path) -> None:
    """300 separate blocks are 128 + 128 + 44 entries: no batch is filled up with reads nobody asked for."""
    path, data = write_file(tmp_path, 600 * 4096)
    engine = make(arena_bytes=4096 * KIB)
    file = engine.open(path)
    stub_of(engine).calls.clear()
    offsets = [2 * i * 4096 for i in range(300)]
    future = engine.read(Plan.of(file, offsets, [4096] * 300))
    assert items_of(future.wait(), future.position_bytes, [4096] * 300) == [data[o : o + 4096] for o in offsets]
    submitted = [arguments[1] for name, arguments in stub_of(engine).calls if name == "batch_io_submit"]
    assert submitted == [128, 128, 44]
    assert engine.stats().bytes_moved == 300 * 4096
    assert stub_of(engine).count("buf_register") == 0  # nothing is registered per read
    assert stub_of(engine).count("handle_register") == 0


def test_driver_s_batch_limit_is_kept(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 40 * 4096)
    engine = make(CuFileStub(max_batch=5), batch_size=128)
    offsets = [2 * i * 4096 for i in range(17)]
    future = engine.read(Plan.of(engine.open(path), offsets, [10] * 17))
    assert items_of(future.wait(), future.position_bytes, [10] * 17) == [data[o : o + 10] for o in offsets]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_to_read(make: MakeEngine, tmp_path: Path, sizes: list[int]) -> None:
    path, _ = write_file(tmp_path, 100)
    engine = make()
    future = engine.read(Plan.of(engine.open(path), [0] * len(sizes), sizes))
    items, finished = future.next(at_least=10)
    assert finished
    assert sorted(items.tolist()) == list(range(len(sizes)))
    assert future.wait().numel() == 0
    assert future.position_bytes.tolist() == [-1] * len(sizes)


def test_large_items_are_read_in_pieces_of_their_own(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 1_000_003)
    engine = make(batch_bytes=64 * KIB, large_bytes=128 * KIB, threads=2, arena_bytes=4096 * KIB)
    file = engine.open(path)
    stub_of(engine).calls.clear()
    offsets, sizes = [5, 100, 999_000], [1_000_003 - 5, 700_001, 3]
    future = engine.read(Plan.of(file, offsets, sizes))
    assert items_of(future.wait(), future.position_bytes, sizes) == [data[o : o + s] for o, s in zip(offsets, sizes, strict=True)]
    largest = max(arguments[1] for name, arguments in stub_of(engine).calls if name == "read")
    assert largest == 128 * KIB


def test_without_batches_reads_are_made_one_by_one(make: MakeEngine, tmp_path: Path) -> None:
    """Libraries older than the batches' compatibility mode refuse them at submission, or do not offer them at all."""
    path, data = write_file(tmp_path, 50_000)
    for prepare in (lambda stub: setattr(stub, "batches", False), lambda stub: stub.refuse.update(batch_io_submit=5049)):
        stub = CuFileStub()
        prepare(stub)
        engine = make(stub)
        future = engine.read(Plan.of(engine.open(path), [1, 20_000, 49_990], [10, 9000, 10]))
        expected = [data[1:11], data[20_000:29_000], data[49_990:]]
        assert items_of(future.wait(), future.position_bytes, [10, 9000, 10]) == expected
        assert "no batches" in engine.fallback_reason


def test_into_the_caller_s_memory(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_000)
    engine = make()
    offsets, sizes, places = [0, 4096, 50_001, 7], [4096, 4096, 777, 0], [100, 4196, 20_000, 5]
    out = torch.full((30_000,), 0x77, dtype=torch.uint8)
    future = engine.read(Plan.of(engine.open(path), offsets, sizes, places), out)
    assert future.wait() is out
    expected = bytearray(b"\x77" * 30_000)
    for offset, size, place in zip(offsets, sizes, places, strict=True):
        expected[place : place + size] = data[offset : offset + size]
    assert bytes(out.numpy()) == bytes(expected)
    assert future.position_bytes.tolist() == [100, 4196, 20_000, -1]


def bad_plans(file: FileHandle) -> list[tuple[Plan, Any, type[Exception]]]:
    out = torch.empty(100, dtype=torch.uint8)
    return [
        (Plan.of(file, [-1], [5]), None, errors.InvalidInputError),
        (Plan.of(file, [0], [-5]), None, errors.InvalidInputError),
        (Plan.of(file, [2**62], [2**62]), None, errors.InvalidInputError),
        (Plan.of(file, [0, 95], [5, 6]), None, errors.TruncatedFileError),
        (Plan(torch.tensor([7]), torch.tensor([0]), torch.tensor([1])), None, errors.InvalidInputError),
        (Plan(torch.tensor([-1]), torch.tensor([0]), torch.tensor([1])), None, errors.InvalidInputError),
        (Plan(torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([1])), None, errors.InvalidInputError),
        (Plan(torch.tensor([0]), torch.tensor([0.0]), torch.tensor([1])), None, errors.InvalidInputError),
        (Plan.of(file, [0], [5]), out, errors.InvalidInputError),
        (Plan.of(file, [0], [5], [96]), out, errors.InvalidInputError),
        (Plan.of(file, [0], [5], [-1]), out, errors.InvalidInputError),
        (Plan.of(file, [0], [5], [0]), out[::2], errors.InvalidInputError),
        (Plan.of(file, [0], [5], [0]), out.float(), errors.InvalidInputError),
    ]


def test_bad_plans_are_refused_before_anything_is_read(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 100)
    engine = make()
    file = engine.open(path)
    stub_of(engine).calls.clear()
    for plan, out, kind in bad_plans(file):
        with pytest.raises(kind):
            engine.read(plan, out)
    for options in ({"gap_bytes": -1}, {"deadline_s": 0.0}):
        with pytest.raises(errors.InvalidInputError):
            engine.read(Plan.of(file, [0], [1]), **options)
    assert stub_of(engine).count("batch_io_submit") == 0
    with pytest.raises(errors.PathUnavailableError, match="uring"):
        engine.write(Plan.of(file, [0], [1]), torch.zeros(1, dtype=torch.uint8))


def test_file_that_grew_is_read_whole(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100)
    engine = make()
    file = engine.open(path)
    with path.open("ab") as more:
        more.write(b"x" * 50)
    future = engine.read(Plan.of(file, [90], [60]))
    assert items_of(future.wait(), future.position_bytes, [60]) == [data[90:] + b"x" * 50]


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
def test_failed_entry_is_named(make: MakeEngine, tmp_path: Path, rule: Rule, number: int | None, words: str, batches: bool) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[rule])
    stub.batches = batches
    engine = make(stub)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [0, 8200, 40_000], [10, 10, 10]))
    with pytest.raises(errors.ReadError) as caught:
        future.wait()
    assert (caught.value.path, caught.value.offset_bytes, caught.value.size_bytes) == (str(path), 8192, 4096)
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


@pytest.mark.parametrize("moved", [1, 4095, 4096, 5000, 8192])
@pytest.mark.parametrize("batches", [True, False])
def test_short_reads_go_on_from_the_last_whole_block(make: MakeEngine, tmp_path: Path, moved: int, batches: bool) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("short", moved, match=lambda o, s: s > 4096, count=3)])
    stub.batches = batches
    engine = make(stub)
    file = engine.open(path)
    assert file.direct
    future = engine.read(Plan.of(file, [100, 90_000], [60_000, 10_000]))
    assert items_of(future.wait(), future.position_bytes, [60_000, 10_000]) == [data[100:60_100], data[90_000:]]
    assert engine.stats().retries == 3
    offsets = [arguments[2] for name, arguments in stub.calls if name == "read"]
    assert all(offset % 4096 == 0 for offset in offsets)
    assert future.bytes_moved == 61_440 + 100_000 - 86_016  # each byte once, whatever was read again


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


def test_checksums(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 50_000)
    engine = make()
    file = engine.open(path)
    offsets, sizes = [0, 4097, 30_000, 5], [10, 9000, 20_000, 0]
    joined = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    crcs = torch.ops.espnx.crc32c(joined, torch.tensor(offsets), torch.tensor(sizes))
    crcs[3] = 12345  # the empty item has no bytes to be wrong
    future = engine.read(Plan.of(file, offsets, sizes, crc32c=crcs))
    assert items_of(future.wait(), future.position_bytes, sizes) == [data[o : o + s] for o, s in zip(offsets, sizes, strict=True)]
    stub_of(engine).rules.append(Rule("flip", 8 * 1000 + 3, match=lambda o, s: o == 4096))
    with pytest.raises(errors.ChecksumError) as caught:
        engine.read(Plan.of(file, offsets, sizes, crc32c=crcs)).wait()
    assert (caught.value.offset_bytes, caught.value.size_bytes, caught.value.path) == (4097, 9000, str(path))


def test_an_entry_reported_twice_counts_once(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_000)
    engine = make(CuFileStub(rules=[Rule("twice", match=lambda o, s: o == 0, nth=2), Rule("late", 5, match=lambda o, s: o == 40_960)]))
    file = engine.open(path)
    future = engine.read(Plan.of(file, [0, 41_000], [10, 10]))
    assert items_of(future.wait(), future.position_bytes, [10, 10]) == [data[:10], data[41_000:41_010]]
    assert engine.stats().in_flight == 0


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


def test_deadline_puts_memory_in_quarantine_until_the_read_completes(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 400_000)
    stub = CuFileStub(rules=[Rule("never", match=lambda o, s: o == 40_960)])
    engine = make(stub, arena_bytes=16 * KIB)  # three blocks are out: the next read of two cannot lie there
    file = engine.open(path)
    future = engine.read(Plan.of(file, [0, 41_000, 80_000], [10, 10, 10]), deadline_s=0.05)
    with pytest.raises(errors.DeadlineExceededError) as caught:
        future.wait()
    assert (caught.value.path, caught.value.offset_bytes) == (str(path), 40_960)
    assert isinstance(caught.value, TimeoutError)
    held = engine.stats()
    assert (held.quarantined_buffers, held.quarantined_bytes, held.in_flight) == (1, 12_288, 1)
    assert stub.count("batch_io_cancel") == 1
    pointer = future.memory.data_ptr()
    del future
    gc.collect()

    again = engine.read(Plan.of(file, [41_000 + 100_000, 300_000], [4000, 4000]))  # the engine is still usable ...
    memory = again.wait()
    assert not pointer <= memory.data_ptr() < pointer + 12_288  # ... and does not touch what the device may still write to
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
    with pytest.raises(errors.DeadlineExceededError):
        engine.read(Plan.of(file, [0], [300_000]), deadline_s=0.05).wait()
    assert engine.stats().quarantined_buffers == 1
    again = engine.read(Plan.of(file, [10], [300_000]), deadline_s=5.0)
    assert items_of(again.wait(), again.position_bytes, [300_000]) == [data[10:300_010]]
    stub.release()
    until(lambda: engine.stats().quarantined_buffers == 0)


def test_cancel_drops_what_waits_and_keeps_what_is_out(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 600 * 4096)
    stub = CuFileStub(rules=[Rule("hold", match=lambda o, s: o > 0)])
    engine = make(stub, batch_size=4, batches=2)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [2 * (i + 1) * 4096 for i in range(100)], [4096] * 100))
    until(lambda: stub.busy() == 8)
    future.cancel()
    with pytest.raises(errors.EngineClosedError, match="cancelled"):
        future.wait()
    until(lambda: engine.stats().in_flight == 0)
    assert engine.stats().requests == 8
    assert engine.stats().quarantined_buffers == 0
    assert future.done()
    assert stub.count("batch_io_destroy") >= 2  # a cancelled context is not used again


def test_timeout_inside_cufile_is_no_completion(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("status", gds_driver.TIMEOUT, match=lambda o, s: o == 8192)])
    engine = make(stub)
    with pytest.raises(errors.ReadError, match="timed out"):
        engine.read(Plan.of(engine.open(path), [8192], [10])).wait()
    assert engine.stats().quarantined_buffers == 1
    engine.close(grace_s=0.05)
    assert engine.stats().quarantined_buffers == 1
    assert abandoned
    assert stub.count("driver_close") == 0


@pytest.mark.parametrize("call", ["batch_io_set_up", "batch_io_submit", "batch_io_get_status"])
def test_failing_calls_fail_the_read_and_spare_the_engine(make: MakeEngine, tmp_path: Path, call: str) -> None:
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
    stuck = 0 if call == "batch_io_set_up" else 1  # nobody knows what became of these: their memory is never used again
    assert engine.stats().quarantined_buffers == stuck
    engine.close(grace_s=0.05)


def test_higher_priority_goes_first(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 600 * 4096)
    stub = CuFileStub(rules=[Rule("never", match=lambda o, s: o == 4096)])
    engine = make(stub, batch_size=1, batches=1)
    file = engine.open(path)
    first = engine.read(Plan.of(file, [4096], [10]))  # fills the queue
    until(lambda: stub.busy() == 1)
    low = engine.read(Plan.of(file, [8192 * i + 16_384 for i in range(5)], [10] * 5))
    high = engine.read(Plan.of(file, [8192 * i + 409_600 for i in range(5)], [10] * 5), priority=1)
    order: list[int] = []
    stub.rules.append(Rule("late", 0, match=lambda o, s: order.append(o) or False))  # type: ignore[func-returns-value]
    stub.release()
    for future in (first, high, low):
        future.wait()
    assert [offset >= 409_600 for offset in order] == [True] * 5 + [False] * 5


def test_many_threads(make: MakeEngine, tmp_path: Path) -> None:
    paths = [write_file(tmp_path, 300_007, seed=i, name=f"f{i}") for i in range(2)]
    engine = make(CuFileStub(order="random"), batch_size=7, arena_bytes=256 * KIB, batch_bytes=32 * KIB, large_bytes=16 * KIB)
    files = [engine.open(path) for path, _ in paths]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(12):
                which = (seed + i) % 2
                data = paths[which][1]
                offsets, sizes = random_plan(100 * seed + i, len(data), 20, 40_000)
                future = engine.read(Plan.of(files[which], offsets, sizes), gap_bytes=4096)
                assert items_of(future.wait(), future.position_bytes, sizes) == [
                    data[o : o + s] for o, s in zip(offsets, sizes, strict=True)
                ]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert stub_of(engine).count("driver_open") == 1
    assert engine._memory.threads  # every thread that calls cuFile has made the device current


def test_memory_comes_back_when_nobody_can_see_it(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_000)
    memory = HostMemory()
    engine = make(memory=memory, arena_bytes=64 * KIB)
    file = engine.open(path)
    arenas = len(memory.allocated)
    for i in range(50):  # the arena is used again and again, never registered again
        engine.read(Plan.of(file, [i * 100], [50_000])).wait()
    assert len(memory.allocated) == arenas
    assert stub_of(engine).count("buf_register") == arenas

    view = engine.read(Plan.of(file, [7], [20_000])).wait()[100:200]
    gc.collect()
    engine.read(Plan.of(file, [30_000], [40_000])).wait()  # finds no room beside the view ...
    assert len(memory.allocated) == arenas + 1
    assert bytes(view.numpy()) == data[100:200]  # ... and leaves it alone
    del view
    gc.collect()
    assert engine._pool.held_bytes() == 0


def test_memory_is_not_used_again_before_queued_kernels_have_run(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 100_000)
    memory = HostMemory()
    engine = make(memory=memory, arena_bytes=64 * KIB)
    file = engine.open(path)
    memory.current.stream = "side"
    pointer = engine.read(Plan.of(file, [0], [60_000])).wait().data_ptr()
    memory.current.stream = "default"
    memory.busy = {"side"}  # a kernel on the stream that took the items has not run
    gc.collect()
    other = engine.read(Plan.of(file, [0], [60_000])).wait().data_ptr()
    assert not pointer <= other < pointer + 61_440
    memory.busy = set()
    gc.collect()
    assert engine._pool.held_bytes() == 0


def test_closing_a_file_under_a_read(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("never", match=lambda o, s: o == 8192)])
    engine = make(stub)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [8192], [10]))
    until(lambda: stub.busy() == 1)
    engine.close_file(file)
    assert stub.count("handle_deregister") == 0
    stub.release()
    assert items_of(future.wait(), future.position_bytes, [10]) == [data[8192:8202]]
    until(lambda: stub.count("handle_deregister") == 1)
    for use in (lambda: engine.read(Plan.of(file, [0], [1])), lambda: engine.close_file(file)):
        with pytest.raises(errors.InvalidInputError):
            use()


def test_closing_the_engine(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 100_000)
    stub = CuFileStub(rules=[Rule("hold", match=lambda o, s: o == 8192)])
    engine = make(stub)
    file = engine.open(path)
    held = engine.read(Plan.of(file, [0], [10])).wait()
    before = bytes(held.numpy())
    future = engine.read(Plan.of(file, [8192], [10]))
    until(lambda: stub.busy() == 1)
    engine.close()
    engine.close()
    with pytest.raises(errors.EngineClosedError):
        future.wait()
    for use in (lambda: engine.read(Plan.of(file, [0], [1])), lambda: engine.open(path)):
        with pytest.raises(errors.EngineClosedError):
            use()
    assert bytes(held.numpy()) == before  # results stay readable
    assert (stub.open_count, stub.handles, stub.regions) == (0, {}, {})
    assert stub.count("handle_register") == 1


def test_opening_files(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 5000)
    path.chmod(0o444)
    engine = make()
    file = engine.open(path)
    assert (file.path, file.size_bytes, file.requested, file.effective) == (str(path), 5000, "gds-compat", "gds-compat")
    assert (file.direct, file.alignment_bytes) == (True, 4096)
    buffered = engine.open(path, direct=False)
    assert (buffered.effective, buffered.alignment_bytes) == ("gds-compat (buffered)", 1)
    with pytest.raises(errors.StoreNotFoundError):
        engine.open(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    with pytest.raises(errors.ReadError):
        engine.open(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="uring"):
        engine.open(path, "w")
    assert path.stat().st_size == 5000


def test_first_read_of_a_file_fails(make: MakeEngine, tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, 5000)
    engine = make(CuFileStub(rules=[Rule("error", errno.EIO, count=1)]))
    with pytest.raises(errors.ReadError) as caught:
        engine.open(path)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(path))
    assert stub_of(engine).handles == {}
    engine.open(path)


@pytest.mark.parametrize(
    ("requested", "direct", "effective"),
    [("gds", True, "gds"), ("gds", False, None), ("gds-compat", True, "gds"), ("gds-compat", False, "gds-compat")],
)
def test_effective_path(make: MakeEngine, tmp_path: Path, requested: str, direct: bool, effective: str | None) -> None:
    path, data = write_file(tmp_path, 5000)
    stub = CuFileStub(direct=direct)
    if effective is None:
        with pytest.raises(errors.PathUnavailableError, match="gds-compat"):
            make(stub, requested)
        assert stub.open_count == 0
        return
    engine = make(stub, requested)
    file = engine.open(path)
    assert (file.effective, file.requested) == (effective, requested)
    assert stub.allow_compat is (requested == "gds-compat")
    empty = tmp_path / "empty"
    empty.touch()
    engine.open(empty)
    future = engine.read(Plan.of(file, [4000], [1000]))
    assert items_of(future.wait(), future.position_bytes, [1000]) == [data[4000:]]


def test_driver_that_another_library_opened(make: MakeEngine, tmp_path: Path) -> None:
    """Then compatibility mode cannot be switched off, and statistics have to show that reads are direct."""
    path, _ = write_file(tmp_path, 5000)
    stub = CuFileStub(direct=True)
    stub.open_count = 1
    assert make(stub, "gds").open(path).effective == "gds"
    for spoil in ({"force_compat": True}, {"statistics": False}):
        stub = CuFileStub(direct=True)
        stub.open_count = 1
        engine = None
        vars(stub).update(spoil)
        with pytest.raises(errors.PathUnavailableError, match="gds-compat"):
            engine = make(stub, "gds")
            engine.open(path)
        if engine is not None:
            engine.close()
        assert stub.open_count == 1  # it is not ours to close
        assert stub.handles == {}


def test_two_engines_share_the_driver(make: MakeEngine) -> None:
    stub = CuFileStub()
    first, second = make(stub), make(stub)
    first.close()
    assert stub.open_count == 1
    second.close()
    assert stub.open_count == 0
    assert stub.count("driver_open") == 1


def test_memory_that_cannot_be_registered(make: MakeEngine, tmp_path: Path) -> None:
    """Direct reads need it; in compatibility mode cuFile has buffers of its own, and the engine says so."""
    path, data = write_file(tmp_path, 5000)
    stub = CuFileStub(direct=True)
    stub.register_fails = True
    with pytest.raises(errors.PathUnavailableError, match="registered"):
        make(stub, "gds")
    stub = CuFileStub()
    stub.register_fails = True
    engine = make(stub)
    future = engine.read(Plan.of(engine.open(path), [1], [4000]))
    assert items_of(future.wait(), future.position_bytes, [4000]) == [data[1:4001]]
    assert "not registered" in engine.fallback_reason


@pytest.mark.parametrize(
    "options",
    [{"path": "uring"}, {"batch_size": 0}, {"batches": 0}, {"threads": 0}, {"batch_bytes": 1000}, {"large_bytes": 0}, {"arena_bytes": 1}],
)
def test_options_out_of_range(make: MakeEngine, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError):
        make(**options)


def test_driver_that_hangs(monkeypatch: pytest.MonkeyPatch, make: MakeEngine) -> None:
    stub = CuFileStub()
    gate = threading.Event()
    monkeypatch.setattr(gds_driver, "_OPEN_LIMIT_S", 0.05)
    monkeypatch.setattr(stub, "driver_open", lambda: gate.wait(10) and None, raising=False)
    with pytest.raises(errors.PathUnavailableError, match="did not return"):
        make(stub)
    gate.set()


def fake_package(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", module)  # None: the import fails


def test_missing_bindings_and_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(monkeypatch, None)
    with pytest.raises(errors.MissingDependencyError, match="cuda-bindings"):
        GdsEngine("gds", memory=HostMemory())
    module: Any = types.ModuleType("cuda.bindings.cufile")

    def get_version() -> int:
        raise RuntimeError('Failure finding "libcufile.so.0"')

    module.get_version = get_version
    fake_package(monkeypatch, module)
    with pytest.raises(errors.MissingDependencyError, match="libcufile"):
        GdsEngine("gds-compat", memory=HostMemory())


def test_no_gpu_is_said_in_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for path in ("gds", "gds-compat"):
        with pytest.raises(errors.PathUnavailableError, match="CUDA device"):
            open_engine(path)


def test_importing_storage_imports_no_cuda() -> None:
    code = "import sys, espnx.storage; print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'kvikio', 'cupy') or '.gds' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_structures_are_those_of_the_bindings() -> None:
    """Our layouts of the C structures against the installed bindings', field by field."""
    cufile = pytest.importorskip(
        "cuda.bindings.cufile", reason="cuda-bindings is not installed (pip install espnx[gds])", exc_type=ImportError
    )
    flat = cufile.io_params_dtype
    inner = flat["u"]["batch"]
    at = {name: flat.fields[name][1] for name in ("mode", "fh", "opcode", "cookie")}
    at |= {name: flat.fields["u"][1] + inner.fields[name][1] for name in ("dev_ptr_base", "file_offset", "dev_ptr_offset", "size_")}
    names = {"mode": "mode", "base": "dev_ptr_base", "file_offset": "file_offset", "base_offset": "dev_ptr_offset"}
    names |= {"size": "size_", "handle": "fh", "opcode": "opcode", "cookie": "cookie"}
    ours = gds_driver._PARAMS
    assert {name: ours.fields[name][1] for name in names} == {name: at[theirs] for name, theirs in names.items()}
    assert ours.itemsize == flat.itemsize
    assert [gds_driver.EVENTS.fields[name][1] for name in ("cookie", "status", "ret")] == [0, 8, 16]
    assert gds_driver.EVENTS.itemsize == cufile.io_events_dtype.itemsize
    assert gds_driver._DESCRIPTOR.itemsize == cufile.descr_dtype.itemsize
    assert [gds_driver._DESCRIPTOR.fields[n][1] for n in ("type", "fd", "fs_ops")] == [
        cufile.descr_dtype.fields[n][1] for n in ("type", "handle", "fs_ops")
    ]
    stats = cufile.stats_level1_dtype
    counters = {"nvfs_submit": gds_driver._NVFS_AT, "p2p_submit": gds_driver._P2P_AT, "posix_enqueued": gds_driver._POSIX_AT}
    counters |= {"aio_submit": gds_driver._AIO_AT, "iouring_submit": gds_driver._IO_URING_AT}
    assert {name: stats.fields[f"batch_{name}_ops"][1] for name in counters} == counters
    assert stats.itemsize < gds_driver._STATS_BYTES
    codes = {"DRIVER_ALREADY_OPEN": gds_driver.DRIVER_ALREADY_OPEN, "IO_NOT_SUPPORTED": 5008, "BATCH_NOCOMPAT_ERROR": 5049}
    assert {name: int(getattr(cufile.OpError, name)) for name in codes} == codes
    statuses = ("WAITING", "PENDING", "INVALID", "CANCELED", "COMPLETE", "TIMEOUT", "FAILED")
    assert [int(getattr(cufile.Status, name)) for name in statuses] == [getattr(gds_driver, name) for name in statuses]


@pytest.mark.gpu
@pytest.mark.parametrize("batch_bytes", [4 * KIB, 1024 * KIB])
def test_on_the_gpu(tmp_path: Path, batch_bytes: int) -> None:
    """Whatever path this machine's cuFile takes, the bytes in GPU memory are the file's."""
    path, data = write_file(tmp_path, 3_000_001)
    with open_engine("gds-compat", batch_bytes=batch_bytes, large_bytes=256 * KIB, arena_bytes=32 * 1024 * KIB) as engine:
        file = engine.open(path)
        offsets, sizes = random_plan(1, len(data), 400, 30_000)
        offsets, sizes = [*offsets, 1], [*sizes, 3_000_000]
        joined = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        crcs = torch.ops.espnx.crc32c(joined, torch.tensor(offsets), torch.tensor(sizes))
        for _ in range(2):  # the second time in memory that was used before
            future = engine.read(Plan.of(file, offsets, sizes, crc32c=crcs), gap_bytes=8192)
            memory = future.wait()
            assert memory.is_cuda
            assert items_of(memory, future.position_bytes, sizes) == [data[o : o + s] for o, s in zip(offsets, sizes, strict=True)]
        places = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
        out = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
        engine.read(Plan.of(file, offsets, sizes, places), out).wait()
        assert bytes(out.cpu().numpy()) == b"".join(data[o : o + s] for o, s in zip(offsets, sizes, strict=True))


@pytest.mark.gpu
def test_gds_on_the_gpu_is_direct_or_refused(tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_001)
    try:
        with open_engine("gds") as engine:
            file = engine.open(path)
            assert file.effective == "gds"
            future = engine.read(Plan.of(file, [7], [100_000 - 7]))
            assert items_of(future.wait(), future.position_bytes, [100_000 - 7]) == [data[7:100_000]]
    except errors.PathUnavailableError as error:
        assert "gds-compat" in str(error)  # noqa: PT017 - either outcome is right; silence would not be
