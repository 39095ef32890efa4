"""Product quantisation of vectors: each is rotated where that helps, and cut in parts, each named
by the nearest of 256 centroids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...ops.centroids import PRODUCT_CENTROIDS, encode_product, fit_product_quantizer
from .rotation import fit_rotation

_SAMPLE = 65_536
# Rotated at a time: vectors that are held once more, as float32.
_BLOCK_BYTES = 4 << 20
# With more dimensions the rotation would be more than 16 MiB, of which an open graph keeps all. Of
# fewer vectors it would weigh more than a quarter of them as float16, and would follow the sample.
_ROTATED_DIM_MAX, _ROWS_PER_DIM, _ROTATED_ROWS_MIN = 2048, 8, 256
# Of the sample, by which it is decided whether a rotation is any good: so many centroids are fitted
# to, and as many others measured. What it takes off the squared error must be more than two samples
# differ by.
_TRIED_ROWS, _BETTER = 4096, 0.95
# Values of a turned vector are sums of products: of vectors farther from the origin than so many
# times what they differ by, float32 would keep too little of the differences.
_FAR = 256
# Of a value of the covariance, while its principal directions are looked for.
_BYTES_PER_COVARIANCE = 48


@dataclass(frozen=True, eq=False)
class Codebook:
    """Centroids of the parts of vectors.

    Attributes:
        begin: int64 [code_bytes + 1]: part p has the dimensions ``begin[p]`` to ``begin[p + 1] -
            1``.
        centroids: float32 [256, dim]: row c has each part's centroid of number c.
        rotation: float32 [dim, dim], orthogonal: parts are of ``vectors @ rotation``; None: of the
            vectors as they are.
    """

    begin: np.ndarray
    centroids: np.ndarray
    rotation: np.ndarray | None = None

    @property
    def code_bytes(self) -> int:
        return len(self.begin) - 1

    def rotated(self, vectors: np.ndarray) -> np.ndarray:
        """float32 [n, dim]: what parts are of."""
        values = np.asarray(vectors, dtype=np.float32)
        return values if self.rotation is None else _product(values, self.rotation)

    def encode(self, vectors: np.ndarray) -> np.ndarray:
        """uint8 [n, code_bytes] of vectors [n, dim] of any dtype."""
        if self.rotation is None:
            return encode_product(vectors, self.begin, self.centroids)
        found = np.empty((len(vectors), self.code_bytes), np.uint8)
        at_once = max(1, _BLOCK_BYTES // (4 * vectors.shape[1]))
        for first in range(0, len(vectors), at_once):
            part = slice(first, first + at_once)
            found[part] = encode_product(self.rotated(vectors[part]), self.begin, self.centroids)
        return found

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 [n, dim]: what codes stand for."""
        part = np.repeat(np.arange(self.code_bytes), np.diff(self.begin))
        values: np.ndarray = self.centroids[codes[:, part], np.arange(self.centroids.shape[1])]
        return values if self.rotation is None else _product(values, self.rotation.T)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return (
            codebook_bytes(self.centroids.shape[1], is_rotated=self.rotation is not None)
            + self.begin.nbytes
        )

    def packed(self) -> np.ndarray:
        """float32: centroids, and the rotation behind them, as files have them. See
        `unpack_codebook`."""
        parts = [self.centroids] if self.rotation is None else [self.centroids, self.rotation]
        return np.concatenate([each.reshape(-1) for each in parts])


def codebook_bytes(dim: int, *, is_rotated: bool) -> int:
    """Bytes of a packed codebook of vectors of `dim` values."""
    return 4 * dim * (PRODUCT_CENTROIDS + (dim if is_rotated else 0))


