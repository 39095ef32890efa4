"""Files of clusters for tests, and what must come out of them, by NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from espnx.device.clusters import write_clusters

DTYPES = {"uint8": np.uint8, "int8": np.int8, "fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Made:
    """Vectors in clusters. All values are whole, so that every format's distances are exact."""

    directory: Path
    format: str
    ids: np.ndarray
    vectors: np.ndarray
    of_cluster: list[np.ndarray]  # which vectors

    def query(self, seed: int = 1) -> torch.Tensor:
        values = random_values(self.format, (self.vectors.shape[1],), seed)
        return torch.from_numpy(values if values.dtype.kind in "iu" else values.astype(np.float32))

    def reply(
        self, query: torch.Tensor, cluster: int, metric: str = "l2"
    ) -> list[tuple[float, int]]:
        """(distance, id) of each vector of a cluster, in order."""
        rows, wanted = (
            self.vectors[self.of_cluster[cluster]].astype(np.int64),
            query.numpy().astype(np.int64),
        )
        far = ((rows - wanted) ** 2).sum(1) if metric == "l2" else -(rows * wanted).sum(1)
        return [
            (float(np.float32(each)), int(of))
            for each, of in zip(far, self.ids[self.of_cluster[cluster]], strict=True)
        ]

    def nearest(
        self, query: torch.Tensor, clusters: list[int], k: int, metric: str = "l2"
    ) -> list[tuple[float, int]]:
        """The k nearest, each id once, ties by id."""
        best: dict[int, float] = {}
        for cluster in clusters:
            for far, of in self.reply(query, cluster, metric):
                best[of] = min(far, best.get(of, np.inf))
        return sorted((far, of) for of, far in best.items())[:k]


def random_values(fmt: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    low, high = {"uint8": (0, 256), "int8": (-128, 128)}.get(fmt, (-9, 10))
    return np.random.default_rng(seed).integers(low, high, shape).astype(DTYPES[fmt])


def make(folder: Path, counts: list[int], fmt: str = "uint8", dim: int = 60, seed: int = 0) -> Made:
    """Clusters of so many vectors, written in a random order."""
    n = sum(counts)
    rng = np.random.default_rng(seed)
    assignment = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    ids = rng.permutation(n).astype(np.int32) * 3 - n
    vectors = random_values(fmt, (n, dim), seed)
    directory = folder / f"clusters-{fmt}-{dim}-{seed}"
    write_clusters(directory, ids, vectors, assignment, n_clusters=len(counts))
    return Made(
        directory,
        fmt,
        ids,
        vectors,
        [np.flatnonzero(assignment == cluster) for cluster in range(len(counts))],
    )


def pairs(replies: np.ndarray) -> list[tuple[float, int]]:
    """Entries of a reply as the oracle has them."""
    return [(float(each["distance"]), int(each["id"])) for each in replies]
