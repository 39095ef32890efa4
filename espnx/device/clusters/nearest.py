"""The two ways in which a host finds the nearest vectors of some clusters (Sung, 2025, section
3.4): it reads the clusters and measures their vectors itself (algorithm 1), or it has the device
measure them and sorts the replies (algorithm 2).

Both share the clusters out over host threads, each of which hands its share over in one call, keeps
its own nearest, and merges them. Both give the same result, bit for bit, whatever the number of
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import torch

from ...checks import check_whole
from ...ops.distances import distances
from ..vectors.interface import REPLY, ClusterDevice
from ..workers import Job, Workers, wait
from .device import SsdClusterDevice
from .layout import ID_BYTES, ClusterFile

HOST_THREADS_MAX = 32
#: (ids int32 [m], distances float32 [m]).
Found = tuple[np.ndarray, np.ndarray]


class _Asked(Protocol):
    def cancel(self) -> None: ...


AskedT = TypeVar("AskedT", bound=_Asked)


class _UnderWay:
    """What threads have asked for, so that another one can call it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._asked = list[_Asked]()
        self._is_wanted = True

    def add(self, asked: AskedT) -> AskedT:
        with self._lock:
            self._asked.append(asked)
            is_wanted = self._is_wanted
        if not is_wanted:
            asked.cancel()
        return asked

    def cancel(self) -> None:
        """Whoever waits for any of it, or will, gets TransferCancelledError."""
        with self._lock:
            self._is_wanted = False
        for each in self._asked:
            each.cancel()


def nearest_by_command(
    device: ClusterDevice,
    query: torch.Tensor,
    clusters: Sequence[int] | np.ndarray,
    k: int,
    *,
    metric: str = "l2",
    threads: int = 1,
    deadline_s: float = 30.0,
) -> Found:
    """Algorithm 2: a distance command for each cluster; the host sorts the replies.

    Args:
        device: measures.
        query, clusters, metric, deadline_s: of `ClusterDevice.distances`.
        k: vectors wanted.
        threads: of the host, 1 to 32.

    Returns:
        (ids int32 [m], distances float32 [m]), the nearest first, ties by id; m is k, or fewer
        where the clusters hold fewer. An id that lies in several clusters counts once.
    """

    def search(share: np.ndarray, under_way: _UnderWay) -> Found:
        ticket = device.distances(query, share, metric=metric, deadline_s=deadline_s)
        return nearest(under_way.add(ticket).finish(), k)

    return _over_threads(device, search, np.asarray(clusters), k, threads)


def nearest_by_read(
    device: SsdClusterDevice,
    query: torch.Tensor,
    clusters: Sequence[int] | np.ndarray,
    k: int,
    *,
    metric: str = "l2",
    threads: int = 1,
    deadline_s: float = 30.0,
) -> Found:
    """Algorithm 1: the device is an SSD that reads; the host checks and measures what it has read.
    As `nearest_by_command` else."""
    wanted = device.clusters.check_clusters(clusters)
    device.commands(query, wanted[:1], metric=metric)  # refuses what that does

    def search(share: np.ndarray, under_way: _UnderWay) -> Found:
        return _read_and_measure(device, query, share, k, metric, deadline_s, under_way)

    return _over_threads(device, search, wanted, k, threads)


def nearest(replies: np.ndarray, k: int) -> Found:
    """The k nearest of entries, each id once."""
    # sort what may be among them alone, unless that turns out to hold an id too often
    if len(replies) > 4 * k:
        limit = np.partition(replies["distance"], 2 * k - 1)[2 * k - 1]
        found = _sorted(replies[replies["distance"] <= limit], k)
        if len(found[0]) == k:
            return found
    return _sorted(replies, k)


def _sorted(replies: np.ndarray, k: int) -> Found:
    order = np.lexsort((replies["id"], replies["distance"]))
    ids = replies["id"][order]
    first = np.sort(np.unique(ids, return_index=True)[1])[:k]
    return ids[first], replies["distance"][order][first]


def _over_threads(
    device: ClusterDevice,
    search: Callable[[np.ndarray, _UnderWay], Found],
    clusters: np.ndarray,
    k: int,
    threads: int,
) -> Found:
    check_whole("k, vectors wanted", k, 1)
    check_whole("threads of the host", threads, 1, HOST_THREADS_MAX)
    if threads == 1 or len(clusters) < 2:
        return search(clusters, _UnderWay())
    shares = np.array_split(clusters, min(threads, len(clusters)))
    under_way, jobs = _UnderWay(), list[Job[Found]]()
    with ThreadPoolExecutor(len(shares)) as pool, Workers([device]) as workers:
        try:
            for share in shares:
                jobs.append(workers.submit(pool, search, share, under_way))
            wait(jobs)
        except BaseException:  # Ctrl-C, or no thread could be had: the pool waits for its threads
            under_way.cancel()
            wait(jobs)
            raise
        found = [job.result() for job in jobs]
    replies = np.empty(sum(len(ids) for ids, _ in found), REPLY)
    replies["id"], replies["distance"] = (
        np.concatenate([each[part] for each in found]) for part in (0, 1)
    )
    return nearest(replies, k)


def _read_and_measure(
    device: SsdClusterDevice,
    query: torch.Tensor,
    clusters: np.ndarray,
    k: int,
    metric: str,
    deadline_s: float,
    under_way: _UnderWay,
) -> Found:
    file = device.clusters
    best = np.empty(0, REPLY)
    for some in _bounded(file, clusters):
        future = under_way.add(device.read(some, deadline_s=deadline_s))
        position = future.position_bytes.numpy()
        for items in future:
            arrived = items.numpy()
            arrived = arrived[file.n_vectors[some[arrived]] > 0]
            measured = _measure(
                file, query, some[arrived], future.memory, position[arrived], metric
            )
            ids, found = nearest(np.concatenate([best, measured]), k)
            best = np.empty(len(ids), REPLY)
            best["id"], best["distance"] = ids, found
    return best["id"], best["distance"]


def _measure(
    file: ClusterFile,
    query: torch.Tensor,
    clusters: np.ndarray,
    memory: torch.Tensor,
    position_bytes: np.ndarray,
    metric: str,
) -> np.ndarray:
    """`REPLY` of the vectors of clusters that lie there."""
    counts = file.n_vectors[clusters]
    before = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(counts.sum()) - before
    offset = np.repeat(position_bytes, counts) + within * file.entry_bytes + ID_BYTES
    replies = np.empty(len(offset), REPLY)
    replies["distance"] = distances(
        query, memory, torch.from_numpy(offset), file.format, metric, threads=1
    ).numpy()
    data, ids = memory.numpy(), replies["id"]
    begin = 0
    for at, count in zip(position_bytes.tolist(), counts.tolist(), strict=True):
        ids[begin : begin + count] = data[at : at + count * file.entry_bytes].view(
            file.entry_dtype
        )["id"]
        begin += count
    return replies


def _bounded(
    file: ClusterFile, clusters: np.ndarray, limit_bytes: int = 16 << 20
) -> list[np.ndarray]:
    """The clusters in groups that one read may hold in memory."""
    group = np.cumsum(file.size_bytes_of(clusters)) // limit_bytes
    return np.split(clusters, np.flatnonzero(np.diff(group)) + 1)
