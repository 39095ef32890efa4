"""The processes of espnx, of FAISS and of LanceDB; see worker.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import espnx.graph
from espnx.ops.quantise import load_faiss

from ..machine.counters import read_counters
from ..machine.memory import rss_bytes
from .lance import LanceTable, build_lance, load_lance
from .names import CODES, LANCE, LIST_SIZES, LONG_CODES, UNROTATED
from .service import Found, Opened, Service, Setting, most_bytes

HNSW_DEGREE, HNSW_CONSTRUCTION = 32, 100
_INDEX, _LISTS = "index", "lists"
#: Of all threads together: pages of codes that are kept, where codes are paged.
CODE_CACHE_BYTES = 5 << 20


class EspnxGraph(Opened):
    """A graph of espnx."""

    def __init__(self, folder: str, threads: int, in_flight: int):
        self._folder, self._in_flight = folder, in_flight
        self._graphs = {threads: self._open(threads)}

    def _open(self, threads: int) -> espnx.graph.GraphIndex:
        walks = max(1, self._in_flight // threads)
        return espnx.graph.open(
            self._folder, threads=threads, walks=walks, code_cache_bytes=CODE_CACHE_BYTES // threads
        )

    def search(self, queries: np.ndarray, k: int, setting: Setting) -> Found:
        if setting.threads not in self._graphs:
            self._graphs[setting.threads] = self._open(setting.threads)
        found = self._graphs[setting.threads].search(
            queries, k, list_size=setting.list_size, beam_width=setting.beam_width
        )
        reads = found.pages.sum() + found.code_pages.sum()
        return Found(found.ids, found.distances, float(reads), float(found.bytes_read.sum()))

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()


class FaissIndex(Opened):
    """HNSW in memory, or inverted lists that are mapped into it."""

    def __init__(self, folder: str):
        self._faiss = load_faiss()
        self._index: Any = self._faiss.read_index(os.path.join(folder, _INDEX))
        self._is_lists = hasattr(self._index, "nprobe")

    def search(self, queries: np.ndarray, k: int, setting: Setting) -> Found:
        faiss, wide = self._faiss, queries.astype(np.float32)
        faiss.omp_set_num_threads(setting.threads)
        if not self._is_lists:
            self._index.hnsw.efSearch = setting.list_size
            far, ids = self._index.search(wide, k)
            return Found(ids, far, 0.0, 0.0)
        self._index.nprobe = setting.list_size
        faiss.cvar.indexIVF_stats.reset()
        far, ids = self._index.search(wide, k)
        # A list is scanned whole: vectors and ids, 8 bytes each. How many pages that is decides the
        # kernel.
        return Found(
            ids, far, None, float(faiss.cvar.indexIVF_stats.ndis * (self._index.code_size + 8))
        )

    def close(self) -> None:
        self._index = None


def cost(work: Callable[[], object]) -> dict[str, float]:
    """What some work takes: seconds, processor time, memory beyond what there was, bytes written
    to the device; without them where nobody counts, as of a file system in memory."""
    begun, before = time.perf_counter(), read_counters()
    held = rss_bytes()
    most = most_bytes(work)
    used = read_counters() - before
    said = {
        "seconds": time.perf_counter() - begun,
        "cpu_s": used.cpu_s,
        "more_bytes": float(most - held),
    }
    if used.device_written_bytes:
        said["written_bytes"] = float(used.device_written_bytes)
    return said


class Session(Service):
    """A worker's session with one system."""

    def handle(self, command: Mapping[str, Any]) -> dict[str, Any]:
        do, rest = command["do"], {name: value for name, value in command.items() if name != "do"}
        if do == "cost":
            return self._cost(**rest)
        return self._cost_of_merge(**rest) if do == "cost_of_merge" else super().handle(command)

    @staticmethod
    def _cost(base: str, folder: str, **options: Any) -> dict[str, float]:
        """What a build takes."""
        return cost(lambda: espnx.graph.build(base, folder, replace=True, **options))

    def _cost_of_merge(
        self, base: str, folder: str, added: str, **options: Any
    ) -> dict[str, float]:
        """What a merge takes of some additions, and of as many deletions, as it goes by itself."""
        self._cost(base, folder, **options)
        more = np.load(added)
        with espnx.graph.open_writer(folder, durability="none") as graph:
            gone = np.random.default_rng(0).choice(len(graph), len(more), replace=False)
            graph.delete(np.sort(gone))
            graph.add(more)
            return cost(graph.merge)

    def build(
        self, system: str, base: str, folder: str, pq_bytes: int, threads: int
    ) -> dict[str, Any]:
        if system.startswith("espnx"):
            wanted = None if system in LONG_CODES else pq_bytes
            report = espnx.graph.build(
                base,
                folder,
                codes=CODES.get(system, "inline"),
                pq_bytes=wanted,
                threads=threads,
                list_size=LIST_SIZES.get(system, 100),
                use_opq=system not in UNROTATED,
            )
            return {"pq_bytes": report.pq_bytes}
        if system == LANCE:
            build_lance(base, folder, pq_bytes, threads)
            return {"pq_bytes": pq_bytes}
        faiss = load_faiss()
        faiss.omp_set_num_threads(threads)
        vectors = np.load(base).astype(np.float32)
        index: Any
        if system == "faiss-hnsw":
            index = faiss.IndexHNSWFlat(vectors.shape[1], HNSW_DEGREE)
            index.hnsw.efConstruction = HNSW_CONSTRUCTION
            index.add(vectors)
        else:
            n_lists = max(1, int(len(vectors) ** 0.5))
            index = faiss.IndexIVFFlat(
                faiss.IndexFlatL2(vectors.shape[1]), vectors.shape[1], n_lists
            )
            index.train(vectors)
            index.add(vectors)
            lists = faiss.OnDiskInvertedLists(
                n_lists, index.code_size, os.path.join(folder, _LISTS)
            )
            lists.merge_from_1(index.invlists)
            index.replace_invlists(lists, False)
        faiss.write_index(index, os.path.join(folder, _INDEX))
        return {}

    def load(self, system: str, threads: int) -> None:
        if system.startswith("faiss"):
            load_faiss()
        if system == LANCE:
            load_lance(threads)

    def open(self, system: str, folder: str, threads: int, in_flight: int) -> Opened:
        if system == LANCE:
            return LanceTable(folder, threads)
        return (
            EspnxGraph(folder, threads, in_flight)
            if system.startswith("espnx")
            else FaissIndex(folder)
        )
