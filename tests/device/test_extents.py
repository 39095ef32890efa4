"""Space in a file: random programs against a set of bytes that are in use, and disks that are
full."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from espnx import errors
from espnx.device.rows import extents
from espnx.device.rows.extents import Extents
from espnx.storage import FaultRule, FaultyEngine, NativeEngine
from espnx.storage.engine import FileHandle
from tests.storage.machine import mounted

MIB = 1 << 20
GROW_BYTES = 50


class Disk:
    """An engine that holds nothing and remembers how long the file is. `can_reserve`: as
    `NativeEngine.allocate` says it."""

    def __init__(self, limit_bytes: int = 2**62, *, can_reserve: bool = True):
        self.limit_bytes, self.can_reserve, self.size_bytes = limit_bytes, can_reserve, 0

    def allocate(self, file: FileHandle, size_bytes: int) -> bool:
        if size_bytes > self.limit_bytes:
            raise errors.DiskFullError(
                "full",
                needed_bytes=size_bytes,
                free_bytes=self.limit_bytes - self.size_bytes,
                path=file.path,
            )
        if self.can_reserve:
            self.size_bytes = max(self.size_bytes, size_bytes)
        return self.can_reserve

    def truncate(self, file: FileHandle, size_bytes: int) -> None:
        assert size_bytes <= self.size_bytes
        self.size_bytes = size_bytes


def handle(folder: Path) -> FileHandle:
    return FileHandle(0, str(folder / "rows"), 0, False, 1, "posix", "posix")


def open_extents(disk: Any, folder: Path, reserved_bytes: int = 0) -> Extents:
    return Extents(disk, handle(folder), reserved_bytes)


class Model:
    """What is in use, byte by byte."""

    def __init__(self, space: Extents):
        self.space, self.used, self.held = space, set[int](), list[tuple[int, int]]()

    def first_fit(self, size_bytes: int) -> int | None:
        run = 0
        for byte in range(self.space.size_bytes):
            run = 0 if byte in self.used else run + 1
            if run == size_bytes:
                return byte - size_bytes + 1
        return None

    def tail(self) -> int:
        """Where what is free at the end of the file begins."""
        end = self.space.size_bytes
        while end and end - 1 not in self.used:
            end -= 1
        return end

    def hold(self, offset: int, size_bytes: int) -> None:
        taken = set(range(offset, offset + size_bytes))
        assert not taken & self.used, f"{offset} and {size_bytes} bytes after it belong to somebody"
        self.used |= taken
        self.held.append((offset, size_bytes))

    def take(self, size_bytes: int) -> None:
        fit = self.first_fit(size_bytes)
        wanted = self.tail() if fit is None else fit
        before = self.space.size_bytes
        offset = self.space.take(size_bytes)
        assert offset == wanted
        assert (self.space.size_bytes == before) == (fit is not None), (
            "the file grows where nothing fits, and only there"
        )
        self.hold(offset, size_bytes)

    def give_back(self, rng: random.Random) -> None:
        """All of a place, or a part of it."""
        offset, size = self.held.pop(rng.randrange(len(self.held)))
        begin = rng.randint(0, size - 1) if rng.random() < 0.4 else 0
        end = rng.randint(begin + 1, size) if rng.random() < 0.4 else size
        self.space.give_back(offset + begin, end - begin)
        self.used -= set(range(offset + begin, offset + end))
        self.held += [part for part in ((offset, begin), (offset + end, size - end)) if part[1]]

    def claim(self, offset: int, size_bytes: int) -> None:
        if set(range(offset, offset + size_bytes)) & self.used:
            with pytest.raises(errors.FormatError, match="two pieces claim one place") as caught:
                self.space.claim(offset, size_bytes)
            assert (caught.value.offset_bytes, caught.value.size_bytes) == (offset, size_bytes)
        else:
            self.space.claim(offset, size_bytes)
            self.hold(offset, size_bytes)


@pytest.mark.parametrize("can_reserve", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, can_reserve: bool
) -> None:
    monkeypatch.setattr(extents, "_GROW_BYTES", GROW_BYTES)
    rng = random.Random(seed)
    disk = Disk(can_reserve=can_reserve)
    disk.truncate = lambda file, size_bytes: setattr(disk, "size_bytes", size_bytes)  # type: ignore[method-assign]
    model = Model(open_extents(disk, tmp_path))
    space, is_reserved = model.space, False
    for _ in range(400):
        what = rng.random()
        if what < 0.45:
            model.take(rng.choice([1, 2, 3, 7, 20, 49, 50, 51, 120]))
        elif what < 0.85:
            if model.held:
                model.give_back(rng)
        elif what < 0.93:
            model.claim(rng.randint(0, space.size_bytes + 20), rng.choice([1, 5, 30]))
        elif what < 0.98:
            wanted = space.size_bytes if is_reserved else model.tail()
            space.shrink()
            assert space.size_bytes == wanted
        else:
            size, before = rng.randint(1, 200), space.size_bytes
            space.reserve(size)
            is_reserved = True
            assert space.size_bytes == max(before, len(model.used) + size)
        assert space.used_bytes == len(model.used)
    for offset, size in model.held:
        space.give_back(offset, size)
    assert space.used_bytes == 0
    end = space.size_bytes
    if end:
        assert space.take(end) == 0, "everything was returned, and is one place again"
        assert space.size_bytes == end


def test_a_place_that_was_returned_in_parts(tmp_path: Path) -> None:
    space = open_extents(Disk(), tmp_path)
    places = [space.take(10) for _ in range(5)]
    assert places == [0, 10, 20, 30, 40]
    for place in (places[3], places[1], places[2]):
        space.give_back(place, 10)
    assert space.take(30) == 10
    assert space.used_bytes == 50


def test_full_disk_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the grown file nor the space; what still fits is still given, to the last byte."""
    monkeypatch.setattr(extents, "_GROW_BYTES", GROW_BYTES)
    disk = Disk(limit_bytes=130)
    space = open_extents(disk, tmp_path)
    assert space.take(60) == 0
    assert space.take(20) == 60
    before = space.used_bytes, space.size_bytes
    with pytest.raises(errors.DiskFullError) as caught:
        space.take(51)
    assert caught.value.needed_bytes == 60 + 51 + 20 - before[1], (
        "the rest of the file's end counts"
    )
    assert caught.value.free_bytes == 130 - disk.size_bytes
    assert caught.value.path == str(tmp_path / "rows")
    assert (space.used_bytes, space.size_bytes) == before
    assert space.take(50) == 80, "less than the usual growth was left, and it was enough"
    assert (space.used_bytes, space.size_bytes) == (130, 130)
    with pytest.raises(errors.DiskFullError):
        space.take(1)
    space.give_back(60, 20)
    assert space.take(20) == 60


