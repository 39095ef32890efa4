"""Indexes of several systems over the same vectors: built and measured each in a process of its
own, in turns."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..harness.leftovers import size_bytes
from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from ..machine import page_cache
from . import rows
from .data import Data
from .disk import random_reads_per_s
from .names import IN_RAM, MAPPED, OURS, PEER
from .rows import Built, Point, Way
from .service import Setting

PEER_MODULE = "benchmarks.graph.peer"
IN_FLIGHT = 64
#: Queries of a pass that are asked one at a time.
ALONE = 50
#: A graph that finds less with its longest list is broken, whatever its distances.
RECALL_MIN = 0.8
#: Of those that are tried, pairs of threads and W.
WAYS_MEASURED = 3


@dataclass(frozen=True)
class Plan:
    """Attributes: peer: the Python that has diskannpy, or None. threads: of builds and of FAISS.
    own_threads, of espnx's searches, and peer_threads, peer_beam_widths: all pairs are tried, the
    quickest few are measured, and the best one counts. list_sizes, of the peer peer_list_sizes.
    pass_s: that a pass takes at least, of espnx and the peer."""

    path: Path
    systems: Sequence[str]
    peer: str | None
    pq_bytes: int
    threads: int
    own_threads: Sequence[int]
    peer_threads: Sequence[int]
    peer_beam_widths: Sequence[int]
    list_sizes: Sequence[int]
    peer_list_sizes: Sequence[int]
    pass_s: float
    pairs: int
    seed: int

    def ways(self, system: str) -> list[Way]:
        """(threads, beam width) that a system is measured with."""
        if system == PEER:
            return [
                (threads, width) for threads in self.peer_threads for width in self.peer_beam_widths
            ]
        if system not in OURS:
            return [(self.threads, None)]
        # pages of a query under way at a time: 1 or 2
        return [(threads, width) for threads in self.own_threads for width in (None, 2)]

    def lists(self, system: str) -> Sequence[int]:
        """Sizes that a system is measured with."""
        return self.peer_list_sizes if system == PEER else self.list_sizes


class Bench:
    """One set of vectors below a directory that goes away with it."""

    def __init__(self, data: Data, plan: Plan, folder: Path, say: Say):
        self.data, self.plan, self.folder, self.say = data, plan, folder, say
        np.save(folder / "base.npy", data.base)
        np.save(folder / "queries.npy", data.queries)

    def _process(self, system: str) -> Worker:
        if system == PEER and self.plan.peer is not None:
            return Worker("graph", system, program=(self.plan.peer, "-m", PEER_MODULE))
        return Worker("graph", system)

    def _open(self, worker: Worker, built: Built) -> float:
        answer = worker.ask(
            "open",
            system=built.system,
            folder=built.folder,
            queries=str(self.folder / "queries.npy"),
            k=self.data.k,
            threads=self.plan.threads,
            in_flight=IN_FLIGHT,
        )
        return float(answer["open_s"])

    def build(self, system: str) -> Built:
        """Its index, and its memory in a process that only opens it and searches with as many
        queries in flight."""
        built = Built(system, str(self.folder / system))
        if system == PEER and self.plan.peer is None:
            built.why = "no --diskann-python"
            return built
        Path(built.folder).mkdir()
        try:
            with self._process(system) as worker:
                answer = worker.ask(
                    "build",
                    system=system,
                    base=str(self.folder / "base.npy"),
                    folder=built.folder,
                    pq_bytes=self.plan.pq_bytes,
                    threads=self.plan.threads,
                )
        except FileNotFoundError as error:
            answer = {"missing": str(error)}
        if "missing" in answer:
            built.why = f"not installed: {answer['missing']}"
            return built
        built.said = {**answer, "folder_bytes": size_bytes(Path(built.folder))}
        threads = IN_FLIGHT if system == PEER else self.plan.threads
        middle = self.plan.list_sizes[len(self.plan.list_sizes) // 2]
        with self._process(system) as worker:
            built.said["open_s"] = self._open(worker, built)
            built.said["more_bytes"] = worker.ask("peak", setting=(middle, threads, 1))[
                "more_bytes"
            ]
        self.say(
            f"    {system}: {answer['build_s']:.1f} s, {built.said['more_bytes'] / 2**20:.1f} MiB "
            "above an empty process"
        )
        return built

    def sweep(self, all_built: Sequence[Built]) -> None:
        """Verifies every way to search and fills `Built.points`: a pass goes over all of them in
        shuffled order, `Plan.pairs` times."""
        there = [built for built in all_built if not built.why]
        order = random.Random(self.plan.seed)
        with ExitStack() as stack:
            workers = {
                built.system: stack.enter_context(self._process(built.system)) for built in there
            }
            for built in there:
                self._open(workers[built.system], built)
                self._verify(workers[built.system], built)
            tried = [
                (built, way)
                for built in there
                if built.problem is None
                for way in self._quickest(workers[built.system], built)
            ]
            for turn in range(self.plan.pairs):
                ways = list(tried)
                order.shuffle(ways)
                for built, way in ways:
                    if self.plan.pass_s:
                        built.disk_rates.append(random_reads_per_s(Path(built.folder)))
                    for list_size in self.plan.lists(built.system):
                        point = self._point(
                            workers[built.system], built, Setting(list_size, *way), turn
                        )
                        built.curves.setdefault(way, {}).setdefault(list_size, []).append(point)
                self.say(f"pass {turn + 1} of {self.plan.pairs}")

    def _quickest(self, worker: Worker, built: Built) -> list[Way]:
        """The few that are worth whole passes, by one search with the list of the middle size each;
        and one with one page of a query under way at a time, whose reads count."""
        ways, lists = self.plan.ways(built.system), self.plan.lists(built.system)
        if len(ways) <= WAYS_MEASURED:
            return ways
        seconds = {
            way: self._searched(worker, built, Setting(lists[len(lists) // 2], *way))["seconds"]
            for way in ways
        }
        self.say(
            f"    {built.system}: "
            + ", ".join(
                f"{len(self.data.queries) / seconds[way]:.0f} queries/s with {way}" for way in ways
            )
        )
        quick = sorted(ways, key=lambda way: seconds[way])
        chosen, narrow = quick[:WAYS_MEASURED], next(way for way in quick if (way[1] or 1) == 1)
        return chosen if narrow in chosen else [*chosen, narrow]

    def _searched(self, worker: Worker, built: Built, setting: Setting) -> dict[str, Any]:
        least_s = self.plan.pass_s if built.system in (*OURS, PEER) else 0.0
        return worker.ask("search", setting=dataclasses.astuple(setting), least_s=least_s)

    def _verify(self, worker: Worker, built: Built) -> None:
        for way in self.plan.ways(built.system):
            answer = worker.ask(
                "search",
                setting=dataclasses.astuple(Setting(max(self.plan.lists(built.system)), *way)),
            )
            ids = np.array(answer["ids"])
            built.problem = self.data.problem(ids, np.array(answer["distances"]))
            if built.problem is None and (recall := self.data.recall(ids)) < RECALL_MIN:
                built.problem = f"recall@{self.data.k} {recall:.3f}"
            if built.problem:
                self.say(f"WRONG RESULT of {built.system}: {built.problem}. It is not measured.")
                return

    def _point(self, worker: Worker, built: Built, setting: Setting, turn: int) -> Point:
        cache = self._cache(worker, built)
        asked = dataclasses.astuple(setting)
        found = self._searched(worker, built, setting)
        is_first = built.system != PEER or setting.threads == self.plan.peer_threads[0]
        which = (
            [(turn * ALONE + i) % len(self.data.queries) for i in range(ALONE)] if is_first else []
        )
        # A beam width of its own is another one for a query that is alone.
        alone = worker.ask("alone", setting=asked, which=which)["seconds"]
        n = len(self.data.queries)
        per_query = {
            name: found[name] / n
            for name in ("reads", "bytes_read", "moved_bytes", "cpu_s")
            if found[name] is not None
        }
        return Point(
            found["seconds"], self.data.recall(np.array(found["ids"])), per_query, alone, cache
        )

    def _cache(self, worker: Worker, built: Built) -> str:
        """State of the page cache as the search begins, emptied before it; a mapped file's only
        leaves it while nobody has it open."""
        if built.system == IN_RAM:
            return "warm"
        if built.system == MAPPED:
            worker.ask("close")
        states = {
            page_cache.prepare(path, "cold")
            for path in Path(built.folder).rglob("*")
            if path.is_file() and path.stat().st_size
        }
        if built.system == MAPPED:
            self._open(worker, built)
        return "cold" if states == {"cold"} else "warm"


def measure(sets: Iterator[Data], plan: Plan, show: str, say: Say) -> list[Row]:
    """Rows of all systems on each set of vectors; those of summaries come first."""
    summaries, others = list[Row](), list[Row]()
    for data in sets:
        say(f"{data.name}: building")
        with tempfile.TemporaryDirectory(prefix="espnx-bench-graph-", dir=plan.path) as folder:
            bench = Bench(data, plan, Path(folder), say)
            built = [bench.build(system) for system in plan.systems]
            params: dict[str, Any] = {
                "data": data.name,
                "n": len(data.base),
                "dim": data.base.shape[1],
                "queries": len(data.queries),
                "k": data.k,
                "pq_bytes": plan.pq_bytes,
            }
            if show == "memory":
                others += [rows.memory(params, each, in_flight=IN_FLIGHT) for each in built]
                continue
            bench.sweep(built)
        summaries += rows.summaries(params, built, vectors_bytes=4 * data.base.size)
        others += rows.sweep(params, built)
    return summaries + others
