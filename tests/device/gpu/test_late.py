"""`GpuRowDevice` on a device that is late on purpose (late.py): right bytes in every order that its
streams and events allow, wrong ones as soon as one of its waits is taken out. And how often the
host waits for it."""

from __future__ import annotations

import errno
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.gpu import readers
from espnx.device.gpu import stream as tensor_stream
from espnx.device.gpu.readers import BounceReader, DirectReader, Reader
from espnx.device.gpu.rows import GpuRowDevice
from espnx.device.gpu.staging import Slot, Staging
from espnx.device.gpu.writes import SLOTS, PieceCopies, WriteInPieces
from espnx.device.row_layout import RowLayout
from espnx.device.rows.writes import PutWrite
from espnx.ops.attention import Queries, RowsInMemory
from espnx.storage import FaultRule, FaultyEngine, FileHandle, NativeEngine, Plan
from espnx.storage.gds.engine import GdsEngine
from espnx.storage.gds.memory import EventFence
from tests.device.gpu.late import LateDevice, LateEvent, LateMemory, LateStream, LateTensor
from tests.device.gpu.late import late_device as late_device
from tests.device.rows import Kept, Seen, assert_right, attend, put, queries
from tests.storage.common import patiently, until
from tests.storage.gds.common import write_file
from tests.storage.gds.cufile_stub import CuFileStub

LAYOUTS = {
    "fp16": RowLayout("fp16", 64, 64),
    "int8": RowLayout("int8", 32, 64),
    "X": RowLayout("fp16", 48, 48, is_shared=True),
}
WAYS = ("bounce", "gds")
PIECE_BYTES = 8192
pytestmark = pytest.mark.usefixtures("one_thread")


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def opened(late: LateDevice, folder: Path, way: str, **options: Any) -> Iterator[GpuRowDevice]:
    def make(engine: NativeEngine, file: FileHandle) -> Reader:
        if way == "bounce":
            slot_bytes = tensor_stream.group_bytes(options["read_ahead_bytes"])
            return BounceReader(engine, file, late.device, 30.0, slot_bytes=slot_bytes)
        gds = GdsEngine(
            "gds-compat", bindings=CuFileStub(), memory=LateMemory(late), arena_bytes=256 << 10
        )
        return DirectReader(gds, gds.open(file.path), 30.0, owns_engine=True)

    options = {"engine": "posix", **options}
    device = GpuRowDevice(folder, compute=late.device, make_reader=make, **options)
    try:
        yield device
    finally:
        device.close()


def there(late: LateDevice, look: Queries, tail: RowsInMemory | None) -> Any:
    """The same queries and rows, on the device."""
    moved = None
    if tail is not None:
        k = tail.k.to(late.device)
        v = k if tail.v is tail.k else tail.v.to(late.device)
        moved = RowsInMemory(k, v, tail.skip, tail.n_rows, tail.first_position)
    masks = (look.last_position, look.first_visible, look.visible)
    return Queries(look.q.to(late.device), look.dv, *masks), moved


