"""What the rows of a KV cache on a device are asked for. All of it is done when `submit`
returns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...ops.attention import Queries, RowsInMemory
from ...storage.parse import Fields
from ..command import Command, Done, Watch
from ..interface import RowDevice, Segment, SegmentPlace, SegmentView, Show, Space
from ..row_layout import DTYPES, RowLayout
from ..wrapper import Wrapper

#: Of one command, in values: what a trace asks for is made in memory.
VALUES_MAX = 1 << 31


class _RowCommand(Command):
    is_done: ClassVar[bool] = True

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> Any:
        return cls()


class _NewSegments(_RowCommand):
    """Makes segments, which its line names. A replay puts others in their place."""

    def end_line(self, line: dict[str, Any], ticket: Any, found: Any, memo: dict[Any, Any]) -> None:
        _keep(line, found, memo)

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> PutAnewCommand:
        alike = defaultdict[tuple[RowLayout, range, int], list[int]](list)
        segments = said.each("segments", count=1 << 24)
        for each, layout in zip(segments, [_layout(each) for each in segments], strict=True):
            alike[layout, _heads(each), each.whole("n_rows")].append(each.whole("number"))
        return PutAnewCommand(
            [
                (PutCommand(key[0], *_some_rows(key, len(numbers), said), key[1]), numbers)
                for key, numbers in alike.items()
            ]
        )


@dataclass(frozen=True, eq=False)
class PutCommand(_NewSegments):
    """Attributes: see `RowDevice.put`."""

    verb: ClassVar[str] = "put"
    layout: RowLayout
    k: torch.Tensor
    v: torch.Tensor | None
    heads: range


@dataclass(frozen=True, eq=False)
class RestoreCommand(_NewSegments):
    """Attributes: see `Space.restore`."""

    verb: ClassVar[str] = "restore"
    places: Sequence[SegmentPlace]

    def ask(self, part: RowDevice, watch: Watch | None = None) -> Done:
        return Done(part.space.restore(self.places))


class LendCommand(RestoreCommand):
    """Attributes: see `Space.lend`. In a trace it is as `RestoreCommand`."""

    def ask(self, part: RowDevice, watch: Watch | None = None) -> Done:
        return Done(part.space.lend(self.places))


@dataclass(frozen=True, eq=False)
class PutAnewCommand(_RowCommand):
    """Rows for the segments of a line of a trace: those of one put are alike, those of a state that
    was restored need not be.

    Attributes:
        puts: each with the numbers of its segments.
    """

    verb: ClassVar[str] = "put"
    puts: Sequence[tuple[PutCommand, Sequence[int]]]

    def ask(self, part: RowDevice, watch: Watch | None = None) -> Done:
        return Done(
            [
                pair
                for put, numbers in self.puts
                for pair in zip(numbers, put.ask(part).finish(), strict=True)
            ]
        )

    def replayed(
        self, said: Fields, found: Sequence[tuple[int, Segment]], memo: dict[Any, Any]
    ) -> None:
        memo |= {("segment", number): segment for number, segment in found}


@dataclass(frozen=True, eq=False)
class JoinCommand(_RowCommand):
    """Attributes: see `RowDevice.join`."""

    verb: ClassVar[str] = "join"
    segments: Sequence[Segment]

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        return {"of": [_number(each, memo) for each in self.segments]}

    def end_line(self, line: dict[str, Any], ticket: Any, found: Any, memo: dict[Any, Any]) -> None:
        _keep(line, None if found is None else [found], memo)

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> JoinCommand:
        segments = [_segment(said, number, memo) for number in said.wholes("of", count=1 << 20)]
        if not said.each("segments", count=1):
            said.refuse("segments", "the one that is made")
        return cls(segments)

    def replayed(self, said: Fields, found: Segment, memo: dict[Any, Any]) -> None:
        (into,) = said.each("segments", count=1)
        memo["segment", into.whole("number")] = found


@dataclass(frozen=True, eq=False)
class ReleaseCommand(_RowCommand):
    """Attributes: see `RowDevice.release`."""

    verb: ClassVar[str] = "release"
    segment: Segment

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        number = _number(self.segment, memo)
        del memo[id(self.segment)]
        return {"segment": number}

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> ReleaseCommand:
        number = said.whole("segment")
        segment = _segment(said, number, memo)
        del memo["segment", number]
        return cls(segment)


class FlushCommand(_RowCommand):
    """See `RowDevice.flush`."""

    verb = "flush"


class SyncCommand(_RowCommand):
    """See `RowDevice.sync`."""

    verb = "sync"


class ForgetCommand(_RowCommand):
    """See `Device.forget`."""

    verb = "forget"

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        _forget_tickets(memo)
        return {}

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> ForgetCommand:
        _forget_tickets(memo)
        return cls()


@dataclass(frozen=True, eq=False)
class AheadCommand(_RowCommand):
    """Attributes: see `RowDevice.ahead`."""

    verb: ClassVar[str] = "ahead"
    layout: RowLayout
    views: Sequence[SegmentView]

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        return {} if stored is None else {"read_ahead_bytes": stored}

    def end_line(
        self, line: dict[str, Any], ticket: Any, found: int | None, memo: dict[Any, Any]
    ) -> None:
        if found is None:
            return
        layout = self.layout
        size_bytes = sum(
            len(each.segment.heads) * layout.blocks(each.n_rows) * layout.block_bytes
            for each in self.views
        )
        line |= {
            "ticket": found,
            "bytes": size_bytes,
            "layout": _shape(layout),
            "views": [
                [_number(each.segment, memo), each.sequence, each.n_rows, each.first_position]
                for each in self.views
            ],
        }
        memo["ticket", found] = line["n"], size_bytes

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> AheadCommand:
        layout, values, views = _layout(said), said.values().get("views"), list[SegmentView]()
        if not isinstance(values, list):
            said.refuse("views", "a list")
        for each in values:
            if not (
                isinstance(each, list)
                and len(each) == 4
                and all(type(number) is int and number >= 0 for number in each)
            ):
                said.refuse("views", "[segment, sequence, n_rows, first_position]", each)
            views.append(SegmentView(_segment(said, each[0], memo), *each[1:]))
        return cls(layout, views)

    def replayed(self, said: Fields, found: int, memo: dict[Any, Any]) -> None:
        memo["ticket", said.whole("ticket")] = found, self.layout


@dataclass(frozen=True, eq=False)
class AttendCommand(_RowCommand):
    """Attributes: see `RowDevice.attend`."""

    verb: ClassVar[str] = "attend"
    ticket: int
    queries: Queries
    tail: RowsInMemory | None = None

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        tail_rows = 0 if self.tail is None else self.tail.n_rows
        return _asks(self.ticket, memo) | {
            "queries": list(self.queries.q.shape),
            "dv": self.queries.dv,
            "tail_rows": tail_rows,
        }

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> AttendCommand:
        (ticket, layout), shape = _ticket(said, memo), said.wholes("queries", count=4)
        if len(shape) != 4:
            said.refuse("queries", "[sequences, KV heads, rows, d]", shape)
        _check_size(shape, said)
        sequences, heads, n, d = shape
        queries = Queries(torch.zeros(sequences, heads, n, d), said.whole("dv", 1, 1 << 20))
        tail_rows = said.whole("tail_rows")
        if not tail_rows:
            return cls(ticket, queries)
        _check_size([sequences, heads, tail_rows, layout.d + layout.dv], said)
        k = torch.zeros(
            sequences, heads, tail_rows, layout.d, dtype=DTYPES.get(layout.format, torch.float16)
        )
        v = (
            k
            if layout.is_shared
            else torch.zeros(sequences, heads, tail_rows, layout.dv, dtype=k.dtype)
        )
        return cls(ticket, queries, RowsInMemory(k, v, 0, tail_rows, 0))


@dataclass(eq=False)
class VisitCommand(_RowCommand):
    """Attributes: see `RowDevice.visit`; show_s: that `show` has taken."""

    verb: ClassVar[str] = "visit"
    ticket: int
    show: Show
    show_s: float = 0.0

    def ask(self, part: RowDevice, watch: Watch | None = None) -> Done:
        part.visit(self.ticket, self._shown)
        return Done()

    def _shown(self, memory: torch.Tensor, pieces: np.ndarray) -> None:
        begun = time.perf_counter()
        self.show(memory, pieces)
        self.show_s += time.perf_counter() - begun

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        return _asks(self.ticket, memo)

    def end_line(self, line: dict[str, Any], ticket: Any, found: Any, memo: dict[Any, Any]) -> None:
        line["host_in_s"] = round(self.show_s, 7)

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> VisitCommand:
        """See `Command`. The host's work is waited for."""
        (ticket, _), in_s = _ticket(said, memo), said.real("host_in_s")
        whole_bytes = max(said.whole("bytes") if "bytes" in said else 0, 1)
        return cls(
            ticket, lambda memory, pieces: time.sleep(in_s * min(memory.numel() / whole_bytes, 1.0))
        )