def unpack_codebook(begin: np.ndarray, values: np.ndarray, dim: int) -> Codebook:
    """A codebook of `codebook_bytes` of float32, with a rotation where there are so many."""
    centroids, rest = np.split(values, [PRODUCT_CENTROIDS * dim])
    return Codebook(
        begin,
        centroids.reshape(PRODUCT_CENTROIDS, dim),
        rest.reshape(dim, dim) if len(rest) else None,
    )


def may_rotate(n: int, dim: int, code_bytes: int, *, use_opq: bool) -> bool:
    """Whether a rotation is tried for n vectors: with a byte for each dimension there is nothing to
    deal out."""
    return (
        use_opq
        and code_bytes < dim <= _ROTATED_DIM_MAX
        and n >= max(_ROTATED_ROWS_MIN, _ROWS_PER_DIM * dim)
    )


def rotation_fit_bytes(n: int, dim: int, code_bytes: int, *, use_opq: bool) -> int:
    """Memory that is taken meanwhile, beside the sample's."""
    return _BYTES_PER_COVARIANCE * dim**2 if may_rotate(n, dim, code_bytes, use_opq=use_opq) else 0


def train_codebook(
    vectors: np.ndarray,
    code_bytes: int,
    *,
    n: int | None = None,
    use_opq: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> Codebook:
    """k-means of each part over a sample of the vectors, [m, dim], m at least 1. The first parts
    are a dimension longer where code_bytes does not divide dim.

    Args:
        n: vectors that there are, of which these are a sample; None: these are all.
        use_opq: of rotated vectors, see `fit_rotation`, where that makes codes better by 5 % of the
            squared error; of 256 vectors or more, 8 for each dimension, and 2,048 dimensions or
            fewer.
    """
    dim = vectors.shape[1]
    chosen = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:_SAMPLE])
    sample = np.asarray(vectors[chosen], dtype=np.float32)
    begin = np.concatenate(
        [
            np.zeros(1, np.int64),
            np.cumsum(dim // code_bytes + (np.arange(code_bytes) < dim % code_bytes)),
        ]
    )
    rotation = None
    if may_rotate(
        len(vectors) if n is None else n, dim, code_bytes, use_opq=use_opq
    ) and not _is_far(_some(sample, 1024)):
        rotation = fit_rotation(sample, begin)
        tried = _some(sample, 2 * _TRIED_ROWS)
        if not _loss(tried, begin, rotation, seed, device) < _BETTER * _loss(
            tried, begin, None, seed, device
        ):
            rotation = None
    if rotation is not None:
        # in place: a build in bounded memory has room for one of these
        for first in range(0, len(sample), _TRIED_ROWS):
            sample[first : first + _TRIED_ROWS] = _product(
                sample[first : first + _TRIED_ROWS], rotation
            )
    return Codebook(begin, fit_product_quantizer(sample, begin, seed=seed, device=device), rotation)


def _some(sample: np.ndarray, most: int) -> np.ndarray:
    """A view of at most so many rows, evenly spread."""
    return sample[:: -(-len(sample) // most)]


def _is_far(rows: np.ndarray) -> bool:
    return bool(
        np.abs(rows.mean(axis=0, dtype=np.float64)).max()
        > _FAR * rows.std(axis=0, dtype=np.float64).mean()
    )


def _loss(
    rows: np.ndarray, begin: np.ndarray, rotation: np.ndarray | None, seed: int, device: str
) -> float:
    """The squared error of codes of one half of some vectors, by centroids of the other."""
    fitted, others = rows[::2], rows[1::2]
    turned = fitted if rotation is None else _product(fitted, rotation)
    book = Codebook(begin, fit_product_quantizer(turned, begin, seed=seed, device=device), rotation)
    return float(np.square(book.decode(book.encode(others)) - others, dtype=np.float64).sum())


def _product(vectors: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """The product, by torch, which keeps to the threads that it was given."""
    found: np.ndarray = torch.mm(
        torch.from_numpy(np.require(vectors, np.float32, ["C", "W"])), torch.from_numpy(matrix)
    ).numpy()
    return found
