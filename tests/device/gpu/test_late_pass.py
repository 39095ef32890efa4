"""Forward passes of a KV cache on a device that is late on purpose (late.py): how often the host
waits and how much it launches, and that nothing counts before its rows are checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.gpu import checks
from espnx.device.gpu.readers import BounceReader
from espnx.device.gpu.rows import GpuRowDevice
from espnx.device.interface import ChecksLater, RowDevice
from espnx.device.plain import PlainDevice
from espnx.device.row_layout import RowLayout
from espnx.device.wrapper import Wrapper
from espnx.kv.attention import Step
from espnx.kv.cache import SsdCache
from espnx.kv.options import CacheOptions
from espnx.kv.striping import StripedDevices
from espnx.storage import FileHandle, NativeEngine
from tests.device.gpu.late import LateDevice, LateEvent
from tests.device.gpu.late import late_device as late_device
from tests.device.rows import assert_right as assert_attended
from tests.device.rows import put, queries
from tests.kv.naive import Naive, Shape, assert_right

SHAPE = Shape(n_layers=2, n_sequences=1, d=64, dv=64, dtype=torch.float16)
X_SHAPE = Shape(n_layers=2, hidden=64, n_heads=1, d=16, dv=16)
PASSES = (70, 1)
pytestmark = pytest.mark.usefixtures("one_thread")


def open_on(late: LateDevice, directory: str | Path, **options: Any) -> GpuRowDevice:
    def make(engine: NativeEngine, file: FileHandle) -> BounceReader:
        return BounceReader(engine, file, late.device, 30.0, slot_bytes=1 << 20)

    return GpuRowDevice(
        directory, **{**options, "compute": late.device, "engine": "posix", "make_reader": make}
    )


@contextmanager
def cache_on(
    late: LateDevice, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape, n_disks: int = 1
) -> Iterator[SsdCache]:
    """A cache whose rows are computed on in the memory of the late device."""

    def open_rows(self: PlainDevice, directory: str, **options: Any) -> RowDevice:
        return open_on(late, directory, **options)

    monkeypatch.setattr(PlainDevice, "open_rows", open_rows)
    disks = [folder / str(i) for i in range(n_disks)]
    cache = SsdCache(disks, shape.n_layers, CacheOptions(), names=["rows"] * n_disks)
    cache.rows.x_rows = 2 if shape.hidden else 0
    try:
        yield cache
    finally:
        cache.close()


def moved(late: LateDevice, step: Step) -> Step:
    there: dict[str, Any] = {name: getattr(step, name).to(late.device) for name in "qkv"}
    if step.x is not None and step.projection is not None:
        names = ("k_weight", "v_weight", "k_bias", "v_bias")
        weights = {name: getattr(step.projection, name) for name in names}
        there["x"] = step.x.to(late.device)
        there["projection"] = replace(
            step.projection,
            **{name: None if w is None else w.to(late.device) for name, w in weights.items()},
        )
    return replace(step, **there)


def attended(late: LateDevice, cache: SsdCache, steps: list[Any], before: int) -> list[Any]:
    """The layers of a pass, without its end."""
    given = [moved(late, step) for step, _, _ in steps]
    cache.begin(before)
    late.waits.clear()
    late.pageable_copies = 0
    return [cache.attend(number, step) for number, step in enumerate(given)]


@pytest.mark.parametrize("n_disks", [1, 2])
@pytest.mark.parametrize("shape", [SHAPE, X_SHAPE], ids=["kv", "x"])
def test_one_wait_a_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape, n_disks: int
) -> None:
    """For the checksums of all layers, of each disk; none in the layers."""
    naive = Naive(shape, torch.Generator().manual_seed(1))
    with (
        late_device(2, eagerness=1.0) as late,
        cache_on(late, folder, monkeypatch, shape, n_disks) as cache,
    ):
        if n_disks > 1:  # its threads have to know the device
            assert cache.striped._pool is not None
            cache.striped._pool._initializer = late.enter_thread
        for n in PASSES:
            steps = naive.step(n)
            found = attended(late, cache, steps, naive.count - n)
            in_layers, copies = dict(late.waits), late.pageable_copies
            late.waits.clear()
            cache.end()
            at_end = dict(late.waits)
            assert_right([o.cpu() for o in found], steps)
            cache.striped.flush()
        assert naive.count == sum(PASSES)
        assert (in_layers, at_end, copies) == ({}, {"event": n_disks}, 0)


def damage(cache: SsdCache, layer: int) -> None:
    """Changes a byte of the first stored block of a layer."""
    cache.striped.flush()
    rows = cache.rows.kv[layer]
    assert rows is not None
    place = cache.striped.place(rows.runs[0].parts[0][0])
    with open(cache.places.data_files[0], "r+b") as file:
        file.seek(place.offset_bytes + 11)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 64]))


@pytest.mark.parametrize("layer", [0, 1])
def test_damage_is_seen_before_a_pass_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """At the end of the pass, which is then taken out of every layer; without the wait there it is
    not seen."""
    naive = Naive(SHAPE, torch.Generator().manual_seed(3))
    with late_device(4, eagerness=0.0) as late, cache_on(late, folder, monkeypatch, SHAPE) as cache:
        steps = naive.step(70)
        attended(late, cache, steps, 0)
        cache.end()
        damage(cache, layer)
        for _ in range(2):
            steps = naive.step(1)
            attended(late, cache, steps, 70)
            with pytest.raises(errors.ChecksumError, match="stored rows are damaged") as caught:
                cache.end()
            assert str(folder) in str(caught.value.path)
            naive.crop(70)
            assert [cache.rows.length(i) for i in range(SHAPE.n_layers)] == [70] * SHAPE.n_layers
        late.main.synchronize()
        steps = naive.step(1)
        monkeypatch.setattr(LateEvent, "synchronize", lambda _: None)
        device = cache.striped.devices[0]
        assert isinstance(device, GpuRowDevice)
        device._stream._checks._answer.zero_()
        attended(late, cache, steps, 70)
        cache.end()


def test_a_pass_that_was_given_up_is_not_asked_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksums do not fail the next one."""
    naive = Naive(SHAPE, torch.Generator().manual_seed(3))
    with late_device(4) as late, cache_on(late, folder, monkeypatch, SHAPE) as cache:
        attended(late, cache, naive.step(70), 0)
        cache.end()
        damage(cache, 0)
        attended(late, cache, naive.step(1), 70)
        cache.crop(70)
        cache.end()


