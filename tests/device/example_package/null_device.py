"""The least that is a device for rows: they lie in memory, and the reference attends. A beginning for a device of your own, which opens
as ``package.module:Class``, or by the name of an entry point of the group ``espnx.devices``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from espnx import errors
from espnx.device.interface import PIECE, Capabilities, DeviceStats, FilePath, Segment, SegmentPlace, SegmentView, Show
from espnx.device.near_storage import NearStorageDevice
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import Queries, RowsInMemory, attend_rows_reference, merge


@dataclass(eq=False, slots=True)
class Blocks(Segment):
    """Attributes: blocks: uint8 [heads, blocks, block_bytes]."""

    blocks: torch.Tensor


class NullSpace:
    """Room is what memory has; nothing is kept."""

    path = ""

    def reserve(self, size_bytes: int) -> None: ...

    def pin(self, segments: Sequence[Segment], *, also: bool = False) -> None: ...

    def place(self, segment: Segment) -> SegmentPlace:
        raise errors.InvalidInputError("a place of rows in memory", fix="another device")

    def restore(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        raise errors.InvalidInputError("rows that were kept in memory", fix="another device")


class NullRows:
    compute = torch.device("cpu")
    capabilities = Capabilities(attends_unlike_widths=True, attends_latent=True)

    def __init__(self) -> None:
        self.space, self._line, self._next, self._closed = NullSpace(), deque[tuple[int, Sequence[SegmentView]]](), 0, False
        self._lock, self._bytes = threading.Lock(), {"bytes_asked": 0, "bytes_moved": 0, "bytes_written": 0, "stored_bytes": 0}

    def memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def put(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range) -> list[Blocks]:
        self._check_open()
        if k.shape[1:4:2] != (len(heads), layout.d) or (v is not None and v.shape != (*k.shape[:3], layout.dv)):
            raise errors.InvalidInputError("rows to put", got=list(k.shape))
        found = [Blocks(layout, heads, k.shape[2], blocks) for blocks in layout.pack(k, v)]
        for name in ("bytes_written", "stored_bytes"):
            self._bytes[name] += sum(each.size_bytes for each in found)
        return found

    def join(self, segments: Sequence[Segment]) -> Blocks:
        first, n_rows = segments[0], sum(each.n_rows for each in segments)
        joined = Blocks(first.layout, first.heads, n_rows, torch.cat([each.blocks for each in segments if isinstance(each, Blocks)], dim=1))
        self._bytes["stored_bytes"] += joined.size_bytes
        return joined

    def is_written(self, segment: Segment) -> bool:
        return True

    def release(self, segment: Segment) -> None:
        self._bytes["stored_bytes"] -= segment.size_bytes

    def flush(self) -> None:
        self._check_open()

    sync = flush

    def ahead(self, layout: RowLayout, views: Sequence[SegmentView]) -> int:
        self._check_open()
        with self._lock:
            self._line.append((self._next, views))
            self._next += 1
        return self._next - 1

    def front(self) -> int:
        with self._lock:
            return self._line[0][0] if self._line else -1

    def forget(self) -> None:
        with self._lock:
            self._line.clear()

    def visit(self, ticket: int, show: Show) -> None:
        for view in self._take(ticket):
            layout, used = view.segment.layout, view.segment.layout.blocks(view.n_rows)
            for head, blocks in zip(view.segment.heads, view.segment.blocks if isinstance(view.segment, Blocks) else (), strict=True):
                for name in ("bytes_asked", "bytes_moved"):
                    self._bytes[name] += used * layout.block_bytes
                if used:
                    show(blocks[:used].flatten(), np.array([(view.sequence, head, 0, view.n_rows, view.first_position)], PIECE))
            if self.front() != ticket:
                raise errors.TransferCancelledError("the rows that were asked for are not needed")
        with self._lock:
            self._line.popleft()

    def attend(self, ticket: int, queries: Queries, tail: RowsInMemory | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        layout = next((view.segment.layout for view in self._take(ticket)), None)
        if layout is not None and (missing := self.capabilities.lacks(queries, layout)):
            raise errors.InvalidInputError("attention in memory", got=", ".join(missing), expected="what capabilities say")
        o, lse = attend_rows_reference(queries, tail)

        def add(memory: torch.Tensor, pieces: np.ndarray) -> None:
            sequence, head, _, n_rows, first = pieces.tolist()[0]
            k, v = (rows[None, None] for rows in layout.unpack(memory.view(-1, layout.block_bytes), n_rows))  # type: ignore[union-attr]
            one = queries.part(sequence, sequence + 1)
            one = type(one)(one.q[:, head : head + 1], one.dv, one.last_position, one.first_visible, one.visible)
            at = slice(sequence, sequence + 1), slice(head, head + 1)
            o[at], lse[at] = merge(o[at], lse[at], *attend_rows_reference(one, RowsInMemory(k, v, 0, n_rows, first)))

        self.visit(ticket, add)
        return o, lse

    def _take(self, ticket: int) -> Sequence[SegmentView]:
        self._check_open()
        with self._lock:
            if not self._line or self._line[0][0] != ticket:
                raise errors.InvalidInputError("rows are consumed in the order in which they were asked for", got=ticket)
            return self._line[0][1]

    def path_report(self) -> list[FilePath]:
        return []

    def stats(self) -> DeviceStats:
        return DeviceStats(**self._bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the device is closed")

    def close(self) -> None:
        self._closed = True
        self.forget()


class NullDevice(NearStorageDevice):
    name = "null"
    capabilities = NullRows.capabilities

    def open_rows(self, directory: str | None = None, **options: Any) -> NullRows:
        return NullRows()
