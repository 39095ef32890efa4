"""The life of rows on a device: put, counted, pinned, released, flushed, closed; and what is left
behind: nothing."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.device.row_layout import RowLayout
from espnx.device.rows.ssd import SsdRowDevice
from espnx.storage import FaultRule, FaultyEngine, NativeEngine
from tests.device.rows import assert_right, attend, draw, opened, put, queries
from tests.storage.common import open_descriptors, until
from tests.storage.machine import mounted

LAYOUT = RowLayout("fp16", 64, 64)  # blocks of 32 tokens, 8 KiB
BLOCK = LAYOUT.block_bytes
MIB = 1 << 20
HEADS = range(2)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mode(path: str | Path) -> int:
    return os.stat(path).st_mode & 0o777


def test_the_file_without_a_name(folder: Path) -> None:
    """Nobody else can read it, and nobody finds it; the directory is made where it is missing."""
    (folder / "a").mkdir()
    before, umask = open_descriptors(), os.umask(0)
    try:
        with opened(folder / "a" / "b") as device:
            put(device, LAYOUT, 1, HEADS, 5, rng())
            device.flush()
            assert os.listdir(folder / "a" / "b") == []
            assert os.path.dirname(device.space.path) == str(folder / "a" / "b")
            links = [
                name.split()[0] for name in open_descriptors() - before if device.space.path in name
            ]
            assert links, "no descriptor of the data file"
            assert {mode(f"/proc/self/fd/{number}") for number in links} == {0o600}
    finally:
        os.umask(umask)


def test_the_file_with_a_name(folder: Path) -> None:
    """Is there again for the next device, byte for byte."""
    umask = os.umask(0)
    try:
        with opened(folder, name="rows") as device:
            assert device.space.path == str(folder / "rows")
            stored = put(device, LAYOUT, 1, HEADS, 100, rng())[0]
            device.sync()
            assert mode(folder / "rows") == 0o600
            assert os.stat(folder / "rows").st_size == stored.segment.size_bytes, (
                "what nobody has taken is cut off"
            )
            place = device.space.place(stored.segment)
    finally:
        os.umask(umask)
    content = (folder / "rows").read_bytes()
    assert content == LAYOUT.pack(*draw(LAYOUT, 1, HEADS, 100, rng())).numpy().tobytes()
    with opened(folder, name="rows") as device:
        stored.segment = device.space.restore([place])[0]
        look = queries(LAYOUT, 1, 2, 1, rng(1))
        assert_right(attend(device, LAYOUT, [stored.use(0)], look), [stored.use(0)], look)
    assert os.listdir(folder) == ["rows"]


def test_a_directory_that_cannot_be_written(folder: Path) -> None:
    (folder / "file").touch()
    before = open_descriptors()
    with pytest.raises(errors.WriteError, match="Not a directory") as caught:
        SsdRowDevice(folder / "file" / "below")
    assert str(folder / "file" / "below") in str(caught.value.path)
    assert until(lambda: open_descriptors() <= before)


@pytest.mark.parametrize(
    ("operation", "value"), [("open_write", 5), ("open_write", 13), ("allocate", 28)]
)
def test_a_device_that_cannot_be_opened(folder: Path, operation: str, value: int) -> None:
    """The caller's engine lives on, and no file stays behind."""
    with FaultyEngine(
        [FaultRule("error", operation=operation, nth=1, count=2, value=value)]
    ) as engine:
        before = open_descriptors()
        with pytest.raises(errors.StorageError) as caught:
            SsdRowDevice(folder, engine=engine, reserve_bytes=MIB)
        assert str(folder) in str(caught.value.path)
        assert os.listdir(folder) == []
        assert operation == "allocate" or until(lambda: open_descriptors() <= before)
        while engine.stats().fault_hits < 2:
            with pytest.raises(errors.StorageError):
                SsdRowDevice(folder, engine=engine, reserve_bytes=MIB)
        with opened(folder, engine=engine, reserve_bytes=MIB) as device:
            stored = put(device, LAYOUT, 1, HEADS, 5, rng())[0]
            look = queries(LAYOUT, 1, 2, 1, rng(1))
            assert_right(attend(device, LAYOUT, [stored.use(0)], look), [stored.use(0)], look)


