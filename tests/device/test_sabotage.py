"""Devices that are wrong on purpose, each in one way: the conformance checks and a soak find every
one of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.conformance.row_checks import CHECKS
from espnx.device.conformance.soak import soak
from espnx.device.example.ram_device import RamRows
from espnx.device.interface import DeviceStats, Segment, SegmentView, Show
from espnx.ops.attention import Queries, RowsInMemory
from tests.sweeps import some

Result = tuple[torch.Tensor, torch.Tensor]
#: A soak makes more of them in a minute.
CALLS = 5000


class Wrong(RamRows):
    """Counts the calls of all devices together: a fault that is rare does not begin anew with each
    of them."""

    calls = faults = 0

    def rarely(self, n: int) -> bool:
        """In one of so many calls, of those that can go wrong that way."""
        cls = type(self)
        if cls.calls < n * (cls.faults + 1):
            return False
        cls.faults += 1
        return True

    def put(self, *args: Any) -> list[Any]:
        type(self).calls += 1
        return super().put(*args)

    def ahead(self, *args: Any) -> int:
        type(self).calls += 1
        return super().ahead(*args)

    def attend(self, *args: Any) -> Result:
        type(self).calls += 1
        return super().attend(*args)

    def visit(self, *args: Any) -> None:
        type(self).calls += 1
        super().visit(*args)


def result(
    change: Callable[
        [Wrong, torch.Tensor, torch.Tensor, Sequence[SegmentView], Queries], Result | None
    ],
) -> type[Wrong]:
    """A device whose results are changed."""

    class Changed(Wrong):
        def attend(self, ticket: int, queries: Queries, tail: RowsInMemory | None = None) -> Result:
            views = self._views(ticket)
            o, lse = super().attend(ticket, queries, tail)
            return change(self, o, lse, views, queries) or (o, lse)

    return Changed


def seen_as(change: Callable[[Wrong, Sequence[SegmentView]], Sequence[SegmentView]]) -> type[Wrong]:
    """A device that looks at other rows than it was asked for."""

    class Changed(Wrong):
        def _views(self, ticket: int) -> Sequence[SegmentView]:
            return change(self, super()._views(ticket))

    return Changed


def stored_as(change: Callable[[Wrong, Any], None]) -> type[Wrong]:
    """A device that stores other rows than it is given."""

    class Changed(Wrong):
        def put(self, *args: Any) -> list[Any]:
            found = super().put(*args)
            for each in found:
                change(self, each)
            return found

    return Changed


def flipped(bit: int, n: int = 1000) -> Callable[[Wrong, Any], None]:
    def flip(rows: Wrong, segment: Any) -> None:
        for head in segment.blocks:
            if head.numel() and rows.rarely(n):
                head.view(-1)[segment.n_rows * 2 - 1 if segment.n_rows > 9 else 1] ^= bit

    return flip


def rows_changed(rows: Wrong, segment: Any) -> None:
    if rows.rarely(50) and segment.blocks.numel():
        segment.blocks.copy_(torch.roll(segment.blocks, 1))


def zeroed(rows: Wrong, segment: Any) -> None:
    if rows.rarely(1000):
        segment.blocks.zero_()


def replaced(view: SegmentView, **facts: Any) -> SegmentView:
    return replace(view, **facts)


class LosesTickets(Wrong):
    def ahead(self, *args: Any) -> int:
        ticket = super().ahead(*args)
        if self.rarely(200):
            self._line.pop()
        return ticket


class TakesAnyTicket(Wrong):
    def _views(self, ticket: int) -> Sequence[SegmentView]:
        return dict(self._line)[ticket]

    def _end(self, ticket: int) -> None:
        self._line = type(self._line)(each for each in self._line if each[0] != ticket)


class NeverGivesBack(Wrong):
    def release(self, segment: Segment) -> None: ...


class GivesBackTwice(Wrong):
    def release(self, segment: Segment) -> None:
        super().release(segment)
        if self.rarely(300):
            super().release(segment)


class NeverWritten(Wrong):
    def is_written(self, segment: Segment) -> bool:
        return False


class NotClosed(Wrong):
    def close(self) -> None: ...


class ClosesOnce(Wrong):
    def close(self) -> None:
        if self._closed:
            raise RuntimeError("closed twice")
        super().close()


class KeepsNoCopy(Wrong):
    """What it was given to put is read when it is looked at."""

    def put(self, layout: Any, k: torch.Tensor, v: torch.Tensor | None, heads: range) -> list[Any]:
        found = super().put(layout, k, v, heads)
        for i, each in enumerate(found):
            each.blocks = Later(layout, k[i], v if v is None else v[i])  # type: ignore[assignment]
        return found

    def _blocks(self, view: SegmentView) -> torch.Tensor:
        later: Any = view.segment.blocks  # type: ignore[attr-defined]
        self._asked += (
            len(view.segment.heads)
            * view.segment.layout.blocks(view.n_rows)
            * view.segment.layout.block_bytes
        )
        return later.layout.pack(later.k, later.v)[:, : view.segment.layout.blocks(view.n_rows)]


class Later:
    def __init__(self, layout: Any, k: torch.Tensor, v: torch.Tensor | None):
        self.layout, self.k, self.v = layout, k, v


class OneBufferForResults(Wrong):
    buffers: dict[torch.Size, torch.Tensor] = {}  # noqa: RUF012 - this is what is wrong with it

    def attend(self, *args: Any) -> Result:
        o, lse = super().attend(*args)
        return self.buffers.setdefault(o.shape, torch.empty_like(o)).copy_(o), lse


class ScalesQueries(Wrong):
    def attend(self, ticket: int, queries: Queries, tail: RowsInMemory | None = None) -> Result:
        found = super().attend(ticket, queries, tail)
        queries.q.mul_(2)
        return found


class LeaksFiles(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.leaked = os.open("/dev/null", os.O_RDONLY)
        LEAKED.append(self.leaked)


LEAKED: list[int] = []


class LeaksMemory(Wrong):
    held: list[torch.Tensor] = []  # noqa: RUF012 - this is what is wrong with it

    def put(self, *args: Any) -> list[Any]:
        found = super().put(*args)
        self.held += [each.blocks for each in found]
        return found


class SwallowsWhatShowRaises(Wrong):
    def visit(self, ticket: int, show: Show) -> None:
        def calm(*args: Any) -> None:
            with suppress(Exception):
                show(*args)

        super().visit(ticket, calm)


class ShowsTwice(Wrong):
    def visit(self, ticket: int, show: Show) -> None:
        def again(memory: torch.Tensor, pieces: np.ndarray) -> None:
            show(memory, pieces)
            if self.rarely(200):
                show(memory, pieces)

        super().visit(ticket, again)


class ShowsTheFirstPieceAlone(Wrong):
    def visit(self, ticket: int, show: Show) -> None:
        seen: list[int] = []

        def first(memory: torch.Tensor, pieces: np.ndarray) -> None:
            if not seen or not self.rarely(100):
                show(memory, pieces)
            seen.append(1)

        super().visit(ticket, first)


class SharedLine(Wrong):
    """Of all devices of the process."""

    line: Any = None

    def __init__(self) -> None:
        super().__init__()
        type(self).line = self._line if type(self).line is None else type(self).line
        self._line = type(self).line


class StatsOfOneThread(Wrong):
    def stats(self) -> DeviceStats:
        if os.getpid() != __import__("threading").get_native_id():
            raise RuntimeError("of the thread that opened it alone")
        return super().stats()


class JoinsTheFirstTwo(Wrong):
    def join(self, segments: Sequence[Segment]) -> Any:
        joined = super().join(segments)
        if len(segments) > 2:
            joined.blocks = joined.blocks.clone()
            joined.blocks[:, -segments[-1].n_blocks :] = 0
        return joined


class RaisesSometimes(Wrong):
    def put(self, *args: Any) -> list[Any]:
        if self.rarely(200):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().put(*args)


class ForgetsNothing(Wrong):
    def forget(self) -> None: ...


class CountsHalf(Wrong):
    def stats(self) -> DeviceStats:
        return replace(super().stats(), bytes_asked=self._asked // 2)


def noise(rows: Wrong, o: torch.Tensor, lse: torch.Tensor, *_: Any) -> Result:
    return o + 3e-4 * torch.randn(o.shape, generator=torch.Generator().manual_seed(1)), lse


def stale(rows: Wrong, o: torch.Tensor, lse: torch.Tensor, *_: Any) -> Result | None:
    last, rows.last = getattr(rows, "last", None), (o.clone(), lse.clone())  # type: ignore[attr-defined]
    return last if rows.rarely(50) and last is not None and last[0].shape == o.shape else None


def grouped(
    rows: Wrong, o: torch.Tensor, lse: torch.Tensor, views: Sequence[SegmentView], queries: Queries
) -> Result:
    o[:, :, 3:] = 0  # queries of one KV head
    return o, lse


def mask_off_by_one(
    rows: Wrong, o: torch.Tensor, lse: torch.Tensor, views: Sequence[SegmentView], queries: Queries
) -> Result | None:
    if queries.first_visible is None or queries.last_position is not None or not views:
        return None
    return o.roll(1, dims=0), lse


def if_width(
    rows: Wrong, o: torch.Tensor, lse: torch.Tensor, views: Sequence[SegmentView], queries: Queries
) -> Result | None:
    d = queries.q.shape[-1]
    return (o * 1.001, lse) if d & (d - 1) else None


def on(
    condition: Callable[[SegmentView], bool], change: Callable[[SegmentView], SegmentView | None]
) -> type[Wrong]:
    def changed(rows: Wrong, views: Sequence[SegmentView]) -> Sequence[SegmentView]:
        found = [change(each) if condition(each) else each for each in views]
        return [each for each in found if each is not None]

    return seen_as(changed)


def one_less(view: SegmentView) -> SegmentView:
    return replaced(view, n_rows=view.n_rows - 1)


def one_on(view: SegmentView) -> SegmentView:
    return replaced(view, first_position=view.first_position + 1)


def _every(n: int, found: Callable[[torch.Tensor, torch.Tensor], Result]) -> type[Wrong]:
    return result(lambda rows, o, lse, *_: found(o, lse) if rows.rarely(n) else None)


SABOTAGES: dict[str, Callable[[], type[Wrong]]] = {
    "a result is wrong in 1 of 10 calls": lambda: _every(10, lambda o, lse: (o * 1.5, lse)),
    "a result is wrong in 1 of 1,000 calls": lambda: _every(
        1000, lambda o, lse: (o * 1.5 + 1, lse)
    ),
    "a result is no number in 1 of 200 calls": lambda: _every(
        200, lambda o, lse: (o * torch.nan, lse)
    ),
    "noise": lambda: result(noise),
    "lse is off": lambda: result(lambda rows, o, lse, *_: (o, lse + 1e-3)),
    "the highest bit in 1 of 200 heads": lambda: stored_as(flipped(128, 200)),
    "the lowest bit in 1 of 1,000 heads": lambda: stored_as(flipped(1)),
    "rows are stale": lambda: result(stale),
    "rows are moved": lambda: stored_as(rows_changed),
    "the last row is dropped": lambda: on(lambda view: view.n_rows > 1, one_less),
    "tickets in any order": lambda: TakesAnyTicket,
    "bytes are never given back": lambda: NeverGivesBack,
    "bytes are given back twice": lambda: GivesBackTwice,
    "never written": lambda: NeverWritten,
    "not closed": lambda: NotClosed,
    "closes once": lambda: ClosesOnce,
    "a ticket is lost in 1 of 200": lambda: LosesTickets,
    "a write is lost in 1 of 1,000": lambda: stored_as(zeroed),
    "the 4th sequence is zeros": lambda: on(lambda view: view.sequence == 3, lambda view: None),
    "heads from the 5th on are zeros": lambda: result(
        lambda rows, o, lse, *_: (torch.cat([o[:, :4], 0 * o[:, 4:]], dim=1), lse)
    ),
    "lengths of a multiple of 128": lambda: on(
        lambda view: view.n_rows > 0 and view.n_rows % 128 == 0, one_less
    ),
    "more than 2^16 rows": lambda: on(
        lambda view: view.n_rows > 1 << 16, lambda view: replaced(view, n_rows=1 << 16)
    ),
    "the mask of another sequence": lambda: result(mask_off_by_one),
    "positions after a crop": lambda: on(
        lambda view: view.n_rows < view.segment.n_rows and view.first_position > 0, one_on
    ),
    "grouped queries": lambda: result(grouped),
    "widths that are no power of two": lambda: result(if_width),
    "one buffer for results": lambda: OneBufferForResults,
    "queries are changed": lambda: ScalesQueries,
    "no copy of what is put": lambda: KeepsNoCopy,
    "files are left open": lambda: LeaksFiles,
    "memory is kept": lambda: LeaksMemory,
    "what `show` raises is swallowed": lambda: SwallowsWhatShowRaises,
    "rows are shown twice in 1 of 200": lambda: ShowsTwice,
    "rows are not shown": lambda: ShowsTheFirstPieceAlone,
    "a line that devices share": lambda: SharedLine,
    "counters for one thread": lambda: StatsOfOneThread,
    "the third of joined segments": lambda: JoinsTheFirstTwo,
    "an error that is none of espnx's": lambda: RaisesSometimes,
    "tickets are not forgotten": lambda: ForgetsNothing,
    "half is counted": lambda: CountsHalf,
}


#: Those that no soak can find, or only a long one, and what does.
FOUND_BY = {
    "tickets in any order": "serves_tickets_in_order",
    "not closed": "is_closed",
    "closes once": "is_closed",
    "more than 2^16 rows": "attends_wide_and_long",
    "memory is kept": "gives_memory_back",
    "what `show` raises is swallowed": "hands_on_what_show_raises",
    "a line that devices share": "serves_two_at_once",
}


#: Those that take long to find.
RARE = tuple(name for name in SABOTAGES if "1 of 1,000" in name)


@pytest.mark.parametrize(
    "name",
    [
        *some([name for name in SABOTAGES if name not in RARE], 2),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in RARE),
    ],
)
def test_it_is_found(name: str) -> None:
    rows = SABOTAGES[name]()
    rows.calls = rows.faults = 0

    def open_rows(**options: Any) -> Wrong:
        return rows()

    try:
        if name in FOUND_BY:
            (check,) = (each for each in CHECKS if each.__name__ == FOUND_BY[name])
            with pytest.raises((errors.NotConformingError, RuntimeError)):
                check(open_rows)
        else:
            with pytest.raises(errors.NotConformingError):
                soak(open_rows, calls=CALLS)
    finally:
        while LEAKED:
            os.close(LEAKED.pop())


def test_the_device_that_is_not_wrong_passes() -> None:
    found = soak(lambda **options: Wrong(), calls=300, seed=3)
    assert found.total() >= 300
    assert {"put", "ahead", "attend", "visit", "release"} <= set(found)
