"""What holds for every device that keeps rows of KV caches: `CHECKS`, each over a way to open one.

A test of a package's own device::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_mine(check, tmp_path):
        check(espnx.device.open("mine", tmp_path).open_rows)

Every check raises NotConformingError that says what was got and what expected.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ...storage import FaultRule, FaultyEngine
from ..interface import RowDevice
from ..near_storage import NearStorageDevice
from ..row_layout import RowLayout
from .draws import HEADS, ROWS, SEQUENCES
from .faults import fault_checks
from .known_rows import (
    Kept,
    Seen,
    ShownRows,
    assert_right,
    attend,
    draw,
    kept,
    normal,
    put,
    queries,
    served,
)
from .requirement import Found, in_threads, raises, require
from .soak import soak

Open = Callable[..., RowDevice]
_ANY = Queries(torch.empty(0, 0, 0, 8), 8)
LAYOUTS = (
    RowLayout("fp16", 64, 64),
    RowLayout("fp32", 40, 72),
    RowLayout("bf16", 128, 64),
    RowLayout("int8", 64, 64),
    RowLayout("fp16", 48, 48, is_shared=True),
    RowLayout("fp16", 128, 128),
)


@contextmanager
def opened(open_device: Open, **options: Any) -> Iterator[RowDevice]:
    device = open_device(**options)
    try:
        yield device
    finally:
        device.close()


def plain_of(device: RowDevice) -> RowLayout:
    """A layout of rows that it attends over; any, if there is none."""
    return next(
        (layout for layout in layouts_of(device) if not device.capabilities.lacks(_ANY, layout)),
        LAYOUTS[0],
    )


def layouts_of(device: RowDevice) -> list[RowLayout]:
    """`LAYOUTS`, and those that a device for certain widths and formats alone attends over."""
    can = device.capabilities
    own = (
        RowLayout(name, width, width)
        for width in can.attends_widths or ()
        for name in can.attends_formats or ("fp16", "fp32")
    )
    return list(dict.fromkeys([*LAYOUTS, *own]))


def right(device: RowDevice) -> Callable[..., None]:
    """`assert_right`, as exact as what crosses to the device and back."""
    return partial(assert_right, exchanges=device.capabilities.exchanges)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def n_heads(layout: RowLayout) -> int:
    return 1 if layout.is_shared else 3


def some_rows(device: RowDevice, layout: RowLayout) -> list[Seen]:
    """Heads in two segments; runs that end in a block, in the middle of a segment, at its first
    row; one that two sequences share."""
    heads, n = n_heads(layout), 2 * layout.block_rows + 3
    seen = list[Seen]()
    for part in (range(0, heads, 2), range(1, heads, 2)):
        if part:
            first = put(device, layout, 3, part, n, rng(1 + part.start))
            shared = put(device, layout, 1, part, layout.block_rows, rng(3 + part.start))[0]
            seen += [
                shared.use(0, None, 0),
                shared.use(1, layout.block_rows - 1, 0),
                first[0].use(0, n, layout.block_rows),
            ]
            seen += [
                first[1].use(1, layout.block_rows + 1, layout.block_rows),
                first[2].use(2, 1, 0),
            ]
    return seen


def some_tail(layout: RowLayout, first: int) -> RowsInMemory:
    k = normal(3, n_heads(layout), 12, layout.d, rng=rng(7)).to(torch.float16)
    return RowsInMemory(
        k,
        k
        if layout.is_shared
        else normal(3, n_heads(layout), 12, layout.dv, rng=rng(8)).to(torch.float16),
        2,
        9,
        first,
    )


def extras(device: RowDevice, layout: RowLayout, n: int, positions: int) -> list[dict[str, Any]]:
    """What queries may ask for here, each alone and all together."""
    can, position = device.capabilities, torch.arange(positions - n, positions)
    offered: dict[str, dict[str, Any]] = {
        "attends_window": {"window": positions // 2},
        "attends_soft_cap": {"soft_cap": 2.0},
        "attends_slopes": {"slopes": torch.rand(n_heads(layout), n, generator=rng(9))},
    }
    found: list[dict[str, Any]] = [
        {"position": position, **more} for name, more in offered.items() if getattr(can, name)
    ]
    return (
        [*found, {name: value for each in found for name, value in each.items()}] if found else []
    )


def attends(open_device: Open) -> None:
    """Every layout, mask, tail, change of scores that the device offers; windows down to one
    read."""
    with opened(open_device) as device:
        layouts = layouts_of(device)
    for layout in layouts:
        for window_bytes in (1, 64 << 20):
            with opened(open_device, read_ahead_bytes=window_bytes) as device:
                seen, positions, n = some_rows(device, layout), 3 * layout.block_rows + 20, 4
                shown = (torch.rand(3, positions, generator=rng(4)) < 0.8).to(torch.uint8)
                last = torch.tensor([3, positions, 2 * layout.block_rows + 1, 0])
                masks: list[dict[str, Any]] = [
                    {},
                    {"first_visible": torch.tensor([0, 5, positions])},
                    {"visible": shown, "last_position": last},
                    *extras(device, layout, n, positions),
                ]
                for mask in masks:
                    look = queries(layout, 3, n_heads(layout), n, rng(5), **mask)
                    if device.capabilities.lacks(look, layout):
                        _refuses(device, layout, seen, look)
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
                _refuses(device, plain, seen, look)


def _refuses(device: RowDevice, layout: RowLayout, seen: list[Seen], look: Queries) -> None:
    with raises(errors.InvalidInputError):
        device.attend(device.ahead(layout, [each.use for each in seen]), look)
    device.forget()


def attends_wide_and_long(open_device: Open) -> None:
    """Attends for as many sequences and heads as the soak has, and over as many rows; and over
    2^16 rows, one fewer and one more."""
    with opened(open_device) as device:
        plain = plain_of(device)
        rows, look = (
            put(device, plain, SEQUENCES, range(HEADS), 5, rng()),
            queries(plain, SEQUENCES, HEADS, 2, rng(1)),
        )
        seen = [each.use(i, 1 + i % 5) for i, each in enumerate(rows)]
        right(device)(attend(device, plain, seen, look), seen, look)
        (long,) = put(device, plain, 1, range(1), ROWS, rng(2))
        look = queries(plain, 1, 1, 2, rng(3))
        for n_rows in ((1 << 16) - 1, 1 << 16, (1 << 16) + 1, ROWS):
            some = [long.use(0, n_rows)]
            right(device)(attend(device, plain, some, look), some, look)


def shows_every_row_once(open_device: Open) -> None:
    """Shows rows to the bit, in any order."""
    with opened(open_device) as device:
        layouts = layouts_of(device)
    for layout in layouts:
        with opened(open_device, read_ahead_bytes=1 << 20) as device:
            seen = some_rows(device, layout)
            shown = ShownRows(layout, seen)
            device.visit(device.ahead(layout, [each.use for each in seen]), shown.show)
            shown.finish()


def serves_tickets_in_order(open_device: Open) -> None:
    with opened(open_device, read_ahead_bytes=1 << 20) as device:
        plain = plain_of(device)
        seen = some_rows(device, plain)
        tickets = [device.ahead(plain, [each.use for each in seen]) for _ in range(3)]
        require(
            device.front() == tickets[0],
            "the ticket in front",
            got=device.front(),
            expected=tickets[0],
        )
        look = queries(plain, 3, 3, 1, rng())
        with raises(errors.InvalidInputError):
            device.attend(tickets[1], look)
        with raises(errors.InvalidInputError):
            device.visit(tickets[1], _shows_nothing)
        for ticket in tickets:
            right(device)(served(device, ticket, plain, seen, look), seen, look)


def _require_stored(device: RowDevice, expected: int) -> None:
    require(
        device.stats().stored_bytes == expected,
        "bytes stored",
        got=device.stats().stored_bytes,
        expected=expected,
    )


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
        parts = [
            draw(plain, 1, range(2), n, rng(n)) for n in (plain.block_rows, 2 * plain.block_rows, 7)
        ]
        segments = [device.put(plain, k, v, range(2))[0] for k, v in parts]
        k, v = (torch.cat([part[i] for part in parts], dim=2) for i in range(2))
        (whole,) = kept(plain, [device.join(segments)], k, v)
        for segment in segments:
            device.release(segment)
        look = queries(plain, 1, 2, 2, rng())
        right(device)(attend(device, plain, [whole.use(0)], look), [whole.use(0)], look)
        _require_stored(device, whole.segment.size_bytes)


def counts(open_device: Open) -> None:
    """Counts whole blocks; what was released is not stored."""
    with opened(open_device) as device:
        plain = plain_of(device)
        stored: list[Kept] = put(device, plain, 2, range(2), 3 * plain.block_rows, rng())
        device.flush()
        require(
            all(device.is_written(each.segment) for each in stored),
            "is_written after a flush",
            got=False,
        )
        size = sum(each.segment.size_bytes for each in stored)
        found = device.stats()
        counted = found.bytes_written, found.stored_bytes, found.bytes_asked
        require(
            counted == (size, size, 0),
            "bytes written, stored and asked",
            got=counted,
            expected=(size, size, 0),
        )
        some = [each.use(i) for i, each in enumerate(stored)]
        attend(device, plain, some, queries(plain, 2, 2, 1, rng()))
        found = device.stats()
        require(found.bytes_asked == size, "bytes asked", got=found.bytes_asked, expected=size)
        require(
            found.bytes_moved >= size,
            "bytes moved",
            got=found.bytes_moved,
            expected=f"at least {size}",
        )
        device.release(stored[0].segment)
        _require_stored(device, size // 2)
        require(
            all(file.effective_path for file in device.path_report()),
            "a file without a path",
            got=device.path_report(),
        )


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


def hands_on_what_show_raises(open_device: Open) -> None:
    """And serves what is asked next."""
    with opened(open_device) as device:
        plain = plain_of(device)
        some = [put(device, plain, 1, range(2), 900, rng())[0].use(0)]

        def show(memory: torch.Tensor, pieces: np.ndarray) -> None:
            raise errors.StateError("of whoever is shown rows")

        with raises(errors.StateError):
            device.visit(device.ahead(plain, [each.use for each in some]), show)
        device.forget()
        look = queries(plain, 1, 2, 1, rng())
        right(device)(attend(device, plain, some, look), some, look)


def serves_two_at_once(open_device: Open) -> None:
    """Rows of two KV caches on one device, each asked by a thread of its own."""
    in_threads(lambda seed: soak(open_device, calls=150, seed=seed, is_alone=False), (1, 2))


def gives_memory_back(open_device: Open) -> None:
    """Less than a quarter of what is put, asked for, looked at and released again and again stays
    in the memory of this process."""
    with opened(open_device) as device:
        plain = plain_of(device)
        n_rows = -(-(256 << 10) // plain.block_bytes) * plain.block_rows
        k, v = draw(plain, 1, range(1), n_rows, rng())
        stored_k, stored_v = plain.unpack(plain.pack(k, v)[0], n_rows)
        look, first, put_bytes = queries(plain, 1, 1, 1, rng()), 0, 0
        for turn in range(400):
            (segment,) = device.put(plain, k, v, range(1))
            attend(device, plain, [Kept(segment, stored_k, stored_v).use(0)], look)
            device.release(segment)
            if turn == 50:  # what is mapped once for all is mapped
                first = _resident_bytes()
            put_bytes += segment.size_bytes if turn > 50 else 0
        grown = _resident_bytes() - first
        require(
            grown < put_bytes // 4,
            f"memory that stays of {put_bytes} bytes",
            got=f"{grown} bytes",
            expected=f"less than {put_bytes // 4}",
        )


def _resident_bytes() -> int:
    """Resident bytes of this process, without what only its allocator holds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def is_closed(open_device: Open) -> None:
    """Closes with tickets in line; twice."""
    with opened(open_device) as device:
        plain = plain_of(device)
        some = [put(device, plain, 1, range(2), 900, rng())[0].use(0)]
        ticket = device.ahead(plain, [each.use for each in some])
        for _ in range(2):
            device.close()
        for call in (
            lambda: device.attend(ticket, queries(plain, 1, 2, 1, rng())),
            lambda: device.visit(ticket, _shows_nothing),
            device.flush,
            device.sync,
            lambda: device.ahead(plain, []),
            lambda: put(device, plain, 1, range(2), 5, rng()),
            lambda: device.join([some[0].kept.segment]),
        ):
            with raises(errors.EngineClosedError):
                call()


