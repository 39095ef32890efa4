"""One vector a passage: HNSW and our own graph, both with private graphs on SSD, and inverted lists
of vectors on SSD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import espnx.device
import espnx.graph
from espnx.device.clusters import SsdClusterDevice, open_clusters, write_clusters
from espnx.device.clusters.nearest import nearest
from espnx.device.near_storage import NearStorageDevice
from espnx.device.vectors.interface import WALK_REPLY, GraphDevice
from espnx.graph.hnsw import HnswGraph, build_hnsw
from espnx.ops.quantise import fit_clusters

from .parts import Answer, Found, Part, Private, Retriever, Spread, Work

#: RAGX's, section 5.1.
M, EF_CONSTRUCTION = 32, 100
#: Of an IVF's lists, rounded up: RAGX compares with that.
PROBED = 0.001
#: Of distances in float32 to those in float64.
_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Vectors:
    """Attributes: name; base: float32 [n, dim]; queries: float32 [q, dim]; metric: ``l2`` or
    ``ip``; k: neighbours asked for."""

    name: str
    base: np.ndarray
    queries: np.ndarray
    metric: str
    k: int

    def distances(self, query: int, rows: np.ndarray) -> np.ndarray:
        """float64 [m]: the smaller the nearer."""
        near, asked = self.base[rows].astype(np.float64), self.queries[query].astype(np.float64)
        return -(near @ asked) if self.metric == "ip" else np.square(near - asked).sum(axis=1)

    @cached_property
    def farthest(self) -> np.ndarray:
        """float64 [q]: of each query's k-th nearest."""
        everything = np.arange(len(self.base))
        return np.array(
            [
                np.partition(self.distances(i, everything), self.k - 1)[self.k - 1]
                for i in range(len(self.queries))
            ]
        )

    def recall(self, ids: Sequence[np.ndarray]) -> float:
        """The share of what is as near as the k-th nearest; of equally near ones any will do."""
        limits = self.farthest + 1e-9 * np.abs(self.farthest)
        return sum(
            int((self.distances(i, each) <= limits[i]).sum()) for i, each in enumerate(ids)
        ) / (self.k * len(ids))

    def problem(self, found: Sequence[Answer], k: int) -> str | None:
        """Rows that were found twice, or that are not as far as was said."""
        for i, each in enumerate(found):
            if len(set(each.ids.tolist())) != len(each.ids) or len(each.ids) > k:
                return f"query {i}: a passage was found twice"
            far = self.distances(i, each.ids)
            scale = (
                np.square(self.base[each.ids].astype(np.float64)).sum(axis=1)
                + np.square(self.queries[i].astype(np.float64)).sum()
            )
            if (np.abs(far - each.far) > _TOLERANCE * scale).any():
                return f"query {i}: {each.far} instead of {far}"
        return None


def by_recipe(n: int, dim: int, n_queries: int, k: int, seed: int) -> Vectors:
    """Normal and without any clusters, which is the hardest there is for graphs and lists alike."""
    rng = np.random.default_rng(seed)
    base, queries = (
        rng.standard_normal((count, dim)).astype(np.float32) for count in (n, n_queries)
    )
    return Vectors("recipe", base, queries, "l2", k)


class _OfVectors:
    """What the three have in common."""

    def __init__(self, name: str, index: str, data: Vectors, effort: int, least: int):
        self.name, self.index, self.data, self.collection, self.effort, self.least = (
            name,
            index,
            data,
            data.name,
            effort,
            least,
        )

    def recall(self, ids: Sequence[np.ndarray]) -> float:
        return self.data.recall(ids)

    def problem(self, found: Sequence[Answer], k: int) -> str | None:
        return self.data.problem(found, k)


class Hnsw(_OfVectors):
    """RAGX's: FAISS's graph in memory, vectors on SSD, one node expanded at a time. Effort:
    efSearch."""

    def __init__(self, name: str, data: Vectors, ef: int):
        super().__init__(name, "HNSW", data, ef, data.k)

    def build(self, folder: Path, shares: Sequence[np.ndarray]) -> Spread:
        for i, rows in enumerate(shares):
            build_hnsw(
                self.data.base[rows],
                folder / str(i),
                m=M,
                ef_construction=EF_CONSTRUCTION,
                metric=self.data.metric,
            )
        return self.opened(
            shares, espnx.device.open("ssd", [folder / str(i) for i in range(len(shares))])
        )

    def opened(self, shares: Sequence[np.ndarray], devices: Sequence[NearStorageDevice]) -> Spread:
        """What `build` has built, on these devices."""
        return Private(
            [_WalkedPart(self.data, each.open_graph(HnswGraph(each.path))) for each in devices],
            shares,
        )


