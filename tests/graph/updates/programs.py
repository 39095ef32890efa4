"""Random programs over graphs of clusters beside a dictionary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import espnx.graph
from tests.graph.conftest import clustered, exact, recall_of

_DIM = 6
_EVERY = 1 << 20  # clusters


class Program:
    """Adds, deletes, merges, opens anew, reloads and searches, and compares each time.

    Args:
        path: a folder that is made.
    """

    def __init__(self, path: Path, seed: int):
        self.random = random = np.random.default_rng(seed)
        path.mkdir()
        self.path, self.seed = path / "g", seed
        self.is_alike = seed % 5 == 1
        self.metric = ["l2", "l2", "cosine", "ip"][seed % 4]
        n = int(random.integers(1, 400))
        directories = [path / str(each) for each in range(seed % 3)]
        base = self._vectors(n)
        espnx.graph.build(
            base,
            self.path,
            clusters=int(random.integers(1, 41)),
            replicas=[0.0, 0.3, 1.0][seed % 3],
            metric=self.metric,
            directories=directories or None,
            max_degree=10,
            list_size=30,
            threads=1,
            vector_dtype="float32",
        )
        self.known = dict(enumerate(base))
        self.id_end = n
        self.held: dict[int, np.ndarray] = dict(self.known)  # by the reader
        self.graph = self._writer()
        self.reader = espnx.graph.open(self.path)

    def _vectors(self, n: int) -> np.ndarray:
        if self.is_alike and self.random.random() < 0.8:
            return np.ones((n, _DIM), np.float32)
        return clustered(n, _DIM, int(self.random.integers(1000))) + np.float32(0.01)

    def _writer(self) -> Any:
        return espnx.graph.open_writer(
            self.path,
            durability=str(self.random.choice(["each", "group", "none"])),
            pending_bytes=int(self.random.choice([4096, 1 << 20])),
        )

    def run(self, steps: int) -> None:
        """So many steps; everything is closed then."""
        for _ in range(steps):
            step = self.random.choice(["add", "delete", "all", "merge", "open", "reload"],
                                      p=[0.3, 0.25, 0.05, 0.2, 0.1, 0.1])  # fmt: skip
            getattr(self, f"_{step}")()
            self._compare(self.graph, self.known)
            self._compare(self.reader, self.held)
        self.graph.close()
        self.reader.close()

    def _add(self) -> None:
        rows = self._vectors(int(self.random.integers(1, 120)))
        ids = None
        if self.random.random() < 0.4:
            free = np.setdiff1d(np.arange(self.id_end + 500), sorted(self.known))
            ids = self.random.choice(free, len(rows), replace=False)
        given = self.graph.add(rows, ids=ids)
        if ids is None:
            assert np.array_equal(given, np.arange(self.id_end, self.id_end + len(rows)))
        self.id_end = max(self.id_end, int(given.max()) + 1)
        self.known |= dict(zip(given.tolist(), rows, strict=True))

    def _delete(self) -> None:
        most = max(1, len(self.known) // int(self.random.integers(1, 9)))
        gone = self.random.permutation(sorted(self.known))[:most]
        assert self.graph.delete(gone) == len(gone)
        for each in gone.tolist():
            del self.known[each]

    def _all(self) -> None:
        self.graph.delete(sorted(self.known))
        self.known.clear()

    def _merge(self) -> None:
        self.graph.merge(measure="never")

    def _open(self) -> None:
        self.graph.close()
        self.graph = self._writer()

    def _reload(self) -> None:
        self.reader.reload()
        self.held = dict(self.known)

    def _compare(self, graph: Any, known: dict[int, np.ndarray]) -> None:
        assert len(graph) == len(known)
        graph.verify()
        queries = clustered(6, _DIM, self.seed) + np.float32(0.02)
        k = 5
        if not known:
            assert (graph.search(queries, k, nprobe=_EVERY).ids == -1).all()
            return
        ids = np.array(sorted(known))
        rows = np.stack([known[each] for each in ids.tolist()])
        found = graph.search(queries, k, list_size=400, nprobe=_EVERY)
        self._check(found, ids, rows, queries, k)
        allowed = self.random.random(len(ids)) < self.random.choice([0.05, 0.5])
        if allowed.any():
            found = graph.search(queries, k, include=ids[allowed], list_size=400, nprobe=_EVERY)
            self._check(found, ids[allowed], rows[allowed], queries, k)
        auto = graph.search(queries, k)
        assert np.isin(auto.ids, [-1, *ids.tolist()]).all()
        if self.metric != "cosine":
            some = self.random.permutation(len(ids))[:9]
            assert np.array_equal(graph.vectors(ids[some]), rows[some])

    def _check(
        self, found: Any, ids: np.ndarray, rows: np.ndarray, queries: np.ndarray, k: int
    ) -> None:
        """Those that are found are as near as the nearest, nearly always."""
        k = min(k, len(ids))
        assert (found.ids[:, :k] >= 0).all()
        assert (found.ids[:, k:] == -1).all()
        assert np.isin(found.ids[:, :k], ids).all()
        assert all(len(set(each[:k])) == k for each in found.ids.tolist())
        true = exact(rows, queries, k, self.metric)
        if self.is_alike:  # any of those that are as near
            return
        assert recall_of(found.ids[:, :k], ids[true]) > 0.85