@pytest.mark.parametrize("by_argument", [True, False])
def test_reserving(tmp_path: Path, by_argument: bool) -> None:
    disk = Disk(limit_bytes=100 * MIB)
    if by_argument:
        space = open_extents(disk, tmp_path, 100 * MIB)
    else:
        space = open_extents(disk, tmp_path)
        space.reserve(100 * MIB)
    assert disk.size_bytes == space.size_bytes == 100 * MIB
    space.shrink()
    assert disk.size_bytes == 100 * MIB
    places = [space.take(10 * MIB) for _ in range(10)]
    assert places == [i * 10 * MIB for i in range(10)]
    with pytest.raises(errors.DiskFullError):
        space.reserve(1)
    space.give_back(0, 10 * MIB)
    space.reserve(10 * MIB)
    with pytest.raises(errors.DiskFullError) as caught:
        space.reserve(11 * MIB)
    assert caught.value.needed_bytes == MIB


def test_more_than_the_disk_has_where_nothing_can_be_reserved(tmp_path: Path) -> None:
    """A sparse file would be promised, and fail hours later."""
    space = open_extents(Disk(can_reserve=False), tmp_path)
    with pytest.raises(errors.DiskFullError) as caught:
        space.take(2**60)
    assert caught.value.needed_bytes == 2**60
    assert 0 < caught.value.free_bytes < 2**60
    assert (space.size_bytes, space.used_bytes) == (0, 0)
    assert space.take(10) == 0


