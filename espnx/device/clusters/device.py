"""The plain SSD as a device for clusters: a deep queue, and distances on this machine's cores as
clusters arrive (csrc/device/cluster_stream)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.distances.checks import check_metric, check_query
from ...storage import Future, NativeEngine, Plan
from ...storage.native import load_native
from ..command import Part
from ..interface import Capabilities, DeviceStats, FilePath
from ..vectors.interface import PAGE_BYTES, REPLY, DistanceCommand
from .layout import ClusterFile, ClusterSource, read_clusters

_WINDOW_BYTES = 64 << 20


class SsdClusterDevice(Part):
    """See `espnx.device.vectors.interface.ClusterDevice`.

    Args:
        source: a directory of clusters (`write_clusters`), or sections of another file.
        engine: of the reads, which stays the caller's; a name opens one of its own.
        threads: that measure clusters as they arrive, beside the thread that waits for them, which
            does too; None: as many as PyTorch uses, less one. A request of less than 256 KiB is
            measured by whoever waits for it alone.
        window_bytes: of clusters that are under way at a time.

    Raises what `read_clusters` does, and PathUnavailableError.
    """

    compute = torch.device("cpu")
    capabilities = Capabilities()

    def __init__(
        self,
        source: ClusterSource,
        *,
        engine: NativeEngine | str = "auto",
        threads: int | None = None,
        window_bytes: int = _WINDOW_BYTES,
    ):
        self._owns_engine = isinstance(engine, str)
        self.engine = (
            NativeEngine(engine, pool_bytes=window_bytes) if isinstance(engine, str) else engine
        )
        try:
            self.clusters: ClusterFile = read_clusters(self.engine, source)
            self._file = self.engine.open(self.clusters.path)
        except BaseException:
            if self._owns_engine:
                self.engine.close()
            raise
        helpers = max(0, torch.get_num_threads() - 1) if threads is None else threads
        self._stream = load_native().ClusterStream(self.engine.native, window_bytes, helpers)
        self._closed = False

    def commands(
        self, query: torch.Tensor, clusters: Sequence[int] | np.ndarray, *, metric: str = "l2"
    ) -> list[DistanceCommand]:
        """See `ClusterDevice`."""
        self._check_query(query, metric)
        wanted = self.clusters.check_clusters(clusters)
        payload = query.contiguous().numpy().tobytes()
        file = self.clusters
        return [
            DistanceCommand(
                begin // PAGE_BYTES,
                payload,
                count,
                file.entry_bytes,
                metric,
                cdw11=begin % PAGE_BYTES,
                page_bytes=file.page_bytes,
            )
            for begin, count in zip(
                file.offset_bytes(wanted).tolist(), file.n_vectors[wanted].tolist(), strict=True
            )
            if count
        ]

    def distances(
        self,
        query: torch.Tensor,
        clusters: Sequence[int] | np.ndarray,
        *,
        metric: str = "l2",
        deadline_s: float = 30.0,
    ) -> SsdDistanceTicket:
        """See `ClusterDevice`."""
        self._check_open()
        self._check_query(query, metric)
        file, wanted = self.clusters, self.clusters.check_clusters(clusters)
        n_vectors = file.n_vectors[wanted]
        values = query.contiguous()
        native = self._stream.push(
            values.view(torch.uint8) if values.dtype == torch.int8 else values,
            file.format,
            metric,
            self._file.number,
            os.fsencode(file.path),
            torch.from_numpy(wanted),
            torch.from_numpy(file.offset_bytes(wanted)),
            torch.from_numpy(n_vectors),
            torch.from_numpy(file.crc32c[wanted].astype(np.int64)),
            deadline_s,
        )
        return SsdDistanceTicket(native, n_vectors)

    def read(self, clusters: np.ndarray, *, deadline_s: float = 30.0) -> Future:
        """Starts reading the entries of clusters, int64 numbers of such; item i is ``clusters[i]``,
        checked when it is handed out."""
        self._check_open()
        file = self.clusters
        plan = Plan.of(
            self._file,
            torch.from_numpy(file.offset_bytes(clusters)),
            torch.from_numpy(file.size_bytes_of(clusters)),
            crc32c=torch.from_numpy(file.crc32c[clusters].astype(np.int64)),
        )
        return self.engine.read(plan, deadline_s=deadline_s)

    def _check_query(self, query: torch.Tensor, metric: str) -> None:
        check_metric(metric)
        check_query(query, self.clusters.format, self.clusters.dim)
        if query.dim() != 1 or query.device.type != "cpu":
            raise errors.InvalidInputError(
                "query against clusters",
                got=f"{list(query.shape)} on {query.device}",
                expected="one query, [dim], on the CPU",
            )

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        buffered = self._file.effective.endswith("(buffered)")
        reason = (
            f"no direct I/O in {os.path.dirname(self._file.path)}"
            if buffered
            else self.engine.fallback_reason
        )
        return [FilePath(self._file.path, self._file.effective, reason)]

    def stats(self) -> DeviceStats:
        """See `Device`."""
        return DeviceStats(**self._stream.stats(), stored_bytes=self.clusters.size_bytes)

    def forget(self) -> None:
        """See `Device`."""
        self._stream.clear()

    def close(self) -> None:
        """See `Device`."""
        if self._closed:
            return
        self._closed = True
        self.forget()
        self.engine.close_file(self._file)
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> SsdClusterDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the device is closed", fix="open it again")


class SsdDistanceTicket:
    """See `espnx.device.vectors.interface.DistanceTicket`."""

    def __init__(self, native: Any, n_vectors: np.ndarray):
        self._native = native
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(n_vectors)])
        self._replies: np.ndarray = native.replies().numpy().view(REPLY)

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `DistanceTicket`."""
        items, finished = self._native.next(at_least, 1e9 if timeout_s is None else timeout_s)
        return items.numpy(), finished

    def reply(self, item: int) -> np.ndarray:
        """See `DistanceTicket`."""
        return self._replies[self._first[item] : self._first[item + 1]]

    def finish(self) -> np.ndarray:
        """See `DistanceTicket`."""
        while not self.next(2**62)[1]:
            pass
        return self._replies

    def cancel(self) -> None:
        """See `Ticket`."""
        self._native.forget()

    @property
    def stats(self) -> DeviceStats:
        """See `Ticket`; `waiting_s` and `computing_s` are of all threads."""
        return DeviceStats(**self._native.costs())


def open_clusters(
    source: ClusterSource, *, engine: NativeEngine | str = "auto", threads: int | None = None
) -> SsdClusterDevice:
    """Opens clusters on the plain SSD. Arguments and errors are those of `SsdClusterDevice`."""
    return SsdClusterDevice(source, engine=engine, threads=threads)
