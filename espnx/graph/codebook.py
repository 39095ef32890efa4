"""Product quantisation of vectors: each is cut in parts, and each part named by the nearest of its 256 centroids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ops.centroids import encode_product, fit_product_quantizer

_SAMPLE = 65_536


@dataclass(frozen=True, eq=False)
class Codebook:
    """Centroids of the parts of vectors.

    Attributes:
        begin: int64 [code_bytes + 1]: part p has the dimensions ``begin[p]`` to ``begin[p + 1] - 1``.
        centroids: float32 [256, dim]: row c has each part's centroid of number c.
    """

    begin: np.ndarray
    centroids: np.ndarray

    @property
    def code_bytes(self) -> int:
        return len(self.begin) - 1

    def encode(self, vectors: np.ndarray) -> np.ndarray:
        """uint8 [n, code_bytes] of vectors [n, dim] of any dtype."""
        return encode_product(vectors, self.begin, self.centroids)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 [n, dim]: what codes stand for."""
        part = np.repeat(np.arange(self.code_bytes), np.diff(self.begin))
        return self.centroids[codes[:, part], np.arange(self.centroids.shape[1])]


def train_codebook(vectors: np.ndarray, code_bytes: int, *, seed: int = 0, device: str = "cpu") -> Codebook:
    """k-means of each part over a sample of the vectors, [n, dim], n at least 1. The first parts are a dimension longer where code_bytes
    does not divide dim."""
    n, dim = vectors.shape
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:_SAMPLE])
    sample = np.asarray(vectors[chosen], dtype=np.float32)
    begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(dim // code_bytes + (np.arange(code_bytes) < dim % code_bytes))])
    return Codebook(begin, fit_product_quantizer(sample, begin, seed=seed, device=device))