ROW_COMMANDS: tuple[type[_RowCommand], ...] = (
    PutCommand, RestoreCommand, JoinCommand, ReleaseCommand, FlushCommand, SyncCommand,
    ForgetCommand, AheadCommand, AttendCommand, VisitCommand,
)  # fmt: skip


class RowSpace:
    """The space of a part that stands in front of rows: its `restore` is a command, too."""

    _inner: Any

    @property
    def space(self) -> Any:
        """See `RowDevice`."""
        return _SpaceAround(self._inner.space, self)


class _SpaceAround(Wrapper):
    """See `espnx.device.interface.Space`."""

    def __init__(self, inner: Space, rows: Any):
        super().__init__(inner)
        self._rows = rows

    def restore(self, places: Sequence[SegmentPlace]) -> Any:
        """See `Space`."""
        return self._rows.submit(RestoreCommand(places)).finish()

    def lend(self, places: Sequence[SegmentPlace]) -> Any:
        """See `Space`."""
        return self._rows.submit(LendCommand(places)).finish()


# --- how a trace calls segments and tickets ---


def _number(segment: Segment, memo: dict[Any, Any]) -> int:
    """The number of a segment in the trace; `memo` keeps it, so that no other has its `id`."""
    if id(segment) not in memo:
        memo[id(segment)] = memo.setdefault("count", 0), segment
        memo["count"] += 1
    return int(memo[id(segment)][0])


