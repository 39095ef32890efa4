"""What a walk in rounds asks for: nodes that a device reads, and what the graph says of them. The
walk itself is csrc/graph/rounds.cpp.

Nodes of a round are parsed and measured as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from ... import errors
from ...ops.distances import distances
from ...storage import Future, Plan
from ...storage.native import load_native
from ..vectors.interface import Estimate, Graph, LayeredGraph, Nodes, Round, WalkStats

#: Nodes of a round are taken in so many groups: each call costs more than the arithmetic of a node.
_GROUPS = 4


class WalkSource:
    """One query's walk, and what it reads.

    Args:
        graph: walked over.
        read: starts the reads of a plan.
        query: [dim].
        check: called before every round; raises to end the walk.
        watch: gets every round once it has been measured.

    Attributes:
        stats: so far.
        rounds: so far.
    """

    def __init__(
        self,
        graph: Graph,
        read: Callable[[Plan], Future],
        query: torch.Tensor,
        *,
        check: Callable[[], None],
        watch: Callable[[Round], None] | None = None,
    ):
        self._graph, self._read, self._query, self._check, self._watch = (
            graph,
            read,
            query,
            check,
            watch,
        )
        self._estimator = graph.estimator(query)
        self._codes: dict[int, np.ndarray] = {}  # of nodes that were read: of their neighbours
        self.rounds: list[Round] = []
        self.stats = WalkStats()

    def run(self, list_size: int, k: int, beam_width: int) -> tuple[np.ndarray, np.ndarray]:
        """Walks: (ids int64 [m], distances float32 [m]), m at most k: the nearest nodes of those
        that were read, ties by id.

        Args:
            list_size: candidates that are kept.
            k: nodes wanted.
            beam_width: candidates that are expanded in one round.

        Raises what reads and `Graph.parse` do, and FormatError for a node that is not there.
        """
        graph = self._graph
        entry = np.unique(np.asarray(graph.entry_points(self._query), dtype=np.int64))
        self._check_numbers(entry, "an entry point")
        self._walk = load_native().RoundWalk(
            n_nodes=graph.n_nodes,
            k=k,
            list_size=list_size,
            beam_width=beam_width,
            by_codes=self._estimator is not None,
            upper_layers=graph.n_upper_layers if isinstance(graph, LayeredGraph) else None,
        )
        ids, far = self._walk.run(self, torch.from_numpy(entry))
        return ids.numpy(), far.numpy()

    def read(self, numbers: torch.Tensor) -> None:
        """Reads a round's nodes, int64 [m]; parses and measures them as they arrive."""
        self._check()
        nodes, measured = numbers.numpy(), self.stats.distances
        future = self._read(self._graph.plan(nodes))
        position = future.position_bytes.numpy()
        missing, finished = set(nodes.tolist()), False
        while not finished:
            items, finished = future.next(-(-len(nodes) // _GROUPS))
            arrived = items.numpy()
            if arrived.size:  # the last of them may come with the news that there are no more
                missing -= self._take(
                    self._graph.parse(nodes[arrived], future.memory, position[arrived]),
                    future.memory,
                )
        if missing:
            first = next(node for node in nodes.tolist() if node in missing)
            raise errors.FormatError(
                f"node {first} of a graph", got="other nodes in its place", expected="that node"
            )
        self._count(
            WalkStats(
                hops=1,
                nodes=len(nodes),
                read_requests=future.request_count,
                bytes_asked=future.bytes_asked,
                bytes_moved=future.bytes_moved,
            )
        )
        self.rounds.append(
            Round(nodes, future.bytes_moved, self.stats.distances - measured, future.request_count)
        )
        if self._watch is not None:
            self._watch(self.rounds[-1])

    def estimate(self, node: int, neighbours: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """float32 [m]: how far some neighbours of a node are, int64 [m]; they have these places
        among all of its neighbours."""
        codes, estimator = self._codes.get(node), cast(Estimate, self._estimator)  # or nobody asks
        far = estimator(neighbours.numpy(), None if codes is None else codes[places.numpy()])
        self._count(WalkStats(estimates=len(far)))
        return torch.from_numpy(np.ascontiguousarray(far, dtype=np.float32))

    def upper_neighbours(self, layer: int, node: int) -> torch.Tensor:
        """int64 [m]: of a node in a layer above. Raises FormatError for one that is not there."""
        near = cast(LayeredGraph, self._graph).upper_neighbours(layer, node)  # or nobody asks
        self._check_neighbours(near, node)
        return torch.from_numpy(np.ascontiguousarray(near, dtype=np.int64))

    def _take(self, nodes: Nodes, memory: torch.Tensor) -> set[int]:
        """Hands those that the walk does not know to it; the numbers of all."""
        self._check_nodes(nodes)
        numbers, neighbours, first = (
            np.ascontiguousarray(each, np.int64)
            for each in (nodes.numbers, nodes.neighbours, nodes.first)
        )
        ids = numbers if nodes.ids is None else np.ascontiguousarray(nodes.ids, np.int64)
        fresh = self._walk.unknown(torch.from_numpy(numbers)).numpy()
        offset = torch.from_numpy(np.asarray(nodes.vector_offset_bytes, np.int64)[fresh])
        far = distances(
            self._query, memory, offset, self._graph.format, self._graph.metric, threads=1
        )
        if nodes.codes is not None:  # copies: what was read returns to the engine
            self._codes.update(
                (int(numbers[i]), np.array(nodes.codes[first[i] : first[i + 1]])) for i in fresh
            )
        self._walk.arrived(
            torch.from_numpy(numbers[fresh]),
            torch.from_numpy(ids[fresh]),
            far,
            torch.from_numpy(neighbours),
            torch.from_numpy(first[fresh]),
            torch.from_numpy(first[fresh + 1]),
        )
        self._count(WalkStats(distances=len(fresh)))
        return set(numbers.tolist())

    def _check_nodes(self, nodes: Nodes) -> None:
        self._check_numbers(nodes.numbers, "a node that was read")
        outside = self._outside(nodes.neighbours)
        if outside.size:
            owner = int(
                nodes.numbers[int(np.searchsorted(nodes.first, int(outside[0]), side="right")) - 1]
            )
            self._check_neighbours(nodes.neighbours[outside[:1]], owner)

    def _outside(self, nodes: np.ndarray) -> np.ndarray:
        """Places of those that are not there."""
        return np.flatnonzero((nodes < 0) | (nodes >= self._graph.n_nodes))

    def _check_neighbours(self, nodes: np.ndarray, owner: int) -> None:
        if (outside := self._outside(nodes)).size:
            raise errors.FormatError(
                f"neighbour of node {owner} of a graph",
                got=int(nodes[outside[0]]),
                expected=f"0 to {self._graph.n_nodes - 1}",
                fix="restore the graph from a copy, or build it again",
            )

    def _check_numbers(self, nodes: np.ndarray, what: str) -> None:
        if (outside := self._outside(nodes)).size:
            raise errors.FormatError(
                f"{what} of a graph",
                got=int(nodes[outside[0]]),
                expected=f"0 to {self._graph.n_nodes - 1}",
            )

    def _count(self, more: WalkStats) -> None:
        self.stats = self.stats + more
