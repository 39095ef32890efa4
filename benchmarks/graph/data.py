"""Vectors, queries, and what is right: by recipe, or from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from espnx.errors import InvalidInputError
from espnx.graph import read_vectors
from espnx.ops.quantise import load_faiss

LATENT, CLUSTERS, NOISE = 24, 100, 0.1
#: Of separated clusters: dimensions that centres lie in, noise in all, and vectors of a centre.
RC_LATENT, RC_NOISE, RC_PER_CENTRE = 32, 0.5, 50
RECIPES = ("hard", "rc")
KIB = 1024
#: How many lists of SPANN have which size, as shares, by data set of 100 million vectors of uint8
#: (Sung, 2025).
LIST_MIXES: Mapping[str, Mapping[int, float]] = {
    "sift": {4 * KIB: 0.3883, 8 * KIB: 0.4809, 12 * KIB: 0.1102, 16 * KIB: 0.0206},
    "spacev": {4 * KIB: 0.3375, 8 * KIB: 0.3103, 12 * KIB: 0.3124, 16 * KIB: 0.0398},
}
#: Standard deviations that the steps of uint8 go, to both sides; what lies beyond is cut.
SPAN = 4.0
#: Of the squared size of a distance's parts: vectors may be stored as float16, and their distances
#: are those of what is stored.
TOLERANCE = 2.0**-9


@dataclass(frozen=True, eq=False)
class Data:
    """Attributes: base: [n, dim], uint8, int8 or float32; queries: [q, dim], likewise; k:
    neighbours that are asked for."""

    name: str
    base: np.ndarray
    queries: np.ndarray
    k: int

    @cached_property
    def farthest(self) -> np.ndarray:
        """float64 [q]: the squared distance of each query's k-th nearest, by a search of all."""
        _, ids = load_faiss().knn(
            self.queries.astype(np.float32), self.base.astype(np.float32), self.k
        )
        return self.distances(ids).max(axis=1)

    def distances(self, ids: np.ndarray) -> np.ndarray:
        """float64 [q, k]: squared, of the vectors as they are."""
        apart = self.base[ids].astype(np.float64) - self.queries[:, None].astype(np.float64)
        return np.einsum("qkd,qkd->qk", apart, apart)

    def recall(self, ids: np.ndarray) -> float:
        """The share of what was found that is as near as the k-th nearest; of equally near ones any
        will do."""
        return float((self.distances(ids) <= self.farthest[:, None] * (1 + 1e-9)).mean())

    def problem(self, ids: np.ndarray, far: np.ndarray) -> str | None:
        """What is wrong with a search's results, or None: rows that are none, found twice, or not
        as far as was said."""
        if ids.shape != (len(self.queries), self.k) or ids.min() < 0 or ids.max() >= len(self.base):
            return f"ids {list(ids.shape)} from {ids.min()} to {ids.max()}"
        if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
            return "a vector was found twice"
        norms = [
            np.square(part.astype(np.float64)).sum(axis=-1)
            for part in (self.base[ids], self.queries[:, None])
        ]
        # a NaN is wrong too
        wrong = ~(np.abs(far - self.distances(ids)) <= TOLERANCE * (norms[0] + norms[1]))
        if wrong.any():
            query, place = np.argwhere(wrong)[0]
            return (
                f"query {query}: {far[query, place]:g} instead of "
                f"{self.distances(ids)[query, place]:g}"
            )
        return None


def by_recipe(
    n: int,
    n_queries: int,
    k: int,
    seed: int,
    dim: int = 128,
    dtype: str = "float32",
    recipe: str = "hard",
) -> Data:
    """Vectors of one of `RECIPES`. Queries are drawn as the vectors are.

    ``hard``: overlapping clusters, since the nearest of a vector are in several of them. ``rc``:
    clusters that lie apart, of which a Gaussian centre in a subspace has 50 vectors, with noise in
    all dimensions: 1,000 centres of 50,000 vectors.
    """
    rng = np.random.default_rng(seed)
    draw = {"hard": _hard, "rc": _separated}[recipe](rng, n, dim)
    base, queries = draw(n), draw(n_queries)
    if dtype == "uint8":
        step = SPAN * float(base.std()) / 128
        base, queries = (
            np.clip(np.rint(values / step) + 128, 0, 255).astype(np.uint8)
            for values in (base, queries)
        )
    return Data(f"{recipe}, {n:,} x {dim} {dtype}", base, queries, k)


