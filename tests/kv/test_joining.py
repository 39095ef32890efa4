"""Generated tokens are spilled a few at a time; what is stored of them comes to lie as if it had
been prefilled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.kv.cache import SsdCache
from espnx.kv.options import CacheOptions
from espnx.kv.rows import JOIN_ROWS
from espnx.storage import FaultRule, FaultyEngine
from tests.kv.naive import Naive, Shape, assert_right, forward

SHAPE = Shape(n_layers=1, n_sequences=2, n_heads=2, group=1, d=64, dv=64, dtype=torch.float16)


def feed(cache: SsdCache, naive: Naive, sizes: list[int], *, checks: bool = True) -> None:
    for n in sizes:
        before = naive.count
        steps = naive.step(n)
        outputs = forward(cache, steps, before)
        if checks:
            assert_right(outputs, steps, before)


@pytest.mark.parametrize("disks", [1, 2])
def test_generated_tokens_lie_like_prefilled_ones(folder: Path, disks: int) -> None:
    counts = []
    for sizes in ([JOIN_ROWS] * 8, [1] * (8 * JOIN_ROWS)):
        with_joins = Naive(SHAPE, torch.Generator().manual_seed(0))
        cache = SsdCache([folder / f"{len(sizes)}-{i}" for i in range(disks)], 1)
        try:
            feed(cache, with_joins, sizes, checks=len(sizes) < 9)
            feed(cache, with_joins, [1])
            rows = cache.rows.kv[0]
            assert rows is not None
            counts.append(
                (len(rows.runs), sum(len(part) for part in rows.views(rows.stored, range(2))))
            )
            stored = sum(device.stats().stored_bytes for device in cache.striped.devices)
            assert stored == rows.stored * 2 * 2 * rows.layout.row_bytes
        finally:
            cache.close()
    # The last write is joined when it has ended: at most one run's worth of short ones is left.
    assert counts[1][0] <= counts[0][0] + JOIN_ROWS // 32 + 1
    assert counts[1][1] <= counts[0][1] + 2 * disks * (JOIN_ROWS // 32 + 1)


def test_a_twin_covers_as_much(folder: Path) -> None:
    """Rows that were put in this pass are not read by the next, of int8, wherever they are."""
    naive = Naive(SHAPE, torch.Generator().manual_seed(3))
    cache = SsdCache(folder, 1, CacheOptions(format="int8"))
    try:
        feed(cache, naive, [1], checks=False)
        rows = cache.rows.kv[0]
        assert rows is not None
        n_rows = rows.layout.block_rows
        feed(cache, naive, [1] * (n_rows - 1), checks=False)
        twin = rows.twin()
        assert rows.stored == twin.stored == n_rows
        assert rows.covered() == twin.covered() == 0
        feed(cache, naive, [1], checks=False)
        twin = rows.twin()
        assert rows.covered() == twin.covered() == n_rows
    finally:
        cache.close()


def test_an_interval_longer_than_any_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is taken as rows come; where there is none, the error says so."""
    monkeypatch.setattr("espnx.kv.rows._ROOM_ROWS", 16)
    naive, cache = (
        Naive(SHAPE, torch.Generator().manual_seed(2)),
        SsdCache(folder, 1, CacheOptions(spill_interval=10**12)),
    )
    try:
        feed(cache, naive, [7] + [1] * 60 + [13] * 9)
        rows = cache.rows.kv[0]
        assert rows is not None
        assert (rows.stored, rows.count) == (0, naive.count)
        assert (
            rows.memory_bytes
            <= 6 * 2 * rows.count * SHAPE.n_sequences * SHAPE.n_heads * SHAPE.d * 2
        )

        def refuse(self: object, size_bytes: int) -> torch.Tensor:
            raise MemoryError("std::bad_alloc")

        monkeypatch.setattr(type(cache.striped.devices[0]), "memory", refuse)
        with pytest.raises(errors.OutOfMemoryError, match="smaller spill_interval"):
            feed(cache, naive, [16] * 30)
    finally:
        cache.close()


def test_beams_keep_sharing(folder: Path) -> None:
    naive, cache = Naive(SHAPE, torch.Generator().manual_seed(1)), SsdCache(folder, 1)
    try:
        feed(cache, naive, [40] + [1] * 50)
        for each in (naive, cache):
            each.select([0, 0, 1, 0])
        feed(cache, naive, [1] * 300)
        for each in (naive, cache):
            each.crop(333)
            each.select([3, 2])
        feed(cache, naive, [1] * 300)
        cache.clear()
        cache.striped.flush()
        assert cache.striped.devices[0].stats().stored_bytes == 0
    finally:
        cache.close()


@pytest.mark.parametrize("fault", ["EIO", "flipped"])
def test_a_join_that_cannot_read(folder: Path, fault: str) -> None:
    """Every read fails once: the pass is taken back, and right when it is run again."""
    rule = FaultRule("error" if fault == "EIO" else "flip", operation="read", nth=60, count=3)
    engine = FaultyEngine([rule])
    naive, cache = (
        Naive(SHAPE, torch.Generator().manual_seed(2)),
        SsdCache(folder, 1, CacheOptions(engine=lambda: engine)),
    )
    try:
        failed = 0
        for _ in range(400):
            before = naive.count
            steps = naive.step(1)
            for _ in range(4):
                try:
                    assert_right(forward(cache, steps, before), steps, before)
                    break
                except (errors.ReadError, errors.ChecksumError):
                    failed += 1
                    assert cache.rows.length(0) == before
        assert failed
    finally:
        cache.close()
