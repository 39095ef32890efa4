"""`GpuRowDevice` on CPU memory: its answers over every kind of rows are within the bounds of fp32,
and those of `SsdRowDevice`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.gpu import attention as group_attention
from espnx.device.gpu import readers
from espnx.device.gpu.rows import GpuRowDevice
from espnx.device.row_layout import RowLayout
from espnx.device.rows.ssd import SsdRowDevice
from espnx.ops.attention import RowsInMemory, attention_reference, running
from espnx.storage import NativeEngine
from tests.device.gpu.rows import WAYS, opened_gpu
from tests.device.rows import Seen, assert_right, attend, normal, opened, put, queries

HEADS = range(2)
LAYOUTS = {
    "fp16": RowLayout("fp16", 64, 64),
    "fp32, wider V": RowLayout("fp32", 40, 72),
    "bf16": RowLayout("bf16", 128, 128),
    "int8": RowLayout("int8", 64, 32),
    "X": RowLayout("fp16", 48, 48, is_shared=True),
}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_rows(device: GpuRowDevice | SsdRowDevice, layout: RowLayout, n_heads: int) -> list[Seen]:
    """Three sequences: two runs of each, of which the first ends within a block or has been
    cropped; one shared; one hardly there."""
    heads = range(n_heads)
    n = 2 * layout.block_rows + 3
    first = put(device, layout, 3, heads, n, rng(1))
    second = put(device, layout, 2, heads, 3 * layout.block_rows, rng(2))
    prefix = put(device, layout, 1, heads, layout.block_rows, rng(3))[0]
    seen = [prefix.use(0, None, 0), prefix.use(1, layout.block_rows - 1, 0)]
    at = layout.block_rows
    seen += [
        first[0].use(0, n, at),
        first[1].use(1, layout.block_rows + 1, at),
        first[2].use(2, 1, 0),
    ]
    return [
        *seen,
        second[0].use(0, None, at + n),
        second[1].use(1, None, at + layout.block_rows + 1),
    ]


def some_tail(layout: RowLayout, n_sequences: int, n_heads: int, first: int) -> RowsInMemory:
    k = normal(n_sequences, n_heads, 12, layout.d, rng=rng(7)).to(torch.float16)
    v = (
        k
        if layout.is_shared
        else normal(n_sequences, n_heads, 12, layout.dv, rng=rng(8)).to(torch.float16)
    )
    return RowsInMemory(k, v, 2, 9, first)


@pytest.mark.parametrize(
    ("kind", "way", "is_wide"),
    [
        *((kind, "direct", is_wide) for kind in LAYOUTS for is_wide in (False, True)),
        ("fp16", "bounce", False),
        ("int8", "gds", False),
    ],
)
def test_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str, is_wide: bool
) -> None:
    """Every kind of rows, with queries of several heads and positions, masks, a tail and windows
    down to one read. `is_wide`: as where rows are longer than the kernel takes."""
    layout = LAYOUTS[kind]
    if is_wide:
        monkeypatch.setattr(running, "HOST_DIM_MAX", 8)
        monkeypatch.setattr(group_attention, "_TILE_BYTES", 8 * layout.block_bytes)
    n_heads = 1 if layout.is_shared else 2
    for window in (1, 5 * layout.block_bytes, 64 << 20):
        with opened_gpu(folder, way, read_ahead_bytes=window) as device:
            seen = some_rows(device, layout, n_heads)
            positions = 7 * layout.block_rows + 20
            shown = (torch.rand(3, positions, generator=rng(4)) < 0.8).to(torch.uint8)
            last = torch.tensor([3, positions, 2 * layout.block_rows + 1])
            masks: list[dict[str, torch.Tensor]] = [
                {},
                {"first_visible": torch.tensor([0, layout.block_rows + 2, positions])},
                {"visible": shown},
                {"last_position": last},
                {"first_visible": torch.tensor([5, 1, 0]), "visible": shown, "last_position": last},
            ]
            for mask in masks:
                look = queries(layout, 3, n_heads, 3, rng(5), **mask)
                for tail in (None, some_tail(layout, 3, n_heads, positions - 9))[bool(mask) :]:
                    assert_right(attend(device, layout, seen, look, tail), seen, look, tail)
            assert device.stats().bytes_asked == (1 + len(masks)) * _used_bytes(seen, layout)
            assert device.front() == -1


def _used_bytes(seen: list[Seen], layout: RowLayout) -> int:
    """Of the blocks that are looked at, each once."""
    used: dict[int, int] = {}
    for each in seen:
        segment = each.use.segment
        used[segment.place] = max(
            used.get(segment.place, 0), len(segment.heads) * layout.blocks(each.use.n_rows)
        )
    return sum(used.values()) * layout.block_bytes


@pytest.mark.parametrize("way", WAYS)
def test_beside_the_host(folder: Path, way: str) -> None:
    """Both devices keep the same bytes, and read a ticket's each once; several tickets wait in
    line."""
    layout = LAYOUTS["fp16"]
    with (
        opened_gpu(folder / "a", way, read_ahead_bytes=1 << 20) as ours,
        opened(folder / "b") as theirs,
    ):
        seen = [some_rows(device, layout, 2) for device in (ours, theirs)]
        ours.flush()
        for a, b in zip(*seen, strict=True):
            assert (a.use.segment.sums == b.use.segment.sums).all()
        tickets = [
            [device.ahead(layout, [each.use for each in some]) for _ in range(3)]
            for device, some in zip((ours, theirs), seen, strict=True)
        ]
        for a, b in zip(*tickets, strict=True):
            look = queries(layout, 3, 2, 4, rng(a))
            o, lse = ours.attend(a, look)
            wanted_o, wanted_lse = theirs.attend(b, look)
            torch.testing.assert_close(o, wanted_o, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
        assert (
            ours.stats().bytes_asked
            == theirs.stats().bytes_asked
            == 3 * _used_bytes(seen[0], layout)
        )


@pytest.mark.parametrize("way", WAYS)
def test_visits(folder: Path, way: str) -> None:
    """Every row that is looked at is shown once, with what it is."""
    layout = LAYOUTS["X"]
    for window in (1, 64 << 20):
        with opened_gpu(folder, way, read_ahead_bytes=window) as device:
            seen = some_rows(device, layout, 1)
            shown: dict[tuple[int, int], torch.Tensor] = {}

            def see(
                memory: torch.Tensor,
                pieces: np.ndarray,
                shown: dict[tuple[int, int], torch.Tensor] = shown,
            ) -> None:
                for sequence, head, offset, n_rows, first in pieces.tolist():
                    assert head == 0
                    size = layout.blocks(n_rows) * layout.block_bytes
                    x, _ = layout.unpack(
                        memory[offset : offset + size].view(-1, layout.block_bytes), n_rows
                    )
                    for row in range(n_rows):
                        assert (sequence, first + row) not in shown
                        shown[sequence, first + row] = x[row].clone()

            device.visit(device.ahead(layout, [each.use for each in seen]), see)
            assert len(shown) == sum(each.use.n_rows for each in seen)
            for each in seen:
                for row in range(each.use.n_rows):
                    assert torch.equal(
                        shown[each.use.sequence, each.use.first_position + row], each.kept.k[0, row]
                    )


def test_nothing(folder: Path) -> None:
    layout = LAYOUTS["fp16"]
    with opened_gpu(folder) as device:
        stored = put(device, layout, 2, HEADS, 0, rng())
        for uses in ([], [each.use(i) for i, each in enumerate(stored)]):
            look = queries(layout, 2, 2, 3, rng())
            assert_right(attend(device, layout, uses, look), uses, look)
            device.visit(
                device.ahead(layout, [each.use for each in uses]),
                lambda memory, pieces: pytest.fail("nothing was stored"),
            )
        stored = put(device, layout, 2, HEADS, 5, rng())
        uses = [each.use(i) for i, each in enumerate(stored)]
        look = queries(layout, 2, 2, 0, rng())
        assert [list(each.shape) for each in attend(device, layout, uses, look)] == [
            [2, 2, 0, 64],
            [2, 2, 0],
        ]
        assert (device.path_report()[0].effective_path.split()[0], device.front()) == (
            device.engine.effective,
            -1,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(dtype: torch.dtype, bad: float) -> None:
    """Matrix products: a hidden row has no effect, one that is seen is not hidden behind a
    number."""
    k, v = normal(1, 70, 16, rng=rng(1)).to(dtype), normal(1, 70, 16, rng=rng(2)).to(dtype)
    seen = torch.ones(1, 3, 70, dtype=torch.bool)
    seen[0, 0, 40] = seen[0, 0, 41] = False
    seen[0, 1] = False
    clean, _ = running.matrix_attention(normal(1, 3, 16, rng=rng(3)), k, v, seen)
    v[0, 40, 3], k[0, 41, 2] = bad, bad
    o, lse = running.matrix_attention(normal(1, 3, 16, rng=rng(3)), k, v, seen)
    torch.testing.assert_close(o[0, 0], clean[0, 0])
    assert not o[0, 1].any()
    assert lse[0, 1].item() == -torch.inf
    assert bool(o[0, 2].isnan().all())


def test_matrix_products_are_the_op() -> None:
    k, v, q = (
        normal(2, 70, 16, rng=rng(1)),
        normal(2, 70, 24, rng=rng(2)),
        normal(2, 3, 16, rng=rng(3)),
    )
    memory = torch.cat([k.flatten(1), v.flatten(1)], dim=1).view(torch.uint8).view(-1)
    offsets = torch.tensor([0, memory.numel() // 2]).view(2, 1, 1)
    counts, last = torch.tensor([70, 33]), torch.tensor([[69, 5, -1], [40, 0, 32]])
    seen = (torch.arange(70) < counts[:, None])[:, None] & (torch.arange(70) <= last[:, :, None])
    o, lse = running.matrix_attention(q, k, v, seen)
    wanted = attention_reference(
        q.unsqueeze(1),
        memory,
        offsets,
        counts,
        block_rows=70,
        format="fp32",
        scale=1.0,
        dv=24,
        last_position=last,
        dtype=torch.float64,
    )
    torch.testing.assert_close(o.double(), wanted[0].squeeze(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted[1].squeeze(1), rtol=1e-5, atol=1e-6)


def test_what_is_refused(folder: Path) -> None:
    for path in ("gds", "gds-compat"):
        with pytest.raises(errors.InvalidInputError, match="GPU memory"):
            GpuRowDevice(folder, compute="cpu", engine=path)
    if not torch.cuda.is_available():
        with pytest.raises(errors.PathUnavailableError, match="no CUDA device"):
            GpuRowDevice(folder, engine="gds")
    with pytest.raises(errors.InvalidInputError, match="read_ahead_bytes"):
        GpuRowDevice(folder, compute="cpu", read_ahead_bytes=0)
    assert not list(folder.iterdir())


def test_the_way_is_said(folder: Path) -> None:
    for way, path, why in (
        ("direct", "posix", ""),
        ("bounce", "posix+copy", "no gds here"),
        ("gds", "gds-compat", ""),
    ):
        with opened_gpu(folder, way, engine="posix") as device:
            (file,) = device.path_report()
            assert (file.effective_path.replace(" (buffered)", ""), file.fallback_reason) == (
                path,
                why,
            )
            assert file.path == device.space.path


@pytest.mark.parametrize(
    "error",
    [
        errors.ReadError("first read of the file failed", path="x", errno=95),
        errors.OutOfMemoryError("memory of the GPU for reads", needed_bytes=5, free_bytes=1),
        errors.PathUnavailableError("no direct reads into GPU memory"),
    ],
    ids=["read", "memory", "path"],
)
def test_auto_reads_by_host_memory_where_gds_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: errors.EspnxError
) -> None:
    """Also where its first read fails, or the GPU has no room for its arena; named, it fails."""

    def refuse(path: str, **options: object) -> None:
        raise error

    monkeypatch.setattr(readers, "open_engine", refuse)
    with NativeEngine("posix") as engine:
        file = engine.open(folder / "rows", "w")
        given = (engine, file, torch.device("meta"))
        sizes = {"window_bytes": 1 << 20, "slot_bytes": 1 << 20, "deadline_s": 30.0}
        found = readers.open_reader("auto", *given, **sizes)
        assert isinstance(found, readers.BounceReader)
        assert found.fallback_reason == str(error)
        with pytest.raises(type(error)):
            readers.open_reader("gds", *given, **sizes)
