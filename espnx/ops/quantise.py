"""Clusters and product quantisers of float32 vectors, fitted by FAISS. Seeded: the same sample gives the same bits.

It stands in `ops` because whatever stores vectors in lists or codes needs it, and lies above: the first stage's inverted lists, and graphs,
which may not import `retrieval`. The centroids of residual token formats are PyTorch's (ops/maxsim/kmeans.py): formats need no FAISS.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .. import errors

#: Centroids of one part of a vector: what a byte can name.
PRODUCT_CENTROIDS = 256
#: Of k-means, unless a caller says otherwise.
KMEANS_ROUNDS = 10
# Above so many rows a byte's centroids get no better, and FAISS would draw a sample itself.
_PRODUCT_SAMPLE = 256 * PRODUCT_CENTROIDS


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


def fit_product_quantizer(sample: np.ndarray, parts: int) -> np.ndarray:
    """The centroids of each part of a vector that is cut in `parts` equal ones, each named by a byte.

    Args:
        sample: float32 [m, d], m >= 256.
        parts: of a vector; divides d.

    Returns:
        float32 [parts, 256, d // parts].
    """
    faiss = load_faiss()
    rows = np.linspace(0, len(sample) - 1, min(len(sample), _PRODUCT_SAMPLE)).round().astype(np.int64)
    quantizer = faiss.ProductQuantizer(sample.shape[1], parts, 8)
    quantizer.cp.min_points_per_centroid = 1  # small samples are no mistake
    quantizer.train(np.ascontiguousarray(sample[rows], dtype=np.float32))
    return faiss.vector_to_array(quantizer.centroids).reshape(parts, PRODUCT_CENTROIDS, -1)


def encode_product(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest centroid of each part of each vector.

    Args:
        vectors: [n, d] of any dtype.
        centroids: float32 [parts, 256, d // parts], of `fit_product_quantizer`.

    Returns:
        uint8 [n, parts].
    """
    faiss = load_faiss()
    parts, _, width = centroids.shape
    quantizer = faiss.ProductQuantizer(parts * width, parts, 8)
    faiss.copy_array_to_vector(np.ascontiguousarray(centroids, dtype=np.float32).ravel(), quantizer.centroids)
    codes: np.ndarray = quantizer.compute_codes(np.ascontiguousarray(vectors, dtype=np.float32))
    return codes