def program(folder: Path, seed: int, way: str) -> LateDevice:
    """A random program: rows are written, read ahead and attended to, several tickets in line, with
    windows down to one group. Raises where something is wrong."""
    draw = random.Random(seed)
    layout = LAYOUTS[draw.choice([*LAYOUTS])]
    n_heads = 1 if layout.is_shared else 2
    window = draw.choice([1, 4, 12]) * layout.block_bytes
    with (
        late_device(seed, draw.choice([0.0, 0.05, 0.5])) as late,
        opened(late, folder, way, read_ahead_bytes=window) as device,
    ):
        if seed % 2:  # what is written goes in pieces
            device._slots = Staging(late.device, PIECE_BYTES)
        stored: list[Seen] = []
        at = [0, 0]
        for step in range(draw.randrange(1, 4)):
            n = draw.choice([1, layout.block_rows, 3 * layout.block_rows + 5])
            own = range(n_heads)
            for i, each in enumerate(put(device, layout, 2, own, n, rng(100 * seed + step))):
                stored.append(each.use(i, None, at[i]))
                at[i] += n
        if draw.random() < 0.5:
            device.flush()
        tickets = [
            device.ahead(layout, [each.use for each in stored]) for _ in range(draw.randrange(1, 3))
        ]
        results = []
        for number, ticket in enumerate(tickets):
            look = queries(layout, 2, n_heads, draw.randrange(1, 4), rng(7 * seed + number))
            with late.on(late.main if draw.random() < 0.7 else late.new(late.device)):
                own_look, _ = there(late, look, None)
                results.append((look, [x.cpu() for x in device.attend(ticket, own_look)]))
        for look, (o, lse) in results:
            assert_right((o, lse), stored, look)
    return late


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "seeds",
    [range(10)]
    + [
        pytest.param(range(first, first + 10), marks=pytest.mark.sweep)
        for first in range(10, 510, 10)
    ],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_right_in_any_order(folder: Path, way: str, seeds: range) -> None:
    for seed in seeds:
        program(folder / str(seed), seed, way)


def test_a_full_device_is_no_error_of_who_reads_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been read and found no room on the device is copied when it is needed: by then what
    is computed now may have given back its own."""
    layout, full = LAYOUTS["fp16"], []

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *args: Any, **options: Any) -> torch.Tensor:
            if full:
                full.pop()
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.empty(*args, **options)

    with (
        late_device(3) as late,
        opened(late, folder, "bounce", read_ahead_bytes=64 * layout.block_bytes) as device,
    ):
        stored = [each.use(0) for each in put(device, layout, 1, range(2), 90, rng(1))]
        device.flush()
        first = device.ahead(layout, [each.use for each in stored])
        arrivals = [arrival for _, arrival, _ in device._stream._line[0].arrivals]
        until(lambda: all(each._future.done() for each in arrivals))
        monkeypatch.setattr(readers, "torch", Torch())
        full.append("of what is computed now")
        second = device.ahead(layout, [each.use for each in stored])
        assert full == []
        look = queries(layout, 1, 2, 2, rng(2))
        for ticket in (first, second):
            own_look, _ = there(late, look, None)
            found = [x.cpu() for x in device.attend(ticket, own_look)]
            assert_right((found[0], found[1]), stored, look)


def _passed_at_once(fence: EventFence) -> bool:
    return True


def _any_slot(staging: Staging) -> Slot | None:
    if not staging._free:
        return None
    slot = staging._free.popleft()
    slot.copied = None
    return slot


GUARDS: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "rows wait for their copy": ("bounce", LateStream, "wait_event", lambda *_: None),
    "a copy's target is kept for who computes": (
        "bounce",
        LateTensor,
        "record_stream",
        lambda *_: None,
    ),
    "pinned memory is used again after its copy": ("bounce", Staging, "_copied", _any_slot),
    "what is written waits for who made it": ("gds", LateStream, "wait_stream", lambda *_: None),
    "what is written has arrived": ("gds", LateEvent, "synchronize", lambda *_: None),
    "memory of reads waits for kernels": ("gds", EventFence, "passed", _passed_at_once),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_each_wait_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    """Without it some order gives wrong bytes, and the tests above would see it."""
    way, owner, name, instead = GUARDS[guard]
    monkeypatch.setattr(owner, name, instead)
    for seed in range(40):
        try:
            program(folder / str(seed), seed, way)
        except (errors.ChecksumError, errors.NotConformingError):
            return
    pytest.fail("nobody noticed")


def test_results_handed_out_on_two_streams(folder: Path, monkeypatch: Any) -> None:
    """The engine's memory is not used again before both have read it, whichever stream is current
    when the last view goes."""

    def wrong(seed: int) -> bool:
        path, data = write_file(folder, 200_000, seed, f"data{seed}")
        with late_device(seed, 0.0) as late:
            memory = LateMemory(late)
            with GdsEngine(
                "gds-compat", bindings=CuFileStub(), memory=memory, arena_bytes=64 << 10
            ) as engine:
                file, side = engine.open(path), late.new(late.device)
                future = engine.read(Plan.of(file, [4096], [57_344]))
                future.wait()
                with late.on(side):
                    kept = future.wait().clone()
                del future
                gc.collect()
                engine.read(Plan.of(file, [100_000], [57_344])).wait()
                side.synchronize()
                return bytes(kept.cpu().numpy()) != data[4096 : 4096 + 57_344]

    assert not any(wrong(seed) for seed in range(3))
    monkeypatch.setattr(LateMemory, "fence", lambda self, some: EventFence({self.stream()}))
    assert any(wrong(seed) for seed in range(3, 6))


@pytest.mark.parametrize("way", WAYS)
def test_how_often_the_host_waits(folder: Path, way: str) -> None:
    """Once for a layer's checksums, however many groups it is read in, and not for what is
    computed; tables are copied from pinned memory."""
    layout = LAYOUTS["fp16"]
    with (
        late_device(3, eagerness=1.0) as late,  # that keeps up
        opened(late, folder, way, read_ahead_bytes=4 * layout.block_bytes) as device,
    ):
        stored = [
            each.use(i)
            for i, each in enumerate(
                put(device, layout, 2, range(2), 8 * layout.block_rows, rng(1))
            )
        ]
        look = queries(layout, 2, 2, 3, rng(2))
        own_look, _ = there(late, look, None)
        device.flush()
        late.waits.clear()
        late.pageable_copies = 0
        o, lse = attend(device, layout, stored, own_look)
        assert device.stats().read_requests >= 8
        assert late.waits == {"event": 1}
        assert late.pageable_copies == 0
        assert_right((o.cpu(), lse.cpu()), stored, look)


def test_the_answer_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage is seen before the rows count, however late the device is; without the wait it is
    not."""
    layout = LAYOUTS["fp16"]
    with (
        late_device(1, eagerness=0.0) as late,
        opened(late, folder, "bounce", name="rows", read_ahead_bytes=64 << 20) as device,
    ):
        stored = [each.use(0) for each in put(device, layout, 1, range(2), 40, rng(1))]
        own_look, _ = there(late, queries(layout, 1, 2, 1, rng(2)), None)
        attend(device, layout, stored, own_look)
        device.sync()
        with open(folder / "rows", "r+b") as file:
            file.seek(stored[0].use.segment.place + 100)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(errors.ChecksumError, match="damaged"):
            attend(device, layout, stored, own_look)
        late.main.synchronize()
        device._stream._checks._answer.zero_()
        monkeypatch.setattr(LateEvent, "synchronize", lambda _: None)
        attend(device, layout, stored, own_look)