@pytest.mark.parametrize(
    "options", [{"read_ahead_bytes": 0}, {"deadline_s": 0.0}, {"engine": "no such path"}]
)
def test_options_out_of_range(folder: Path, options: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidInputError):
        SsdRowDevice(folder, **options)  # type: ignore[arg-type]
    assert os.listdir(folder) == []


def test_counts(folder: Path, path: str) -> None:
    """Blocks that are asked for, once however many look at them; and what the engine moved for
    them."""
    with opened(folder, engine=path) as device:
        zero = device.stats()
        assert (
            zero.bytes_written,
            zero.write_requests,
            zero.bytes_asked,
            zero.bytes_moved,
            zero.stored_bytes,
        ) == (0, 0, 0, 0, 0)
        a, b = put(device, LAYOUT, 2, HEADS, 100, rng(1))  # 4 blocks a head
        c = put(device, LAYOUT, 1, HEADS, 1, rng(2))[0]
        put(device, LAYOUT, 1, HEADS, 0, rng(3))
        written = device.stats()
        assert (written.bytes_written, written.write_requests) == ((2 * 8 + 2) * BLOCK, 2)
        assert written.stored_bytes == written.bytes_written
        look, asked = queries(LAYOUT, 3, 2, 1, rng(4)), 0
        for seen, blocks in (
            ([a.use(0), b.use(1)], 16),
            ([a.use(0, 33), a.use(1, 32), a.use(2, 1)], 2 * 2),
            ([c.use(0)], 2),
            ([b.use(0, 0)], 0),
            ([], 0),
        ):
            assert_right(attend(device, LAYOUT, seen, look), seen, look)
            asked += blocks * BLOCK
            found = device.stats()
            assert found.bytes_asked == asked
            assert found.bytes_moved == asked, "whole pages: nothing was read beside them"
        device.ahead(LAYOUT, [a.use(0).use])
        device.forget()
        assert device.stats().bytes_asked == asked, "rows that nobody took do not count"
        assert device.stats().computing_s > 0
        device.release(a.segment)
        assert device.stats().stored_bytes == (8 + 2) * BLOCK
        assert device.stats().bytes_written == written.bytes_written


def test_released_places_are_used_again(folder: Path) -> None:
    with opened(folder) as device:
        first = put(device, LAYOUT, 3, HEADS, 40, rng(1))
        places = [each.segment.place for each in first]
        assert places == sorted(places)
        device.release(first[1].segment)
        second = put(device, LAYOUT, 1, HEADS, 64, rng(2))[0]
        assert second.segment.place == places[1]
        seen = [first[0].use(0), second.use(1), first[2].use(2)]
        look = queries(LAYOUT, 3, 2, 1, rng(3))
        assert_right(attend(device, LAYOUT, seen, look), seen, look)
        for each in (first[0], second, first[2]):
            device.release(each.segment)
        assert device.stats().stored_bytes == 0


def test_pinned_places(folder: Path) -> None:
    """Keep what lies there after their segments have gone, until another set of places is
    pinned."""
    with opened(folder) as device:
        a, b, c = (put(device, LAYOUT, 1, HEADS, 40, rng(i))[0] for i in range(3))
        device.space.pin([each.segment for each in (a, b)])
        for each in (a, b, c):
            device.release(each.segment)
        each_bytes = a.segment.size_bytes
        assert device.stats().stored_bytes == 2 * each_bytes
        d = put(device, LAYOUT, 1, HEADS, 40, rng(3))[0]
        assert d.segment.place == c.segment.place
        look = queries(LAYOUT, 1, 2, 1, rng(4))
        assert_right(attend(device, LAYOUT, [a.use(0)], look), [a.use(0)], look)
        device.space.pin([each.segment for each in (b, d)])
        assert put(device, LAYOUT, 1, HEADS, 40, rng(5))[0].segment.place == a.segment.place
        assert_right(attend(device, LAYOUT, [b.use(0)], look), [b.use(0)], look)
        device.release(d.segment)
        device.space.pin([])
        assert device.stats().stored_bytes == each_bytes


