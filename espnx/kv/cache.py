"""The KV cache of a whole model on SSD: every layer's rows, reads that run ahead over layers and steps, attention over all of it.

Rows do not depend on the query. So the reads of the next layers, and after the last one those of the next step, are under way while this
layer computes: the device never waits for the dense layers, and decoding takes as long as the device needs for the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import errors
from ..device.interface import Queries
from ..device.layout import RowLayout, format_of
from ..device.ssd import SsdDevice, attend_rows
from ..ops.attention import merge
from .chunk import chunk_attention
from .rows import LayerRows
from .spread import Spread
from .visibility import Visibility

#: From so many new tokens on, their attention over one another is left to the framework's fused kernels.
CHUNK_TOKENS = 17


@dataclass
class _Ahead:
    """Reads that are under way for a layer, and how many tokens they bring."""

    tickets: list[int]
    covered: int


class SsdCache:
    """K and V of `n_layers` layers.

    Args:
        storage: a directory, or several (one for each SSD).
        n_layers: with rows to keep.
        format: of stored rows: None keeps the dtype of K and V; ``int8`` is lossy.
        spill_interval: new tokens wait in memory until there are so many; None: as many as fill whole pages.
        read_ahead_bytes: of rows read before they are asked for, on each device.
        capacity_tokens: of each sequence: space for as many is reserved when the first rows come, so that a full disk shows then.
        engine: ``auto``, ``uring``, ``posix``, or how to make an engine (tests inject faults so).
        threads: that compute on rows; None: as many as PyTorch uses.
        deadline_s: of each transfer.

    Attributes:
        layers: `LayerRows` by layer, made when their first rows come.
    """

    def __init__(
        self,
        storage: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        n_layers: int,
        *,
        format: str | None = None,  # noqa: A002 - what it is called wherever rows are stored
        spill_interval: int | None = None,
        read_ahead_bytes: int = 64 << 20,
        capacity_tokens: int | None = None,
        engine: str | Callable[[], Any] = "auto",
        threads: int | None = None,
        deadline_s: float = 30.0,
        names: Sequence[str] | None = None,
    ):
        if spill_interval is not None and spill_interval < 1:
            raise errors.InvalidInputError("spill_interval", got=spill_interval, expected="at least 1")
        directories = [storage] if isinstance(storage, (str, os.PathLike)) else list(storage)
        if not directories:
            raise errors.InvalidInputError("storage", got="no directory", expected="at least one")
        self._format, self._spill_interval, self._threads = format, spill_interval, threads or 0
        self._capacity_tokens = capacity_tokens
        devices: list[SsdDevice] = []
        try:
            for i, directory in enumerate(directories):
                devices.append(
                    SsdDevice(
                        directory,
                        engine=engine if isinstance(engine, str) else engine(),
                        name=None if names is None else names[i],
                        read_ahead_bytes=read_ahead_bytes,
                        threads=threads,
                        deadline_s=deadline_s,
                    )
                )
        except BaseException:
            for device in devices:
                device.close()
            raise
        self.spread = Spread(devices)
        self.layers: list[LayerRows | None] = [None] * n_layers
        self._ahead: dict[int, _Ahead] = {}
        self._begun = 0  # tokens when the forward pass under way began

    def length(self, layer: int) -> int:
        rows = self.layers[layer]
        return 0 if rows is None else rows.count

    @property
    def sequences(self) -> int:
        """In the batch; 0 while nothing is cached."""
        return next((rows.sequences for rows in self.layers if rows is not None), 0)

    @property
    def memory_bytes(self) -> int:
        """Of rows that wait in memory, and of checksums."""
        return sum(rows.memory_bytes for rows in self.layers if rows is not None)

    # --- attention ---

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visibility: Visibility) -> torch.Tensor:
        """Adds new tokens and attends over all of them.

        Args:
            q: [sequences, heads, n, d], the query heads of one KV head adjacent.
            k, v: [sequences, KV heads, n, d] and [..., dv]: the new tokens' rows, as they are to be kept (after RoPE).
            scale: of the scores.
            visibility: of all positions, the new ones included.

        Returns:
            [sequences, heads, n, dv], in q's dtype. A query that may see nothing gets zeros.

        Raises:
            DiskFullError, WriteError, ReadError, ChecksumError, DeadlineExceededError: the tokens of this forward pass are forgotten in
                every layer then, and the cache can be used as it was before.
        """
        with self._undone_on_error():
            rows = self._rows(layer, k, v)
            past, n = rows.count, k.shape[2]
            if n >= CHUNK_TOKENS:
                hidden = None if visibility.hidden is None else visibility.hidden[:, past : past + n].to(q.device)
                o, lse = chunk_attention(q, k, v, scale, hidden, wants_lse=past > 0)
                if past and lse is not None:
                    o, _ = merge(o.float(), lse, *self._attend_stored(layer, rows, q, scale, visibility, None))
                rows.write(k, v)
                return o.to(q.dtype)
            rows.append(k, v)
            last = past + torch.arange(n)
            o, _ = self._attend_stored(layer, rows, q, scale, visibility, last if n > 1 else None)
            rows.spill()
            self._look_ahead(layer, rows)
            return o.to(q.dtype)

    def _attend_stored(
        self, layer: int, rows: LayerRows, q: torch.Tensor, scale: float, visibility: Visibility, last: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32 [sequences, heads, n, dv], lse) over what is stored and what waits in memory."""
        n_sequences, heads, n, d = q.shape
        groups = heads // rows.n_heads
        grouped = q.float().mul(scale).reshape(n_sequences, rows.n_heads, groups * n, d).contiguous()
        queries = Queries(
            grouped,
            rows.layout.dv,
            None if last is None else last.repeat(groups),
            visibility.first_visible,
            visibility.visible,
        )
        ahead = self._arriving(layer, rows)
        tail = rows.tail(0 if ahead is None else ahead.covered)
        if ahead is None:
            o, lse = attend_rows(None, -1, queries, tail, self._threads)
        else:
            del self._ahead[layer]
            o, lse = self.spread.attend(ahead.tickets, queries, tail)
        shape = (n_sequences, heads, n)
        return o.reshape(*shape, -1), lse.reshape(shape)

    def _arriving(self, layer: int, rows: LayerRows) -> _Ahead | None:
        """The reads of a layer's rows, at the front of every device's line; None where nothing is stored."""
        if not rows.runs:
            return None
        ahead = self._ahead.get(layer)
        if ahead is None or not self.spread.are_next(ahead.tickets):
            self.forget_ahead()
            for number in range(layer, len(self.layers)):
                later = self.layers[number]
                if later is not None:
                    self._look_ahead(number, later)
            ahead = self._ahead.get(layer)  # None: the first write is still under way, and all rows are in memory
        return ahead

    def _look_ahead(self, layer: int, rows: LayerRows) -> None:
        """Puts the reads for the next time in line."""
        covered = rows.covered()
        if covered:
            self._ahead[layer] = _Ahead(self.spread.ahead(rows.layout, rows.uses(covered)), covered)
            rows.trim(covered)

    def forget_ahead(self) -> None:
        """Nothing that was read ahead is wanted any more."""
        self.spread.forget()
        self._ahead.clear()

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.crop(self._begun)
            raise

    def begin(self, tokens: int) -> None:
        """A forward pass begins with so many tokens in the cache; where it fails, the cache returns to them."""
        self._begun = tokens

    # --- the batch ---

    def _rows(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> LayerRows:
        rows = self.layers[layer]
        if rows is None:
            layout = RowLayout(self._format or format_of(k.dtype), k.shape[-1], v.shape[-1])
            rows = LayerRows(self.spread, layout, k.shape[1], k.dtype, self._spill_interval or layout.block_rows)
            if not any(self.layers):
                self._reserve(layout, k.shape[0] * k.shape[1] * len(self.layers))
            self.layers[layer] = rows
        return rows

    def _reserve(self, layout: RowLayout, streams: int) -> None:
        if self._capacity_tokens is not None:
            total = layout.blocks(self._capacity_tokens) * layout.block_bytes * streams
            for device in self.spread.devices:
                device.extents.reserve(total // len(self.spread.devices))

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of every sequence."""
        self.forget_ahead()
        for rows in self.layers:
            if rows is not None:
                rows.crop(tokens)

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was (beams, repeats, a part of the batch); stored rows are shared, not copied."""
        self.forget_ahead()
        for rows in self.layers:
            if rows is not None:
                rows.select(list(sequences))

    def clear(self) -> None:
        """Forgets all tokens; the space is used again."""
        self.forget_ahead()
        for number, rows in enumerate(self.layers):
            if rows is not None:
                rows.clear()
            self.layers[number] = None

    def close(self) -> None:
        self.spread.close()
