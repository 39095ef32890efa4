"""Several devices as one: every (sequence, head) on one of them, in turn; results as of one device;
errors of one leave nothing on any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.interface import Segment, SegmentView
from espnx.device.row_layout import RowLayout
from espnx.device.rows.ssd import SsdRowDevice
from espnx.kv.striping import StripedDevices, StripedSegment
from espnx.ops.attention import Queries, RowsInMemory
from espnx.storage import FaultRule, FaultyEngine
from tests.device.rows import Seen, assert_right, draw, kept, normal, queries

LAYOUT = RowLayout("fp16", 64, 64)
X_LAYOUT = RowLayout("fp16", 128, 128, is_shared=True)
Parts = list[list[StripedSegment]]


@contextmanager
def striped_over(
    folder: Path, count: int, rules: dict[int, FaultRule] | None = None
) -> Iterator[StripedDevices]:
    engines = [FaultyEngine([rules[i]] if rules and i in rules else []) for i in range(count)]
    striped = StripedDevices(count, lambda i, _: SsdRowDevice(folder / str(i), engine=engines[i]))
    striped.open(torch.device("cpu"))
    try:
        yield striped
    finally:
        striped.close()
        for engine in engines:
            engine.close(grace_s=0.05)


def uses_of(parts: Parts, n_rows: list[int], count: int) -> list[list[SegmentView]]:
    """By device."""
    found: list[list[SegmentView]] = [[] for _ in range(count)]
    for sequence, each in enumerate(parts):
        for part in each:
            found[part.device].append(SegmentView(part.segment, sequence, n_rows[sequence], 0))
    return found


def stored(striped: StripedDevices) -> list[int]:
    return [device.stats().stored_bytes for device in striped.devices]


def seen_of(
    layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, n_rows: list[int], heads: int
) -> list[Seen]:
    """What one device would hold."""
    whole = Segment(layout, range(heads), k.shape[2])
    return [each.use(i, n_rows[i]) for i, each in enumerate(kept(layout, [whole] * len(k), k, v))]


@pytest.mark.parametrize("layout", [LAYOUT, X_LAYOUT], ids=["kv", "x"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("n_sequences", "n_heads"), [(1, 1), (1, 4), (3, 2), (4, 3), (7, 1)])
def test_like_one_device(
    folder: Path, count: int, n_sequences: int, n_heads: int, layout: RowLayout
) -> None:
    rng = torch.Generator().manual_seed(count)
    with striped_over(folder, count) as striped:
        k, v = draw(layout, n_sequences, range(n_heads), 70, rng)
        parts = striped.put(layout, k, v)
        places = {
            (s, h): part.device
            for s, each in enumerate(parts)
            for part in each
            for h in part.segment.heads
        }
        assert (
            sum(len(part.segment.heads) for each in parts for part in each) == n_sequences * n_heads
        ), "a head lies in two places"
        assert places == {
            (s, h): (s * n_heads + h) % count for s in range(n_sequences) for h in range(n_heads)
        }
        striped.flush()
        assert all(striped.is_written(part) for each in parts for part in each)
        n_rows = [70 - 9 * i for i in range(n_sequences)]
        seen = seen_of(layout, k, v, n_rows, n_heads)
        uses = uses_of(parts, n_rows, count)
        tickets, later = striped.ahead(layout, uses), striped.ahead(layout, uses)
        assert striped.are_next(tickets)
        assert not striped.are_next(later)
        tail_k = normal(n_sequences, n_heads, 5, layout.d, rng=rng)
        tail = RowsInMemory(
            tail_k, tail_k if v is None else normal(n_sequences, n_heads, 5, 64, rng=rng), 1, 3, 70
        )
        look = queries(
            layout,
            n_sequences,
            n_heads,
            2,
            rng,
            last_position=torch.tensor([71, 20]),
            first_visible=torch.arange(n_sequences) * 5,
        )
        assert_right(striped.attend(tickets, look, tail), seen, look, tail)
        assert striped.are_next(later)
        striped.forget()
        assert [device.front() for device in striped.devices] == [-1] * count
        assert_right(striped.attend(striped.ahead(layout, uses), look, None), seen, look)
        for each in parts:
            for part in each:
                striped.release(part)
        assert stored(striped) == [0] * count


def test_visit(folder: Path) -> None:
    """Every head's rows, from all devices."""
    with striped_over(folder, 3) as striped:
        k, v = draw(LAYOUT, 2, range(4), 40, torch.Generator().manual_seed(1))
        tickets = striped.ahead(LAYOUT, uses_of(striped.put(LAYOUT, k, v), [40, 33], 3))
        found: list[tuple[int, int, int]] = []

        def see(memory: torch.Tensor, pieces: np.ndarray) -> None:
            found.extend((s, h, rows) for s, h, _, rows, _ in pieces.tolist())

        striped.visit(tickets, see)
        rows = {(s, h): sum(n for a, b, n in found if (a, b) == (s, h)) for s, h, _ in found}
        assert rows == {(s, h): (40, 33)[s] for s in range(2) for h in range(4)}


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_put_that_fails_on_one_device(folder: Path, bad: int) -> None:
    """Is kept on none."""
    rule = FaultRule("error", operation="allocate", nth=1, count=2, value=28)
    with striped_over(folder, 3, {bad: rule}) as striped:
        k, v = draw(LAYOUT, 2, range(3), 40, torch.Generator().manual_seed(1))
        with pytest.raises(errors.DiskFullError) as caught:
            striped.put(LAYOUT, k, v)
        assert str(folder / str(bad)) in str(caught.value.path)
        assert stored(striped) == [0, 0, 0]
        look = queries(LAYOUT, 2, 3, 1, torch.Generator().manual_seed(2))
        tickets = striped.ahead(LAYOUT, uses_of(striped.put(LAYOUT, k, v), [40, 40], 3))
        assert_right(striped.attend(tickets, look, None), seen_of(LAYOUT, k, v, [40, 40], 3), look)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_read_that_fails_on_one_device(folder: Path, bad: int) -> None:
    """Nobody is at work any more when the error comes, and the same again is right."""
    with striped_over(
        folder, 3, {bad: FaultRule("error", operation="read", nth=1, count=1)}
    ) as striped:
        k, v = draw(LAYOUT, 2, range(3), 900, torch.Generator().manual_seed(1))
        parts = striped.put(LAYOUT, k, v)
        look = queries(LAYOUT, 2, 3, 1, torch.Generator().manual_seed(2))
        tickets = striped.ahead(LAYOUT, uses_of(parts, [900, 900], 3))
        with pytest.raises(errors.ReadError) as caught:
            striped.attend(tickets, look, None)
        assert str(folder / str(bad)) in str(caught.value.path)
        assert [device.front() for device in striped.devices] == [-1] * 3
        tickets = striped.ahead(LAYOUT, uses_of(parts, [900, 900], 3))
        assert_right(
            striped.attend(tickets, look, None), seen_of(LAYOUT, k, v, [900, 900], 3), look
        )


