"""A stored graph as a near-storage device walks over it: one command a query, whatever the walk
reads (RAGX, section 4.3)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from ... import errors
from ...device.vectors.interface import Estimate, Nodes
from ...storage import Engine, FileHandle, NativeEngine, Plan
from ..format import NODES, GraphFacts
from ..layout import HEADER
from ..pages.checked import parse_pages, read_codes
from ..pages.directory import read_graph
from ..search.kinds import refuse_clusters, refuse_gaps


class StoredGraph:
    """See `espnx.device.vectors.interface.Graph`. For a device's ``open_graph``; results are rows
    of the input.

    Queries of a graph by cosine must have length 1; distances are squared ones of vectors of length
    1 then.

    Args:
        path: of a graph that `espnx.graph.build` has made.

    Raises what `espnx.graph.open` raises.
    """

    def __init__(self, path: str | os.PathLike[str]):
        with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
            self.facts: GraphFacts = read_graph(engine, path)
            refuse_clusters(self.facts, "on a device")
            refuse_gaps(self.facts, "on a device")
            if self.facts.layout.paged_codes:
                raise errors.InvalidInputError(
                    f"graph {os.fspath(path)} on a device",
                    got="codes in pages of their own",
                    expected="inline or in memory",
                    fix='build it with codes="inline"',
                )
            if self.facts.layout.format == "pq":
                raise errors.InvalidInputError(
                    f"graph {os.fspath(path)} on a device",
                    got="codes in place of vectors",
                    expected="vectors in its nodes",
                    fix='build it with vector_dtype="float16"',
                )
            self._codes = (
                None if self.facts.layout.codes_in == "inline" else read_codes(engine, self.facts)
            )
        self._file: FileHandle | None = None

    @property
    def n_nodes(self) -> int:
        """See `Graph`."""
        return self.facts.layout.n

    @property
    def format(self) -> str:
        """See `Graph`."""
        return self.facts.layout.format

    @property
    def dim(self) -> int:
        """See `Graph`."""
        return self.facts.layout.dim

    @property
    def metric(self) -> str:
        """See `Graph`."""
        return "ip" if self.facts.metric == "ip" else "l2"

    def open(self, engine: Engine) -> Sequence[FileHandle]:
        """See `Graph`."""
        self._file = engine.open(self.facts.path(NODES))
        return [self._file]

    def entry_points(self, query: torch.Tensor) -> np.ndarray:
        """The entry point whose code is nearest."""
        if not len(self.facts.entries):
            return self.facts.entries
        return self.facts.entries[
            [int(np.argmin(self._estimates(self._table(query), self.facts.entry_codes)))]
        ]

    def plan(self, nodes: np.ndarray) -> Plan:
        """The page of each node."""
        if self._file is None:
            raise errors.StateError(
                "plan of a graph",
                got="a graph that no device has opened",
                fix="device.open_graph(graph)",
            )
        layout = self.facts.layout
        begin = self.facts.begin_bytes(NODES) + nodes // layout.nodes_per_page * layout.page_bytes
        return Plan.of(self._file, begin.tolist(), [layout.page_bytes] * len(nodes))

    def parse(self, nodes: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray) -> Nodes:
        """All nodes of the pages that were read."""
        layout = self.facts.layout
        pages, first = np.unique(nodes // layout.nodes_per_page, return_index=True)
        begin = np.asarray(position_bytes)[first]
        read = parse_pages(self.facts, pages, memory, begin)
        numbers = pages[:, None] * layout.nodes_per_page + np.arange(layout.nodes_per_page)
        there = numbers < layout.n
        vector = (
            begin[:, None] + HEADER.itemsize + np.arange(layout.nodes_per_page) * layout.node_bytes
        )
        found = read[there]
        counts = found["n_neighbours"].astype(np.int64)
        valid = np.arange(layout.max_degree) < counts[:, None]
        return Nodes(
            numbers=numbers[there],
            vector_offset_bytes=vector[there],
            neighbours=found["neighbours"][valid].astype(np.int64),
            first=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
            codes=found["codes"][valid] if self._codes is None else None,
            ids=found["row"].astype(np.int64),
        )

    def estimator(self, query: torch.Tensor) -> Estimate:
        """Estimates distances to a query by the codes of product quantisation."""
        table = self._table(query)

        def estimate(nodes: np.ndarray, codes: np.ndarray | None) -> np.ndarray:
            return self._estimates(
                table, np.asarray(codes) if self._codes is None else self._codes[nodes]
            )

        return estimate

    def _table(self, query: torch.Tensor) -> np.ndarray:
        """float32 [code_bytes, 256]: a query's part of the distance to each centroid."""
        book = self.facts.codebook
        values = book.rotated(query.numpy()[None])
        each = (
            -values * book.centroids if self.metric == "ip" else np.square(values - book.centroids)
        )
        return np.add.reduceat(each, book.begin[:-1], axis=1).T

    def _estimates(self, table: np.ndarray, codes: np.ndarray) -> np.ndarray:
        found: np.ndarray = table[np.arange(codes.shape[1]), codes].sum(axis=1, dtype=np.float32)
        return found
