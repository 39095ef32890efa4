"""What a process with one index in it answers: time, work and memory of its searches. DiskANN's
runs it in an environment of its own, which has neither espnx nor torch, so nothing but the standard
library and NumPy is imported here."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..machine.counters import read_counters
from ..machine.memory import rss_bytes

_SAMPLE_S = 0.001


@dataclass(frozen=True)
class Found:
    """Attributes: ids, distances: [q, k], the nearest first. reads, bytes_read: of all queries;
    None where nobody counts."""

    ids: np.ndarray
    distances: np.ndarray
    reads: float | None = None
    bytes_read: float | None = None


@dataclass(frozen=True)
class Setting:
    """How a search goes. Attributes: list_size: candidates (L; efSearch of HNSW, nprobe of lists).
    beam_width: None: the system's own."""

    list_size: int
    threads: int
    beam_width: int | None


def most_bytes(work: Callable[[], object]) -> int:
    """Memory of this process, at most while something is done."""
    most, ended = rss_bytes(), threading.Event()

    def sample() -> None:
        nonlocal most
        while not ended.wait(_SAMPLE_S):
            most = max(most, rss_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        work()
    finally:
        ended.set()
        sampler.join()
    return max(most, rss_bytes())


class Opened(ABC):
    """An index that can be searched."""

    @abstractmethod
    def search(self, queries: np.ndarray, k: int, setting: Setting) -> Found: ...

    @abstractmethod
    def close(self) -> None: ...


class Service(ABC):
    """`handle` runs one command: a mapping with ``do`` and arguments."""

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._queries = np.empty((0, 0))
        self._k = self._empty_bytes = 0

    @abstractmethod
    def build(
        self, system: str, base: str, folder: str, pq_bytes: int, threads: int
    ) -> dict[str, Any]:
        """Builds the index of the vectors in a file. Returns what there is to say of it.
        ImportError: what it needs is not installed."""

    @abstractmethod
    def load(self, system: str, threads: int) -> None:
        """Imports what `open` needs: its memory is not the index's."""

    @abstractmethod
    def open(self, system: str, folder: str, threads: int, in_flight: int) -> Opened:
        """Opens a system; as soon as this returns, its searches can be timed."""

    def handle(self, command: Mapping[str, Any]) -> dict[str, Any]:
        do, rest = command["do"], {name: value for name, value in command.items() if name != "do"}
        if do == "build":
            return self._build(**rest)
        if do == "open":
            return self._open(**rest)
        if self._opened is None:
            raise OSError("nothing is open")
        if do == "close":
            self.close()
            return {}
        setting = Setting(*rest.pop("setting"))
        if do == "alone":
            return {
                "seconds": [
                    self._timed(self._opened, self._queries[i : i + 1], setting)[0]
                    for i in rest["which"]
                ]
            }
        return (
            self._search(self._opened, setting, **rest)
            if do == "search"
            else self._peak(self._opened, setting)
        )

    def _build(self, **options: Any) -> dict[str, Any]:
        begun = time.perf_counter()
        try:
            said = self.build(**options)
        except ImportError as error:
            return {"missing": str(error)}
        return {**said, "build_s": time.perf_counter() - begun}

    def _open(
        self, system: str, folder: str, queries: str, k: int, threads: int, in_flight: int
    ) -> dict[str, Any]:
        self._queries, self._k = np.load(queries), k
        self.load(system, threads)
        self._empty_bytes, begun = rss_bytes(), time.perf_counter()
        self._opened = self.open(system, folder, threads, in_flight)
        return {"open_s": time.perf_counter() - begun}

    def _timed(self, opened: Opened, queries: np.ndarray, setting: Setting) -> tuple[float, Found]:
        begun = time.perf_counter()
        found = opened.search(queries, self._k, setting)
        return time.perf_counter() - begun, found

    def _search(self, opened: Opened, setting: Setting, least_s: float = 0.0) -> dict[str, Any]:
        """Searches for all queries; again for as many copies of them in one batch as take
        `least_s`, where once is over sooner."""
        before, cpu_s, times = read_counters(), time.process_time(), 1
        seconds, found = self._timed(opened, self._queries, setting)
        moved_bytes = (read_counters() - before).device_read_bytes
        if seconds < least_s:
            times = math.ceil(1.1 * least_s / seconds)
            queries, cpu_s = np.tile(self._queries, (times, 1)), time.process_time()
            seconds, _ = self._timed(opened, queries, setting)
        return {
            "seconds": seconds / times,
            "ids": found.ids.tolist(),
            "distances": found.distances.tolist(),
            "reads": found.reads,
            "bytes_read": found.bytes_read,
            "moved_bytes": moved_bytes,
            "cpu_s": (time.process_time() - cpu_s) / times,
        }

    def _peak(self, opened: Opened, setting: Setting) -> dict[str, Any]:
        """Memory above that before it was opened, at most while all queries are searched for, and
        before that."""
        most = most_bytes(lambda: self._timed(opened, self._queries, setting))
        return {"more_bytes": most - self._empty_bytes}

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None
