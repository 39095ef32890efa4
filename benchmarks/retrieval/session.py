"""What a process of the retrieval benchmark can be asked to do; see worker.py."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import espnx
from espnx.errors import InvalidInputError
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.first_stage.ivf.probing import measure as measure_probing
from espnx.retrieval.first_stage.registry import described
from espnx.retrieval.search.index import Index
from espnx.retrieval.search.read_cost import DeviceCost
from espnx.retrieval.search.result import SearchResult
from espnx.retrieval.store.manifest import data_directories

from ..corpora.stores import load_queries
from ..harness.traces import Steps, recording
from ..machine.counters import read_counters
from ..machine.memory import rss_bytes
from .index import faiss_overlap, measure_index
from .layout import LayoutReplay
from .systems.whole_store import WHOLE_STORE, WholeStoreRanker, lists_of, query_vectors

#: Options of a search that every system understands, with k.
SHARED = ("k", "candidates", "rerank", "nprobe")
ESPNX = "espnx"


class Session:
    """One open store and one way of re-ranking. `handle` runs one command, a mapping with ``do``
    and arguments."""

    def __init__(self) -> None:
        self._index: Index | None = None
        self._ranker: WholeStoreRanker | None = None
        self._queries: list[Encoded] = []
        self._layout: LayoutReplay | None = None
        self._recording, self._steps = ExitStack(), Steps()

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        arguments = {key: value for key, value in command.items() if key != "do"}
        known: dict[Any, Callable[..., dict[str, Any]]] = {
            "open": self.open,
            "search": self.search,
            "reference": self.reference,
            "pieces": self.pieces,
            "maxsim": self.maxsim,
            "candidates": self.candidates,
            "nprobe_for": self.nprobe_for,
            "callers": self.callers,
            "layout": self.layout,
            "overlap": self.overlap,
            "load_index": self.load_index,
        }
        if command.get("do") not in known:
            raise InvalidInputError("command", got=command.get("do"), expected=", ".join(known))
        return known[command["do"]](**arguments)

    @property
    def index(self) -> Index:
        if self._index is None:
            raise InvalidInputError("no store is open", fix="send `open` first")
        return self._index

    @property
    def ranker(self) -> WholeStoreRanker:
        if self._ranker is None:
            raise InvalidInputError(
                "this process does not hold the whole store", expected=", ".join(WHOLE_STORE)
            )
        return self._ranker

    def open(
        self,
        store: str,
        queries: str,
        system: str,
        threads: int | None = None,
        gather_threads: int = 1,
        engine: str = "auto",
        coarse: str = "ssd",
        hot: int = 0,
        record: str | None = None,
    ) -> dict[str, Any]:
        """Opens a store. `system`: ``espnx``, or one of `WHOLE_STORE`. `record`: the file of a
        trace, of ``espnx``."""
        before = rss_bytes()
        self._queries = load_queries(Path(queries))
        if system in WHOLE_STORE:
            self._index = Index(store, engine=engine, threads=threads, cost=DeviceCost())
            self._ranker = WholeStoreRanker(self._index, system, gather_threads)
        else:
            device = None
            if record is not None:
                devices = espnx.device.open("ssd", data_directories(store))
                device = recording(
                    record, "espnx bench retrieval", devices, self._recording, self._steps
                )
            self._index = Index(
                store, engine=engine, threads=threads, coarse=coarse, hot=hot, device=device
            )
        index = self._index
        manifest = index.store.manifest
        return {
            "rss_growth_bytes": rss_bytes() - before,
            "effective_path": index.store.effective_path if self._ranker is None else system,
            "default_nprobe": index.default_nprobe,
            "count": index.store.count,
            "record_bytes": index.store.full.size_bytes,
            "live_record_bytes": int(index.store.full.schema.sizes(index.store.n_tokens).sum()),
            "resident_bytes": index.resident_bytes,
            "cost": asdict(index.cost),
            "gap_bytes": index.cost.gap_bytes,
            "first_stage": {
                key: value
                for key, value in described(manifest.first_stage).items()
                if key != "steps"
            },
            "format": manifest.schema.format,
        }

    def search(self, queries: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
        """One batch, timed. `queries`: their numbers."""
        index = self.index
        chosen = [self._queries[number] for number in queries]
        before = read_counters()
        if self._ranker is not None:
            shared = {name: options[name] for name in SHARED}
            begun = time.perf_counter()
            rankings = self._ranker.search(chosen, **shared)
            seconds = time.perf_counter() - begun
            spent = read_counters() - before
            asked = sum(ranking.bytes_asked for ranking in rankings)
            timings = _medians([ranking.timings for ranking in rankings])
            return _measured(
                seconds,
                spent,
                asked,
                spent.device_read_bytes or 0,
                [r.hits for r in rankings],
                timings,
            )
        begun = time.perf_counter()
        results = index.search(chosen if len(chosen) > 1 else chosen[0], **options)
        seconds = time.perf_counter() - begun
        spent = read_counters() - before
        found: list[SearchResult] = results if isinstance(results, list) else [results]
        metrics = _medians([vars(result.timings) for result in found])
        metrics |= {
            "requests": sum(result.requests for result in found) / len(found),
            "hit_rate": sum(result.hit_rate for result in found) / len(found),
            "hot_documents": sum(result.hot for result in found) / len(found),
            "prefetch_step": found[-1].prefetch_steps[0] if found[-1].prefetch_steps else 0.0,
            "prefetch_steps": float(len(found[-1].prefetch_steps)),
        }
        hits = [[(hit.number, hit.score) for hit in result.hits] for result in found]
        asked, moved = (
            sum(result.bytes_asked for result in found),
            sum(result.bytes_moved for result in found),
        )
        return {
            **_measured(seconds, spent, asked, moved, hits, metrics),
            "steps": found[-1].prefetch_steps,
        }

    def reference(self, query: int, options: dict[str, Any]) -> dict[str, Any]:
        """The ranking to compare with, and how far scores may be off (docs/tolerances.md), for
        documents' vectors of norm about 1."""
        shared = {name: options[name] for name in SHARED}
        return {
            "hits": self.ranker.reference(self._queries[query], **shared),
            "tolerance": tolerance(query_vectors(self.index, self._queries[query])),
        }

    def pieces(self, query: int, options: dict[str, Any], steps: Sequence[float]) -> dict[str, Any]:
        """The parts of a search one by one, nothing else running: the first stage up to its first
        step and after it, then the reads.

        Without steps nothing is read ahead: all reads begin when the first stage is complete.
        """
        prepared = [query_vectors(self.index, self._queries[query]).prepared]
        rerank = options["rerank"]
        begun = stepped = time.perf_counter()
        search = self.index.first_stage.start(prepared, options["candidates"], options["nprobe"])
        ahead = np.empty(0, np.int64)
        for number, step in enumerate(steps):
            early = search.advance(step)[0][0][:rerank]
            if number == 0:
                stepped = time.perf_counter()
            ahead = np.union1d(ahead, early)
        final = search.complete()[0][0][:rerank]
        complete = time.perf_counter()
        missed = np.setdiff1d(final, ahead)
        if not steps:
            ahead, missed, stepped = np.sort(final), missed[:0], complete
        return {
            "delta_s": stepped - begun,
            "rest_s": complete - stepped,
            "prefetch": self._read(ahead),
            "misses": self._read(missed),
            "numbers": final.tolist(),
        }

    def _read(self, numbers: np.ndarray) -> dict[str, float]:
        """Reads records and nothing else: no check, no score."""
        if not len(numbers):
            return {"seconds": 0.0, "bytes_asked": 0, "bytes_moved": 0, "requests": 0}
        begun = time.perf_counter()
        future = self.index.store.full.read(numbers, gap_bytes=self.index.cost.gap_bytes)
        future.wait()
        return {
            "seconds": time.perf_counter() - begun,
            "bytes_asked": future.bytes_asked,
            "bytes_moved": future.bytes_moved,
            "requests": future.request_count,
        }

    def maxsim(self, query: int, numbers: Sequence[int]) -> dict[str, float]:
        """Seconds that MaxSim takes for those records in memory."""
        return {
            "seconds": self.ranker.maxsim_s(self._queries[query], np.array(numbers, dtype=np.int64))
        }

    def candidates(self, queries: Sequence[int], candidates: int, nprobe: int) -> dict[str, Any]:
        """Record numbers that the first stage finds, per query."""
        prepared = [query_vectors(self.index, self._queries[number]).prepared for number in queries]
        found = self.index.first_stage.start(prepared, candidates, nprobe).complete()
        return {"numbers": [numbers.tolist() for numbers, _ in found]}

    def nprobe_for(self, queries: Sequence[int], candidates: int, recall: float) -> dict[str, Any]:
        """The smallest number of lists with that share of the exhaustive candidates, and hit rates
        of prefetch steps there."""
        vectors = np.stack(
            [query_vectors(self.index, self._queries[number]).prepared for number in queries]
        )
        nprobe, steps = measure_probing(lists_of(self.index), vectors, candidates, recall)
        return {"nprobe": nprobe, "steps": steps}

    def layout(self, numbers: Sequence[int], layout: str, gap_bytes: int) -> dict[str, Any]:
        """Reads records where one of two layouts has them; see `LayoutReplay`."""
        if self._layout is None:
            self._layout = LayoutReplay(self.index)
        return self._layout.read(np.array(numbers, dtype=np.int64), layout, gap_bytes)

    def overlap(
        self, queries: Sequence[int], candidates: int, nprobe: int, shares: Sequence[float]
    ) -> dict[str, Any]:
        """What FAISS alone says of hit rates: the overlap of one search of all `nprobe` lists with
        one of each share of them; and the recall of the former, against all lists."""
        vectors = np.stack(
            [query_vectors(self.index, self._queries[number]).prepared for number in queries]
        )
        return faiss_overlap(lists_of(self.index).index, vectors, candidates, nprobe, shares)

    def load_index(
        self, path: str, queries: str, numbers: Sequence[int], candidates: int, nprobe: int | None
    ) -> dict[str, Any]:
        """Reads a FAISS index: growth of this process's memory, and what it finds for queries
        (nprobe None: all lists)."""
        wanted = load_queries(Path(queries))
        vectors = np.stack([wanted[number].cls.numpy() for number in numbers])
        return measure_index(path, vectors, candidates, nprobe)

    def callers(
        self, queries: Sequence[int], options: dict[str, Any], callers: int
    ) -> dict[str, Any]:
        """All queries, one by one, by so many threads: each query's latency in seconds, and the
        time of all."""
        waiting = list(queries)
        latencies: list[float] = []
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    number = waiting.pop()
                seconds = self._search_one(number, options)
                with lock:
                    latencies.append(seconds)

        threads = [threading.Thread(target=work) for _ in range(callers)]
        begun = time.perf_counter()
        with self._steps.step():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return {"seconds": time.perf_counter() - begun, "latencies": latencies}

    def _search_one(self, number: int, options: dict[str, Any]) -> float:
        query = self._queries[number]
        begun = time.perf_counter()
        if self._ranker is not None:
            self._ranker.search([query], **{name: options[name] for name in SHARED})
        else:
            self.index.search(query, **options)
        return time.perf_counter() - begun

    def close(self) -> None:
        if self._ranker is not None:
            self._ranker.close()
        if self._index is not None:
            self._index.close()
        self._recording.close()


def tolerance(query: Any) -> float:
    """How far two correct scores of a document may lie apart, where its vectors have norm at most
    1.01."""

    def gamma(n: int) -> float:
        return n * 2.0**-24 / (1 - n * 2.0**-24)

    lq, dim = query.tokens.shape
    maxsim = 2 * gamma(dim + lq) * float(query.tokens.norm(dim=1).sum())
    cls = 2 * gamma(query.cls.shape[1] + 1) * abs(query.cls_weight) * float(query.cls.norm())
    return 1.01 * (maxsim + cls) + 2.0**-23 * (lq + 1)


def _medians(parts: list[dict[str, float]]) -> dict[str, float]:
    return {
        key: statistics.median(part[key] for part in parts) for key in (parts[0] if parts else {})
    }


def _measured(
    seconds: float, spent: Any, asked: int, moved: int, hits: Any, metrics: dict[str, float]
) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "cpu_s": spent.cpu_s,
        "bytes_asked": asked,
        "bytes_moved": moved,
        "hits": hits,
        "metrics": metrics,
        "rss_bytes": rss_bytes(),
        "pid": os.getpid(),
    }
