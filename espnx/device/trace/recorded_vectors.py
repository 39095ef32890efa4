"""Clusters and graphs of vectors whose commands are written into a trace: which clusters were measured, which nodes a walk read, round
after round (RAGX's vertex scoring sequences, section 5.1). What they do is what the device inside does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..around import D, DeviceAround
from ..interface import DeviceStats
from ..vectors.interface import (
    ClusterDevice,
    Clusters,
    DistanceCommand,
    DistanceTicket,
    Graph,
    GraphDevice,
    Round,
    SearchCommand,
    SearchTicket,
    WalkStats,
)
from .writer import TraceWriter


class _Recorded(DeviceAround[D]):
    """What both have in common."""

    def __init__(self, inner: D, device: int, writer: TraceWriter):
        super().__init__(inner)
        self._device, self._writer, self._part = device, writer, writer.part()

    def _said(self, verb: str, **facts: Any) -> None:
        """A line that says what a part is."""
        with self._writer.command(self._device, verb) as line:
            line |= {"part": self._part, "files": [each.path for each in self.path_report()], **facts}


class RecordedGraph(_Recorded[GraphDevice]):
    """See `espnx.device.vectors.interface.GraphDevice`."""

    def __init__(self, inner: GraphDevice, device: int, writer: TraceWriter):
        super().__init__(inner, device, writer)
        graph = inner.graph
        self._said("open_graph", nodes=graph.n_nodes, format=graph.format, dim=graph.dim, metric=graph.metric)

    @property
    def graph(self) -> Graph:
        return self._inner.graph

    def command(self, query: torch.Tensor, L: int, k: int, *, beam: int = 4) -> SearchCommand:
        return self._inner.command(query, L, k, beam=beam)

    def search(self, query: torch.Tensor, L: int, k: int, *, beam: int = 4, deadline_s: float = 30.0) -> SearchTicket:
        line = self._writer.begin(self._device, "search") | {"part": self._part, "L": L, "k": k, "beam": beam}
        try:
            return _Walk(self._inner.search(query, L, k, beam=beam, deadline_s=deadline_s), line, self._writer)
        except BaseException as error:
            self._writer.end(line, failed=type(error).__name__)
            raise


class RecordedClusters(_Recorded[ClusterDevice]):
    """See `espnx.device.vectors.interface.ClusterDevice`."""

    def __init__(self, inner: ClusterDevice, device: int, writer: TraceWriter):
        super().__init__(inner, device, writer)
        held = inner.clusters
        self._said("open_clusters", clusters=len(held.n_vectors), format=held.format, dim=held.dim)

    @property
    def clusters(self) -> Clusters:
        return self._inner.clusters

    def commands(self, query: torch.Tensor, clusters: Sequence[int] | np.ndarray, *, metric: str = "l2") -> list[DistanceCommand]:
        return self._inner.commands(query, clusters, metric=metric)

    def distances(
        self, query: torch.Tensor, clusters: Sequence[int] | np.ndarray, *, metric: str = "l2", deadline_s: float = 30.0
    ) -> DistanceTicket:
        line = self._writer.begin(self._device, "distances") | {"part": self._part}
        try:
            wanted = np.asarray(clusters, dtype=np.int64)
            flash_bytes = sum(each.flash_bytes for each in self._inner.commands(query, clusters, metric=metric))
            line |= {"bytes": flash_bytes, "clusters": wanted.tolist(), "vectors": int(np.asarray(self.clusters.n_vectors)[wanted].sum())}
            return _Measuring(self._inner.distances(query, clusters, metric=metric, deadline_s=deadline_s), line, self._writer)
        except BaseException as error:
            self._writer.end(line, failed=type(error).__name__)
            raise


class _Written:
    """A command's line, written once, when it has ended."""

    def __init__(self, line: dict[str, Any], writer: TraceWriter):
        self._line, self._writer, self._is_open = line, writer, True

    def _end(self, failed: str | None = None) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.end(self._line, failed=failed)


class _Walk(_Written):
    """See `espnx.device.vectors.interface.SearchTicket`."""

    def __init__(self, inner: SearchTicket, line: dict[str, Any], writer: TraceWriter):
        super().__init__(line, writer)
        self._inner = inner

    def finish(self, timeout_s: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        try:
            found = self._inner.finish(timeout_s)
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        rounds = self._inner.rounds
        self._line |= {"bytes": sum(each.bytes_moved for each in rounds), "rounds": [each.nodes.tolist() for each in rounds]}
        self._line["round_bytes"] = [each.bytes_moved for each in rounds]
        self._line["round_requests"] = [each.read_requests for each in rounds]
        self._end()
        return found

    def cancel(self) -> None:
        self._inner.cancel()
        self._end("cancelled")

    @property
    def walk(self) -> WalkStats:
        return self._inner.walk

    @property
    def rounds(self) -> Sequence[Round]:
        return self._inner.rounds

    @property
    def stats(self) -> DeviceStats:
        return self._inner.stats


class _Measuring(_Written):
    """See `espnx.device.vectors.interface.DistanceTicket`."""

    def __init__(self, inner: DistanceTicket, line: dict[str, Any], writer: TraceWriter):
        super().__init__(line, writer)
        self._inner = inner

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        try:
            found, is_finished = self._inner.next(at_least, timeout_s)
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        if is_finished:
            self._end()
        return found, is_finished

    def reply(self, item: int) -> np.ndarray:
        return self._inner.reply(item)

    def finish(self) -> np.ndarray:
        try:
            found = self._inner.finish()
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        self._end()
        return found

    def cancel(self) -> None:
        self._inner.cancel()
        self._end("cancelled")

    @property
    def stats(self) -> DeviceStats:
        return self._inner.stats