@pytest.mark.parametrize("way", WAYS)
def test_checked_is_not_computed(folder: Path, way: str) -> None:
    """When a layer's attention comes back, its rows are checked and nothing else has to have
    run."""
    layout = LAYOUTS["fp16"]
    with (
        late_device(5, eagerness=0.0) as late,
        opened(late, folder, way, read_ahead_bytes=64 << 20) as device,
    ):
        stored = [
            each.use(i)
            for i, each in enumerate(put(device, layout, 2, range(2), layout.block_rows, rng(1)))
        ]
        look = queries(layout, 2, 2, 3, rng(2))
        own_look, _ = there(late, look, None)
        device.flush()
        late.main.synchronize()
        late.main.pace = 1e-9  # its work is done when somebody needs it, and not before
        begun = late.main.queued
        o, lse = attend(device, layout, stored, own_look)
        assert late.main.queued >= begun + 2  # its table, and a kernel
        assert late.main.done < late.main.queued
        assert_right((o.cpu(), lse.cpu()), stored, look)


def test_any_slot_whose_copy_has_run() -> None:
    """Also one that came back after others."""
    with late_device(0, eagerness=0.0) as late:
        staging = Staging(late.device, 4096)
        slots = [staging.take(100) for _ in range(3)]
        slow, fast = late.new(late.device), late.new(late.device)
        for slot, stream in zip(slots, (slow, fast, slow), strict=True):
            with late.on(stream):
                slot.memory[:100].to(late.device, non_blocking=True)
            staging.give_back(slot, late.event_behind(stream))
        fast.synchronize()
        late.waits.clear()
        assert staging.take(4096) is slots[1]
        assert staging.take(1) not in slots
        assert not late.waits
        assert staging.take(5000).memory.numel() == 5000
        big = staging.take(5000)
        staging.give_back(big, late.event_behind(fast))
        assert big not in staging._free


