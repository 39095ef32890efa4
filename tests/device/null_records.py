"""A near-storage device of sixty lines: it takes the files into its own memory, and hands out
scores, never records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import torch

from espnx.device.interface import (
    Capabilities,
    DeviceStats,
    FilePath,
    KeptRecords,
    Pairs,
    RecordQuery,
    RecordTicket,
)
from espnx.device.record_layout import RecordLayout
from espnx.device.records.score import score
from espnx.storage import FileHandle, Future, NativeEngine


class NullRecordDevice:
    """See `espnx.device.interface.RecordDevice`."""

    compute, engine, capabilities = torch.device("cpu"), None, Capabilities()

    def __init__(self) -> None:
        self.numbers = count()
        self.memory: dict[int, torch.Tensor] = {}
        self.paths: dict[int, FilePath] = {}
        self.scored = 0

    def open(self, path: str) -> FileHandle:
        data = Path(path).read_bytes()
        number = next(self.numbers)
        self.memory[number] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.paths[number] = FilePath(path, "near-storage")
        return FileHandle(number, path, len(data), False, 1, "near-storage", "near-storage")

    def close_file(self, file: FileHandle) -> None:
        del self.memory[file.number], self.paths[file.number]

    def path_report(self) -> Sequence[FilePath]:
        return list(self.paths.values())

    def keep_records(self, layout: RecordLayout) -> KeptRecords:
        return NullRecords(self, layout)

    def forget(self) -> None: ...

    def stats(self) -> DeviceStats:
        return DeviceStats(bytes_moved=4 * self.scored)

    def close(self) -> None: ...


class NullRecords:
    """See `espnx.device.interface.KeptRecords`."""

    def __init__(self, device: NullRecordDevice, layout: RecordLayout):
        self._device, self._layout = device, layout

    def gathered(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        file, offset, size = self._layout.locate(numbers)
        places = zip(
            self._layout.file_numbers[file].tolist(), offset.tolist(), size.tolist(), strict=True
        )
        pieces = [
            self._device.memory[number][begin : begin + length] for number, begin, length in places
        ]
        return torch.cat([torch.empty(0, dtype=torch.uint8), *pieces]), size.cumsum(0) - size

    def maxsim(
        self,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs | None = None,
        **options: float,
    ) -> RecordTicket:
        self._device.scored += len(numbers) if pairs is None else len(pairs)
        return NullTicket(
            self,
            self._layout,
            numbers,
            queries,
            pairs or Pairs(np.arange(len(numbers)), np.zeros(len(numbers), np.int64)),
        )

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """The protocol of futures is the storage engines': one of them reads the files, for what
        wants records and not scores."""
        engine = NativeEngine()
        files = [engine.open(file.path) for file in self._layout.files]
        found = RecordLayout(
            self._layout.schema,
            self._layout.n_tokens,
            self._layout.group_offset_bytes,
            self._layout.segment_begin,
            files,
            salt=self._layout.salt,
        )
        return engine.read(found.plan(numbers), gap_bytes=gap_bytes, deadline_s=deadline_s)

    def release(self) -> None: ...


class NullTicket:
    """See `espnx.device.interface.RecordTicket`. All is done when it is asked for."""

    def __init__(
        self,
        kept: NullRecords,
        layout: RecordLayout,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs,
    ):
        self._layout, self._numbers, self._queries, self._pairs = layout, numbers, queries, [pairs]
        self._memory, self._at = kept.gathered(numbers)
        self._handed_out = False
        self.finished_at = time.perf_counter()
        self.stats = DeviceStats(
            bytes_asked=self._memory.numel(), bytes_moved=4 * len(pairs), read_requests=1
        )

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        items = np.arange(0 if self._handed_out else len(self._numbers))
        self._handed_out = True
        self._layout.check(self._memory, self._at, self._numbers)
        return items, True

    def add(self, pairs: Pairs) -> None:
        self._pairs.append(pairs)

    @property
    def scores(self) -> np.ndarray:
        return self._score(self._pairs[0])

    def _score(self, pairs: Pairs) -> np.ndarray:
        result = np.empty(len(pairs), dtype=np.float32)
        for q, query in enumerate(self._queries):
            mine = np.flatnonzero(pairs.query == q)
            items = pairs.item[mine]
            if len(items):
                result[mine] = score(
                    self._layout,
                    self._memory,
                    self._at[torch.from_numpy(items)],
                    self._numbers[items],
                    query,
                )
        return result

    def finish(self) -> np.ndarray:
        self.next()
        return np.concatenate([self._score(pairs) for pairs in self._pairs])

    def cancel(self) -> None: ...

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("this device hands out no records")
