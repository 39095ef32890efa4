"""The plain SSD as a device for records: a deep queue, and MaxSim on this machine's cores as records arrive (csrc/device/record_stream)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import errors
from ..storage import Engine, FileHandle, Future, NativeEngine
from ..storage.native import host_engine, load_native
from .interface import Pairs, RecordDevice, RecordQuery, RecordStats
from .record_layout import RecordLayout

if TYPE_CHECKING:
    from .._C import KeptRecords as CompiledRecords

_WINDOW_BYTES = 256 << 20
_WORKERS = 32  # they wait for the disk most of the time


class SsdRecordDevice:
    """See `espnx.device.interface.RecordDevice`.

    Args:
        engine: of the reads; stays the caller's.
        window_bytes: of records that are read before anybody waits for them.
        workers: threads that score those, started when they are needed.
    """

    compute = torch.device("cpu")
    hands_out_records = True

    def __init__(self, engine: NativeEngine, *, window_bytes: int = _WINDOW_BYTES, workers: int = _WORKERS):
        self.engine: Engine | None = engine
        self._reads = engine
        self.effective_path, self.fallback_reason = engine.effective, engine.fallback_reason
        self._stream = load_native().RecordStream(engine.native, window_bytes, workers)

    def open(self, path: str) -> FileHandle:
        """See `RecordDevice`."""
        return self._reads.open(path)

    def close_file(self, file: FileHandle) -> None:
        """See `RecordDevice`."""
        self._reads.close_file(file)

    def keep_records(self, layout: RecordLayout) -> _SsdRecords:
        """See `RecordDevice`."""
        return _SsdRecords(self._reads, self._stream, layout)

    def forget(self) -> None:
        """See `RecordDevice`."""
        self._stream.clear()

    def stats(self) -> RecordStats:
        """See `RecordDevice`."""
        return RecordStats(**self._stream.stats())

    def close(self) -> None:
        """See `RecordDevice`."""
        self.forget()


class _SsdRecords:
    """See `espnx.device.interface.KeptRecords`."""

    def __init__(self, engine: NativeEngine, stream: Any, layout: RecordLayout):
        self._engine, self._stream, self._layout = engine, stream, layout

    @cached_property
    def _native(self) -> CompiledRecords:
        """Made when scores are first asked for: of residual records that are none there is no codebook either."""
        layout = self._layout
        schema, book = layout.schema, layout.codebook
        rules = {
            "salt": layout.salt, "format_number": schema.format_number, "fixed_bytes": schema.fixed_bytes, "row_bytes": schema.row_bytes,
            "format": schema.format, "cls_format": schema.cls_format, "dim": schema.stored_dim, "d_cls": schema.stored_d_cls,
        }  # fmt: skip
        tables = (None, None) if book is None else (book.centroids, book.bucket_weights)
        return load_native().keep_records(
            torch.from_numpy(layout.n_tokens), layout.group_offset_bytes, layout.segment_begin, layout.file_numbers, rules, *tables
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
        wanted = [(schema.query_tokens(query.tokens), schema.query_cls(query.cls), query.cls_weight) for query in queries]
        item, of_query = (None, None) if pairs is None else (torch.from_numpy(pairs.item), torch.from_numpy(pairs.query))
        native = self._stream.push(self._native, torch.from_numpy(numbers), wanted, item, of_query, is_urgent, gap_bytes, deadline_s)
        return SsdRecordTicket(native, self._layout, numbers)

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """See `KeptRecords`."""
        return self._engine.read(self._layout.plan(numbers), gap_bytes=gap_bytes, deadline_s=deadline_s)

    def release(self) -> None:
        """See `KeptRecords`."""


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
        more = [self._native.score_more(torch.from_numpy(each.item), torch.from_numpy(each.query)).numpy() for each in self._added]
        return np.concatenate([self.scores, *more])

    def _raise_damaged(self, item: int) -> None:
        memory, where = self.records
        number = self._numbers[item : item + 1]
        self._layout.check(memory, where[item : item + 1], number)
        raise errors.ChecksumError(f"record {number[0]} was found damaged, then whole", fix="search again; check the memory")

    def cancel(self) -> None:
        """See `RecordTicket`."""
        self._native.forget()

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordTicket`."""
        memory, position_bytes = self._native.memory()
        return memory, position_bytes

    @property
    def stats(self) -> RecordStats:
        """See `RecordTicket`."""
        return RecordStats(*self._native.costs()[:5])

    @property
    def finished_at(self) -> float:
        """See `RecordTicket`."""
        return time.perf_counter() - float(self._native.costs()[5])


def open_record_device(engine: Engine, compute: torch.device) -> RecordDevice:
    """The device for records that `engine` reads, scored on `compute`. The engine stays the caller's.

    Raises InvalidInputError where the engine reads into the memory of a GPU, and scores are computed on the CPU.
    """
    if compute.type != "cpu":
        from .gpu.records import TensorRecordDevice

        return TensorRecordDevice(engine, compute)
    native = host_engine(engine)
    if native is None:
        raise errors.InvalidInputError("records would lie in GPU memory", got="compute='cpu'", fix="open the index with compute='cuda'")
    return SsdRecordDevice(native)
