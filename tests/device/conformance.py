"""What holds for every device that keeps rows. A test of a device imports `CHECKS` and runs each over its own way to open one::

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_mine(check, tmp_path):
    check(lambda **options: open_rows("mine", tmp_path, **options))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.interface import PIECE, RowDevice
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import RowsInMemory
from tests.device.rows import Kept, Seen, assert_right, attend, draw, kept, normal, put, queries

Open = Callable[..., RowDevice]
LAYOUTS = (
    RowLayout("fp16", 64, 64), RowLayout("fp32", 40, 72), RowLayout("bf16", 128, 64), RowLayout("int8", 64, 64),
    RowLayout("fp16", 48, 48, is_shared=True),
)  # fmt: skip
PLAIN = LAYOUTS[0]


@contextmanager
def opened(open_device: Open, **options: Any) -> Iterator[RowDevice]:
    device = open_device(**options)
    try:
        yield device
    finally:
        device.close()


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def n_heads(layout: RowLayout) -> int:
    return 1 if layout.is_shared else 3


def some_rows(device: RowDevice, layout: RowLayout) -> list[Seen]:
    """Heads in two segments; runs that end in a block, in the middle of a segment, at its first row; one that two sequences share."""
    heads, n = n_heads(layout), 2 * layout.block_rows + 3
    seen = list[Seen]()
    for part in (range(0, heads, 2), range(1, heads, 2)):
        if part:
            first = put(device, layout, 3, part, n, rng(1 + part.start))
            shared = put(device, layout, 1, part, layout.block_rows, rng(3 + part.start))[0]
            seen += [shared.use(0, None, 0), shared.use(1, layout.block_rows - 1, 0), first[0].use(0, n, layout.block_rows)]
            seen += [first[1].use(1, layout.block_rows + 1, layout.block_rows), first[2].use(2, 1, 0)]
    return seen


def some_tail(layout: RowLayout, first: int) -> RowsInMemory:
    k = normal(3, n_heads(layout), 12, layout.d, rng=rng(7)).to(torch.float16)
    return RowsInMemory(k, k if layout.is_shared else normal(3, n_heads(layout), 12, layout.dv, rng=rng(8)).to(torch.float16), 2, 9, first)


def extras(device: RowDevice, layout: RowLayout, n: int, positions: int) -> list[dict[str, Any]]:
    """What queries may ask for here, each alone and all together."""
    can, position = device.capabilities, torch.arange(positions - n, positions)
    offered = {
        "attends_window": {"window": positions // 2}, "attends_soft_cap": {"soft_cap": 2.0},
        "attends_slopes": {"slopes": torch.rand(n_heads(layout), n, generator=rng(9))},
    }  # fmt: skip
    found: list[dict[str, Any]] = [{"position": position, **more} for name, more in offered.items() if getattr(can, name)]
    return [*found, {name: value for each in found for name, value in each.items()}] if found else []


def attends(open_device: Open) -> None:
    """Every layout, mask, tail, change of scores that the device offers; windows down to one read."""
    for layout in LAYOUTS:
        for window_bytes in (1, 64 << 20):
            with opened(open_device, read_ahead_bytes=window_bytes) as device:
                seen, positions, n = some_rows(device, layout), 3 * layout.block_rows + 20, 4
                shown = (torch.rand(3, positions, generator=rng(4)) < 0.8).to(torch.uint8)
                last = torch.tensor([3, positions, 2 * layout.block_rows + 1, 0])
                masks: list[dict[str, Any]] = [
                    {}, {"first_visible": torch.tensor([0, 5, positions])}, {"visible": shown, "last_position": last},
                    *extras(device, layout, n, positions),
                ]  # fmt: skip
                for mask in masks:
                    look = queries(layout, 3, n_heads(layout), n, rng(5), **mask)
                    if device.capabilities.lacks(look, layout):
                        with pytest.raises(errors.InvalidInputError):
                            attend(device, layout, seen, look)
                        device.forget()
                        continue
                    for tail in (None, some_tail(layout, positions - 9)):
                        assert_right(attend(device, layout, seen, look, tail), seen, look, tail)
                assert device.front() == -1


def refuses_what_it_lacks(open_device: Open) -> None:
    with opened(open_device) as device:
        seen = some_rows(device, PLAIN)
        position = torch.arange(2)
        for more in ({"window": 3}, {"soft_cap": 2.0}, {"slopes": torch.ones(3, 2)}):
            look = queries(PLAIN, 3, 3, 2, rng(), position=position, **more)
            if device.capabilities.lacks(look, PLAIN):
                with pytest.raises(errors.InvalidInputError):
                    attend(device, PLAIN, seen, look)
                device.forget()


def shows_every_row_once(open_device: Open) -> None:
    for layout in LAYOUTS:
        with opened(open_device, read_ahead_bytes=1 << 20) as device:
            seen, shown = some_rows(device, layout), dict[tuple[int, int, int], torch.Tensor]()

            def show(
                memory: torch.Tensor, pieces: np.ndarray, layout: RowLayout = layout,
                shown: dict[tuple[int, int, int], torch.Tensor] = shown,
            ) -> None:  # fmt: skip
                assert pieces.dtype == PIECE
                for sequence, head, offset, n_rows, first in pieces.tolist():
                    size = layout.blocks(n_rows) * layout.block_bytes
                    k, v = layout.unpack(memory[offset : offset + size].view(-1, layout.block_bytes), n_rows)
                    for i in range(n_rows):
                        assert (sequence, head, first + i) not in shown
                        shown[sequence, head, first + i] = torch.cat([k[i], v[i]]).double()

            device.visit(device.ahead(layout, [each.use for each in seen]), show)
            assert len(shown) == sum(each.use.n_rows * len(each.use.segment.heads) for each in seen)
            for each in seen:
                for at, head in enumerate(each.use.segment.heads):
                    for i in range(each.use.n_rows):
                        wanted = torch.cat([each.kept.k[at, i], each.kept.v[at, i]])
                        assert torch.equal(shown[each.use.sequence, head, each.use.first_position + i], wanted)


def serves_tickets_in_order(open_device: Open) -> None:
    with opened(open_device, read_ahead_bytes=1 << 20) as device:
        seen = some_rows(device, PLAIN)
        tickets = [device.ahead(PLAIN, [each.use for each in seen]) for _ in range(3)]
        assert device.front() == tickets[0]
        look = queries(PLAIN, 3, 3, 1, rng())
        with pytest.raises(errors.InvalidInputError):
            device.attend(tickets[1], look)
        for ticket in tickets:
            assert_right(device.attend(ticket, look), seen, look)


def has_nothing_to_show(open_device: Open) -> None:
    """No segments, segments without rows, no queries."""
    with opened(open_device) as device:
        stored = put(device, PLAIN, 2, range(2), 0, rng())
        for some in ([], [each.use(i) for i, each in enumerate(stored)]):
            look = queries(PLAIN, 2, 2, 3, rng())
            assert_right(attend(device, PLAIN, some, look), some, look)
            device.visit(device.ahead(PLAIN, [each.use for each in some]), lambda memory, pieces: pytest.fail("nothing was stored"))
        some = [each.use(i) for i, each in enumerate(put(device, PLAIN, 2, range(2), 5, rng()))]
        o, lse = attend(device, PLAIN, some, queries(PLAIN, 2, 2, 0, rng()))
        assert (o.shape, lse.shape) == ((2, 2, 0, 64), (2, 2, 0))


def joins(open_device: Open) -> None:
    with opened(open_device) as device:
        parts = [draw(PLAIN, 1, range(2), n, rng(n)) for n in (PLAIN.block_rows, 2 * PLAIN.block_rows, 7)]
        segments = [device.put(PLAIN, k, v, range(2))[0] for k, v in parts]
        k, v = (torch.cat([part[i] for part in parts], dim=2) for i in range(2))  # type: ignore[misc]
        (whole,) = kept(PLAIN, [device.join(segments)], k, v)
        for segment in segments:
            device.release(segment)
        look = queries(PLAIN, 1, 2, 2, rng())
        assert_right(attend(device, PLAIN, [whole.use(0)], look), [whole.use(0)], look)
        assert device.stats().stored_bytes == whole.segment.size_bytes


def counts(open_device: Open) -> None:
    """In whole blocks; what was released is not stored."""
    with opened(open_device) as device:
        stored: list[Kept] = put(device, PLAIN, 2, range(2), 3 * PLAIN.block_rows, rng())
        device.flush()
        assert all(device.is_written(each.segment) for each in stored)
        size = sum(each.segment.size_bytes for each in stored)
        found = device.stats()
        assert (found.bytes_written, found.stored_bytes, found.bytes_asked) == (size, size, 0)
        some = [each.use(i) for i, each in enumerate(stored)]
        attend(device, PLAIN, some, queries(PLAIN, 2, 2, 1, rng()))
        found = device.stats()
        assert found.bytes_asked == size
        assert found.bytes_moved >= size
        device.release(stored[0].segment)
        assert device.stats().stored_bytes == size // 2
        assert all(file.effective_path for file in device.path_report())


def forgets_from_another_thread(open_device: Open) -> None:
    """Whoever is shown rows gets a typed error, and the device serves what is asked next."""
    with opened(open_device, read_ahead_bytes=1 << 20) as device:
        some = [put(device, PLAIN, 1, range(2), 8000, rng())[0].use(0)]

        def forget(memory: torch.Tensor, pieces: np.ndarray) -> None:
            thread = Thread(target=device.forget)
            thread.start()
            thread.join()

        with pytest.raises(errors.TransferCancelledError):
            device.visit(device.ahead(PLAIN, [each.use for each in some]), forget)
        assert device.front() == -1
        look = queries(PLAIN, 1, 2, 1, rng())
        assert_right(attend(device, PLAIN, some, look), some, look)


def refuses_rows_that_do_not_fit(open_device: Open) -> None:
    with opened(open_device) as device:
        k, v = draw(PLAIN, 1, range(2), 5, rng())
        for rows in ((k[..., :32], v, range(2)), (k, v, range(3))):
            with pytest.raises(errors.InvalidInputError):
                device.put(PLAIN, *rows)
        assert device.stats().stored_bytes == 0


def is_closed(open_device: Open) -> None:
    """With tickets in line; twice."""
    with opened(open_device) as device:
        some = [put(device, PLAIN, 1, range(2), 900, rng())[0].use(0)]
        ticket = device.ahead(PLAIN, [each.use for each in some])
        for _ in range(2):
            device.close()
        for call in (
            lambda: device.attend(ticket, queries(PLAIN, 1, 2, 1, rng())), lambda: device.flush(),
            lambda: device.ahead(PLAIN, []), lambda: put(device, PLAIN, 1, range(2), 5, rng()),
        ):  # fmt: skip
            with pytest.raises(errors.EngineClosedError):
                call()


CHECKS: tuple[Callable[[Open], None], ...] = (
    attends, refuses_what_it_lacks, shows_every_row_once, serves_tickets_in_order, has_nothing_to_show, joins, counts,
    forgets_from_another_thread, refuses_rows_that_do_not_fit, is_closed,
)  # fmt: skip