CHECKS: tuple[Callable[[Open], None], ...] = (
    attends, attends_wide_and_long, refuses_what_it_lacks, shows_every_row_once,
    serves_tickets_in_order, has_nothing_to_show, joins, counts, forgets_from_another_thread,
    hands_on_what_show_raises, refuses_rows_that_do_not_fit, serves_two_at_once, gives_memory_back,
    is_closed,
)  # fmt: skip


@contextmanager
def _asked(
    device: NearStorageDevice, *, engine: FaultyEngine, deadline_s: float
) -> Iterator[Callable[[], None]]:
    with opened(device.open_rows, engine=engine, deadline_s=deadline_s) as rows:
        layout = plain_of(rows)
        seen = [put(rows, layout, 1, range(2), 900, rng())[0].use(0)]  # more than a block
        rows.flush()
        look = queries(layout, 1, 2, 1, rng())

        def ask() -> None:
            try:
                found = attend(rows, layout, seen, look)
            except errors.EspnxError:
                require(
                    rows.front() == -1,
                    "a ticket in line after an error",
                    got=rows.front(),
                    expected=-1,
                )
                raise
            right(rows)(found, seen, look)

        yield ask


def _writes_that_fail(device: NearStorageDevice) -> Found | None:
    """An error of a write comes from the next call that needs it, or from `flush`."""
    rule = FaultRule("error", operation="write", nth=1, count=1, value=28)
    with FaultyEngine([rule]) as engine, opened(device.open_rows, engine=engine) as rows:
        try:
            with raises(errors.WriteError):
                put(rows, plain_of(rows), 1, range(2), 900, rng())
                rows.flush()
        except errors.NotConformingError:
            if not engine.stats().fault_hits:
                return Found(
                    "not made",
                    "it writes past the engine that it is given: nobody knows what it does when "
                    "this happens",
                )
            raise
    return None


#: By what goes wrong, over a device.
FAULT_CHECKS: dict[str, Callable[[NearStorageDevice], Found | None]] = {
    **fault_checks(_asked),
    "writes that fail": _writes_that_fail,
}