@pytest.mark.parametrize("count", [1, 3])
def test_close(folder: Path, count: int) -> None:
    """All of them, also where one complains."""

    class Complaining(SsdRowDevice):
        def close(self) -> None:
            super().close()
            raise KeyError(self.directory)

    devices = [(Complaining if i == 0 else SsdRowDevice)(folder / str(i)) for i in range(count)]
    striped = StripedDevices(count, lambda i, _: devices[i])
    striped.open(torch.device("cpu"))
    with pytest.raises(KeyError):
        striped.close()
    for device in devices:
        with pytest.raises(errors.EngineClosedError):
            device.attend(0, Queries(torch.zeros(1, 1, 1, 64), 64))


@pytest.mark.parametrize("count", [1, 3])
def test_reach(folder: Path, count: int) -> None:
    """Each device its part of it; those that cannot are left alone."""
    asked = dict[int, int]()

    class Far(SsdRowDevice):
        def reach(self, size_bytes: int) -> None:
            asked[int(Path(self.directory).name)] = size_bytes

    class Near(SsdRowDevice):
        reach = None  # type: ignore[assignment]

    striped = StripedDevices(count, lambda i, _: (Near if i == 1 else Far)(folder / str(i)))
    striped.reach(1 << 20)  # nothing is open yet
    striped.open(torch.device("cpu"))
    striped.reach(1 << 20)
    striped.close()
    assert asked == {i: (1 << 20) // count for i in range(count) if i != 1}
