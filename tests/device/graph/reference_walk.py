"""The walk of `SsdGraphDevice` over anything that keeps `Graph`, in plain Python: sets, sorted
lists, one read after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from espnx.device.vectors.interface import Graph, LayeredGraph, Nodes
from espnx.ops.distances import distances
from espnx.storage import NativeEngine


@dataclass
class Walked:
    """What a walk has found, nearest first, and what it took: of each round the nodes asked for,
    bytes moved, distances, requests."""

    found: list[tuple[float, int]] = field(default_factory=list)
    rounds: list[tuple[list[int], int, int, int]] = field(default_factory=list)
    distances: int = 0
    estimates: int = 0


def in_order(each: tuple[float, int]) -> tuple[bool, float, int]:
    """Nearest first, ties by number; what is no number is farther than all that is."""
    far, number = each
    return math.isnan(far), 0.0 if math.isnan(far) else far, number


class ReferenceWalk:
    """One walk; `run` once. The graph is one that `engine` has opened."""

    def __init__(
        self,
        graph: Graph,
        engine: NativeEngine,
        query: torch.Tensor,
        length: int,
        k: int,
        beam: int,
    ):
        self.graph, self.engine, self.query, self.length, self.k, self.beam = (
            graph,
            engine,
            query,
            length,
            k,
            beam,
        )
        self.far: dict[int, float] = {}  # of nodes that were read
        self.ids: dict[int, int] = {}
        self.near: dict[int, list[int]] = {}
        self.codes: dict[int, np.ndarray | None] = {}
        self.counts = set[int]()  # of those that were read: met in the lowest layer
        self.listed: list[tuple[float, int]] = []
        self.expanded = set[int]()  # of `listed`
        self.walked = Walked()

    def run(self) -> Walked:
        estimate = self.graph.estimator(self.query)
        entries = sorted({int(node) for node in self.graph.entry_points(self.query)})
        self.read(entries)
        if isinstance(self.graph, LayeredGraph) and entries:
            entries = [self.descend(self.graph, entries)]
            self.counts = set(entries)
            fresh = set(entries)
        else:
            self.counts = fresh = set(self.far)
        if estimate is None:
            self.add([(self.far[node], node) for node in fresh])
            while turn := self.take():
                near = sorted({each for node in turn for each in self.near[node]})
                came = self.read([node for node in near if node not in self.far])
                fresh = (came | set(near)) - self.counts
                self.counts |= fresh
                self.add([(self.far[node], node) for node in fresh])
        else:
            seen, turn = set(entries), entries
            while turn:
                for node in turn:
                    places = [
                        i
                        for i, each in enumerate(self.near[node])
                        if each not in seen and each not in self.near[node][:i]
                    ]
                    nodes = np.array([self.near[node][i] for i in places], np.int64)
                    seen.update(nodes.tolist())
                    if places:
                        codes = self.codes[node]
                        guessed = estimate(nodes, None if codes is None else codes[places]).astype(
                            np.float32
                        )
                        self.add(list(zip(guessed.tolist(), nodes.tolist(), strict=True)))
                        self.walked.estimates += len(places)
                turn = self.take()
                self.counts.update(turn)
                self.counts |= self.read([node for node in turn if node not in self.far])
        self.walked.found = sorted(
            ((self.far[node], self.ids[node]) for node in self.counts), key=in_order
        )[: self.k]
        return self.walked

    def descend(self, graph: LayeredGraph, entries: list[int]) -> int:
        nearest = min(entries, key=lambda node: (self.far[node], node))
        for layer in range(graph.n_upper_layers, 0, -1):
            while True:
                near = [int(node) for node in graph.upper_neighbours(layer, nearest)]
                self.read(sorted({node for node in near if node not in self.far}))
                # of equally near ones the first
                better = min([nearest, *near], key=lambda node: self.far[node])
                if better == nearest:
                    break
                nearest = better
        return nearest

    def add(self, candidates: list[tuple[float, int]]) -> None:
        self.listed = sorted([*self.listed, *candidates], key=in_order)[: self.length]

    def take(self) -> list[int]:
        turn = [node for _, node in self.listed if node not in self.expanded][: self.beam]
        self.expanded.update(turn)
        return turn

    def read(self, nodes: list[int]) -> set[int]:
        """Those that became known by it."""
        if not nodes:
            return set()
        asked = np.array(nodes, np.int64)
        future = self.engine.read(self.graph.plan(asked))
        future.wait()
        said = self.graph.parse(asked, future.memory, future.position_bytes.numpy())
        before = set(self.far)
        for i, node in enumerate(said.numbers.tolist()):
            if node not in self.far:
                self.take_in(said, i, node, future.memory)
        came = set(self.far) - before
        assert came >= set(nodes)
        self.walked.distances += len(came)
        self.walked.rounds.append((nodes, future.bytes_moved, len(came), future.request_count))
        return came

    def take_in(self, said: Nodes, i: int, node: int, memory: torch.Tensor) -> None:
        where = torch.tensor([int(said.vector_offset_bytes[i])])
        self.far[node] = float(
            distances(self.query, memory, where, self.graph.format, self.graph.metric, threads=1)[0]
        )
        self.ids[node] = node if said.ids is None else int(said.ids[i])
        span = slice(int(said.first[i]), int(said.first[i + 1]))
        self.near[node] = said.neighbours[span].tolist()
        self.codes[node] = None if said.codes is None else np.array(said.codes[span])
