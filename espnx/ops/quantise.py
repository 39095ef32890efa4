"""Clusters of float32 vectors, fitted by FAISS. Seeded: the same sample gives the same bits.

Product quantisers and clusters for graphs are espnx's own (ops/centroids.py), and the centroids of
residual token formats PyTorch's (ops/maxsim/kmeans.py): formats and graphs need no FAISS.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .. import errors

#: Of k-means, unless a caller says otherwise.
KMEANS_ROUNDS = 10


def load_faiss() -> Any:
    """FAISS, or MissingDependencyError."""
    # FAISS brings its own OpenMP, whose idle threads would otherwise spin on the core that the
    # reads and MaxSim need. Read once, at load.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import faiss
    except ImportError as error:
        raise errors.MissingDependencyError(
            "the first stage needs FAISS",
            got=str(error),
            fix="pip install 'espnx[retrieval]' (or faiss-cpu)",
        ) from error
    return faiss


def fit_clusters(
    sample: np.ndarray,
    n_clusters: int,
    *,
    is_spherical: bool,
    iterations: int = KMEANS_ROUNDS,
    seed: int = 1234,
) -> np.ndarray:
    """k-means.

    Args:
        sample: float32 [m, d], m >= n_clusters.
        is_spherical: clusters by the largest inner product, centroids of length 1; else by the
            smallest distance.
        seed: of what k-means begins with, below 2^31.

    Returns:
        Centroids, float32 [n_clusters, d].
    """
    faiss = load_faiss()
    sample = np.ascontiguousarray(sample, dtype=np.float32)
    dim = sample.shape[1]
    clustering = faiss.Clustering(dim, n_clusters)
    clustering.spherical, clustering.niter, clustering.seed = is_spherical, iterations, seed
    clustering.min_points_per_centroid = 1  # small corpora are no mistake
    clustering.train(sample, faiss.IndexFlatIP(dim) if is_spherical else faiss.IndexFlatL2(dim))
    return faiss.vector_to_array(clustering.centroids).reshape(n_clusters, dim)
