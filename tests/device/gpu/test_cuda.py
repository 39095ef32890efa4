"""`GpuRowDevice` on a GPU: rows in its memory, the Triton kernels, and every path there is; answers
within the same bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.gpu.rows import GpuRowDevice
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import Queries, RowsInMemory
from tests.device.gpu.test_device import LAYOUTS, queries, rng, some_rows, some_tail
from tests.device.rows import assert_right, attend

pytestmark = pytest.mark.gpu
WIDE = {"wide X": RowLayout("fp16", 512, 512, is_shared=True), "wide K": RowLayout("bf16", 320, 64)}


def opened_cuda(folder: Path, engine: str, **options: Any) -> GpuRowDevice:
    try:
        return GpuRowDevice(folder, compute="cuda", engine=engine, **options)
    except (errors.PathUnavailableError, errors.MissingDependencyError) as error:
        pytest.skip(f"[gds] {error}")


def there(look: Queries) -> Queries:
    return Queries(look.q.cuda(), look.dv, look.last_position, look.first_visible, look.visible)


@pytest.mark.parametrize("engine", ["auto", "uring", "gds", "gds-compat"])
@pytest.mark.parametrize("kind", [*LAYOUTS, *WIDE])
def test_answers(tmp_path: Path, kind: str, engine: str) -> None:
    layout = (LAYOUTS | WIDE)[kind]
    n_heads = 1 if layout.is_shared else 2
    for window in (1, 64 << 20):
        device = opened_cuda(tmp_path, engine, read_ahead_bytes=window)
        try:
            assert device.path_report()[0].effective_path.startswith(
                {"auto": ("gds", "uring", "posix"), "gds": "gds"}.get(engine, engine)
            )
            seen = some_rows(device, layout, n_heads)
            positions = 7 * layout.block_rows + 20
            last = torch.tensor([3, positions, 2 * layout.block_rows + 1])
            for mask in ({}, {"first_visible": torch.tensor([5, 1, 0]), "last_position": last}):
                look = queries(layout, 3, n_heads, 3, rng(5), **mask)
                tail = some_tail(layout, 3, n_heads, positions - 9)
                moved = tail.k.cuda()
                on_gpu = RowsInMemory(
                    moved,
                    moved if tail.v is tail.k else tail.v.cuda(),
                    tail.skip,
                    tail.n_rows,
                    tail.first_position,
                )
                o, lse = attend(device, layout, seen, there(look), on_gpu)
                assert o.is_cuda
                assert_right((o.cpu(), lse.cpu()), seen, look, tail)
        finally:
            device.close()


def test_damage(tmp_path: Path) -> None:
    """A flipped bit on the disk is found on the GPU; then the device goes on."""
    layout = LAYOUTS["fp16"]
    device = opened_cuda(tmp_path, "uring", name="rows")
    try:
        seen = some_rows(device, layout, 2)
        device.sync()
        look = queries(layout, 3, 2, 1, rng())
        place = seen[0].use.segment.place + 100
        with open(tmp_path / "rows", "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            for value, is_damaged in ((byte ^ 4, True), (byte, False)):
                file.seek(place)
                file.write(bytes([value]))
                file.flush()
                if is_damaged:
                    with pytest.raises(errors.ChecksumError, match="damaged"):
                        attend(device, layout, seen, there(look))
                else:
                    o, lse = attend(device, layout, seen, there(look))
                    assert_right((o.cpu(), lse.cpu()), seen, look)
    finally:
        device.close()
