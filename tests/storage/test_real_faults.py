"""Faults that the kernel makes: a device that loses its end, file systems that are full, a disk far
too slow, memory file systems."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import NativeEngine, Plan
from tests.storage.common import (
    BLOCK,
    OpenEngine,
    content,
    in_child,
    make_file,
    raw,
    read_bytes,
    until,
)
from tests.storage.machine import (
    command,
    file_system,
    free_bytes,
    loop_device,
    mounted,
    small_ext4,
    throttled,
)

MIB = 1 << 20


def unreadable_mib(path: Path, count: int) -> set[int]:
    """Which MiB of the file the device fails, found without the engine."""
    found = set()
    buffer = mmap.mmap(-1, MIB)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for i in range(count):
            try:
                os.preadv(descriptor, [buffer], i * MIB)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                found.add(i)
    finally:
        os.close(descriptor)
        buffer.close()
    return found


@pytest.mark.root
def test_the_device_loses_its_end(disk_path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """EIO from the block layer: where the device fails, an error that says where; where it does
    not, the right bytes."""
    count = 12
    with small_ext4(tmp_path, 24 * MIB) as (where, _):
        data = make_file(where / "a", count * MIB)
        os.sync()
        lost: set[int] = set()
        # wherever the file system has put the file: until some of it is gone
        for end in range(23, 0, -1):
            os.truncate(tmp_path / "ext4.image", end * MIB)
            if lost := unreadable_mib(where / "a", count):
                break
        assert 0 < len(lost) < count
        engine = open_engine(disk_path, request_bytes=256 * 1024)
        file = engine.open(where / "a", direct=True)
        for i in range(count):
            future = engine.read(Plan.of(file, [i * MIB], [MIB]), deadline_s=10)
            if i not in lost:
                assert raw(future.wait()[:MIB]) == data[i * MIB : (i + 1) * MIB]
                continue
            with pytest.raises(errors.ReadError) as caught:
                future.wait()
            error = caught.value
            assert (error.path, error.errno) == (str(where / "a"), errno.EIO)
            assert error.offset_bytes is not None
            assert i * MIB <= error.offset_bytes < (i + 1) * MIB
        assert until(lambda: engine.stats().in_flight == 0)
        stats = engine.stats()
        assert (stats.failures, stats.quarantined_buffers) == (len(lost), 0)
        engine.close()


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(disk_path: str, kind: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """ENOSPC from the file system: bytes needed and free; room made, the same write works."""
    fill = (
        small_ext4(tmp_path, 16 * MIB)
        if kind == "ext4"
        else mounted("tmpfs", "espnx", tmp_path / "tmpfs", "size=8m")
    )
    with fill as made:
        where = made[0] if isinstance(made, tuple) else made
        engine = open_engine(disk_path, request_bytes=256 * 1024, queue_depth=4)
        filler = engine.open(where / "filler", "w")
        free = os.statvfs(where).f_bavail * os.statvfs(where).f_frsize
        assert engine.allocate(filler, free - 2 * MIB)
        data = content(4 * MIB, seed=1)
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        file = engine.open(where / "w", "w", direct=False)
        plan = Plan.of(file, [0], [len(data)], [0])
        with pytest.raises(errors.DiskFullError) as caught:
            engine.write(plan, source).wait()
        error = caught.value
        assert (error.path, error.errno) == (str(where / "w"), errno.ENOSPC)
        assert MIB <= error.needed_bytes <= 4 * MIB
        assert 0 <= error.free_bytes < MIB
        with pytest.raises(errors.DiskFullError) as caught:
            engine.allocate(engine.open(where / "x", "w"), 4 * MIB)
        assert caught.value.needed_bytes == 4 * MIB
        assert 0 <= caught.value.free_bytes < 4 * MIB
        assert (where / "x").stat().st_size == 0
        engine.truncate(filler, 0)
        (where / "x").unlink()
        engine.write(plan, source).wait()
        engine.sync(file)
        assert (where / "w").read_bytes() == data
        engine.close()


@pytest.mark.sampled(1)
@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("own_mib", [0, 4])
def test_a_reservation_that_fails_takes_no_space(
    disk_path: str, kind: str, own_mib: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """ext4 gives what it has before it finds that this is too little."""
    with file_system(kind, tmp_path, 32 * MIB) as where:
        engine = open_engine(disk_path)
        file = engine.open(where / "rows", "w")
        engine.allocate(file, own_mib * MIB)
        used = (where / "rows").stat().st_blocks
        free = free_bytes(where)
        for needed in (free + own_mib * MIB + MIB, free + own_mib * MIB + 1, 1 << 50):
            with pytest.raises(errors.DiskFullError) as caught:
                engine.allocate(file, needed)
            assert (caught.value.needed_bytes, caught.value.errno) == (needed, errno.ENOSPC)
            assert caught.value.free_bytes == free_bytes(where)
            # of a longer list of extents ext4 keeps a block
            assert free - BLOCK <= free_bytes(where) <= free
            now = (where / "rows").stat()
            assert now.st_size == own_mib * MIB
            assert 0 <= now.st_blocks - used <= BLOCK // 512
        assert engine.allocate(file, free + own_mib * MIB - 2 * MIB)
        assert free_bytes(where) <= 2 * MIB
        engine.close()


@pytest.mark.root
def test_no_room_for_another_file(disk_path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    with mounted("tmpfs", "espnx", tmp_path / "tmpfs", "size=1m,nr_inodes=3") as where:
        engine = open_engine(disk_path)
        with pytest.raises(errors.DiskFullError) as caught:
            for i in range(4):
                engine.close_file(engine.open(where / f"file{i}", "w"))
        assert caught.value.path is not None
        assert caught.value.path.startswith(str(where))
        engine.close()


@pytest.mark.root
def test_a_read_only_file_system(disk_path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    with mounted("tmpfs", "espnx", tmp_path / "tmpfs", "size=1m") as where:
        data = make_file(where / "a", 100)
        command("mount", "-o", "remount,ro", where)
        engine = open_engine(disk_path)
        for name, mode in (("a", "r+"), ("a", "w"), ("b", "w")):
            with pytest.raises(errors.WriteError) as caught:
                engine.open(where / name, mode)
            assert caught.value.errno == errno.EROFS
        assert read_bytes(engine, engine.open(where / "a"), 0, 100) == data
        engine.close()


@pytest.mark.root
def test_a_block_device(disk_path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """fstat says 0 for its size; it has one all the same."""
    with loop_device(tmp_path / "image", 2 * MIB) as device:
        data = content(2 * MIB, seed=3)
        engine = open_engine(disk_path)
        file = engine.open(device, "r+")
        assert file.size_bytes == 2 * MIB
        source = torch.zeros(2 * MIB + BLOCK, dtype=torch.uint8)
        start = -source.data_ptr() % BLOCK
        source[start : start + 2 * MIB] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        engine.write(Plan.of(file, [0], [2 * MIB], [start]), source).wait()
        assert read_bytes(engine, file, 1_000_001, 100_000) == data[1_000_001:1_100_001]
        with pytest.raises(errors.TruncatedFileError):
            read_bytes(engine, file, 2 * MIB - 1, 2)
        engine.close()


@pytest.mark.root
def test_a_device_far_too_slow(disk_path: str, tmp_path: Path) -> None:
    """No injected fault: requests that the kernel really holds. Told in time, memory held, closed
    in time; released when they complete."""
    with (
        loop_device(tmp_path / "image", 2 * MIB) as device,
        throttled(device, 50_000) as (group, limit),
    ):
        number = os.stat(device).st_rdev

        def work() -> list[object]:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            engine, second = NativeEngine(disk_path), NativeEngine(disk_path)
            futures = [
                (e, e.read(Plan.of(e.open(device, direct=True), [0], [MIB]), deadline_s=0.4))
                for e in (engine, second)
            ]
            found: list[object] = []
            for _, future in futures:
                try:
                    future.wait()
                    found.append("read")
                except errors.DeadlineExceededError:
                    found.append("late")
            found += [e.stats().quarantined_buffers for e, _ in futures]
            second.close(grace_s=0.1)
            found.append(second.stats().quarantined_buffers)
            limit.write_text(f"{os.major(number)}:{os.minor(number)} 0")
            found.append(until(lambda: engine.stats().quarantined_buffers == 0, 20))
            engine.close()
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            return found

        assert in_child(work, limit_s=60) == ["late", "late", 1, 1, 1, True]


def test_a_memory_file_system(disk_path: str, open_engine: OpenEngine) -> None:
    """tmpfs takes O_DIRECT on some kernels and not on others: the handle shows which, the bytes are
    right."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("[file system] no tmpfs at /dev/shm")
    path = folder / f"espnx-test-{os.getpid()}"
    try:
        data = make_file(path, 5 * BLOCK + 11)
        engine = open_engine(disk_path)
        file = engine.open(path)
        assert file.effective == (disk_path if file.direct else f"{disk_path} (buffered)")
        for offset, size in ((0, len(data)), (1, 4096), (len(data) - 1, 1), (BLOCK, BLOCK)):
            assert read_bytes(engine, file, offset, size) == data[offset : offset + size]
        if not file.direct:
            with pytest.raises(errors.PathUnavailableError):
                engine.open(path, direct=True)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.root
def test_what_the_device_has_not_begun_is_taken_back(tmp_path: Path) -> None:
    """One thread is stuck in a slow pread with seven requests behind it: after the deadline only
    the one is still in flight."""
    with (
        loop_device(tmp_path / "image", 2 * MIB) as device,
        throttled(device, 50_000) as (group, limit),
    ):
        number = os.stat(device).st_rdev

        def work() -> list[object]:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            engine = NativeEngine("posix", threads=1, request_bytes=128 * 1024)
            file = engine.open(device, direct=True)
            future = engine.read(Plan.of(file, [0], [MIB]), deadline_s=0.4)
            assert until(lambda: engine.stats().in_flight == 8)
            try:
                future.wait()
                found: list[object] = ["read"]
            except errors.DeadlineExceededError:
                found = ["late"]
            found.append(until(lambda: engine.stats().in_flight == 1))
            limit.write_text(f"{os.major(number)}:{os.minor(number)} 0")
            found.append(until(lambda: engine.stats().in_flight == 0, 20))
            engine.close()
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            return found

        assert in_child(work, limit_s=60) == ["late", True, True]