def _keep(line: dict[str, Any], found: Sequence[Segment] | None, memo: dict[Any, Any]) -> None:
    """Writes new segments into a line."""
    if found is None:
        return
    line["bytes"] = sum(each.size_bytes for each in found)
    line["segments"] = [
        {
            "number": _number(each, memo),
            "layout": _shape(each.layout),
            "heads": [each.heads.start, each.heads.stop, each.heads.step],
            "n_rows": each.n_rows,
        }
        for each in found
    ]
    if len(found) == 1 and isinstance(found[0], SegmentPlace):
        line["places"] = [[found[0].offset_bytes, found[0].size_bytes]]


def _asks(ticket: int, memo: dict[Any, Any]) -> dict[str, Any]:
    asked, size_bytes = memo.pop(("ticket", ticket), (-1, 0))
    return {"ticket": ticket, "waits_for": asked, "bytes": size_bytes}


def _forget_tickets(memo: dict[Any, Any]) -> None:
    for key in [key for key in memo if isinstance(key, tuple) and key[0] == "ticket"]:
        del memo[key]


def _shape(layout: RowLayout) -> dict[str, Any]:
    return {
        "format": layout.format,
        "d": layout.d,
        "dv": layout.dv,
        "is_shared": layout.is_shared,
        "least_rows": layout.least_rows,
    }


def _segment(said: Fields, number: int, memo: dict[Any, Any]) -> Segment:
    if ("segment", number) not in memo:
        said.refuse("segment", "one that was put before", number)
    found: Segment = memo["segment", number]
    return found


def _ticket(said: Fields, memo: dict[Any, Any]) -> tuple[int, RowLayout]:
    known: tuple[int, RowLayout] | None = memo.pop(("ticket", said.whole("ticket")), None)
    if known is None:
        said.refuse("ticket", "one of an `ahead` before")
    return known


def _layout(said: Fields) -> RowLayout:
    shape = said.inner("layout")
    return RowLayout(
        shape.choice("format", DTYPES),
        shape.whole("d", 1, 1 << 20),
        shape.whole("dv", 1, 1 << 20),
        shape.flag("is_shared"),
        shape.whole("least_rows", 1, 1 << 20),
    )


def _heads(said: Fields) -> range:
    found = said.wholes("heads", most=1 << 20, count=3)
    if len(found) != 3 or not found[2]:
        said.refuse("heads", "[start, stop, step], the step above 0", found)
    start, stop, step = found
    return range(start, stop, step)


def _check_size(shape: Sequence[int], said: Fields) -> None:
    values = 1
    for each in shape:
        values *= each
    if values > VALUES_MAX:
        said.refuse("queries", f"at most {VALUES_MAX} values", list(shape))


def _some_rows(
    key: tuple[RowLayout, range, int], sequences: int, said: Fields
) -> tuple[torch.Tensor, torch.Tensor | None]:
    layout, heads, n = key
    _check_size([sequences, len(heads), n, layout.d + layout.dv], said)
    dtype = DTYPES.get(layout.format, torch.float16)
    dtype = dtype if dtype.is_floating_point else torch.float16
    k = torch.zeros(sequences, len(heads), n, layout.d, dtype=dtype)
    return k, None if layout.is_shared else torch.zeros(
        sequences, len(heads), n, layout.dv, dtype=dtype
    )