def test_put_waits_for_writes_behind(folder: Path) -> None:
    """No more memory than allowed is under way: with none allowed, each write is over before the
    next begins."""
    rule = FaultRule("delay", operation="write", value=30_000_000)
    for allowed, most in ((0, 1), (3 * 4 * BLOCK, 3), (64 << 20, 6)):
        with (
            FaultyEngine([rule]) as engine,
            opened(folder, engine=engine, write_behind_bytes=allowed) as device,
        ):
            found = []
            for i in range(6):
                put(device, LAYOUT, 1, HEADS, 64, rng(i))
                found.append(engine.stats().in_flight)
            assert max(found) <= most
            device.flush()
            assert engine.stats().in_flight == 0


def test_is_written(folder: Path) -> None:
    rule = FaultRule("delay", operation="write", nth=1, count=1, value=500_000_000)
    with FaultyEngine([rule]) as engine, opened(folder, engine=engine) as device:
        a, b = (each.segment for each in put(device, LAYOUT, 2, HEADS, 5, rng()))
        assert not device.is_written(a)
        assert until(lambda: device.is_written(a))
        assert device.is_written(b)
        assert a.writing is None


@pytest.mark.parametrize("work", ["flush", "sync"])
def test_flush(folder: Path, work: str) -> None:
    """Everything is written afterwards; again, or with nothing to do, it is nothing."""
    with opened(folder, name="rows") as device:
        getattr(device, work)()
        stored = [
            *put(device, LAYOUT, 2, HEADS, 50, rng(1)),
            *put(device, LAYOUT, 1, HEADS, 3, rng(2)),
        ]
        device.release(stored.pop(0).segment)
        getattr(device, work)()
        getattr(device, work)()
        assert all(each.segment.writing is None for each in stored)
        data = (folder / "rows").read_bytes()
        for each in stored:
            part = data[each.segment.place : each.segment.place + each.segment.size_bytes]
            blocks = torch.frombuffer(bytearray(part), dtype=torch.uint8).view(2, -1, BLOCK)
            assert torch.equal(LAYOUT.unpack(blocks, each.segment.n_rows)[0].double(), each.k)


def test_after_close(folder: Path) -> None:
    device = SsdRowDevice(folder)
    stored = put(device, LAYOUT, 1, HEADS, 5, rng())[0]
    ticket = device.ahead(LAYOUT, [stored.use(0).use])
    device.close()
    device.close()
    look = queries(LAYOUT, 1, 2, 1, rng(1))
    for work in (
        lambda: put(device, LAYOUT, 1, HEADS, 5, rng()),
        lambda: device.ahead(LAYOUT, [stored.use(0).use]),
        lambda: device.attend(ticket, look),
        lambda: device.visit(ticket, lambda memory, pieces: None),
        device.flush,
        device.sync,
    ):
        with pytest.raises(errors.EngineClosedError):
            work()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("is_stuck", [False, True])
def test_close_with_work_under_way(folder: Path, path: str, is_stuck: bool) -> None:
    """Writes, reads, or both with a device that answers none of them: closing does not wait for it,
    and leaves no descriptor behind."""
    rules = [FaultRule("never", operation="write", nth=2)] if is_stuck else []
    before = open_descriptors()
    engine = FaultyEngine(rules, path)
    device = SsdRowDevice(folder, engine=engine)
    stored = put(device, LAYOUT, 1, HEADS, 600, rng(1))[0]
    for _ in range(3):
        device.ahead(LAYOUT, [stored.use(0).use])
    put(device, LAYOUT, 1, HEADS, 600, rng(2))
    device.close()
    engine.close(grace_s=0.05)
    del device, engine, stored
    gc.collect()
    assert is_stuck or until(lambda: open_descriptors() <= before)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("own_engine", [True, False])
def test_no_descriptor_stays(folder: Path, path: str, own_engine: bool) -> None:
    before = open_descriptors()
    engine = None if own_engine else NativeEngine(path)
    for i in range(4):
        with opened(folder, engine=path if engine is None else engine, reserve_bytes=MIB) as device:
            stored = put(device, LAYOUT, 1, HEADS, 70, rng(i))[0]
            look = queries(LAYOUT, 1, 2, 1, rng(9))
            assert_right(attend(device, LAYOUT, [stored.use(0)], look), [stored.use(0)], look)
            put(device, LAYOUT, 1, HEADS, 500, rng(i))
        if engine is not None:
            assert until(lambda: not any(str(folder) in name for name in open_descriptors()))
    if engine is not None:
        engine.close()
    del device
    gc.collect()
    assert until(lambda: open_descriptors() <= before)


