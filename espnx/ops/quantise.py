"""Clusters of float32 vectors, fitted by FAISS, and product quantisers, fitted here. Seeded: the same sample gives the same bits.

It stands in `ops` because whatever stores vectors in lists or codes needs it, and lies above: the first stage's inverted lists, and graphs,
which may not import `retrieval`. The centroids of residual token formats are PyTorch's (ops/maxsim/kmeans.py): formats need no FAISS.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from .. import errors
from ._native import load_extension

#: Centroids of one part of a vector: what a byte can name.
PRODUCT_CENTROIDS = 256
#: Of k-means, unless a caller says otherwise.
KMEANS_ROUNDS = 10
# Above so many rows a byte's centroids get no better.
_PRODUCT_SAMPLE = 256 * PRODUCT_CENTROIDS
# Ten more take 2 % off the squared error of the codes of 50,000 vectors of 128 dimensions in 55 bytes, and half as long again.
_PRODUCT_ROUNDS = 16


def load_faiss() -> Any:
    """FAISS, or MissingDependencyError."""
    # FAISS brings its own OpenMP, whose idle threads would otherwise spin on the core that the reads and MaxSim need. Read once, at load.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import faiss
    except ImportError as error:
        raise errors.MissingDependencyError(
            "the first stage needs FAISS", got=str(error), fix="pip install 'espnx[retrieval]' (or faiss-cpu)"
        ) from error
    return faiss


def fit_clusters(sample: np.ndarray, n_clusters: int, *, is_spherical: bool, iterations: int = KMEANS_ROUNDS) -> np.ndarray:
    """k-means.

    Args:
        sample: float32 [m, d], m >= n_clusters.
        is_spherical: clusters by the largest inner product, centroids of length 1; else by the smallest distance.

    Returns:
        Centroids, float32 [n_clusters, d].
    """
    faiss = load_faiss()
    sample = np.ascontiguousarray(sample, dtype=np.float32)
    dim = sample.shape[1]
    clustering = faiss.Clustering(dim, n_clusters)
    clustering.spherical, clustering.niter = is_spherical, iterations
    clustering.min_points_per_centroid = 1  # small corpora are no mistake
    clustering.train(sample, faiss.IndexFlatIP(dim) if is_spherical else faiss.IndexFlatL2(dim))
    return faiss.vector_to_array(clustering.centroids).reshape(n_clusters, dim)


def fit_product_quantizer(sample: np.ndarray, begin: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """The centroids of each part of a vector, each named by a byte: k-means of each part by itself.

    FAISS's does the same, but takes 13 times as long for parts of one or two values as for wider ones.

    Args:
        sample: float32 [m, d], m >= 1; of more than 65,536 rows so many are taken, evenly spread.
        begin: int64 [parts + 1], from 0 to d: part p has the values ``begin[p]`` to ``begin[p + 1] - 1``.

    Returns:
        float32 [256, d]: row c has each part's centroid of number c.
    """
    if not len(sample):
        raise errors.InvalidInputError("vectors to fit centroids to", got=0, expected="1 or more")
    rows = np.linspace(0, len(sample) - 1, min(len(sample), _PRODUCT_SAMPLE)).round().astype(np.int64)
    # Around their mean: squares of numbers that are all large and much alike would leave little of their differences.
    values = np.ascontiguousarray(sample[rows], dtype=np.float32)
    mean = values.mean(axis=0, dtype=np.float64).astype(np.float32)
    found = load_extension().fit_product(
        torch.from_numpy(values - mean), _tensor(begin, np.int64), _PRODUCT_ROUNDS, seed, torch.get_num_threads()
    )  # fmt: skip
    return found.numpy() + mean


def encode_product(vectors: np.ndarray, begin: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest centroid of each part of each vector.

    Args:
        vectors: [n, d] of any dtype.
        begin: int64 [parts + 1]. centroids: float32 [256, d]; of `fit_product_quantizer`.

    Returns:
        uint8 [n, parts].
    """
    values, means = _tensor(vectors, np.float32), _tensor(centroids, np.float32)
    return load_extension().encode_product(values, _tensor(begin, np.int64), means, torch.get_num_threads()).numpy()


def _tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.require(values, dtype, ["C", "W"]))  # torch warns of memory that is read-only
