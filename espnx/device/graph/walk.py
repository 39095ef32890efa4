"""A best-first walk over a graph whose nodes are read as the walk comes to them (RAGX's metadata navigation, sections 3 and 4.3; with
DiskANN's beam).

Two kinds of graphs, one loop. Where nodes carry codes of their neighbours, or codes lie in memory, a candidate is as far as its code says,
and a node is read when it is expanded. Where there are none, all neighbours of an expanded node are read: nothing else says how far they
are. Either way what is returned was measured to the vectors themselves.

Nodes of a hop are parsed and measured as they arrive, and become candidates when all of them are there: so the walk, its result and its
counters depend on the graph and the query alone, and not on the order in which a drive answers.

A graph with layers above (HNSW) is descended first, greedily, and with reads like any other. A node that was met above alone is no
result and no candidate until the walk meets it below, as in the paper; then it is not read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ... import errors
from ...ops.distances import distances
from ...storage import Future, Plan
from ..vectors.interface import WALK_REPLY, Estimate, Graph, LayeredGraph, Nodes, Round, WalkStats

#: Nodes of a hop are taken in so many groups: each call costs more than the arithmetic of a node.
_GROUPS = 4


@dataclass(frozen=True, slots=True)
class _Known:
    """A node that was read."""

    distance: float
    id: int
    neighbours: np.ndarray
    codes: np.ndarray | None


class _Candidates:
    """The L nearest nodes so far, those that were expanded among them; ties by number."""

    def __init__(self, limit: int):
        self._limit = limit
        self._nodes = np.empty(0, np.int64)
        self._distances = np.empty(0, np.float32)
        self._waiting = np.empty(0, bool)

    def add(self, nodes: np.ndarray, far: np.ndarray) -> None:
        """Nodes that were never candidates before."""
        all_nodes = np.concatenate([self._nodes, nodes])
        all_far = np.concatenate([self._distances, far.astype(np.float32)])
        order = np.lexsort((all_nodes, all_far))[: self._limit]
        self._waiting = np.concatenate([self._waiting, np.ones(len(nodes), bool)])[order]
        self._nodes, self._distances = all_nodes[order], all_far[order]

    def take(self, count: int) -> list[int]:
        """The nearest that were not expanded; they are, from here on."""
        chosen = np.flatnonzero(self._waiting)[:count]
        self._waiting[chosen] = False
        return [int(node) for node in self._nodes[chosen]]


class Walk:
    """One query's walk.

    Args:
        graph: walked over.
        read: starts the reads of a plan.
        query: [dim].
        length: of the list of candidates, L.
        beam: candidates that are expanded in one hop.
        check: called before every hop; raises to end the walk.
        watch: gets every round once it has been measured.

    Attributes:
        stats: so far.
        rounds: so far.
    """

    def __init__(
        self, graph: Graph, read: Callable[[Plan], Future], query: torch.Tensor, *, length: int, beam: int, check: Callable[[], None],
        watch: Callable[[Round], None] | None = None,
    ):  # fmt: skip
        self._graph, self._read, self._query, self._beam, self._check = graph, read, query, beam, check
        self.rounds: list[Round] = []
        self._watch = watch
        self._estimate = graph.estimator(query)
        self._candidates = _Candidates(length)
        self._known: dict[int, _Known] = {}
        self._fresh: list[int] = []  # known since candidates were last added
        self._above = set[int]()  # of those known: met in layers above alone
        self._seen = set[int]()  # whose distance was estimated, or need not be
        self.stats = WalkStats()

    def run(self, k: int) -> np.ndarray:
        """`WALK_REPLY` [m], m at most k: the nearest nodes of those that were read, ties by id. Raises what reads and `Graph.parse` do,
        and FormatError for a node that is not there."""
        entry = np.unique(np.asarray(self._graph.entry_points(self._query), dtype=np.int64))
        self._check_numbers(entry, "an entry point")
        self._hop(entry)
        if isinstance(self._graph, LayeredGraph) and entry.size:
            entry = np.array([self._descend(self._graph, entry.tolist())], np.int64)
        expanded: list[int] = []
        if self._estimate is None:
            self._add_measured()
        else:
            expanded = entry.tolist()
            self._seen.update(expanded)
        while True:
            if self._estimate is not None:
                self._add_estimates(self._estimate, expanded)
            expanded = self._candidates.take(self._beam)
            if not expanded:
                break
            self._hop_of(expanded)
        met = [each for node, each in self._known.items() if node not in self._above]
        far = np.array([each.distance for each in met], np.float32)
        ids = np.array([each.id for each in met], np.int64)
        order = np.lexsort((ids, far))[:k]
        found = np.empty(len(order), WALK_REPLY)
        found["id"], found["distance"] = ids[order], far[order]
        return found

    def _descend(self, graph: LayeredGraph, entry: list[int]) -> int:
        """The node that the layers above lead to; it is met below, and what was read on the way is not yet."""
        nearest = min(entry, key=lambda node: (self._known[node].distance, node))
        for layer in range(graph.n_upper_layers, 0, -1):
            while True:
                near = graph.upper_neighbours(layer, nearest)
                self._check_neighbours(near, nearest)
                self._hop(np.array(sorted({node for node in near.tolist() if node not in self._known}), np.int64))
                before = nearest
                for node in near.tolist():  # in their order: of equally near ones the first, as FAISS does
                    if self._known[node].distance < self._known[nearest].distance:
                        nearest = node
                if nearest == before:
                    break
        self._above, self._fresh = self._known.keys() - {nearest}, [nearest]
        return nearest

    def _hop_of(self, expanded: list[int]) -> None:
        """Reads what the expansion of these needs: themselves, or their neighbours."""
        if self._estimate is not None:
            self._above.difference_update(expanded)
            self._hop(np.array([node for node in expanded if node not in self._known], np.int64))
            return
        near = np.unique(np.concatenate([self._known[node].neighbours for node in expanded]))
        met = self._above.intersection(near.tolist())
        self._fresh += sorted(met)
        self._above -= met
        self._hop(np.array([node for node in near.tolist() if node not in self._known], np.int64))
        self._add_measured()

    def _add_measured(self) -> None:
        """Nodes that became known are candidates, too: those that were asked for, and those that came with them."""
        fresh, self._fresh = self._fresh, []
        self._candidates.add(np.array(fresh, np.int64), np.array([self._known[node].distance for node in fresh], np.float32))

    def _add_estimates(self, estimate: Estimate, expanded: list[int]) -> None:
        """The neighbours of expanded nodes become candidates, each once."""
        for node in expanded:
            known = self._known[node]
            fresh = []
            for i, each in enumerate(known.neighbours.tolist()):
                if each not in self._seen:
                    self._seen.add(each)
                    fresh.append(i)
            if not fresh:
                continue
            nodes = known.neighbours[fresh]
            self._candidates.add(nodes, estimate(nodes, None if known.codes is None else known.codes[fresh]))
            self._count(WalkStats(estimates=len(fresh)))

    def _hop(self, nodes: np.ndarray) -> None:
        """Reads nodes; parses and measures them as they arrive."""
        self._check()
        if nodes.size == 0:
            return
        measured = self.stats.distances
        future = self._read(self._graph.plan(nodes))
        position = future.position_bytes.numpy()
        finished = False
        while not finished:
            items, finished = future.next(-(-len(nodes) // _GROUPS))
            arrived = items.numpy()
            self._take(nodes[arrived], future.memory, position[arrived])
        missing = [int(node) for node in nodes if int(node) not in self._known]
        if missing:
            raise errors.FormatError(f"node {missing[0]} of a graph", got="other nodes in its place", expected="that node")
        moved = WalkStats(
            hops=1, nodes=len(nodes), read_requests=future.request_count, bytes_asked=future.bytes_asked, bytes_moved=future.bytes_moved
        )
        self._count(moved)
        self.rounds.append(Round(nodes, future.bytes_moved, self.stats.distances - measured, future.request_count))
        if self._watch is not None:
            self._watch(self.rounds[-1])

    def _take(self, asked: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray) -> None:
        """What arrived becomes known."""
        if not asked.size:  # the last of them may come with the news that there are no more
            return
        nodes = self._graph.parse(asked, memory, position_bytes)
        self._check_nodes(nodes)
        place = {node: i for i, node in enumerate(nodes.numbers.tolist()) if node not in self._known}  # of two in one page each comes twice
        if not place:
            return
        fresh = np.array(list(place.values()), np.int64)
        offset = torch.from_numpy(np.ascontiguousarray(nodes.vector_offset_bytes[fresh], dtype=np.int64))
        far = distances(self._query, memory, offset, self._graph.format, self._graph.metric, threads=1).tolist()
        for i, distance in zip(fresh.tolist(), far, strict=True):
            span = slice(int(nodes.first[i]), int(nodes.first[i + 1]))
            # Copies: what was read returns to the engine.
            codes = None if nodes.codes is None else np.array(nodes.codes[span])
            self._fresh.append(int(nodes.numbers[i]))
            own = self._fresh[-1] if nodes.ids is None else int(nodes.ids[i])
            self._known[self._fresh[-1]] = _Known(distance, own, np.array(nodes.neighbours[span], np.int64), codes)
        self._count(WalkStats(distances=len(far)))

    def _check_nodes(self, nodes: Nodes) -> None:
        self._check_numbers(nodes.numbers, "a node that was read")
        outside = self._outside(nodes.neighbours)
        if outside.size:
            owner = int(nodes.numbers[int(np.searchsorted(nodes.first, int(outside[0]), side="right")) - 1])
            self._check_neighbours(nodes.neighbours[outside[:1]], owner)

    def _outside(self, nodes: np.ndarray) -> np.ndarray:
        """Places of those that are not there."""
        return np.flatnonzero((nodes < 0) | (nodes >= self._graph.n_nodes))

    def _check_neighbours(self, nodes: np.ndarray, owner: int) -> None:
        if (outside := self._outside(nodes)).size:
            raise errors.FormatError(
                f"neighbour of node {owner} of a graph", got=int(nodes[outside[0]]), expected=f"0 to {self._graph.n_nodes - 1}",
                fix="restore the graph from a copy, or build it again",
            )  # fmt: skip

    def _check_numbers(self, nodes: np.ndarray, what: str) -> None:
        if (outside := self._outside(nodes)).size:
            raise errors.FormatError(f"{what} of a graph", got=int(nodes[outside[0]]), expected=f"0 to {self._graph.n_nodes - 1}")

    def _count(self, more: WalkStats) -> None:
        self.stats = self.stats + more
