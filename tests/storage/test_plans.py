"""Whatever a plan asks for arrives: random plans against the bytes of the files, with and without
the caller's own memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from espnx.storage import FileHandle, NativeEngine, Plan
from tests.storage.common import (
    BLOCK,
    CANARY,
    FILLER,
    Case,
    OpenEngine,
    crc32c,
    make_file,
    random_case,
    raw,
    read_bytes,
)

SIZES = (1, 4095, 4096, 4097, 100_003, 196_608)
REQUEST = 16 * 1024
SEEDS = range(8)


def open_all(
    engine: NativeEngine, folder: Path, direct: bool | None
) -> list[tuple[FileHandle, bytes]]:
    files = []
    for i, size in enumerate(SIZES):
        data = make_file(folder / f"file{i}", size, seed=i)
        files.append((engine.open(folder / f"file{i}", direct=direct), data))
    return files


def engine_for(open_engine: OpenEngine, path: str, rng: random.Random) -> NativeEngine:
    return open_engine(
        path,
        queue_depth=rng.choice([1, 2, 3, 8, 64]),
        threads=rng.choice([1, 2, 7]),
        request_bytes=REQUEST,
    )


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
def test_random_plans(
    path: str, direct: bool | None, open_engine: OpenEngine, tmp_path: Path
) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        engine = engine_for(open_engine, path, rng)
        files = open_all(engine, tmp_path, direct)
        futures = []
        for _ in range(4):  # several at once
            case = random_case(rng, files, REQUEST)
            futures.append(
                (
                    case,
                    engine.read(
                        case.plan,
                        gap_bytes=rng.choice([0, 1, 4095, 4096, 100_000]),
                        priority=rng.randint(-2, 2),
                    ),
                )
            )
        rng.shuffle(futures)
        for case, future in futures:
            seen: list[int] = []
            finished = False
            while not finished:
                items, finished = future.next(at_least=rng.choice([0, 1, 2, 1000]))
                seen += items.tolist()
                for i in items.tolist():  # at once, not only when everything is there
                    at = int(future.position_bytes[i])
                    assert (
                        raw(future.memory[at : at + len(case.wanted[i])]) == case.wanted[i]
                        or not case.wanted[i]
                    )
            assert sorted(seen) == list(range(len(case.plan))), "each item exactly once"
            case.check(future.wait(), future.position_bytes)
            assert future.done()
            assert future.bytes_asked == sum(map(len, case.wanted))
        assert engine.stats().in_flight == 0
        assert engine.stats().failures == 0
        engine.close()


def lay_out(rng: random.Random, sizes: list[int], *, aligned: bool) -> tuple[list[int], int]:
    """Places for items in a random order with random holes between them, and the size of the
    memory."""
    places, at = [0] * len(sizes), 0
    for i in rng.sample(range(len(sizes)), len(sizes)):
        at += rng.choice([0, BLOCK, 3 * BLOCK]) if aligned else rng.randint(0, 700)
        places[i] = at
        at += sizes[i]
    return places, at + rng.choice([0, 1, 5000])


def aligned_tensor(size_bytes: int, fill: int) -> torch.Tensor:
    whole = torch.full((size_bytes + BLOCK,), fill, dtype=torch.uint8)
    start = -whole.data_ptr() % BLOCK
    return whole[start : start + size_bytes]


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_the_callers_memory(
    path: str, direct: bool | None, aligned: bool, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Items land where the plan says, and no byte beside them changes."""
    for seed in SEEDS:
        rng = random.Random(1000 + seed)
        engine = engine_for(open_engine, path, rng)
        files = open_all(engine, tmp_path, direct)
        case = random_case(rng, files, REQUEST, aligned=aligned)
        sizes = [len(wanted) for wanted in case.wanted]
        places, memory_bytes = lay_out(rng, sizes, aligned=aligned)
        out = aligned_tensor(memory_bytes + (0 if aligned else 1), CANARY)[(0 if aligned else 1) :]
        wanted = bytearray([CANARY]) * memory_bytes
        for place, data in zip(places, case.wanted, strict=True):
            wanted[place : place + len(data)] = data
        plan = Plan(
            case.plan.file, case.plan.offset_bytes, case.plan.size_bytes, torch.tensor(places)
        )
        future = engine.read(plan, out, gap_bytes=rng.choice([0, 20_000]))
        assert future.wait() is out
        assert raw(out) == bytes(wanted), f"seed {seed}"
        Case(plan, case.wanted).check(out, future.position_bytes)
        engine.close()