def test_outside_of_passes_each_layer_is_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naive = Naive(SHAPE, torch.Generator().manual_seed(3))
    with late_device(4) as late, cache_on(late, folder, monkeypatch, SHAPE) as cache:
        attended(late, cache, naive.step(70), 0)
        cache.end()
        damage(cache, 1)
        steps = [moved(late, step) for step, _, _ in naive.step(1)]
        cache.attend(0, steps[0])
        with pytest.raises(errors.ChecksumError):
            cache.attend(1, steps[1])


@pytest.mark.parametrize("blocks_max", [checks.BLOCKS_MAX, 10])
def test_tickets_wait_together_up_to_a_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch, blocks_max: int
) -> None:
    """More blocks than the bound are looked at in between."""
    monkeypatch.setattr("espnx.device.gpu.stream.BLOCKS_MAX", blocks_max)
    layout = RowLayout("fp16", 64, 64)
    with late_device(5, eagerness=1.0) as late:
        device = open_on(late, folder)
        assert isinstance(device, ChecksLater)
        stored = put(device, layout, 1, range(2), 3 * layout.block_rows, torch.Generator())[0]
        look = queries(layout, 1, 2, 3, torch.Generator().manual_seed(1))
        own = look.to(late.device)
        device.flush()
        late.waits.clear()
        results = []
        for _ in range(3):
            ticket = device.ahead(layout, [stored.use(0).use])
            results.append(device.attend_unchecked(ticket, own))
        assert late.waits == ({} if blocks_max > 10 else {"event": 1})
        device.check_looked_at()
        assert late.waits["event"] == (1 if blocks_max > 10 else 2)
        for o, lse in results:
            assert_attended((o.cpu(), lse.cpu()), [stored.use(0)], look)
        device.close()


def test_a_device_in_front_is_not_passed_by(folder: Path) -> None:
    """It hands on what it does not know (`Wrapper`), and is asked for checked rows all the same."""
    asked: list[str] = []

    class Front(Wrapper):
        def attend(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append("attend")
            found: tuple[torch.Tensor, torch.Tensor] = self._inner.attend(*given)
            return found

    layout = RowLayout("fp16", 64, 64)
    device = GpuRowDevice(folder, compute="cpu", engine="posix")
    striped = StripedDevices(1, lambda number, compute: Front(device))  # type: ignore[arg-type]
    striped.open(torch.device("cpu"))
    stored = put(device, layout, 1, range(2), 10, torch.Generator())[0]
    look = queries(layout, 1, 2, 3, torch.Generator().manual_seed(1))
    striped.checks_later = True
    device.flush()
    assert_attended(
        striped.attend(striped.ahead(layout, [[stored.use(0).use]]), look, None),
        [stored.use(0)],
        look,
    )
    striped.check()
    assert asked == ["attend"]
    striped.close()


def test_what_a_group_costs_the_host(folder: Path) -> None:
    """A group more is one launch more for each of its kernels: tables are copied once a ticket, and
    parts are merged once."""
    layout = RowLayout("fp16", 64, 64)
    queued: dict[int, tuple[int, int]] = {}
    with late_device(6, eagerness=1.0) as late:
        device = open_on(late, folder, read_ahead_bytes=4 * layout.block_bytes)
        for n_blocks in (4, 12):
            stored = put(
                device, layout, 1, range(1), n_blocks * layout.block_rows, torch.Generator()
            )[0]
            own = queries(layout, 1, 1, 3, torch.Generator().manual_seed(1)).to(late.device)
            device.flush()
            streams = late.main, device._stream._checks.stream
            ticket = device.ahead(layout, [stored.use(0).use])
            before = [stream.queued for stream in streams]  # type: ignore[union-attr]
            device.attend(ticket, own)
            queued[n_blocks] = tuple(  # type: ignore[assignment]
                stream.queued - begun  # type: ignore[union-attr]
                for stream, begun in zip(streams, before, strict=True)
            )
        more = [(b - a) / 8 for a, b in zip(queued[4], queued[12], strict=True)]
        # a kernel, and the wait for the copy of the rows
        assert more == [2.0, 2.0]
        device.close()
