"""The process of DiskANN: diskannpy (0.7, or diskannpy-rust) in an environment of its own, whose
NumPy need not be ours.

    PYTHON -m benchmarks.graph.peer

Commands and answers are lines of JSON, as of harness/worker.py, which cannot be imported where
espnx is not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import numpy as np

from .names import PEER_PAGE_BYTES
from .service import Found, Opened, Service, Setting

R, L = 64, 100
_MEMORY_GB = 8.0


class DiskAnn(Opened):
    """The static disk index; threads and W belong to an index that is open, so there is one for
    each pair that is asked for."""

    def __init__(self, folder: str):
        self._library, self._folder = importlib.import_module("diskannpy"), folder
        self._indexes: dict[tuple[int, int], Any] = {}

    def search(self, queries: np.ndarray, k: int, setting: Setting) -> Found:
        index = self.index(setting.threads, setting.beam_width or 1, queries)
        if len(queries) == 1:
            one = index.search(queries[0], k_neighbors=k, complexity=setting.list_size)
            return Found(one.identifiers[None], one.distances[None])
        found = index.batch_search(
            queries, k_neighbors=k, complexity=setting.list_size, num_threads=setting.threads
        )
        reads = (
            found.search_stats["mean_ios"] * len(queries)
            if hasattr(found, "search_stats")
            else None
        )
        nodes = found.identifiers.astype(np.int64)
        return Found(
            nodes, found.distances, reads, None if reads is None else reads * PEER_PAGE_BYTES
        )

    def index(self, threads: int, beam_width: int, queries: np.ndarray) -> Any:
        """The index for queries of that kind, opened the first time."""
        key = threads, beam_width
        if key not in self._indexes:
            self._indexes[key] = self._library.StaticDiskIndex(
                index_directory=self._folder,
                num_threads=threads,
                beam_width=beam_width,
                distance_metric="l2",
                vector_dtype=queries.dtype.type,
                dimensions=queries.shape[1],
            )
        return self._indexes[key]

    def close(self) -> None:
        self._indexes.clear()


class Session(Service):
    """A worker's session with DiskANN."""

    def build(
        self, system: str, base: str, folder: str, pq_bytes: int, threads: int
    ) -> dict[str, Any]:
        library = importlib.import_module("diskannpy")
        vectors = np.load(base)
        library.build_disk_index(
            data=vectors,
            distance_metric="l2",
            index_directory=folder,
            complexity=L,
            graph_degree=R,
            build_memory_maximum=_MEMORY_GB,
            num_threads=threads,
            num_of_pq_chunks=pq_bytes,
            vector_dtype=vectors.dtype.type,
        )
        return {"pq_bytes": pq_bytes}

    def load(self, system: str, threads: int) -> None:
        importlib.import_module("diskannpy")

    def open(self, system: str, folder: str, threads: int, in_flight: int) -> Opened:
        opened = DiskAnn(folder)
        opened.index(in_flight, 1, self._queries)
        return opened


def main() -> None:
    # The library prints what it does: stdout carries the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    session = Session()
    for line in sys.stdin:
        try:
            answer = session.handle(json.loads(line))
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