def put_long(late: LateDevice, device: GpuRowDevice, seed: int) -> list[Kept]:
    """Rows of 50 pieces."""
    device._slots = Staging(late.device, PIECE_BYTES)
    layout = LAYOUTS["fp16"]
    return put(device, layout, 1, range(2), 25 * layout.block_rows, rng(seed))


def assert_reads_right(late: LateDevice, device: GpuRowDevice, stored: list[Kept]) -> None:
    layout = LAYOUTS["fp16"]
    look = queries(layout, 1, 2, 3, rng(99))
    own_look, _ = there(late, look, None)
    seen = [each.use(0) for each in stored]
    o, lse = attend(device, layout, seen, own_look)
    assert_right((o.cpu(), lse.cpu()), seen, look)


def test_long_rows_go_through_a_few_slots(folder: Path) -> None:
    """However long they are, and however many come."""
    with (
        late_device(2, eagerness=0.0) as late,
        opened(late, folder, "gds", read_ahead_bytes=1 << 20) as device,
    ):
        for turn in range(2):
            begun = len(late._pinned)
            if turn == 0:
                stored = put_long(late, device, 1)
            else:
                stored = put(device, LAYOUTS["fp16"], 1, range(2), 1000, rng(2))
            device.flush()
            taken = [each.numel() for each in late._pinned[begun:] if each.numel() > 4096]
            assert taken == ([PIECE_BYTES + 4096] * SLOTS if turn == 0 else [])
            assert_reads_right(late, device, stored)


@pytest.mark.parametrize("nth", [1, 4, 5, 50])
def test_a_piece_that_fails_is_written_again(folder: Path, nth: int) -> None:
    """From the device's memory; whoever waits is told once."""
    rule = FaultRule("error", operation="write", nth=nth, count=1, value=errno.EIO)
    engine = FaultyEngine([rule], poison=True)
    try:
        with (
            late_device(3, eagerness=0.0) as late,
            opened(late, folder, "bounce", engine=engine, read_ahead_bytes=1 << 20) as device,
        ):
            stored = put_long(late, device, 1)
            with pytest.raises(errors.WriteError) as caught:
                device.flush()
            assert caught.value.offset_bytes == (nth - 1) * PIECE_BYTES
            device.flush()
            assert_reads_right(late, device, stored)
            for each in stored:
                device.release(each.segment)
            assert device.stats().stored_bytes == 0
    finally:
        engine.close(grace_s=0.05)


@pytest.mark.parametrize("is_released", [False, True])
def test_a_piece_that_may_still_arrive(folder: Path, is_released: bool) -> None:
    """Its slot is not used again, and neither is its place, where the rows are not wanted."""

    def attempt(deadline_s: float) -> bool:
        kind = "never" if is_released else "delay"
        rule = FaultRule(kind, operation="write", nth=3, count=1, value=int(1.5e9 * deadline_s))
        engine = FaultyEngine([rule], poison=True)
        try:
            with (
                late_device(3, eagerness=0.0) as late,
                opened(
                    late,
                    folder,
                    "bounce",
                    engine=engine,
                    read_ahead_bytes=1 << 20,
                    deadline_s=deadline_s,
                ) as device,
            ):
                stored = put_long(late, device, 1)
                if is_released:
                    device.release(stored[0].segment)
                    assert device.stats().stored_bytes == 50 * PIECE_BYTES
                    return True
                with pytest.raises(errors.DeadlineExceededError):
                    device.flush()
                device.flush()  # when it has arrived
                assert engine.stats().in_flight == 0
                assert_reads_right(late, device, stored)
                assert len(device._slots._free) == SLOTS
                begins = [each.memory.data_ptr() for each in device._slots._free]
                taken = [each for each in late._pinned if each.numel() == PIECE_BYTES + 4096]
                lost = [
                    each
                    for each in taken
                    if not any(0 <= begin - each.data_ptr() <= 4096 for begin in begins)
                ]
                assert len(lost) == 1
        finally:
            engine.close(grace_s=0.05)
        return True

    patiently(attempt, 0.15)