@pytest.mark.parametrize("shares", [True, False])
def test_two_devices(folder: Path, shares: bool) -> None:
    """In one directory, on one engine or two: neither sees the other's rows, tickets, counts or
    end."""
    engine = NativeEngine() if shares else None
    with (
        opened(folder, engine=engine or "auto") as one,
        opened(folder, engine=engine or "auto") as two,
    ):
        assert one.space.path != two.space.path
        a, b = put(one, LAYOUT, 1, HEADS, 90, rng(1))[0], put(two, LAYOUT, 1, HEADS, 70, rng(2))[0]
        look = queries(LAYOUT, 1, 2, 1, rng(3))
        tickets = one.ahead(LAYOUT, [a.use(0).use]), two.ahead(LAYOUT, [b.use(0).use])
        one.forget()
        assert (one.front(), two.front()) == (-1, tickets[1])
        assert_right(two.attend(tickets[1], look), [b.use(0)], look)
        assert (one.stats().bytes_asked, two.stats().bytes_asked) == (0, 6 * BLOCK)
        assert_right(attend(one, LAYOUT, [a.use(0)], look), [a.use(0)], look)
        one.close()
        assert_right(attend(two, LAYOUT, [b.use(0)], look), [b.use(0)], look)
    if engine is not None:
        engine.close()


@pytest.mark.root
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """Nothing of the put that failed is kept; the rows before it are, and what fits still goes
    in."""
    with mounted("tmpfs", "espnx", tmp_path / "small", "size=4m") as where, opened(where) as device:
        stored = put(device, LAYOUT, 1, HEADS, 2048, rng(1))[0]  # 1 MiB
        before = device.stats()
        with pytest.raises(errors.DiskFullError) as caught:
            put(device, LAYOUT, 4, HEADS, 2048, rng(2))
        assert caught.value.needed_bytes == 4 * MIB
        assert 2 * MIB < caught.value.free_bytes <= 3 * MIB
        assert str(where) in str(caught.value.path)
        assert device.stats() == before
        seen = [
            stored.use(0),
            *(
                each.use(1 + i)
                for i, each in enumerate(put(device, LAYOUT, 2, HEADS, 2048, rng(3)))
            ),
        ]
        look = queries(LAYOUT, 3, 2, 1, rng(4))
        assert_right(attend(device, LAYOUT, seen, look), seen, look)
    with mounted("tmpfs", "espnx", tmp_path / "small", "size=4m") as where:
        with pytest.raises(errors.DiskFullError) as caught:
            SsdRowDevice(where, reserve_bytes=5 * MIB)
        assert caught.value.needed_bytes == 5 * MIB
        assert os.listdir(where) == []


def test_put_on_an_engine_that_was_closed(folder: Path) -> None:
    """By whoever owns it: the place that was taken for the rows is given back."""
    engine = NativeEngine()
    device = SsdRowDevice(folder, engine=engine)
    put(device, LAYOUT, 1, HEADS, 5, rng(1))
    device.space.reserve(MIB)  # so that nothing but the write itself needs the engine
    device.flush()
    before = device.stats()
    engine.close()
    with pytest.raises(errors.EngineClosedError):
        put(device, LAYOUT, 1, HEADS, 5, rng(2))
    assert device.stats() == before
    device.close()


def test_a_file_that_others_could_read(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "rows").touch(0o644)
    (folder / "rows").chmod(0o644)
    with opened(folder, name="rows"):
        assert mode(folder / "rows") == 0o600


def test_more_room_than_a_file_may_have(folder: Path) -> None:
    with pytest.raises(errors.DiskFullError) as caught:
        SsdRowDevice(folder, reserve_bytes=1 << 60)
    assert caught.value.needed_bytes == 1 << 60
    assert 0 < caught.value.free_bytes < 1 << 60