@pytest.mark.parametrize("size_bytes", [2**63, 2**70])
def test_more_than_a_file_can_hold(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / "rows").touch()
    with NativeEngine("posix") as engine:
        file = engine.open(tmp_path / "rows", "r+")
        space = Extents(engine, file)
        for ask in (space.reserve, space.take):
            with pytest.raises(errors.DiskFullError, match="file would be larger") as caught:
                ask(size_bytes)
            assert caught.value.needed_bytes == size_bytes
        assert (space.size_bytes, space.used_bytes) == (0, 0)
        assert space.take(10) == 0


def test_a_claim_past_the_end(tmp_path: Path) -> None:
    """What lies before it is free, and nothing after it."""
    disk = Disk()
    space = open_extents(disk, tmp_path)
    space.claim(100, 20)
    assert (space.size_bytes, space.used_bytes) == (120, 20)
    assert space.take(100) == 0
    space.give_back(100, 20)
    assert space.take(20) == 100


@pytest.mark.parametrize("path", ["posix", "uring"])
def test_the_file_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Grows in large steps, is cut at its last byte in use, and takes more disk than it says
    nowhere."""
    monkeypatch.setattr(extents, "_GROW_BYTES", 64 * MIB)
    with NativeEngine(path) as engine:
        (tmp_path / "rows").touch()
        file = engine.open(tmp_path / "rows", "r+")
        space = Extents(engine, file)
        assert space.take(4096) == 0
        assert os.stat(file.path).st_size == space.size_bytes == 64 * MIB
        assert space.take(65 * MIB) == 4096
        space.give_back(4096, 65 * MIB)
        space.shrink()
        assert os.stat(file.path).st_size == space.size_bytes == 4096
        assert os.stat(file.path).st_blocks * 512 <= 8192
        engine.close_file(file)


def test_reservation_that_fails_now_and_then(tmp_path: Path) -> None:
    """ENOSPC for the usual growth: what is needed alone is asked for."""
    with FaultyEngine(
        [FaultRule("error", operation="allocate", nth=1, count=1, value=28)]
    ) as engine:
        (tmp_path / "rows").touch()
        file = engine.open(tmp_path / "rows", "r+")
        space = Extents(engine, file)
        assert space.take(4096) == 0
        assert space.size_bytes == os.stat(file.path).st_size == 4096
        engine.close_file(file)


@pytest.mark.root
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with (
        mounted("tmpfs", "espnx", tmp_path / "small", "size=8m") as where,
        NativeEngine("posix") as engine,
    ):
        (where / "rows").touch()
        file = engine.open(where / "rows", "r+")
        space = Extents(engine, file)
        assert space.take(5 * MIB) == 0
        with pytest.raises(errors.DiskFullError) as caught:
            space.take(4 * MIB)
        assert caught.value.needed_bytes == 4 * MIB
        assert 2 * MIB < caught.value.free_bytes <= 3 * MIB
        assert (space.used_bytes, space.size_bytes) == (5 * MIB, 5 * MIB)
        assert space.take(2 * MIB) == 5 * MIB
        engine.close_file(file)


def test_a_limit_of_file_sizes_is_no_full_disk(tmp_path: Path) -> None:
    """What there is room for is what the limit leaves, and the limit is what helps."""
    (tmp_path / "rows").touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with NativeEngine("posix") as engine:
        file = engine.open(tmp_path / "rows", "r+")
        space = Extents(engine, file)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, before[1]))
        try:
            with pytest.raises(errors.DiskFullError, match="ulimit -f") as caught:
                space.take(4 * MIB)
            assert (caught.value.needed_bytes, caught.value.free_bytes) == (4 * MIB, 3 * MIB)
            assert space.take(2 * MIB) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert space.take(4 * MIB) == 2 * MIB
        engine.close_file(file)


def test_a_file_larger_than_the_file_system_takes(tmp_path: Path) -> None:
    disk = Disk()
    disk.allocate = lambda *args: (_ for _ in ()).throw(errors.WriteError("allocate", errno=27))  # type: ignore[method-assign]
    with pytest.raises(errors.DiskFullError, match=r"the file system takes.*more directories"):
        open_extents(disk, tmp_path).take(1)
