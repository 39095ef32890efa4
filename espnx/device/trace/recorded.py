"""A device whose commands are written into a trace. What it does is what the device inside does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ...ops.attention import Queries, RowsInMemory
from ...storage import Engine, FileHandle, Future
from ..around import DeviceAround
from ..crew import Clock, clock_of
from ..interface import (
    DeviceStats,
    KeptRecords,
    Pairs,
    RecordDevice,
    RecordQuery,
    RecordTicket,
    RowDevice,
    Segment,
    SegmentPlace,
    SegmentView,
    Show,
    Space,
)
from ..near_storage import NearStorageDevice
from ..postings.interface import PostingLists, PostingsDevice
from ..record_layout import RecordLayout
from ..row_layout import RowLayout
from ..vectors.encoding import Encoding
from ..vectors.interface import ClusterDevice, Graph, GraphDevice
from .recorded_postings import RecordedPostings
from .recorded_vectors import RecordedClusters, RecordedGraph
from .writer import TraceWriter

if TYPE_CHECKING:
    from ..emulation.topology import Topology

T = TypeVar("T")


def recorded(devices: Sequence[NearStorageDevice], writer: TraceWriter) -> list[NearStorageDevice]:
    """The same devices, whose commands `writer` writes."""
    return [RecordedDevice(device, number, writer) for number, device in enumerate(devices)]


class RecordedDevice(NearStorageDevice):
    """See `espnx.device.near_storage.NearStorageDevice`. Encoding passes unrecorded.

    Args:
        inner: does the work; is closed with this one.
        number: of the device in the trace.
    """

    def __init__(self, inner: NearStorageDevice, number: int, writer: TraceWriter):
        super().__init__(inner.path)
        self.name, self.kind, self.capabilities = inner.name, inner.kind, inner.capabilities
        self._inner, self._number, self._writer = inner, number, writer

    @property
    def topology(self) -> Topology | None:
        """Of an emulated device."""
        return getattr(self._inner, "topology", None)

    @property
    def clock(self) -> Clock | None:
        """See `clock_of`."""
        return clock_of(self._inner)

    def refuses(self, call: str) -> str:
        """See `NearStorageDevice`."""
        return self._inner.refuses(call)

    def check(self, directory: str | None = None, *, engine: Any = "auto", name: str | None = None) -> None:
        """See `NearStorageDevice`."""
        self._inner.check(directory, engine=engine, name=name)

    def open_rows(self, directory: str | None = None, **options: Any) -> RowDevice:
        """See `NearStorageDevice`."""
        return _Rows(self._inner.open_rows(directory, **options), self._number, self._writer)

    def open_records(self, engine: Engine, compute: torch.device) -> RecordDevice:
        """See `NearStorageDevice`."""
        return _Records(self._inner.open_records(engine, compute), self._number, self._writer)

    def open_clusters(self, directory: str | os.PathLike[str], *, engine: Any = "auto", threads: int | None = None) -> ClusterDevice:
        """See `NearStorageDevice`."""
        return RecordedClusters(self._inner.open_clusters(directory, engine=engine, threads=threads), self._number, self._writer)

    def open_graph(self, graph: Graph, *, engine: Any = "auto") -> GraphDevice:
        """See `NearStorageDevice`."""
        return RecordedGraph(self._inner.open_graph(graph, engine=engine), self._number, self._writer)

    def open_postings(self, lists: PostingLists, *, engine: Any = "auto") -> PostingsDevice:
        """See `NearStorageDevice`."""
        return RecordedPostings(self._inner.open_postings(lists, engine=engine), self._number, self._writer)

    def encode(self, encode: Callable[[Sequence[str]], T], texts: Sequence[str], *, flop: float | None = None) -> Encoding[T]:
        """See `NearStorageDevice`."""
        return self._inner.encode(encode, texts, flop=flop)

    def describe(self) -> dict[str, Any]:
        """See `NearStorageDevice`."""
        return self._inner.describe()

    def close(self) -> None:
        """See `NearStorageDevice`."""
        self._inner.close()


def _shape(layout: RowLayout) -> dict[str, Any]:
    return {
        "format": layout.format, "d": layout.d, "dv": layout.dv, "is_shared": layout.is_shared, "least_rows": layout.least_rows,
    }  # fmt: skip


class _Rows(DeviceAround[RowDevice]):
    """See `espnx.device.interface.RowDevice`."""

    def __init__(self, inner: RowDevice, device: int, writer: TraceWriter):
        super().__init__(inner)
        self._device, self._writer, self._part = device, writer, writer.part()
        self._numbers, self._count = dict[int, tuple[int, Segment]](), 0  # of segments that were not released
        self._ahead = dict[int, tuple[int, int]]()  # by ticket: the command, and the bytes that it asks for
        self.space: Space = _Space(inner.space, self)

    def number(self, segment: Segment) -> int:
        """Of a segment in the trace."""
        if id(segment) not in self._numbers:
            self._numbers[id(segment)] = self._count, segment
            self._count += 1
        return self._numbers[id(segment)][0]

    def command(self, verb: str) -> Any:
        return self._writer.command(self._device, verb)

    def kept(self, line: dict[str, Any], segments: Sequence[Segment]) -> None:
        """Writes new segments into a line."""
        line["part"], line["bytes"] = self._part, sum(each.size_bytes for each in segments)
        line["segments"] = [
            {"number": self.number(each), "layout": _shape(each.layout), "heads": [*_bounds(each.heads)], "n_rows": each.n_rows}
            for each in segments
        ]
        if self.capabilities.keeps and len(segments) == 1 and all(isinstance(each, SegmentPlace) for each in segments):
            line["places"] = [[each.offset_bytes, each.size_bytes] for each in segments if isinstance(each, SegmentPlace)]

    def memory(self, size_bytes: int) -> torch.Tensor:
        return self._inner.memory(size_bytes)

    def put(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range) -> Sequence[Segment]:
        with self.command("put") as line:
            found = self._inner.put(layout, k, v, heads)
            self.kept(line, found)
        return found

    def join(self, segments: Sequence[Segment]) -> Segment:
        with self.command("join") as line:
            line["of"] = [self.number(each) for each in segments]
            found = self._inner.join(segments)
            self.kept(line, [found])
        return found

    def is_written(self, segment: Segment) -> bool:
        return self._inner.is_written(segment)

    def release(self, segment: Segment) -> None:
        with self.command("release") as line:
            line["part"], line["segment"] = self._part, self.number(segment)
            self._inner.release(segment)
        del self._numbers[id(segment)]

    def flush(self) -> None:
        with self.command("flush") as line:
            line["part"] = self._part
            self._inner.flush()

    def sync(self) -> None:
        with self.command("sync") as line:
            line["part"] = self._part
            self._inner.sync()

    def ahead(self, layout: RowLayout, views: Sequence[SegmentView]) -> int:
        with self.command("ahead") as line:
            ticket = self._inner.ahead(layout, views)
            size_bytes = sum(len(each.segment.heads) * layout.blocks(each.n_rows) * layout.block_bytes for each in views)
            line |= {
                "part": self._part, "ticket": ticket, "bytes": size_bytes, "layout": _shape(layout),
                "views": [[self.number(each.segment), each.sequence, each.n_rows, each.first_position] for each in views],
            }  # fmt: skip
            self._ahead[ticket] = line["n"], size_bytes
        return ticket

    def front(self) -> int:
        return self._inner.front()

    def attend(self, ticket: int, queries: Queries, tail: RowsInMemory | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        with self.command("attend") as line:
            self._asks(line, ticket)
            line |= {"queries": list(queries.q.shape), "dv": queries.dv, "tail_rows": 0 if tail is None else tail.n_rows}
            return self._inner.attend(ticket, queries, tail)

    def visit(self, ticket: int, show: Show) -> None:
        computing_s = 0.0

        def shown(memory: torch.Tensor, pieces: np.ndarray) -> None:
            nonlocal computing_s
            begun = time.perf_counter()
            show(memory, pieces)
            computing_s += time.perf_counter() - begun

        with self.command("visit") as line:
            self._asks(line, ticket)
            try:
                self._inner.visit(ticket, shown)
            finally:
                line["host_in_s"] = round(computing_s, 7)

    def _asks(self, line: dict[str, Any], ticket: int) -> None:
        asked, size_bytes = self._ahead.pop(ticket, (-1, 0))
        line |= {"part": self._part, "ticket": ticket, "waits_for": asked, "bytes": size_bytes}

    def forget(self) -> None:
        with self.command("forget") as line:
            line["part"] = self._part
            self._ahead.clear()
            self._inner.forget()


def _bounds(heads: range) -> tuple[int, int, int]:
    return heads.start, heads.stop, heads.step


class _Space:
    """See `espnx.device.interface.Space`."""

    def __init__(self, inner: Space, rows: _Rows):
        self._inner, self._rows = inner, rows

    @property
    def path(self) -> str:
        return self._inner.path

    def reserve(self, size_bytes: int) -> None:
        self._inner.reserve(size_bytes)

    def place(self, segment: Segment) -> SegmentPlace:
        return self._inner.place(segment)

    def restore(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        with self._rows.command("restore") as line:
            found = self._inner.restore(places)
            self._rows.kept(line, found)
        return found

    def pin(self, segments: Sequence[Segment], *, also: bool = False) -> None:
        self._inner.pin(segments, also=also)


class _Records(DeviceAround[RecordDevice]):
    """See `espnx.device.interface.RecordDevice`."""

    def __init__(self, inner: RecordDevice, device: int, writer: TraceWriter):
        super().__init__(inner)
        self._device, self._writer = device, writer

    @property
    def engine(self) -> Engine | None:
        return self._inner.engine

    def open(self, path: str) -> FileHandle:
        return self._inner.open(path)

    def close_file(self, file: FileHandle) -> None:
        self._inner.close_file(file)

    def keep_records(self, layout: RecordLayout) -> KeptRecords:
        part = self._writer.part()
        with self._writer.command(self._device, "keep_records") as line:
            line |= {
                "part": part, "files": [file.path for file in layout.files], "records": len(layout.n_tokens),
                "format": layout.schema.format, "dim": layout.schema.dim, "d_cls": layout.schema.d_cls,
            }  # fmt: skip
            kept = self._inner.keep_records(layout)
        return _Kept(kept, layout, part, self._device, self._writer)


class _Kept:
    """See `espnx.device.interface.KeptRecords`."""

    def __init__(self, inner: KeptRecords, layout: RecordLayout, part: int, device: int, writer: TraceWriter):
        self._inner, self._layout, self._part, self._device, self._writer = inner, layout, part, device, writer

    def maxsim(
        self, numbers: np.ndarray, queries: Sequence[RecordQuery], pairs: Pairs | None = None, **options: Any
    ) -> RecordTicket:  # fmt: skip
        line = self._writer.begin(self._device, "maxsim")
        try:
            line |= {
                "part": self._part, "bytes": self._bytes(numbers), "places": numbers.tolist(),
                "queries": [len(query.tokens) for query in queries], "pairs": len(numbers) if pairs is None else len(pairs), **options,
            }  # fmt: skip
            return _Ticket(self._inner.maxsim(numbers, queries, pairs, **options), line, self._writer)
        except BaseException as error:
            self._writer.end(line, failed=type(error).__name__)
            raise

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        with self._writer.command(self._device, "read") as line:
            line |= {"part": self._part, "bytes": self._bytes(numbers), "places": numbers.tolist()}
            return self._inner.read(numbers, gap_bytes=gap_bytes, deadline_s=deadline_s)

    def _bytes(self, numbers: np.ndarray) -> int:
        return int(self._layout.schema.sizes(self._layout.n_tokens[numbers]).sum())

    def release(self) -> None:
        self._inner.release()


class _Ticket:
    """See `espnx.device.interface.RecordTicket`. The command ends when all is scored; its line is written when the scores are taken."""

    def __init__(self, inner: RecordTicket, line: dict[str, Any], writer: TraceWriter):
        self._inner, self._line, self._writer = inner, line, writer
        self._line["waited_s"] = 0.0
        self._is_running = self._is_open = True

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        begun = time.perf_counter()
        try:
            found, is_finished = self._inner.next(at_least, timeout_s)
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        finally:
            self._line["waited_s"] += time.perf_counter() - begun
        if is_finished:
            self._stop()
        return found, is_finished

    def _stop(self) -> None:
        if self._is_running:
            self._is_running = False
            self._writer.stop(self._line)

    def _end(self, failed: str | None = None) -> None:
        self._stop()
        if self._is_open:
            self._is_open = False
            self._writer.write(self._line, failed=failed)

    @property
    def scores(self) -> np.ndarray:
        return self._inner.scores

    def add(self, pairs: Pairs) -> None:
        self._line["pairs"] += len(pairs)
        self._inner.add(pairs)

    def finish(self) -> np.ndarray:
        begun = time.perf_counter()
        try:
            found = self._inner.finish()
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        finally:
            self._line["waited_s"] += time.perf_counter() - begun
        self._end()
        return found

    def cancel(self) -> None:
        self._inner.cancel()
        self._end("cancelled")

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.records

    @property
    def stats(self) -> DeviceStats:
        return self._inner.stats

    @property
    def finished_at(self) -> float:
        return self._inner.finished_at
