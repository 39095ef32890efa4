"""Distances near storage: how many a second, over host threads and sizes of clusters, beside
FAISS's kernels on the same bytes in memory.

A run asks for the ten nearest vectors of many clusters, for several queries one after the other
(the thesis's stress test: uint8 vectors of 128 dimensions). Systems of ours:

- ``espnx-command``: algorithm 2: a distance command for each cluster, the host sorts the replies.
  On a plain SSD the host's cores compute.
- ``espnx-read``: algorithm 1: the host reads the clusters and measures their vectors.
- ``espnx-kernel``: our kernel and choice of the nearest, one thread, on the clusters' bytes in
  memory, unchecked: neither disk nor device.

FAISS's kernels are asked for the same on all the threads it is given, up to the machine's cores:

- ``faiss-sq8``: `IndexScalarQuantizer` with `QT_8bit_direct`, on the same uint8 values, without
  their ids between them.
- ``faiss-fp32``: `faiss.knn`, which computes on float32: the values are converted before, four
  times the bytes; how long that takes stands apart (``conversion_s``) and is no part of its time.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from espnx.device.clusters import nearest_by_command, nearest_by_read, open_clusters, write_clusters
from espnx.device.clusters.layout import ID_BYTES, ClusterFile
from espnx.device.clusters.nearest import nearest
from espnx.device.vectors.interface import REPLY
from espnx.ops.distances import distances
from espnx.ops.quantise import load_faiss

from ..harness.cells import baselines_of, metric, number, ratio
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import Sample, System, compare
from ..machine import page_cache

DIM, K = 128, 10
KIB = 1024
CLUSTER_BYTES = (4 * KIB, 8 * KIB, 12 * KIB, 16 * KIB)
THREADS = (1, 2, 4, 8, 16, 32)
BASELINES = ("faiss-sq8", "faiss-fp32")
FOLDER_NAME = "espnx-bench-clusters"
ENTRY_BYTES = ID_BYTES + DIM


@dataclass(frozen=True)
class Work:
    """What a run asks for.

    Attributes:
        directory: of the clusters, written for this and used again.
        clusters: of each query, int64 [queries, m].
        queries: uint8 [queries, 128].
        threads: of the host.
        engine: path of the reads.
    """

    directory: Path
    clusters: np.ndarray
    queries: torch.Tensor
    threads: int
    engine: str

    @property
    def vectors_per_cluster(self) -> int:
        return int(self.directory.name.rpartition("-")[2])

    @property
    def n_distances(self) -> int:
        return int(self.clusters.size * self.vectors_per_cluster)

    @property
    def n_bytes(self) -> int:
        return self.n_distances * ENTRY_BYTES

    def sample(self, seconds: float, bytes_moved: int, **metrics: float) -> Sample:
        return Sample(
            seconds,
            self.n_bytes,
            bytes_moved,
            {"distances_per_s": self.n_distances / seconds, **metrics},
        )


def ensure_clusters(path: Path, cluster_bytes: int, size_bytes: int, seed: int) -> Path:
    """A directory with so many bytes of clusters that fill `cluster_bytes` each, written unless it
    is there."""
    per_cluster = cluster_bytes // ENTRY_BYTES
    directory = path / f"{FOLDER_NAME}-{seed}-{size_bytes // cluster_bytes}-{per_cluster}"
    if not directory.is_dir():
        n = size_bytes // cluster_bytes * per_cluster
        vectors = np.random.default_rng(seed).integers(0, 256, (n, DIM), dtype=np.uint8)
        write_clusters(
            directory, np.arange(n, dtype=np.int32), vectors, np.arange(n) // per_cluster
        )
    return directory


def make_work(
    directory: Path, n_queries: int, clusters_per_query: int, threads: int, engine: str, seed: int
) -> Work:
    """Queries, and clusters of each, drawn at random."""
    rng = np.random.default_rng(seed + 1)
    n_clusters = int(directory.name.split("-")[-2])
    m = min(clusters_per_query, n_clusters)
    clusters = np.stack([rng.permutation(n_clusters)[:m] for _ in range(n_queries)])
    return Work(
        directory,
        clusters,
        torch.from_numpy(rng.integers(0, 256, (n_queries, DIM), dtype=np.uint8)),
        threads,
        engine,
    )


def entries_in_memory(file: ClusterFile, clusters: np.ndarray) -> np.ndarray:
    """[vectors]: the entries of clusters, one after the other, read without our engine."""
    with open(file.path, "rb") as source:
        parts = []
        for cluster in clusters.tolist():
            source.seek(int(file.begin_bytes[cluster]))
            parts.append(
                np.frombuffer(
                    source.read(int(file.n_vectors[cluster]) * file.entry_bytes), file.entry_dtype
                )
            )
    return np.concatenate(parts)


def expected(work: Work, file: ClusterFile) -> tuple[np.ndarray, np.ndarray]:
    """(distances float32 [10], ids [10]) of the first query, by NumPy."""
    entries = entries_in_memory(file, work.clusters[0])
    far = (
        (entries["vector"].astype(np.int32) - work.queries[0].numpy().astype(np.int32)) ** 2
    ).sum(axis=1)
    order = np.lexsort((entries["id"], far))[:K]
    return far[order].astype(np.float32), entries["id"][order]


class DeviceSystem:
    """Algorithm 1 or 2 on the plain device."""

    def __init__(self, name: str, work: Work):
        self.name = self.group = name
        self.work = work
        self._find = {"espnx-command": nearest_by_command, "espnx-read": nearest_by_read}[name]
        self._device = open_clusters(
            work.directory, engine=work.engine, threads=0 if work.threads > 1 else None
        )
        self.requested_path, self.effective_path = (
            work.engine,
            self._device.path_report()[0].effective_path,
        )

    def verify(self) -> str | None:
        ids, far = self._find(
            self._device, self.work.queries[0], self.work.clusters[0], K, threads=self.work.threads
        )
        return difference(far, ids, *expected(self.work, self._device.clusters))

    def prepare(self, turn: int) -> str:
        return page_cache.prepare(Path(self._device.clusters.path), "cold")

    def run(self) -> Sample:
        before = self._device.engine.stats().bytes_moved
        begin = time.perf_counter()
        for query, clusters in zip(self.work.queries, self.work.clusters, strict=True):
            self._find(self._device, query, clusters, K, threads=self.work.threads)
        seconds = time.perf_counter() - begin
        return self.work.sample(seconds, self._device.engine.stats().bytes_moved - before)

    def close(self) -> None:
        self._device.close()


class MemorySystem(ABC):
    """Something that finds the nearest among entries in memory: a function of a query's number to
    distances and ids."""

    requested_path = effective_path = "memory"

    def __init__(self, name: str, work: Work, file: ClusterFile, *, value_bytes: int):
        self.name = self.group = name
        self.work, self._file, self._value_bytes = work, file, value_bytes
        self._entries = [entries_in_memory(file, clusters) for clusters in work.clusters]
        self.conversion_s = 0.0

    @abstractmethod
    def find(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(distances, ids) of the nearest of a query."""

    def threads(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def verify(self) -> str | None:
        far, ids = self.find(0)
        return difference(far, ids, *expected(self.work, self._file))

    def prepare(self, turn: int) -> str:
        self.find(0)
        return "warm"

    def run(self) -> Sample:
        with self.threads():
            begin = time.perf_counter()
            for number in range(len(self.work.queries)):
                self.find(number)
            seconds = time.perf_counter() - begin
        metrics = {"conversion_s": self.conversion_s} if self.conversion_s else {}
        return self.work.sample(seconds, self.work.n_distances * DIM * self._value_bytes, **metrics)

    def close(self) -> None:
        self._entries = []


class KernelSystem(MemorySystem):
    """Our kernel on one thread, and our choice of the nearest."""

    def __init__(self, work: Work, file: ClusterFile):
        super().__init__("espnx-kernel", work, file, value_bytes=1)
        self._offset = torch.arange(len(self._entries[0])) * file.entry_bytes + ID_BYTES

    def find(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        entries = self._entries[number]
        buffer = torch.from_numpy(entries.view(np.uint8))
        replies = np.empty(len(entries), REPLY)
        replies["distance"] = distances(
            self.work.queries[number], buffer, self._offset, threads=1
        ).numpy()
        replies["id"] = entries["id"]
        ids, far = nearest(replies, K)
        return far, ids


class FaissSystem(MemorySystem):
    """A kernel of FAISS on the entries' values, without their ids."""

    def __init__(self, name: str, work: Work, file: ClusterFile):
        super().__init__(name, work, file, value_bytes=1 if name == "faiss-sq8" else 4)
        self._faiss = load_faiss()
        self._ids = [entries["id"].copy() for entries in self._entries]
        self._queries = work.queries.numpy().astype(np.float32)
        values = [np.ascontiguousarray(entries["vector"]) for entries in self._entries]
        self._entries = []
        if name == "faiss-sq8":
            self._stored = [self._quantised(each) for each in values]
        else:
            begin = time.perf_counter()
            self._stored = [each.astype(np.float32) for each in values]
            self.conversion_s = time.perf_counter() - begin

    def _quantised(self, values: np.ndarray) -> object:
        """An index whose codes are the values themselves."""
        quantizer = self._faiss.ScalarQuantizer
        index = self._faiss.IndexScalarQuantizer(
            DIM, quantizer.QT_8bit_direct, self._faiss.METRIC_L2
        )
        index.is_trained = True
        self._faiss.copy_array_to_vector(values.reshape(-1), index.codes)
        index.ntotal = len(values)
        return index

    def find(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        query, stored = self._queries[number : number + 1], self._stored[number]
        far, rows = (
            stored.search(query, K)  # type: ignore[attr-defined]
            if self.name == "faiss-sq8"
            else self._faiss.knn(query, stored, K)
        )
        return far[0], self._ids[number][rows[0]]

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        before = self._faiss.omp_get_max_threads()
        self._faiss.omp_set_num_threads(min(self.work.threads, os.cpu_count() or 1))
        yield
        self._faiss.omp_set_num_threads(before)


def difference(
    far: np.ndarray, ids: np.ndarray, wanted_far: np.ndarray, wanted_ids: np.ndarray
) -> str | None:
    """What is wrong with the nearest, or None. Of those at one distance others may come first:
    FAISS does not order them."""
    if not np.array_equal(far, wanted_far):
        return f"distances {far.tolist()} instead of {wanted_far.tolist()}"
    inside = wanted_far < wanted_far[-1]
    if set(ids[inside].tolist()) != set(wanted_ids[inside].tolist()):
        return f"ids {ids.tolist()} instead of {wanted_ids.tolist()}"
    return None


def measure(
    path: Path,
    *,
    cluster_bytes: Sequence[int] = CLUSTER_BYTES,
    threads: Sequence[int] = THREADS,
    size_bytes: int = 512 << 20,
    n_queries: int = 8,
    clusters_per_query: int = 1024,
    engine: str = "auto",
    baselines: Sequence[str] = BASELINES,
    pairs: int = 15,
    seed: int = 0,
    say: Say = lambda text: None,
) -> list[Row]:
    """The rows of every size of clusters with every number of host threads.

    Args:
        path: a directory on the disk; the files of clusters stay there.
        size_bytes: of each file.
        n_queries, clusters_per_query: of a run.
        engine: path of the reads.
        baselines: of `BASELINES`.
        pairs, seed: of `compare`.

    Raises what writing and opening clusters does, MissingDependencyError.
    """
    rows: list[Row] = []
    points = [(size, count) for size in cluster_bytes for count in threads]
    for at, (size, count) in enumerate(points, 1):
        say(f"[{at}/{len(points)}] clusters of {size // KIB} KiB, {count} threads of the host")
        work = make_work(
            ensure_clusters(path, size, size_bytes, seed),
            n_queries,
            clusters_per_query,
            count,
            engine,
            seed,
        )
        with contextlib.ExitStack() as stack:
            rows += _compare(
                work, size, baselines, pairs, seed, say, lambda system: _closing(stack, system)
            )
    return rows


def _compare(
    work: Work,
    cluster_bytes: int,
    baselines: Sequence[str],
    pairs: int,
    seed: int,
    say: Say,
    keep: Callable[[System], System],
) -> list[Row]:
    ours = [keep(DeviceSystem(name, work)) for name in ("espnx-command", "espnx-read")]
    with open_clusters(work.directory, engine=work.engine) as device:
        ours.append(keep(KernelSystem(work, device.clusters)))
        others = [keep(FaissSystem(name, work, device.clusters)) for name in baselines]
    params = {
        "show": "distances",
        "format": "uint8",
        "d": DIM,
        "cluster_bytes": cluster_bytes,
        "clusters": work.clusters.shape[1],
        "queries": len(work.queries),
        "threads": work.threads,
        "k": K,
    }
    return compare("device", params, ours, others, pairs=pairs, seed=seed, say=say)


def _closing(stack: contextlib.ExitStack, system: System) -> System:
    stack.callback(system.close)
    return system


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row. Millions of distances a second; GB/s of what was moved,
    from the disk or through memory."""
    shown = [name for name in BASELINES if name in baselines_of(rows)]
    headers = [
        "cluster",
        "threads",
        "system",
        "path",
        "Mdistances/s",
        "GB/s",
        "conversion ms",
        "n",
        "correct",
    ]
    return headers + [f"vs {name} [IQR]" for name in shown], [_cells(row, shown) for row in rows]


def _cells(row: Row, baselines: Sequence[str]) -> list[str]:
    rate = None if not row.median_s else row.bytes_moved / row.median_s
    cells = [
        f"{row.params['cluster_bytes'] // KIB} KiB",
        str(row.params["threads"]),
        row.system,
        row.effective_path,
        metric("distances_per_s", 1e6)(row),
        number(rate, 1e9),
        metric("conversion_s", 1e-3)(row),
        str(row.n),
        "yes" if row.correct else "NO",
    ]
    return cells + [ratio(row, name) for name in baselines]
