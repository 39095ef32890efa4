"""The plain SSD as a device for records: a deep queue, and MaxSim on this machine's cores as
records arrive (csrc/device/record_stream)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import errors
from ...storage import Engine, Future, NativeEngine
from ...storage.native import load_native
from ..command import Part
from ..interface import DeviceStats, Pairs, RecordQuery
from ..record_layout import RecordLayout
from .files import RecordFiles

if TYPE_CHECKING:
    from ..._C import KeptRecords as CompiledRecords

_WINDOW_BYTES = 256 << 20
_WORKERS = 32  # they wait for the disk most of the time


class SsdRecordDevice(RecordFiles):
    """See `espnx.device.interface.RecordDevice`.

    Args:
        engine: of the reads; stays the caller's.
        window_bytes: of records that are read before anybody waits for them.
        workers: threads that score those, started when they are needed.
    """

    def __init__(
        self, engine: NativeEngine, *, window_bytes: int = _WINDOW_BYTES, workers: int = _WORKERS
    ):
        super().__init__(engine, torch.device("cpu"))
        self._stream = load_native().RecordStream(engine.native, window_bytes, workers)

    def keep_records(self, layout: RecordLayout) -> _SsdRecords:
        """See `RecordDevice`."""
        self._layouts.add(layout)
        return _SsdRecords(self._reads, self._stream, layout, self._layouts.discard)

    def forget(self) -> None:
        """See `Device`."""
        self._stream.clear()

    def stats(self) -> DeviceStats:
        """See `Device`."""
        return DeviceStats(**self._stream.stats())

    def close(self) -> None:
        """See `Device`."""
        self.forget()


class _SsdRecords(Part):
    """See `espnx.device.interface.KeptRecords`."""

    def __init__(
        self,
        engine: Engine,
        stream: Any,
        layout: RecordLayout,
        released: Callable[[RecordLayout], None],
    ):
        self._engine, self._stream, self._layout, self._released = engine, stream, layout, released

    @cached_property
    def _native(self) -> CompiledRecords:
        """Made when scores are first asked for: of residual records that are none there is no
        codebook either."""
        layout = self._layout
        schema, book = layout.schema, layout.codebook
        rules = {
            "salt": layout.salt,
            "format_number": schema.format_number,
            "fixed_bytes": schema.fixed_bytes,
            "row_bytes": schema.row_bytes,
            "format": schema.format,
            "cls_format": schema.cls_format,
            "dim": schema.stored_dim,
            "d_cls": schema.stored_d_cls,
        }
        tables = (None, None) if book is None else (book.centroids, book.bucket_weights)
        return load_native().keep_records(
            torch.from_numpy(layout.n_tokens),
            layout.group_offset_bytes,
            layout.segment_begin,
            layout.file_numbers,
            rules,
            *tables,
        )

    def maxsim(
        self,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs | None = None,
        *,
        gap_bytes: int = 0,
        is_urgent: bool = True,
        deadline_s: float = 30.0,
    ) -> SsdRecordTicket:
        """See `KeptRecords`."""
        schema = self._layout.schema
        numbers = np.ascontiguousarray(numbers, dtype=np.int64)
        wanted = [
            (schema.query_tokens(query.tokens), schema.query_cls(query.cls), query.cls_weight)
            for query in queries
        ]
        item, of_query = (
            (None, None)
            if pairs is None
            else (torch.from_numpy(pairs.item), torch.from_numpy(pairs.query))
        )
        native = self._stream.push(
            self._native,
            torch.from_numpy(numbers),
            wanted,
            item,
            of_query,
            is_urgent,
            gap_bytes,
            deadline_s,
            torch.get_num_threads(),
        )
        return SsdRecordTicket(native, self._layout, numbers)

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """See `KeptRecords`."""
        return self._engine.read(
            self._layout.plan(numbers), gap_bytes=gap_bytes, deadline_s=deadline_s
        )

    def release(self) -> None:
        """See `KeptRecords`."""
        self._released(self._layout)


class SsdRecordTicket:
    """See `espnx.device.interface.RecordTicket`."""

    def __init__(self, native: Any, layout: RecordLayout, numbers: np.ndarray):
        self._native, self._layout, self._numbers = native, layout, numbers
        self._added: list[Pairs] = []

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `RecordTicket`."""
        items, finished = self._native.next(at_least, 1e9 if timeout_s is None else timeout_s)
        if finished and self._native.damaged >= 0:
            self._raise_damaged(self._native.damaged)
        return items.numpy(), finished

    @property
    def scores(self) -> np.ndarray:
        """See `RecordTicket`."""
        scores: np.ndarray = self._native.scores().numpy()
        return scores

    def add(self, pairs: Pairs) -> None:
        """See `RecordTicket`."""
        self._added.append(pairs)

    def finish(self) -> np.ndarray:
        """See `RecordTicket`."""
        while not self.next(2**62)[1]:
            pass
        if not self._added:
            return self.scores
        more = [
            self._native.score_more(
                torch.from_numpy(each.item), torch.from_numpy(each.query)
            ).numpy()
            for each in self._added
        ]
        return np.concatenate([self.scores, *more])

    def _raise_damaged(self, item: int) -> None:
        memory, where = self.records
        number = self._numbers[item : item + 1]
        self._layout.check(memory, where[item : item + 1], number)
        raise errors.ChecksumError(
            f"record {number[0]} was found damaged, then whole",
            fix="search again; check the memory",
        )

    def cancel(self) -> None:
        """See `RecordTicket`."""
        self._native.forget()

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordTicket`."""
        memory, position_bytes = self._native.memory()
        return memory, position_bytes

    @property
    def stats(self) -> DeviceStats:
        """See `RecordTicket`."""
        asked, moved, requests, waiting_s, computing_s, _ = self._native.costs()
        return DeviceStats(
            bytes_asked=asked,
            bytes_moved=moved,
            read_requests=requests,
            waiting_s=waiting_s,
            computing_s=computing_s,
        )

    @property
    def finished_at(self) -> float:
        """See `RecordTicket`."""
        return time.perf_counter() - float(self._native.costs()[5])
