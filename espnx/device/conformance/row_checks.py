"""What holds for every device that keeps rows of KV caches: `CHECKS`, each over a way to open one.

A test of a package's own device::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_mine(check, tmp_path):
        check(espnx.device.open("mine", tmp_path).open_rows)

Every check raises NotConformingError that says what was got and what expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ..interface import PIECE, RowDevice
from ..row_layout import RowLayout
from .known_rows import Kept, Seen, assert_right, attend, draw, kept, normal, put, queries
from .requirement import raises, require

Open = Callable[..., RowDevice]
LAYOUTS = (
    RowLayout("fp16", 64, 64), RowLayout("fp32", 40, 72), RowLayout("bf16", 128, 64), RowLayout("int8", 64, 64),
    RowLayout("fp16", 48, 48, is_shared=True), RowLayout("fp16", 128, 128),
)  # fmt: skip


@contextmanager
def opened(open_device: Open, **options: Any) -> Iterator[RowDevice]:
    device = open_device(**options)
    try:
        yield device
    finally:
        device.close()


def plain_of(device: RowDevice) -> RowLayout:
    """A layout of rows that it attends over."""
    look = Queries(torch.empty(0, 0, 0, 8), 8)
    for layout in LAYOUTS:
        if not device.capabilities.lacks(look, layout):
            return layout
    raise errors.NotConformingError("attention", got=f"a device that takes none of {LAYOUTS}", expected="one of them")


def right(device: RowDevice) -> Callable[..., None]:
    """`assert_right`, as exact as what crosses to the device and back."""
    return partial(assert_right, exchanges=device.capabilities.exchanges)


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
    offered: dict[str, dict[str, Any]] = {
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
                        with raises(errors.InvalidInputError):
                            attend(device, layout, seen, look)
                        device.forget()
                        continue
                    for tail in (None, some_tail(layout, positions - 9)):
                        right(device)(attend(device, layout, seen, look, tail), seen, look, tail)
                require(device.front() == -1, "a ticket in line", got=device.front(), expected=-1)


def refuses_what_it_lacks(open_device: Open) -> None:
    with opened(open_device) as device:
        plain = plain_of(device)
        seen = some_rows(device, plain)
        position = torch.arange(2)
        for more in ({"window": 3}, {"soft_cap": 2.0}, {"slopes": torch.ones(3, 2)}):
            look = queries(plain, 3, 3, 2, rng(), position=position, **more)
            if device.capabilities.lacks(look, plain):
                with raises(errors.InvalidInputError):
                    attend(device, plain, seen, look)
                device.forget()


def shows_every_row_once(open_device: Open) -> None:
    for layout in LAYOUTS:
        with opened(open_device, read_ahead_bytes=1 << 20) as device:
            seen, shown = some_rows(device, layout), dict[tuple[int, int, int], torch.Tensor]()

            def show(
                memory: torch.Tensor, pieces: np.ndarray, layout: RowLayout = layout,
                shown: dict[tuple[int, int, int], torch.Tensor] = shown,
            ) -> None:  # fmt: skip
                require(pieces.dtype == PIECE, "what is shown", got=pieces.dtype, expected=PIECE)
                for sequence, head, offset, n_rows, first in pieces.tolist():
                    size = layout.blocks(n_rows) * layout.block_bytes
                    k, v = layout.unpack(memory[offset : offset + size].view(-1, layout.block_bytes), n_rows)
                    for i in range(n_rows):
                        require((sequence, head, first + i) not in shown, f"row {(sequence, head, first + i)} is shown twice")
                        shown[sequence, head, first + i] = torch.cat([k[i], v[i]]).double()

            device.visit(device.ahead(layout, [each.use for each in seen]), show)
            expected = sum(each.use.n_rows * len(each.use.segment.heads) for each in seen)
            require(len(shown) == expected, "rows that are shown", got=len(shown), expected=expected)
            for each in seen:
                for at, head in enumerate(each.use.segment.heads):
                    for i in range(each.use.n_rows):
                        wanted = torch.cat([each.kept.k[at, i], each.kept.v[at, i]])
                        found = shown[each.use.sequence, head, each.use.first_position + i]
                        require(torch.equal(found, wanted), "a row that is shown", got=found, expected=wanted)


def serves_tickets_in_order(open_device: Open) -> None:
    with opened(open_device, read_ahead_bytes=1 << 20) as device:
        plain = plain_of(device)
        seen = some_rows(device, plain)
        tickets = [device.ahead(plain, [each.use for each in seen]) for _ in range(3)]
        require(device.front() == tickets[0], "the ticket in front", got=device.front(), expected=tickets[0])
        look = queries(plain, 3, 3, 1, rng())
        with raises(errors.InvalidInputError):
            device.attend(tickets[1], look)
        for ticket in tickets:
            right(device)(device.attend(ticket, look), seen, look)


def _require_stored(device: RowDevice, expected: int) -> None:
    require(device.stats().stored_bytes == expected, "bytes stored", got=device.stats().stored_bytes, expected=expected)


def _shows_nothing(memory: torch.Tensor, pieces: np.ndarray) -> None:
    require(False, "rows are shown where nothing was stored", got=pieces)


def has_nothing_to_show(open_device: Open) -> None:
    """No segments, segments without rows, no queries."""
    with opened(open_device) as device:
        plain = plain_of(device)
        stored = put(device, plain, 2, range(2), 0, rng())
        for some in ([], [each.use(i) for i, each in enumerate(stored)]):
            look = queries(plain, 2, 2, 3, rng())
            right(device)(attend(device, plain, some, look), some, look)
            device.visit(device.ahead(plain, [each.use for each in some]), _shows_nothing)
        some = [each.use(i) for i, each in enumerate(put(device, plain, 2, range(2), 5, rng()))]
        o, lse = attend(device, plain, some, queries(plain, 2, 2, 0, rng()))
        found = tuple(o.shape), tuple(lse.shape)
        require(found == ((2, 2, 0, plain.dv), (2, 2, 0)), "shapes without queries", got=found)


def joins(open_device: Open) -> None:
    with opened(open_device) as device:
        plain = plain_of(device)
        parts = [draw(plain, 1, range(2), n, rng(n)) for n in (plain.block_rows, 2 * plain.block_rows, 7)]
        segments = [device.put(plain, k, v, range(2))[0] for k, v in parts]
        k, v = (torch.cat([part[i] for part in parts], dim=2) for i in range(2))
        (whole,) = kept(plain, [device.join(segments)], k, v)
        for segment in segments:
            device.release(segment)
        look = queries(plain, 1, 2, 2, rng())
        right(device)(attend(device, plain, [whole.use(0)], look), [whole.use(0)], look)
        _require_stored(device, whole.segment.size_bytes)


def counts(open_device: Open) -> None:
    """In whole blocks; what was released is not stored."""
    with opened(open_device) as device:
        plain = plain_of(device)
        stored: list[Kept] = put(device, plain, 2, range(2), 3 * plain.block_rows, rng())
        device.flush()
        require(all(device.is_written(each.segment) for each in stored), "is_written after a flush", got=False)
        size = sum(each.segment.size_bytes for each in stored)
        found = device.stats()
        counted = found.bytes_written, found.stored_bytes, found.bytes_asked
        require(counted == (size, size, 0), "bytes written, stored and asked", got=counted, expected=(size, size, 0))
        some = [each.use(i) for i, each in enumerate(stored)]
        attend(device, plain, some, queries(plain, 2, 2, 1, rng()))
        found = device.stats()
        require(found.bytes_asked == size, "bytes asked", got=found.bytes_asked, expected=size)
        require(found.bytes_moved >= size, "bytes moved", got=found.bytes_moved, expected=f"at least {size}")
        device.release(stored[0].segment)
        _require_stored(device, size // 2)
        require(all(file.effective_path for file in device.path_report()), "a file without a path", got=device.path_report())


def forgets_from_another_thread(open_device: Open) -> None:
    """Whoever is shown rows gets a typed error, and the device serves what is asked next."""
    with opened(open_device, read_ahead_bytes=1 << 20) as device:
        plain = plain_of(device)
        some = [put(device, plain, 1, range(2), 8000, rng())[0].use(0)]

        def forget(memory: torch.Tensor, pieces: np.ndarray) -> None:
            thread = Thread(target=device.forget)
            thread.start()
            thread.join()

        with raises(errors.TransferCancelledError):
            device.visit(device.ahead(plain, [each.use for each in some]), forget)
        require(device.front() == -1, "a ticket in line", got=device.front(), expected=-1)
        look = queries(plain, 1, 2, 1, rng())
        right(device)(attend(device, plain, some, look), some, look)


def refuses_rows_that_do_not_fit(open_device: Open) -> None:
    with opened(open_device) as device:
        plain = plain_of(device)
        k, v = draw(plain, 1, range(2), 5, rng())
        for rows in ((k[..., :32], v, range(2)), (k, v, range(3))):
            with raises(errors.InvalidInputError):
                device.put(plain, *rows)
        _require_stored(device, 0)


def is_closed(open_device: Open) -> None:
    """With tickets in line; twice."""
    with opened(open_device) as device:
        plain = plain_of(device)
        some = [put(device, plain, 1, range(2), 900, rng())[0].use(0)]
        ticket = device.ahead(plain, [each.use for each in some])
        for _ in range(2):
            device.close()
        for call in (
            lambda: device.attend(ticket, queries(plain, 1, 2, 1, rng())), device.flush,
            lambda: device.ahead(plain, []), lambda: put(device, plain, 1, range(2), 5, rng()),
        ):  # fmt: skip
            with raises(errors.EngineClosedError):
                call()


CHECKS: tuple[Callable[[Open], None], ...] = (
    attends, refuses_what_it_lacks, shows_every_row_once, serves_tickets_in_order, has_nothing_to_show, joins, counts,
    forgets_from_another_thread, refuses_rows_that_do_not_fit, is_closed,
)  # fmt: skip
