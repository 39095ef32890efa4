"""Small sets of vectors, and graphs of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import espnx.graph
from tests.forks import Forks


def clustered(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """float32 [n, dim]: overlapping clusters in a space of few dimensions, and noise."""
    random = np.random.default_rng(seed)
    inner = min(dim, 12)
    space = np.random.default_rng(99)  # the same for every seed
    centres, spread = space.standard_normal((20, inner)), space.standard_normal((inner, dim))
    latent = centres[random.integers(0, 20, n)] + 0.5 * random.standard_normal((n, inner))
    return (latent @ spread + 0.1 * random.standard_normal((n, dim))).astype(np.float32)


def exact(base: np.ndarray, queries: np.ndarray, k: int, metric: str = "l2") -> np.ndarray:
    """int64 [q, k]: the nearest rows, by float64, ties by number."""
    a, b = base.astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        a, b = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (a, b))
    products = b @ a.T if metric == "ip" else None
    found = np.empty((len(b), min(k, len(a))), np.int64)
    for i, query in enumerate(b):
        # what is subtracted from one query stays in the processor's cache
        far = np.square(query - a).sum(axis=-1) if products is None else -products[i]
        near = np.arange(len(a))
        if 0 < k < len(a):
            near = np.flatnonzero(far <= np.partition(far, k - 1)[k - 1])
        found[i] = near[np.argsort(far[near], kind="stable")[:k]]
    return found


def recall_of(found: np.ndarray, true: np.ndarray) -> float:
    """The share of the true ones that were found."""
    return (
        sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(found, true, strict=True))
        / true.size
    )


@pytest.fixture(scope="session")
def base() -> np.ndarray:
    return clustered(3000, 24)


@pytest.fixture(scope="session")
def queries() -> np.ndarray:
    return clustered(60, 24, seed=1)


@pytest.fixture(scope="session", params=["inline", "memory", "paged"])
def graph(
    request: pytest.FixtureRequest, base: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A graph of `base`, codes beside their nodes, in memory, or in pages of their own."""
    path = tmp_path_factory.mktemp("graph") / request.param
    espnx.graph.build(
        base,
        path,
        max_degree=16,
        list_size=40,
        codes=request.param,
        num_entry_points=20,
        threads=1,
        pq_bytes=8 if request.param == "inline" else 12,
    )
    return path


@pytest.fixture(scope="session")
def processes(open_forks: Callable[[str], Forks]) -> Forks:
    """Builders that can be killed."""
    return open_forks("tests.graph.zygote")