def _hard(rng: np.random.Generator, n: int, dim: int) -> Callable[[int], np.ndarray]:
    centres, spread = (
        rng.standard_normal((CLUSTERS, LATENT)),
        rng.standard_normal((LATENT, dim)) / np.sqrt(LATENT),
    )

    def draw(count: int) -> np.ndarray:
        inside = centres[rng.integers(0, CLUSTERS, count)] + rng.standard_normal((count, LATENT))
        return (inside @ spread + NOISE * rng.standard_normal((count, dim))).astype(np.float32)

    return draw


def _separated(rng: np.random.Generator, n: int, dim: int) -> Callable[[int], np.ndarray]:
    centres = rng.standard_normal((max(1, n // RC_PER_CENTRE), RC_LATENT))
    centres = centres @ rng.standard_normal((RC_LATENT, dim)) / np.sqrt(RC_LATENT)

    def draw(count: int) -> np.ndarray:
        of = centres[rng.integers(0, len(centres), count)]
        return (of + RC_NOISE * rng.standard_normal((count, dim))).astype(np.float32)

    return draw


def sizes_by_mix(mix: str, n_lists: int, seed: int) -> np.ndarray:
    """int64 [n_lists]: bytes of lists, as many of each size as one of `LIST_MIXES` says, in any
    order."""
    shares = LIST_MIXES[mix]
    wanted = np.array(list(shares.values())) * n_lists / sum(shares.values())
    counts = wanted.astype(np.int64)
    # the largest remainders have what rounding down has left
    counts[np.argsort(counts - wanted, kind="stable")[: n_lists - counts.sum()]] += 1
    return np.random.default_rng(seed).permutation(np.repeat(list(shares), counts))


def lists_by_mix(
    mix: str, n_lists: int, n_queries: int, seed: int, dim: int = 128
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors in lists of the sizes of one of `LIST_MIXES`.

    Returns:
        (vectors uint8 [n, dim], the list of each int64 [n], queries uint8 [n_queries, dim]): each
        list is as full of vectors and their ids of 4 bytes as its size lets it be.
    """
    rng = np.random.default_rng(seed)
    counts = sizes_by_mix(mix, n_lists, seed) // (dim + 4)
    list_of = np.repeat(np.arange(n_lists), counts)
    centres = rng.integers(0, 256, (n_lists, dim))

    def near(which: np.ndarray) -> np.ndarray:
        noise = rng.integers(-16, 17, (len(which), dim))
        return np.clip(centres[which] + noise, 0, 255).astype(np.uint8)

    return near(list_of), list_of, near(rng.integers(0, n_lists, n_queries))


def from_files(base: str, queries: str, n_queries: int, k: int) -> Data:
    """Raises what `read_vectors` raises, and InvalidInputError for files that do not fit
    together."""
    vectors, asked = (np.concatenate(list(read_vectors(path).blocks())) for path in (base, queries))
    if vectors.shape[1] != asked.shape[1] or len(vectors) < k or not len(asked):
        raise InvalidInputError(
            "vectors and queries",
            got=f"{list(vectors.shape)} and {list(asked.shape)}",
            expected=f"one dimension, {k} vectors or more",
        )
    dtype = (
        vectors.dtype
        if vectors.dtype.kind in "iu" and asked.dtype == vectors.dtype
        else np.dtype(np.float32)
    )
    name = f"{base.rsplit('/', 1)[-1]}, {len(vectors):,} x {vectors.shape[1]} {dtype}"
    return Data(name, vectors.astype(dtype), asked[:n_queries].astype(dtype), k)
