"""What the `gds` engine reads, where it puts it and how long it keeps it, on emulated bindings
(cufile_stub.py); and on a GPU."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.ops import crc32c_ranges
from espnx.storage import FileHandle, NativeEngine, Plan, open_engine
from espnx.storage.gds.cufile import UDEV
from tests.storage.gds.common import (
    KIB,
    MakeEngine,
    items_of,
    make,
    random_plan,
    stub_of,
    until,
    write_file,
)
from tests.storage.gds.cufile_stub import CuFileStub, HostMemory, Rule

__all__ = ["make"]  # a fixture is found by its name in this module


@pytest.mark.parametrize("order", ["fifo", "lifo", "random"])
@pytest.mark.parametrize("gap_bytes", [0, 16 * KIB])
@pytest.mark.parametrize("batch_size", [3, 128])
def test_reads_are_exact(
    make: MakeEngine, tmp_path: Path, order: str, gap_bytes: int, batch_size: int
) -> None:
    """Unaligned items, empty ones, the file's odd end, more entries than one batch holds,
    completions in any order."""
    path, data = write_file(tmp_path, 700_001)
    engine = make(
        CuFileStub(order=order, seed=gap_bytes),
        batch_size=batch_size,
        batch_bytes=64 * KIB,
        large_bytes=32 * KIB,
    )
    file = engine.open(path)
    offsets, sizes = random_plan(batch_size, len(data), 150, 100_000 if gap_bytes else 9000)
    future = engine.read(Plan.of(file, offsets, sizes), gap_bytes=gap_bytes)
    seen = torch.cat(list(future)).tolist()
    assert sorted(seen) == list(range(150))
    assert items_of(future.memory, future.position_bytes, sizes) == [
        data[o : o + s] for o, s in zip(offsets, sizes, strict=True)
    ]
    assert future.done()
    assert future.bytes_asked == sum(sizes)
    assert engine.stats().in_flight == 0


def test_planning_is_the_native_engine_s(make: MakeEngine, tmp_path: Path) -> None:
    """Same requests, same places, same bytes as the C++ engine's for the same plan."""
    path, data = write_file(tmp_path, 300_000)
    offsets, sizes = random_plan(5, len(data), 80, 5000)
    engine = make(batch_bytes=64 * KIB)
    with NativeEngine("posix", request_bytes=64 * KIB) as native:
        theirs = native.read(
            Plan.of(native.open(path, direct=False), offsets, sizes), gap_bytes=4096
        )
        ours = engine.read(Plan.of(engine.open(path, direct=False), offsets, sizes), gap_bytes=4096)
        theirs.wait()
        ours.wait()
        assert torch.equal(ours.position_bytes, theirs.position_bytes)
        assert ours.request_count == theirs.request_count
        assert ours.bytes_moved == theirs.bytes_moved
        assert items_of(ours.memory, ours.position_bytes, sizes) == items_of(
            theirs.memory, theirs.position_bytes, sizes
        )


def test_exactly_the_submitted_reads_are_made(make: MakeEngine, tmp_path: Path) -> None:
    """300 separate blocks are 128 + 128 + 44 entries: no batch is filled up with reads nobody asked
    for."""
    path, data = write_file(tmp_path, 600 * 4096)
    engine = make(arena_bytes=4096 * KIB)
    file = engine.open(path)
    stub_of(engine).calls.clear()
    offsets = [2 * i * 4096 for i in range(300)]
    future = engine.read(Plan.of(file, offsets, [4096] * 300))
    assert items_of(future.wait(), future.position_bytes, [4096] * 300) == [
        data[o : o + 4096] for o in offsets
    ]
    submitted = [
        arguments[1] for name, arguments in stub_of(engine).calls if name == "batch_io_submit"
    ]
    assert submitted == [128, 128, 44]
    assert engine.stats().bytes_moved == 300 * 4096
    assert stub_of(engine).count("buf_register") == 0  # nothing is registered per read
    assert stub_of(engine).count("handle_register") == 0


def test_driver_s_batch_limit_is_kept(make: MakeEngine, tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 40 * 4096)
    engine = make(CuFileStub(max_batch=5), batch_size=128)
    offsets = [2 * i * 4096 for i in range(17)]
    future = engine.read(Plan.of(engine.open(path), offsets, [10] * 17))
    assert items_of(future.wait(), future.position_bytes, [10] * 17) == [
        data[o : o + 10] for o in offsets
    ]


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
    assert items_of(future.wait(), future.position_bytes, sizes) == [
        data[o : o + s] for o, s in zip(offsets, sizes, strict=True)
    ]
    largest = max(arguments[1] for name, arguments in stub_of(engine).calls if name == "read")
    assert largest == 128 * KIB


