"""What was written is there for a fresh engine; reserving, cutting, flushing and renaming do what
they say."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import FaultRule, NativeEngine, Plan
from tests.storage.common import BLOCK, CANARY, OpenEngine, content, make_file, raw, read_bytes

REQUEST = 16 * 1024


def tensor_of(data: bytes) -> torch.Tensor:
    """Page-aligned memory with these bytes."""
    whole = torch.zeros(len(data) + BLOCK, dtype=torch.uint8)
    start = -whole.data_ptr() % BLOCK
    whole[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return whole[start : start + len(data)]


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
def test_write_and_read_back(
    disk_path: str, direct: bool | None, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Items in any order, one of many requests; what is between them stays."""
    old = make_file(tmp_path / "a", 64 * BLOCK, seed=1)
    new = content(64 * BLOCK, seed=2)
    for seed in range(6):
        rng = random.Random(seed)
        engine = open_engine(disk_path, request_bytes=REQUEST, queue_depth=rng.choice([1, 3, 64]))
        file = engine.open(tmp_path / "a", "r+", direct=direct)
        unit = BLOCK if file.alignment_bytes > 1 else 1
        cuts = sorted(rng.sample(range(64 * BLOCK // unit), 9))
        pieces = [(a * unit, (b - a) * unit) for a, b in itertools.pairwise(cuts)][::2]
        rng.shuffle(pieces)
        source = tensor_of(new)
        plan = Plan.of(file, [o for o, _ in pieces], [s for _, s in pieces], [o for o, _ in pieces])
        future = engine.write(plan, source)
        seen = [i for items in future for i in items.tolist()]
        assert sorted(seen) == list(range(len(pieces)))
        assert raw(source) == new
        engine.sync(file)
        engine.close()
        wanted = bytearray(old)
        for offset, size in pieces:
            wanted[offset : offset + size] = new[offset : offset + size]
        fresh = open_engine("posix" if disk_path == "uring" else "auto")
        assert read_bytes(
            fresh,
            fresh.open(tmp_path / "a", direct=None if direct is False else False),
            0,
            64 * BLOCK,
        ) == bytes(wanted)
        assert (tmp_path / "a").read_bytes() == bytes(wanted)
        old = bytes(wanted)


def test_a_new_file_grows_as_it_is_written(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(path, request_bytes=REQUEST)
    data = content(5 * REQUEST, seed=4)
    file = engine.open(tmp_path / "w", "w")
    assert file.size_bytes == 0
    engine.write(Plan.of(file, [0], [len(data)], [0]), tensor_of(data)).wait()
    assert read_bytes(engine, file, 0, len(data)) == data
    assert read_bytes(engine, file, 12_345, 100) == data[12_345:12_445]
    if path == "memory":
        assert not (tmp_path / "w").exists()
    else:
        assert (tmp_path / "w").read_bytes() == data


@pytest.mark.parametrize(
    ("offset", "size", "to"), [(1, 4096, 0), (0, 4095, 0), (0, 4096, 1), (512, 512, 0)]
)
def test_direct_writes_must_be_aligned(
    disk_path: str, offset: int, size: int, to: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(disk_path)
    file = engine.open(tmp_path / "w", "w")
    if not file.direct:
        pytest.skip(f"[file system] no O_DIRECT in {tmp_path}")
    with pytest.raises(errors.InvalidInputError, match="4096"):
        engine.write(Plan.of(file, [offset], [size], [to]), tensor_of(bytes(3 * BLOCK)))
    assert (tmp_path / "w").stat().st_size == 0
    assert engine.stats().requests == 0


def test_opening_for_writing(disk_path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(disk_path)
    data = make_file(tmp_path / "a", 9000)
    assert engine.open(tmp_path / "a", "r+").size_bytes == 9000
    assert (tmp_path / "a").read_bytes() == data
    assert engine.open(tmp_path / "a", "w").size_bytes == 0
    assert (tmp_path / "a").stat().st_size == 0


def test_a_direct_handle_says_so(disk_path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 9000)
    engine = open_engine(disk_path)
    buffered = engine.open(tmp_path / "a", direct=False)
    assert (buffered.direct, buffered.alignment_bytes, buffered.effective) == (
        False,
        1,
        f"{disk_path} (buffered)",
    )
    assert (buffered.requested, buffered.size_bytes, buffered.path) == (
        disk_path,
        9000,
        str(tmp_path / "a"),
    )
    automatic = engine.open(tmp_path / "a")
    assert automatic.effective == (disk_path if automatic.direct else f"{disk_path} (buffered)")
    if automatic.direct:
        assert automatic.alignment_bytes % BLOCK == 0
        assert engine.open(tmp_path / "a", direct=True).direct
    else:
        with pytest.raises(errors.PathUnavailableError):
            engine.open(tmp_path / "a", direct=True)


def test_a_file_system_without_direct_io(disk_path: str, open_engine: OpenEngine) -> None:
    """/proc has no O_DIRECT: `direct=None` falls back and says so, `direct=True` is refused."""
    engine = open_engine(disk_path)
    with pytest.raises((errors.PathUnavailableError, errors.ReadError)):
        engine.open("/proc/self/status", direct=True)
    file = engine.open("/proc/self/status")
    assert not file.direct
    assert file.effective == f"{disk_path} (buffered)"


def test_allocate_truncate_sync(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(path)
    file = engine.open(tmp_path / "w", "w")
    reserved = engine.allocate(file, 100_000)
    assert reserved in (True, False)
    assert read_bytes(engine, file, 0, 100_000) == bytes(100_000)
    data = content(8192, seed=1)
    engine.write(Plan.of(file, [8192], [8192], [0]), tensor_of(data)).wait()
    engine.allocate(file, 10_000)  # less than there is: nothing is lost
    assert read_bytes(engine, file, 8192, 8192) == data
    engine.truncate(file, 12_000)
    assert read_bytes(engine, file, 8192, 3808) == data[:3808]
    with pytest.raises(errors.TruncatedFileError):
        read_bytes(engine, file, 8192, 3809)
    engine.truncate(file, 20_000)
    assert read_bytes(engine, file, 8192, 11_808) == data[:3808] + bytes(8000)
    engine.sync(file)
    if path != "memory":
        assert (tmp_path / "w").stat().st_size == 20_000
    with pytest.raises(errors.StorageError):
        engine.truncate(file, -1)


def test_what_is_open_for_reading_cannot_be_changed(
    disk_path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(disk_path)
    data = make_file(tmp_path / "a", 9000)
    file = engine.open(tmp_path / "a")
    for change in (engine.truncate, engine.allocate):
        with pytest.raises(errors.WriteError) as caught:
            change(file, 100)
        assert caught.value.path == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data


def test_rename_and_directories(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(path)
    make_file(tmp_path / "new", 100, seed=1)
    make_file(tmp_path / "old", 100, seed=2)
    engine.rename(tmp_path / "new", tmp_path / "old")
    engine.sync_directory(tmp_path)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").read_bytes() == content(100, seed=1)
    with pytest.raises(errors.WriteError) as caught:
        engine.rename(tmp_path / "missing", tmp_path / "old")
    assert "missing" in str(caught.value)
    assert (tmp_path / "old").read_bytes() == content(100, seed=1)
    with pytest.raises(errors.WriteError):
        engine.sync_directory(tmp_path / "missing")
    with pytest.raises(errors.WriteError):
        engine.sync_directory(tmp_path / "old")


def test_memory_files_leave_the_disk_alone(open_engine: OpenEngine, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 10_000)
    engine: NativeEngine = open_engine("memory")
    file = engine.open(tmp_path / "a", "r+")
    engine.write(Plan.of(file, [5], [3], [0]), torch.full((3,), CANARY, dtype=torch.uint8)).wait()
    assert read_bytes(engine, file, 4, 5) == data[4:5] + bytes([CANARY]) * 3 + data[8:9]
    assert (tmp_path / "a").read_bytes() == data
    assert file.effective == "memory"


def test_short_writes_go_on(disk_path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """Every write stops early, in the middle of a block or before it: the file is whole in the
    end."""
    data = content(10 * BLOCK, seed=6)
    for value in (4096, 5000, 8192):
        engine = open_engine(disk_path, [FaultRule("short", operation="write", value=value)])
        file = engine.open(tmp_path / "w", "w")
        future = engine.write(Plan.of(file, [0], [len(data)], [0]), tensor_of(data))
        future.wait()
        assert (tmp_path / "w").read_bytes() == data
        assert engine.stats().retries >= len(data) // value - 1
        assert future.bytes_moved == len(data)


def test_a_write_that_never_progresses_ends(
    disk_path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(disk_path, [FaultRule("short", operation="write", value=0)])
    file = engine.open(tmp_path / "w", "w")
    with pytest.raises(errors.WriteError, match="short") as caught:
        engine.write(Plan.of(file, [BLOCK], [BLOCK], [0]), tensor_of(bytes(BLOCK))).wait()
    assert (caught.value.offset_bytes, caught.value.size_bytes) == (BLOCK, BLOCK)
    assert engine.stats().retries <= 100


def test_the_size_limit_of_a_process(
    disk_path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """EFBIG from the operating system is a WriteError with its number."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = open_engine(disk_path)
    file = engine.open(tmp_path / "w", "w")
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, before[1]))
    try:
        with pytest.raises(errors.WriteError) as caught:
            engine.write(Plan.of(file, [BLOCK], [BLOCK], [0]), tensor_of(bytes(BLOCK))).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.strerror(caught.value.errno or 0) in str(caught.value)
    assert caught.value.offset_bytes == BLOCK
