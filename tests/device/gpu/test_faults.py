"""`GpuRowDevice` whose storage fails: the typed error and what it names, every ticket void, then
right. And bytes that are damaged."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.device.gpu import checks
from espnx.device.gpu import rows as gpu
from espnx.device.gpu.rows import GpuRowDevice
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import running
from espnx.storage import FaultRule, FaultyEngine
from tests.device.gpu.rows import WAYS, opened_gpu
from tests.device.rows import Kept, assert_right, attend, put, queries
from tests.storage.common import patiently, until
from tests.storage.gds.cufile_stub import CuFileStub, Rule

LAYOUT = RowLayout("fp16", 64, 64)  # blocks of 32 tokens, 8 KiB
HEADS = range(2)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_reads_right(device: GpuRowDevice, stored: list[Kept]) -> None:
    seen = [each.use(i) for i, each in enumerate(stored)]
    look = queries(LAYOUT, len(stored), 2, 1, rng(99))
    assert_right(attend(device, LAYOUT, seen, look), seen, look)


def work(device: GpuRowDevice, ticket: int, *, visits: bool) -> None:
    if visits:
        device.visit(ticket, lambda memory, pieces: None)
    else:
        device.attend(ticket, queries(LAYOUT, 1, 2, 1, rng(1)))


def failure(
    device: GpuRowDevice, ticket: int, kind: type[errors.StorageError], *, visits: bool
) -> errors.StorageError | None:
    """How the pass failed, if it did."""
    try:
        work(device, ticket, visits=visits)
    except kind as error:
        return error
    return None


@pytest.mark.parametrize("visits", [False, True])
@pytest.mark.parametrize(
    ("way", "fault", "value", "kind"),
    [
        ("direct", "error", errno.EIO, errors.ReadError),
        ("bounce", "error", errno.EIO, errors.ReadError),
        ("direct", "flip", 8 * 3000 + 5, errors.ChecksumError),
        ("bounce", "flip", 8 * 3000 + 5, errors.ChecksumError),
        # into memory that the engine has filled; that of the other way may hold the rows
        ("direct", "stale", 0, errors.ChecksumError),
    ],
)
def test_each_read_fails_in_turn(
    folder: Path, way: str, fault: str, value: int, kind: type[errors.StorageError], visits: bool
) -> None:
    failures = 0
    for nth in range(1, 20):
        engine = FaultyEngine(
            [FaultRule(fault, operation="read", nth=nth, count=1, value=value)], poison=True
        )
        try:
            with opened_gpu(folder, way, engine=engine, read_ahead_bytes=1 << 20) as device:
                stored = [put(device, LAYOUT, 1, HEADS, n, rng(n))[0] for n in (40, 2500, 90)]
                tickets = [device.ahead(LAYOUT, [each.use(0).use]) for each in stored]
                hits = 0
                for i, ticket in enumerate(tickets):
                    error = failure(device, ticket, kind, visits=visits)
                    if error is not None:
                        segment = stored[i].segment
                        assert error.path == device.space.path
                        assert error.offset_bytes is not None
                        assert (
                            segment.place <= error.offset_bytes < segment.place + segment.size_bytes
                        )
                        assert device.front() == -1
                        for later in tickets[i:]:
                            with pytest.raises(errors.InvalidInputError, match="in the order"):
                                work(device, later, visits=visits)
                        hits = engine.stats().fault_hits
                        assert hits == 1
                        assert_reads_right(device, stored)
                        break
                failures += hits
                assert engine.stats().fault_hits == hits, "a fault was not seen"
        finally:
            engine.close(grace_s=0.05)
        if not hits:
            break
    assert failures > 3


@pytest.mark.parametrize("way", ["direct", "bounce"])
def test_a_read_that_never_ends(folder: Path, way: str) -> None:
    """Its memory stays with the engine; the device goes on."""

    def attempt(deadline_s: float) -> bool:
        engine = FaultyEngine([FaultRule("never", operation="read", nth=1, count=1)], poison=True)
        try:
            with opened_gpu(folder, way, engine=engine, deadline_s=deadline_s) as device:
                stored = put(device, LAYOUT, 1, HEADS, 40, rng())
                with pytest.raises(errors.DeadlineExceededError, match=device.space.path):
                    assert_reads_right(device, stored)
                # none where the device had not heard of the read yet
                held = engine.stats().quarantined_buffers
                assert_reads_right(device, stored)
        finally:
            engine.close(grace_s=0.05)
        return held == 1 or None

    patiently(attempt, 0.15)


def test_writes_that_fail(folder: Path) -> None:
    """Whoever waits is told once; then the rows are written again from memory."""
    for nth in range(1, 4):
        engine = FaultyEngine(
            [FaultRule("error", operation="write", nth=nth, count=1, value=errno.EIO)], poison=True
        )
        try:
            with opened_gpu(folder, engine=engine) as device:
                stored = [put(device, LAYOUT, 1, HEADS, n, rng(n))[0] for n in (40, 900, 90)]
                with pytest.raises(errors.WriteError):
                    device.flush()
                device.flush()
                assert_reads_right(device, stored)
                for each in stored:
                    device.release(each.segment)
                assert device.stats().stored_bytes == 0
        finally:
            engine.close(grace_s=0.05)


def test_a_full_disk_keeps_nothing(folder: Path) -> None:
    engine = FaultyEngine(
        [FaultRule("error", operation="allocate", nth=1, count=2, value=errno.ENOSPC)]
    )
    try:
        with opened_gpu(folder, engine=engine) as device:
            with pytest.raises(errors.DiskFullError):
                put(device, LAYOUT, 2, HEADS, 40, rng())
            assert device.stats().stored_bytes == 0
            assert_reads_right(device, put(device, LAYOUT, 2, HEADS, 40, rng()))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (Rule("error", -errno.EIO, nth=3, count=1), errors.ReadError),
        (Rule("flip", 8 * 5000, nth=3, count=1), errors.ChecksumError),
    ],
)
def test_gds_that_fails(folder: Path, rule: Rule, kind: type[errors.StorageError]) -> None:
    stub = CuFileStub(rules=[rule])
    with opened_gpu(folder, "gds", stub=stub, read_ahead_bytes=1 << 20) as device:
        stored = put(device, LAYOUT, 2, HEADS, 5000, rng())
        with pytest.raises(kind, match=device.space.path):
            assert_reads_right(device, stored)
        assert device.front() == -1
        assert_reads_right(device, stored)


def test_gds_that_hangs(folder: Path) -> None:
    def attempt(deadline_s: float) -> bool:
        stub = CuFileStub(rules=[Rule("never", nth=1, count=1)])
        with opened_gpu(folder, "gds", stub=stub, deadline_s=deadline_s) as device:
            stored = put(device, LAYOUT, 1, HEADS, 40, rng())
            with pytest.raises(errors.DeadlineExceededError):
                assert_reads_right(device, stored)
            assert_reads_right(device, stored)
        return True

    patiently(attempt, 0.15)


@pytest.mark.parametrize("way", WAYS)
def test_closed(folder: Path, way: str) -> None:
    """With reads in line and a write under way; nothing stays in the folder."""
    with opened_gpu(folder, way) as device:
        stored = put(device, LAYOUT, 1, HEADS, 900, rng())[0]
        tickets = [device.ahead(LAYOUT, [stored.use(0).use]) for _ in range(3)]
        put(device, LAYOUT, 1, HEADS, 900, rng())
        device.close()
        for ticket in tickets:
            with pytest.raises(errors.EngineClosedError):
                work(device, ticket, visits=False)
    assert until(lambda: not list(folder.iterdir()))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_is_used_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError]
) -> None:
    """In any call: a typed error, after which the device can be used; other errors of torch stay
    what they are."""
    with opened_gpu(folder) as device:
        stored = put(device, LAYOUT, 1, HEADS, 40, rng())
        places = [(running, "attention_inside"), (gpu, "host_memory"), (checks, "crc32c_inside")]
        for module, name in places:
            for text, expected in (
                ("CUDA error: out of memory", errors.OutOfMemoryError),
                ("CUDA error: other", kind),
            ):
                if kind is torch.OutOfMemoryError and expected is kind:
                    continue

                def fail(*args: object, text: str = text, **options: object) -> None:
                    raise kind(text)

                with monkeypatch.context() as patch:
                    patch.setattr(module, name, fail)
                    with pytest.raises(expected, match=r"memory|other"):
                        put(
                            device, LAYOUT, 1, HEADS, 40, rng()
                        ) if module is gpu else assert_reads_right(device, stored)
                assert_reads_right(device, stored)