@pytest.mark.parametrize("where", ["copy", "give_back"])
def test_an_error_of_the_devices_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nothing is under way when it is told; what is missing is written again."""
    rule = FaultRule("delay", operation="write", nth=2, count=4, value=20_000_000)
    engine, is_broken, turns = FaultyEngine([rule], poison=True), True, 0
    real = getattr(PieceCopies, where)

    def failing(copies: PieceCopies, given: Any) -> Any:
        nonlocal turns
        turns += 1
        if is_broken and turns > 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(copies, given)

    monkeypatch.setattr(PieceCopies, where, failing)
    try:
        with (
            late_device(3, eagerness=0.0) as late,
            opened(late, folder, "bounce", engine=engine, read_ahead_bytes=1 << 20) as device,
        ):
            stored = put_long(late, device, 1)
            shared = device._writes._under_way[0].writing
            assert shared is not None
            pieces = shared._writing
            assert isinstance(pieces, WriteInPieces)
            assert isinstance(pieces._started.exception(), RuntimeError)
            assert not pieces._under_way
            assert pieces.is_over()
            is_broken = False
            with pytest.raises(RuntimeError, match="CUDA error"):
                device.flush()
            device.flush()
            assert_reads_right(late, device, stored)
    finally:
        engine.close(grace_s=0.05)


def test_an_earlier_try_that_stays_in_flight(folder: Path) -> None:
    """It holds up nobody: neither the other writes of the thread, nor who gives the rows up."""

    def attempt(deadline_s: float) -> bool:
        (folder / "rows").touch()
        engine = FaultyEngine([FaultRule("never", operation="write", count=1)])
        memory = engine.memory(4096)
        copies: Any = SimpleNamespace(
            pieces=[range(4096)],
            copy=lambda piece: SimpleNamespace(memory=memory),
            give_back=lambda slot: None,
        )
        try:
            with ThreadPoolExecutor(1) as writer:
                plan = Plan.of(engine.open(folder / "rows", "r+"), [0], [4096], [0])
                pieces = WriteInPieces(writer, engine, plan, copies, deadline_s, lambda: None)
                with pytest.raises(errors.DeadlineExceededError):
                    pieces.wait()
                assert pieces._started.done()
                assert not pieces.done()
                with pytest.raises(errors.DeadlineExceededError, match="still with the device"):
                    pieces.wait()
                pieces._deadline_s = 60.0
                again = ThreadPoolExecutor(1)
                waiting = again.submit(pieces.wait)
                assert PutWrite(pieces, 1).leave((0, 4096)) == []
                assert pieces._copies is None
                with pytest.raises((errors.TransferCancelledError, errors.DeadlineExceededError)):
                    waiting.result(20)
                again.shutdown()
                assert not pieces.is_over()
        finally:
            engine.close(grace_s=0.05)
        return True

    patiently(attempt, 0.15)


def test_rows_that_are_not_wanted_before_they_are_written(folder: Path) -> None:
    """The device is closed with pieces under way: no thread is left over."""
    with (
        late_device(4, eagerness=0.0) as late,
        opened(late, folder, "bounce", read_ahead_bytes=1 << 20) as device,
    ):
        put_long(late, device, 1)
        device.close()
        assert not any("espnx-writeback" in each.name for each in threading.enumerate())
    assert not list(folder.iterdir())