class _WalkedPart:
    def __init__(self, data: Vectors, device: GraphDevice):
        self._data, self._device = data, device

    def ask(self, effort: int, k: int) -> list[Found]:
        queries = [torch.from_numpy(query) for query in self._data.queries]
        tickets = [self._device.search(query, effort, k, beam_width=1) for query in queries]
        found = list[Found]()
        for query, ticket in zip(queries, tickets, strict=True):
            ids, far = ticket.finish()
            walk = ticket.walk
            link_bytes = query.nbytes + len(ids) * WALK_REPLY.itemsize
            found.append(
                Found(
                    ids,
                    far.astype(np.float64),
                    Work(
                        walk.read_requests, walk.bytes_moved, link_bytes, walk.distances, walk.hops
                    ),
                )
            )
        return found

    def close(self) -> None:
        self._device.close()


class OwnGraph(_OfVectors):
    """Our own graph, which lies on SSD whole, links and codes too. Effort: candidates of a walk, L.
    Walks expand a page at a time."""

    def __init__(self, name: str, data: Vectors, length: int):
        super().__init__(name, "graph on SSD", data, length, data.k)

    def build(self, folder: Path, shares: Sequence[np.ndarray]) -> Spread:
        parts = list[Part]()
        for i, rows in enumerate(shares):
            espnx.graph.build(
                self.data.base[rows],
                folder / str(i),
                metric=self.data.metric,
                vector_dtype="float32",
                threads=2,
            )
            parts.append(_GraphPart(self.data, espnx.graph.open(folder / str(i))))
        return Private(parts, shares)


class _GraphPart:
    def __init__(self, data: Vectors, index: espnx.graph.GraphIndex):
        self._data, self._index = data, index

    def ask(self, effort: int, k: int) -> list[Found]:
        found = self._index.search(self._data.queries, k, list_size=effort, beam_width=1)
        answers = list[Found]()
        for i, query in enumerate(self._data.queries):
            there = found.ids[i] >= 0
            reads = int(found.pages[i] + found.code_pages[i])
            link_bytes = query.nbytes + int(there.sum()) * WALK_REPLY.itemsize
            work = Work(reads, int(found.bytes_read[i]), link_bytes, int(found.measured[i]), reads)
            answers.append(
                Found(found.ids[i][there], found.distances[i][there].astype(np.float64), work)
            )
        return answers

    def close(self) -> None:
        self._index.close()


class Ivf(_OfVectors):
    """Inverted lists, sqrt(n) of them, with the vectors on SSD and the centroids in memory. Effort:
    lists that are probed; at equal effort a thousandth of them, and one at least."""

    def __init__(self, name: str, data: Vectors):
        super().__init__(name, "IVF", data, max(1, math.ceil(PROBED * lists_of(len(data.base)))), 1)

    def build(self, folder: Path, shares: Sequence[np.ndarray]) -> Spread:
        parts = list[Part]()
        for i, rows in enumerate(shares):
            own = self.data.base[rows]
            centroids = fit_clusters(own, lists_of(len(own)), is_spherical=False)
            write_clusters(
                folder / str(i),
                np.arange(len(own)),
                own,
                _nearest_centroids(own, centroids, 1)[:, 0],
                n_clusters=len(centroids),
            )
            parts.append(_IvfPart(self.data, centroids, open_clusters(folder / str(i))))
        return Private(parts, shares)


class _IvfPart:
    def __init__(self, data: Vectors, centroids: np.ndarray, device: SsdClusterDevice):
        self._data, self._device = data, device
        self._order = _nearest_centroids(data.queries, centroids, len(centroids))

    def ask(self, effort: int, k: int) -> list[Found]:
        found = list[Found]()
        for query, order in zip(self._data.queries, self._order, strict=True):
            asked = torch.from_numpy(query)
            commands = self._device.commands(asked, order[:effort], metric=self._data.metric)
            ticket = self._device.distances(asked, order[:effort], metric=self._data.metric)
            replies = ticket.finish()
            ids, far = nearest(replies, k)
            link_bytes = sum(len(each.payload) + each.data_len for each in commands)
            stats = ticket.stats
            work = Work(stats.read_requests, stats.bytes_moved, link_bytes, len(replies), 1)
            found.append(Found(ids.astype(np.int64), far.astype(np.float64), work))
        return found

    def close(self) -> None:
        self._device.close()


def retrievers(data: Vectors, name: str, ef: int) -> list[Retriever]:
    """All three over these vectors."""
    return [Hnsw(name, data, ef), OwnGraph(name, data, ef), Ivf(name, data)]


def lists_of(n: int) -> int:
    """sqrt(n), rounded."""
    return max(1, round(math.sqrt(n)))


def _nearest_centroids(vectors: np.ndarray, centroids: np.ndarray, count: int) -> np.ndarray:
    """int64 [n, count], the nearest first, by squared distance."""
    wide = centroids.astype(np.float64)
    found = np.empty((len(vectors), count), np.int64)
    for begin in range(0, len(vectors), 4096):
        some = vectors[begin : begin + 4096].astype(np.float64)
        far = np.square(wide).sum(axis=1) - 2 * (some @ wide.T)
        found[begin : begin + 4096] = (
            np.argsort(far, axis=1, kind="stable")[:, :count]
            if count > 1
            else far.argmin(axis=1)[:, None]
        )
    return found
