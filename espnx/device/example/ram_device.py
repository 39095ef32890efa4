"""The least that is a device for rows: they lie in memory, and plain PyTorch attends. A beginning
for a device of your own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from espnx import errors
from espnx.device.interface import (
    PIECE,
    Capabilities,
    DeviceStats,
    FilePath,
    Segment,
    SegmentPlace,
    SegmentView,
    Show,
)
from espnx.device.near_storage import NearStorageDevice
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import Queries, RowsInMemory, attend_rows_reference, merge


@dataclass(eq=False, slots=True)
class RamSegment(Segment):
    """Public facts, and where the rows are: here they are themselves in `blocks`, uint8 [heads,
    blocks, block_bytes]."""

    blocks: torch.Tensor


class RamSpace:
    """Room is what memory has, and nothing outlives the process: `place` and `restore` are never
    asked, since `keeps` is False."""

    path = ""

    def reserve(self, size_bytes: int) -> None: ...

    def pin(self, segments: Sequence[Segment], *, also: bool = False) -> None: ...

    def place(self, segment: Segment) -> SegmentPlace:
        raise errors.InvalidInputError("a place of rows in memory", fix="another device")

    def restore(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        raise errors.InvalidInputError("rows that were kept in memory", fix="another device")

    def lend(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        raise errors.InvalidInputError("rows that were kept in memory", fix="another device")


class RamRows:
    compute = torch.device("cpu")
    # no window, soft cap or slopes: the host does those
    capabilities = Capabilities(attends_unlike_widths=True, attends_latent=True)

    def __init__(self) -> None:
        self.space, self._closed = RamSpace(), False
        self._line, self._next, self._lock = (
            deque[tuple[int, Sequence[SegmentView]]](),
            0,
            threading.Lock(),
        )
        self._asked = self._written = self._stored = 0

    def memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    # --- rows come and go ---

    def put(
        self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range
    ) -> list[RamSegment]:
        self._check_open()
        if k.shape[1:4:2] != (len(heads), layout.d) or (
            v is not None and v.shape != (*k.shape[:3], layout.dv)
        ):
            raise errors.InvalidInputError(
                "rows to put",
                got=list(k.shape),
                expected=f"[sequences, {len(heads)}, n, {layout.d}]",
            )
        # packing copies: k and v may change now
        found = [RamSegment(layout, heads, k.shape[2], blocks) for blocks in layout.pack(k, v)]
        self._written += sum(each.size_bytes for each in found)
        self._stored += sum(each.size_bytes for each in found)
        return found

    def join(self, segments: Sequence[Segment]) -> RamSegment:
        self._check_open()
        parts = [each for each in segments if isinstance(each, RamSegment)]
        n_rows = sum(each.n_rows for each in parts)
        joined = RamSegment(
            parts[0].layout,
            parts[0].heads,
            n_rows,
            torch.cat([each.blocks for each in parts], dim=1),
        )
        self._stored += joined.size_bytes  # until they are released, the parts are stored, too
        return joined

    def is_written(self, segment: Segment) -> bool:
        return True

    def release(self, segment: Segment) -> None:
        # whoever still has the segment has its blocks: nothing else holds them
        self._stored -= segment.size_bytes

    def flush(self) -> None:
        self._check_open()

    sync = flush

    # --- rows are looked at ---

    def ahead(self, layout: RowLayout, views: Sequence[SegmentView]) -> int:
        self._check_open()
        with self._lock:
            self._line.append((self._next, list(views)))  # a device with a disk starts reading here
            self._next += 1
            return self._next - 1

    def front(self) -> int:
        with self._lock:
            return self._line[0][0] if self._line else -1

    def forget(self) -> None:
        with self._lock:
            self._line.clear()

    def visit(self, ticket: int, show: Show) -> None:
        for view in self._views(ticket):
            for head, blocks in zip(view.segment.heads, self._blocks(view), strict=True):
                if len(blocks):
                    # One head at a time is the least; a piece says where its rows begin in the
                    # bytes that are shown, and what they are.
                    show(
                        blocks.flatten(),
                        np.array(
                            [(view.sequence, head, 0, view.n_rows, view.first_position)], PIECE
                        ),
                    )
                    self._check_wanted(ticket)  # `show` or another thread may have called `forget`
        self._end(ticket)

    def attend(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self._views(ticket)
        if views and (missing := self.capabilities.lacks(queries, views[0].segment.layout)):
            raise errors.InvalidInputError(
                "attention in memory", got=", ".join(missing), expected="what capabilities say"
            )
        o, lse = attend_rows_reference(queries, tail)
        for view in views:
            heads, one = list(view.segment.heads), queries.part(view.sequence, view.sequence + 1)
            k, v = view.segment.layout.unpack(self._blocks(view), view.n_rows)
            rows = RowsInMemory(k[None], v[None], 0, view.n_rows, view.first_position)
            found = attend_rows_reference(replace(one, q=one.q[:, heads]), rows)
            at = slice(view.sequence, view.sequence + 1), heads
            o[at], lse[at] = merge(o[at], lse[at], *found)
        self._end(ticket)
        return o, lse

    def _views(self, ticket: int) -> Sequence[SegmentView]:
        """Views of the ticket that is next. It stays in front until it has been served."""
        self._check_open()
        with self._lock:
            if not self._line or self._line[0][0] != ticket:
                raise errors.InvalidInputError(
                    "rows are consumed in the order in which they were asked for", got=ticket
                )
            return self._line[0][1]

    def _blocks(self, view: SegmentView) -> torch.Tensor:
        """Those that hold the rows of a view: uint8 [heads, blocks, block_bytes]."""
        if not isinstance(view.segment, RamSegment):
            raise errors.InvalidInputError(
                "rows of another device", got=type(view.segment).__name__
            )
        blocks = view.segment.blocks[:, : view.segment.layout.blocks(view.n_rows)]
        self._asked += blocks.numel()
        return blocks

    def _check_wanted(self, ticket: int) -> None:
        if self.front() != ticket:
            raise errors.TransferCancelledError("the rows that were asked for are not needed")

    def _end(self, ticket: int) -> None:
        with self._lock:
            if self._line and self._line[0][0] == ticket:
                self._line.popleft()
                return
        raise errors.TransferCancelledError("the rows that were asked for are not needed")

    # --- what it says of itself ---

    def path_report(self) -> list[FilePath]:
        return []

    def stats(self) -> DeviceStats:
        return DeviceStats(
            bytes_asked=self._asked,
            bytes_moved=self._asked,
            bytes_written=self._written,
            stored_bytes=self._stored,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the device is closed")

    def close(self) -> None:
        self._closed = True
        self.forget()


class RamDevice(NearStorageDevice):
    """Rows in memory: the least that is a device."""

    name = "ram"
    capabilities = RamRows.capabilities

    def open_rows(self, directory: str | None = None, **options: Any) -> RamRows:
        return RamRows()