def test_without_batches_reads_are_made_one_by_one(make: MakeEngine, tmp_path: Path) -> None:
    """Libraries older than the batches' compatibility mode refuse them at submission, or do not
    offer them at all."""
    path, data = write_file(tmp_path, 50_000)
    for prepare in (
        lambda stub: setattr(stub, "batches", False),
        lambda stub: stub.refuse.update(batch_io_submit=5049),
    ):
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
        (
            Plan(torch.tensor([7]), torch.tensor([0]), torch.tensor([1])),
            None,
            errors.InvalidInputError,
        ),
        (
            Plan(torch.tensor([-1]), torch.tensor([0]), torch.tensor([1])),
            None,
            errors.InvalidInputError,
        ),
        (
            Plan(torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([1])),
            None,
            errors.InvalidInputError,
        ),
        (
            Plan(torch.tensor([0]), torch.tensor([0.0]), torch.tensor([1])),
            None,
            errors.InvalidInputError,
        ),
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
    engine = make(
        CuFileStub(order="random"),
        batch_size=7,
        arena_bytes=256 * KIB,
        batch_bytes=32 * KIB,
        large_bytes=16 * KIB,
    )
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
    engine.read(Plan.of(file, [30_000], [50_000])).wait()  # finds no room beside the view ...
    assert len(memory.allocated) == arenas + 1
    assert bytes(view.numpy()) == data[100:200]  # ... and leaves it alone
    del view
    gc.collect()
    assert engine._pool.held_bytes() == 0


def test_memory_is_not_used_again_before_queued_kernels_have_run(
    make: MakeEngine, tmp_path: Path
) -> None:
    path, _ = write_file(tmp_path, 100_000)
    memory = HostMemory()
    engine = make(memory=memory, arena_bytes=64 * KIB)
    file = engine.open(path)
    memory.streams.stream = "side"
    future = engine.read(Plan.of(file, [0], [60_000]))
    pointer = future.wait().data_ptr()
    memory.streams.stream = "default"
    del future
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


@pytest.mark.gpu
@pytest.mark.parametrize("batch_bytes", [4 * KIB, 1024 * KIB])
def test_on_the_gpu(tmp_path: Path, batch_bytes: int) -> None:
    """Whatever path this machine's cuFile takes, the bytes in GPU memory are the file's."""
    path, data = write_file(tmp_path, 3_000_001)
    with open_engine(
        "gds-compat", batch_bytes=batch_bytes, large_bytes=256 * KIB, arena_bytes=32 * 1024 * KIB
    ) as engine:
        try:
            file = engine.open(path)
        except errors.PathUnavailableError as error:
            if os.path.exists(UDEV):
                raise
            pytest.skip(f"[gds] {error}")
        offsets, sizes = random_plan(1, len(data), 400, 30_000)
        offsets, sizes = [*offsets, 1], [*sizes, 3_000_000]
        joined = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        crcs = crc32c_ranges(joined, torch.tensor(offsets), torch.tensor(sizes))
        for _ in range(2):  # the second time in memory that was used before
            future = engine.read(Plan.of(file, offsets, sizes, crc32c=crcs), gap_bytes=8192)
            memory = future.wait()
            assert memory.is_cuda
            assert items_of(memory, future.position_bytes, sizes) == [
                data[o : o + s] for o, s in zip(offsets, sizes, strict=True)
            ]
        places = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
        out = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
        engine.read(Plan.of(file, offsets, sizes, places), out).wait()
        assert bytes(out.cpu().numpy()) == b"".join(
            data[o : o + s] for o, s in zip(offsets, sizes, strict=True)
        )


@pytest.mark.gpu
def test_gds_on_the_gpu_is_direct_or_refused(tmp_path: Path) -> None:
    path, data = write_file(tmp_path, 100_001)
    try:
        with open_engine("gds") as engine:
            file = engine.open(path)
            assert file.effective == "gds"
            future = engine.read(Plan.of(file, [7], [100_000 - 7]))
            assert items_of(future.wait(), future.position_bytes, [100_000 - 7]) == [
                data[7:100_000]
            ]
    except errors.PathUnavailableError as error:
        assert "gds-compat" in str(error)  # noqa: PT017 - either outcome is right; silence would not be