def test_filler_is_never_data(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """The end of a file, gaps and widened edges: the buffer around items may hold anything, the
    items no byte that was not read."""
    engine = open_engine(path)
    data = make_file(tmp_path / "a", 3 * BLOCK + 17, seed=3)
    file = engine.open(tmp_path / "a")
    for offset in range(0, len(data), 509):
        for size in (1, 17, len(data) - offset):
            got = read_bytes(engine, file, offset, min(size, len(data) - offset))
            assert FILLER not in got
            assert got == data[offset : offset + size]


def test_recycled_memory_shows_no_other_read(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """A buffer comes back from the pool with another read's bytes in it; none may be taken for this
    read's."""
    engine = open_engine(path)
    long, short = (
        make_file(tmp_path / "long", 64 * 1024, seed=1),
        make_file(tmp_path / "short", 100, seed=2),
    )
    long_file, short_file = engine.open(tmp_path / "long"), engine.open(tmp_path / "short")
    for _ in range(20):
        assert read_bytes(engine, long_file, 0, len(long)) == long
        assert read_bytes(engine, short_file, 0, 100) == short


@pytest.mark.parametrize("with_memory", [False, True])
@pytest.mark.parametrize("count", [0, 3])
def test_nothing_to_read(
    path: str, with_memory: bool, count: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """An empty plan, and a plan of empty items (at the start, inside, at the end): done at once, no
    request."""
    engine = open_engine(path)
    make_file(tmp_path / "a", 5000)
    file = engine.open(tmp_path / "a")
    out = torch.full((8,), CANARY, dtype=torch.uint8) if with_memory else None
    future = engine.read(
        Plan.of(
            file, [0, 77, 5000][:count], [0] * count, [0, 3, 8][:count] if with_memory else None
        ),
        out,
    )
    items, finished = future.next()
    assert sorted(items.tolist()) == list(range(count))
    assert finished
    assert future.done()
    assert future.position_bytes.tolist() == [-1] * count
    future.wait()
    assert list(future) == []
    assert (future.bytes_asked, future.bytes_moved, future.request_count) == (0, 0, 0)
    assert engine.stats().requests == 0
    assert out is None or raw(out) == bytes([CANARY]) * 8


def test_nothing_to_read_into_no_memory(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 5000)
    engine = open_engine(path)
    file = engine.open(tmp_path / "a")
    none = torch.empty(0, dtype=torch.uint8)
    assert engine.read(Plan.of(file, [], [], []), none).wait() is none
    assert engine.read(Plan.of(file, [5], [0], [0]), none).wait() is none


def test_an_empty_file(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    engine = open_engine(path)
    file = engine.open(tmp_path / "a")
    assert file.size_bytes == 0
    assert read_bytes(engine, file, 0, 0) == b""


def test_ten_thousand_items_in_one_call(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 1 << 20)
    engine = open_engine(path)
    file = engine.open(tmp_path / "a")
    rng = random.Random(5)
    offsets = [rng.randrange(len(data) - 64) for _ in range(10_000)]
    future = engine.read(Plan.of(file, offsets, [64] * len(offsets)))
    Case(Plan.of(file, offsets, [64] * len(offsets)), [data[at : at + 64] for at in offsets]).check(
        future.wait(), future.position_bytes
    )


def test_checksums_of_random_plans(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """Right checksums pass for items of every length and alignment; the reference is another
    implementation."""
    engine = open_engine(path, request_bytes=REQUEST)
    files = open_all(engine, tmp_path, None)
    case = random_case(random.Random(9), files, 2000, count=30)
    sums = [crc32c(wanted) for wanted in case.wanted]
    plan = Plan(
        case.plan.file, case.plan.offset_bytes, case.plan.size_bytes, crc32c=torch.tensor(sums)
    )
    future = engine.read(plan)
    case.check(future.wait(), future.position_bytes)


def test_a_file_that_grew_after_it_was_opened(
    disk_path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(disk_path)
    first = make_file(tmp_path / "a", 5000, seed=1)
    file = engine.open(tmp_path / "a")
    assert read_bytes(engine, file, 0, 5000) == first
    with open(tmp_path / "a", "ab") as stream:
        stream.write(b"more" * 3000)
    assert read_bytes(engine, file, 4990, 12_010) == first[4990:] + b"more" * 3000
