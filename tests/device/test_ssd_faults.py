"""A device whose storage fails, now and then or for good: which error comes, what it names, and
that the next try is right."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.device.row_layout import RowLayout
from espnx.device.rows.ssd import SsdRowDevice
from espnx.storage import FaultRule, FaultyEngine
from tests.device.rows import Kept, assert_right, attend, opened, put, queries
from tests.storage.common import patiently, until

LAYOUT = RowLayout("fp16", 64, 64)  # blocks of 32 tokens, 8 KiB
BLOCK = LAYOUT.block_bytes
HEADS = range(2)
EIO, ENOSPC = 5, 28
# the deadline where a transfer never ends, and the others must make it; longer on a machine that
# needs longer
STALLED_S = 0.15


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def faulty(
    folder: Path, rule: FaultRule, path: str = "auto", **options: object
) -> Iterator[tuple[SsdRowDevice, FaultyEngine]]:
    engine = FaultyEngine([rule], path, poison=True)
    try:
        with opened(folder, engine=engine, **options) as device:
            yield device, engine
    finally:
        engine.close(grace_s=0.05)


def assert_reads_right(device: SsdRowDevice, stored: list[Kept]) -> None:
    seen = [each.use(i) for i, each in enumerate(stored)]
    look = queries(LAYOUT, len(stored), 2, 1, rng(99))
    assert_right(attend(device, LAYOUT, seen, look), seen, look)


def assert_void(device: SsdRowDevice, tickets: list[int]) -> None:
    assert device.front() == -1
    for ticket in tickets:
        with pytest.raises(errors.InvalidInputError, match="in the order"):
            device.attend(ticket, queries(LAYOUT, 1, 2, 1, rng(1)))


def first_failure(
    device: SsdRowDevice, tickets: list[int], *, visits: bool
) -> tuple[int, errors.ReadError | None]:
    """Which of them raised, and what."""
    for i, ticket in enumerate(tickets):
        try:
            if visits:
                device.visit(ticket, lambda memory, pieces: None)
            else:
                device.attend(ticket, queries(LAYOUT, 1, 2, 1, rng(1)))
        except errors.ReadError as error:
            return i, error
    return len(tickets), None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("visits", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_read_fails_in_turn(folder: Path, path: str, threads: int, visits: bool) -> None:
    """EIO in read 1, 2, ...: the pass raises, all tickets are invalid, and the same passes again
    are right."""
    for nth in range(1, 20):
        rule = FaultRule("error", operation="read", nth=nth, count=1, value=EIO)
        with faulty(folder, rule, path, threads=threads) as (device, engine):
            stored = [put(device, LAYOUT, 1, HEADS, n, rng(n))[0] for n in (40, 5000, 90)]
            uses = [[each.use(0).use] for each in stored]
            tickets = [device.ahead(LAYOUT, each) for each in uses]
            failed, error = first_failure(device, tickets, visits=visits)
            hits = engine.stats().fault_hits
            if not hits:
                assert error is None
                break
            assert error is not None
            assert (error.path, error.errno) == (device.space.path, EIO)
            segment = stored[failed].segment
            assert error.offset_bytes in range(segment.place, segment.place + segment.size_bytes)
            assert_void(device, tickets[failed:])
            for each in stored:
                assert_reads_right(device, [each])
            assert engine.stats().fault_hits == 1
            assert until(
                lambda: (engine.stats().in_flight, engine.stats().quarantined_buffers) == (0, 0)
            )
    assert nth > 5
    assert not hits


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [0, 1, 4096, 5000])
def test_short_reads(folder: Path, path: str, value: int) -> None:
    """Once: the rest is asked for. Forever: an error, in time."""
    with faulty(
        folder, FaultRule("short", operation="read", nth=1, count=2, value=value), path
    ) as (device, engine):
        stored = put(device, LAYOUT, 2, HEADS, 600, rng(1))
        try:
            assert_reads_right(device, stored)
        except errors.TruncatedFileError:
            assert value == 0
            assert_reads_right(device, stored)
        assert engine.stats().fault_hits == 2
    with faulty(folder, FaultRule("short", operation="read", value=0), path) as (device, _):
        stored = put(device, LAYOUT, 1, HEADS, 600, rng(1))
        with pytest.raises((errors.ShortReadError, errors.TruncatedFileError)) as caught:
            assert_reads_right(device, stored)
        assert caught.value.path == device.space.path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", [0, 1, 37, 159])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_bit_that_flips_on_the_way(folder: Path, path: str, block: int, threads: int) -> None:
    """The block is named, and the next read is right."""
    unit = block // (960 * 1024 // BLOCK) * (960 * 1024 // BLOCK)
    bit = 8 * ((block - unit) * BLOCK + 777) + 3
    begin = unit * BLOCK
    rule = FaultRule(
        "flip", operation="read", begin_bytes=begin, end_bytes=begin + 1, nth=1, count=1, value=bit
    )
    with faulty(folder, rule, path, threads=threads) as (device, engine):
        stored = put(device, LAYOUT, 2, HEADS, 40 * 32, rng(1))
        with pytest.raises(errors.ChecksumError, match="stored rows are damaged") as caught:
            assert_reads_right(device, stored)
        assert (caught.value.path, caught.value.offset_bytes, caught.value.size_bytes) == (
            device.space.path,
            block * BLOCK,
            BLOCK,
        )
        assert engine.stats().fault_hits == 1
        assert_reads_right(device, stored)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("byte", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 4000])
@pytest.mark.parametrize("visits", [False, True])
def test_a_damaged_file(folder: Path, byte: int, visits: bool) -> None:
    """Every byte counts, padding too; rows of other blocks can still be read."""
    with opened(folder, name="rows") as device:
        a, b = put(device, LAYOUT, 2, HEADS, 33, rng(1))
        device.sync()
        with open(folder / "rows", "r+b") as file:
            file.seek(a.segment.place + byte)
            old = file.read(1)
            file.seek(a.segment.place + byte)
            file.write(bytes([old[0] ^ 0x10]))
            file.flush()
            os.fsync(file.fileno())
        for _ in range(2):
            with pytest.raises(errors.ChecksumError) as caught:
                if visits:
                    device.visit(device.ahead(LAYOUT, [a.use(0).use]), lambda memory, pieces: None)
                else:
                    assert_reads_right(device, [a])
            assert caught.value.offset_bytes == a.segment.place + byte // BLOCK * BLOCK
            assert caught.value.path == str(folder / "rows")
        assert_reads_right(device, [b])


def test_stale_reads(folder: Path, path: str) -> None:
    with faulty(folder, FaultRule("stale", operation="read", nth=1, count=1), path) as (device, _):
        stored = put(device, LAYOUT, 1, HEADS, 100, rng(1))
        with pytest.raises(errors.ChecksumError):
            assert_reads_right(device, stored)
        assert_reads_right(device, stored)


def test_a_file_that_was_cut(folder: Path, path: str) -> None:
    with opened(folder, engine=path, name="rows") as device:
        stored = put(device, LAYOUT, 2, HEADS, 100, rng(1))
        device.sync()
        os.truncate(folder / "rows", stored[1].segment.place + BLOCK)
        with pytest.raises((errors.TruncatedFileError, errors.ShortReadError)) as caught:
            assert_reads_right(device, stored)
        assert caught.value.path == str(folder / "rows")
        assert_reads_right(device, stored[:1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("threads", [1, 3])
def test_reads_that_never_end(folder: Path, path: str, threads: int) -> None:
    def attempt(deadline_s: float) -> bool:
        rule = FaultRule("never", operation="read", nth=2, count=1)
        with faulty(folder, rule, path, deadline_s=deadline_s, threads=threads) as (device, _):
            stored = put(device, LAYOUT, 1, HEADS, 10_000, rng(1))
            tickets = [device.ahead(LAYOUT, [stored[0].use(0).use]) for _ in range(2)]
            with pytest.raises(errors.DeadlineExceededError) as caught:
                device.attend(tickets[0], queries(LAYOUT, 1, 2, 1, rng(2)))
            assert caught.value.path == device.space.path
            assert_void(device, tickets)
            assert_reads_right(device, stored)
        return True

    patiently(attempt, STALLED_S)


def work_on(device: SsdRowDevice, stored: Kept, how: str) -> None:
    """What waits for a write."""
    if how == "ahead":
        device.ahead(LAYOUT, [stored.use(0).use])
        device.forget()
    elif how == "is_written":
        assert until(lambda: device.is_written(stored.segment))
    else:
        getattr(device, how)()


WAYS = [
    (fault, how)
    for fault in ("EIO", "ENOSPC", "late", "short")
    for how in ("ahead", "is_written", "flush", "sync")
]
WAYS.remove(("late", "is_written"))  # a deadline is seen by who waits


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fault", "how"), WAYS)
def test_a_write_that_fails_is_repeated(folder: Path, path: str, fault: str, how: str) -> None:
    """Whoever waits is told once; the rows come from memory, which the caller may have used
    again. A write that is late is over before the next begins."""
    expected: dict[str, type[errors.StorageError]] = {
        "EIO": errors.WriteError,
        "ENOSPC": errors.DiskFullError,
        "late": errors.DeadlineExceededError,
    }

    def attempt(deadline_s: float) -> bool:
        kind, value = {
            "EIO": ("error", EIO),
            "ENOSPC": ("error", ENOSPC),
            "late": ("delay", int(1.5 * deadline_s * 1e9)),
            "short": ("short", 4096),
        }[fault]
        rule = FaultRule(kind, operation="write", nth=1, count=1, value=value)
        with faulty(folder, rule, path, deadline_s=deadline_s) as (device, engine):
            stored = put(device, LAYOUT, 2, HEADS, 100, rng(1))
            if fault in expected:
                with pytest.raises(expected[fault]) as caught:
                    work_on(device, stored[0], how)
                assert caught.value.path == device.space.path
            work_on(device, stored[0], how)
            assert engine.stats().fault_hits == 1
            assert_reads_right(device, stored)
            device.flush()
            for each in stored:
                device.release(each.segment)
            assert device.stats().stored_bytes == 0
        return True

    patiently(attempt, STALLED_S if fault == "late" else 30.0)


def test_a_write_that_fails_for_ever(folder: Path, path: str) -> None:
    """Is told every time; other rows are as good as they were, and the place is not lost."""
    with faulty(folder, FaultRule("error", operation="write", nth=2, value=EIO), path) as (
        device,
        _,
    ):
        good, bad = (
            put(device, LAYOUT, 1, HEADS, 100, rng(1)),
            put(device, LAYOUT, 1, HEADS, 50, rng(2)),
        )
        for _ in range(3):
            with pytest.raises(errors.WriteError):
                assert_reads_right(device, bad)
            with pytest.raises(errors.WriteError):
                device.flush()
            assert_reads_right(device, good)
        device.release(bad[0].segment)
        device.flush()
        assert device.stats().stored_bytes == good[0].segment.size_bytes


def test_put_tells_of_an_earlier_write(folder: Path) -> None:
    """Nothing of the new rows is kept then."""
    rule = FaultRule("error", operation="write", nth=1, count=1, value=EIO)
    with faulty(folder, rule, write_behind_bytes=0) as (device, _):
        first = put(device, LAYOUT, 1, HEADS, 100, rng(1))
        before = device.stats()
        with pytest.raises(errors.WriteError):
            put(device, LAYOUT, 1, HEADS, 10, rng(2))
        assert device.stats() == before
        second = put(device, LAYOUT, 1, HEADS, 10, rng(2))
        assert_reads_right(device, [*first, *second])


def test_a_full_disk_in_put(folder: Path) -> None:
    rule = FaultRule("error", operation="allocate", nth=1, count=2, value=ENOSPC)
    with faulty(folder, rule) as (device, engine):
        before = device.stats()
        with pytest.raises(errors.DiskFullError) as caught:
            put(device, LAYOUT, 2, HEADS, 100, rng(1))
        assert caught.value.needed_bytes == 2 * 2 * 4 * BLOCK
        assert device.stats() == before
        assert engine.stats().fault_hits == 2
        assert_reads_right(device, put(device, LAYOUT, 2, HEADS, 100, rng(1)))


def test_a_write_that_never_ends_is_not_repeated(folder: Path) -> None:
    """It would land over the next one, and over what comes to lie there. Whoever waits is told, in
    time and every time; other rows are as good as they were."""

    def attempt(deadline_s: float) -> bool:
        rule = FaultRule("never", operation="write", nth=2, count=1)
        with faulty(folder, rule, deadline_s=deadline_s) as (device, engine):
            good, lost = (
                put(device, LAYOUT, 1, HEADS, 100, rng(1)),
                put(device, LAYOUT, 1, HEADS, 50, rng(2)),
            )
            assert_reads_right(device, good)
            asked = engine.stats().bytes_asked
            for _ in range(3):
                begun = time.monotonic()
                with pytest.raises(errors.DeadlineExceededError) as caught:
                    device.flush()
                assert time.monotonic() - begun > 0.9 * deadline_s
                assert not device.is_written(lost[0].segment)
            assert "still with the device" in str(caught.value)
            assert engine.stats().bytes_asked == asked
            assert_reads_right(device, good)
        return True

    patiently(attempt, STALLED_S)


def test_what_lands_late_lands_in_nobodys_place(folder: Path) -> None:
    """One piece of a write fails, another comes to the disk when the rows are long given up: its
    place is used again after that, and not before."""
    size_bytes = 2 * 4 * BLOCK

    def attempt(late_s: float) -> bool | None:
        engine = FaultyEngine(
            [
                FaultRule("error", operation="write", end_bytes=1, count=1, value=EIO),
                FaultRule(
                    "delay",
                    operation="write",
                    begin_bytes=size_bytes // 2,
                    end_bytes=size_bytes,
                    count=1,
                    value=int(late_s * 1e9),
                ),
            ],
            request_bytes=size_bytes // 2,
        )
        with engine, opened(folder, engine=engine) as device:
            lost = put(device, LAYOUT, 1, HEADS, 100, rng(1))[0]
            assert until(lambda: engine.stats().fault_hits == 2)
            device.release(lost.segment)
            assert device.stats().stored_bytes == size_bytes
            new = put(device, LAYOUT, 1, HEADS, 100, rng(2))
            device.flush()
            if engine.stats().in_flight == 0:
                return None  # it was not late enough for this machine
            assert new[0].segment.place >= lost.segment.place + size_bytes
            assert until(lambda: engine.stats().in_flight == 0)
            assert_reads_right(device, new)
            again = put(device, LAYOUT, 1, HEADS, 100, rng(3))
            assert again[0].segment.place == lost.segment.place
            assert_reads_right(device, [*new, *again])
            assert device.stats().stored_bytes == 2 * size_bytes
        return True

    patiently(attempt, 0.1)


def test_releasing_begins_no_write(folder: Path) -> None:
    """One piece of a write fails, another comes to the disk late: the rows are given up before they
    are written again, and are not written for nobody."""
    size_bytes = 2 * 4 * BLOCK

    def attempt(late_s: float) -> bool | None:
        half = size_bytes // 2
        late = FaultRule(
            "delay", operation="write", begin_bytes=half, count=1, value=int(late_s * 1e9)
        )
        engine = FaultyEngine(
            [FaultRule("error", operation="write", end_bytes=1, count=1, value=EIO), late],
            request_bytes=half,
        )
        with engine, opened(folder, engine=engine) as device:
            lost = put(device, LAYOUT, 1, HEADS, 100, rng(1))[0]
            with pytest.raises(errors.WriteError):
                device.flush()
            if engine.stats().in_flight == 0:
                return None  # it was not late enough for this machine
            asked = engine.stats().bytes_asked
            assert until(lambda: engine.stats().in_flight == 0)
            device.release(lost.segment)
            assert engine.stats().bytes_asked == asked
            assert device.stats().stored_bytes == 0
        return True

    patiently(attempt, 0.1)


def test_releasing_what_may_still_be_written(folder: Path) -> None:
    """A write that does not end keeps its place forever: nothing else may come to lie there."""

    def attempt(deadline_s: float) -> bool:
        with faulty(
            folder, FaultRule("never", operation="write", nth=1, count=1), deadline_s=deadline_s
        ) as (device, _):
            lost = put(device, LAYOUT, 1, HEADS, 100, rng(1))[0]
            device.release(lost.segment)
            assert device.stats().stored_bytes == lost.segment.size_bytes
            new = put(device, LAYOUT, 1, HEADS, 100, rng(2))
            assert new[0].segment.place >= lost.segment.place + lost.segment.size_bytes
            assert_reads_right(device, new)
        return True

    patiently(attempt, STALLED_S)


@pytest.mark.parametrize("operation", ["sync", "truncate"])
def test_sync_that_fails(folder: Path, operation: str) -> None:
    with faulty(folder, FaultRule("error", operation=operation, nth=1, count=1, value=EIO)) as (
        device,
        _,
    ):
        stored = put(device, LAYOUT, 1, HEADS, 100, rng(1))
        with pytest.raises(errors.WriteError) as caught:
            device.sync()
        assert caught.value.path == device.space.path
        device.sync()
        assert_reads_right(device, stored)
        assert_reads_right(device, [*stored, *put(device, LAYOUT, 1, HEADS, 50, rng(2))])
