"""The links of an HNSW (Malkov and Yashunin, arXiv 1603.09320) as arrays, and the bytes that hold
them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ... import errors

#: Links of a node in the lowest layer are twice as many: FAISS's limit is in its int32, ours in
#: what one page of them should take.
M_MAX = 1024
LAYERS_MAX = 64
_REBUILD = "restore the directory from a copy, or build it again"


@dataclass(frozen=True, eq=False)
class Links:
    """Who is whose neighbour. Rows end with -1 where a node has fewer neighbours than fit.

    Attributes:
        layers: uint8 [n]: of each node, 1 or more.
        lowest: int32 [n, 2 m]: neighbours in the lowest layer.
        upper: int32 [sum of layers - 1, m]: in the layers above, node after node, the lowest of
            them first.
        entry: the node at which walks begin; -1 where there is none.
    """

    layers: np.ndarray
    lowest: np.ndarray
    upper: np.ndarray
    entry: int

    @property
    def n(self) -> int:
        """Nodes."""
        return len(self.layers)

    @property
    def m(self) -> int:
        """Neighbours of a node in a layer above."""
        return int(self.upper.shape[1])

    @property
    def n_upper_layers(self) -> int:
        return int(self.layers[self.entry]) - 1 if self.n else 0

    @property
    def memory_bytes(self) -> int:
        return int(
            self.layers.nbytes + self.lowest.nbytes + self.upper.nbytes + self._first_upper.nbytes
        )

    @cached_property
    def _first_upper(self) -> np.ndarray:
        """int64 [n]: each one's first row of `upper`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.layers.astype(np.int64) - 1)])[
            : self.n
        ]

    def near(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(their neighbours in the lowest layer, node after node, and where each one's begin, [m +
        1]), both int64."""
        rows = self.lowest[nodes]
        counts = np.count_nonzero(rows >= 0, axis=1)
        return rows[rows >= 0].astype(np.int64), np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(counts)]
        )

    def near_above(self, layer: int, node: int) -> np.ndarray:
        """int64 [m]: neighbours in a layer above, from 1. Raises FormatError for a node that does
        not reach it."""
        if not 1 <= layer < self.layers[node]:
            raise errors.FormatError(
                f"layer {layer} of node {node} of an HNSW",
                got=f"a node of {self.layers[node]} layers",
                expected=f"{layer + 1} or more",
                fix=_REBUILD,
            )
        row = self.upper[self._first_upper[node] + layer - 1]
        return row[row >= 0].astype(np.int64)

    def to_bytes(self) -> bytes:
        """The file of links: layers, lowest, upper."""
        return self.layers.tobytes() + self.lowest.tobytes() + self.upper.tobytes()

    def check(self, path: str | os.PathLike[str] | None = None) -> None:
        """Raises FormatError for links that lead nowhere. `path`: where they are from."""
        problem = self._problem()
        if problem is not None:
            raise errors.FormatError(
                f"links of an HNSW: {problem[0]}",
                path=path,
                got=problem[1],
                expected=problem[2],
                fix=_REBUILD,
            )

    def _problem(self) -> tuple[str, object, str] | None:
        if not self.n:
            return (
                None if self.entry == -1 else ("entry point", self.entry, "-1: there are no nodes")
            )
        if not 0 <= self.entry < self.n or self.layers[self.entry] != self.layers.max():
            return (
                "entry point",
                self.entry,
                f"a node of {self.layers.max()} layers, as the highest has",
            )
        if not 1 <= self.layers.min() <= self.layers.max() <= LAYERS_MAX:
            return (
                "layers of a node",
                f"{self.layers.min()} to {self.layers.max()}",
                f"1 to {LAYERS_MAX}",
            )
        if len(self.upper) != int(self.layers.astype(np.int64).sum()) - self.n:
            return "rows above", len(self.upper), "one for each node and layer"
        for name, rows in (("lowest layer", self.lowest), ("layers above", self.upper)):
            if rows.size and not -1 <= int(rows.min()) <= int(rows.max()) < self.n:
                return (
                    f"neighbours in the {name}",
                    f"{rows.min()} to {rows.max()}",
                    f"0 to {self.n - 1}, and -1 behind the last",
                )
            if (rows[:, 1:] > rows[:, :-1]).any() and (
                (rows[:, :-1] < 0) & (rows[:, 1:] >= 0)
            ).any():
                return f"neighbours in the {name}", "one behind the end", "-1 behind the last"
        height = np.concatenate(
            [np.arange(1, count) for count in self.layers[self.layers > 1].tolist()]
            or [np.empty(0, np.int64)]
        )
        low = (self.upper >= 0) & (self.layers[self.upper] <= height[:, None])
        if low.any():
            return (
                "neighbours in the layers above",
                int(self.upper[low][0]),
                "nodes that reach that layer",
            )
        return None


def parse_links(data: bytes, n: int, m: int, n_upper: int, entry: int) -> Links:
    """Links of bytes of the right length, not yet checked."""
    lowest_begin, upper_begin = n, n + 8 * n * m
    return Links(
        np.frombuffer(data, np.uint8, n),
        np.frombuffer(data, "<i4", 2 * n * m, lowest_begin).reshape(n, 2 * m),
        np.frombuffer(data, "<i4", n_upper * m, upper_begin).reshape(n_upper, m),
        entry,
    )


def links_bytes(n: int, m: int, n_upper: int) -> int:
    """Bytes of the file."""
    return n + 4 * m * (2 * n + n_upper)
