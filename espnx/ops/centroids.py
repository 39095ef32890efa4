"""k-means and product quantisation of float32 vectors. Seeded: the same sample gives the same
bits."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from .. import errors
from ._native import load_extension
from .cuvs import fit_means_on

#: Centroids of one part of a vector: what a byte can name.
PRODUCT_CENTROIDS = 256
_MEANS_ROUNDS = 10
# Distances to means at a time: 16 MiB.
_PRODUCTS = 4 << 20
# Above so many rows a byte's centroids get no better.
_PRODUCT_SAMPLE = 256 * PRODUCT_CENTROIDS
# Ten more take 2 % off the squared error of the codes of 50,000 vectors of 128 dimensions in 55
# bytes, and half as long again.
_PRODUCT_ROUNDS = 16


def fit_means(
    sample: np.ndarray,
    n_means: int,
    *,
    rounds: int = _MEANS_ROUNDS,
    seed: int = 0,
    device: str = "cpu",
) -> np.ndarray:
    """k-means by the smallest distance: float32 [n_means, d] of a sample [m, d], m at least
    n_means.

    `device`: ``cpu``, or a GPU, where cuVS does it (and no seed counts). Raises
    MissingDependencyError, PathUnavailableError.
    """
    if device != "cpu":
        return fit_means_on(device, sample, n_means, rounds)
    values = _tensor(sample, np.float32)
    chosen = np.random.default_rng(seed).permutation(len(sample))[:n_means]
    means = values[torch.from_numpy(np.sort(chosen))].clone()
    for _ in range(rounds):
        blocks = values.split(max(1, _PRODUCTS // n_means))
        nearest = torch.cat(
            [
                torch.from_numpy(distances_to_means(each.numpy(), means.numpy()).argmin(axis=1))
                for each in blocks
            ]
        )
        counts = nearest.bincount(minlength=n_means)
        sums = torch.zeros_like(means).index_add_(0, nearest, values)
        means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], means)
    return means.numpy()


def distances_to_means(vectors: np.ndarray, means: np.ndarray) -> np.ndarray:
    """float32 [n, k]: squared, but for each vector's own length, which is the same for all
    means."""
    values, centres = _tensor(vectors, np.float32), _tensor(means, np.float32)
    return torch.addmm(centres.square().sum(dim=1)[None], values, centres.T, alpha=-2).numpy()


def fit_product_quantizer(
    sample: np.ndarray, begin: np.ndarray, *, seed: int = 0, device: str = "cpu"
) -> np.ndarray:
    """The centroids of each part of a vector, each named by a byte: k-means of each part by itself.

    FAISS's does the same, but takes 13 times as long for parts of one or two values as for wider
    ones.

    Args:
        sample: float32 [m, d], m >= 1; of more than 65,536 rows so many are taken, evenly spread.
        begin: int64 [parts + 1], from 0 to d: part p has the values ``begin[p]`` to ``begin[p + 1]
            - 1``.

        device: see `fit_means`.

    Returns:
        float32 [256, d]: row c has each part's centroid of number c.
    """
    if not len(sample):
        raise errors.InvalidInputError("vectors to fit centroids to", got=0, expected="1 or more")
    rows = (
        np.linspace(0, len(sample) - 1, min(len(sample), _PRODUCT_SAMPLE)).round().astype(np.int64)
    )
    # Around their mean: squares of numbers that are all large and much alike would leave little of
    # their differences.
    values = np.ascontiguousarray(sample[rows], dtype=np.float32)
    mean = values.mean(axis=0, dtype=np.float64).astype(np.float32)
    if device != "cpu" and len(values) >= PRODUCT_CENTROIDS:
        around = [values[:, a:b] - mean[a:b] for a, b in itertools.pairwise(begin)]
        means = [
            fit_means(part, PRODUCT_CENTROIDS, rounds=_PRODUCT_ROUNDS, device=device)
            for part in around
        ]
        return np.concatenate(means, axis=1) + mean
    found = load_extension().fit_product(
        torch.from_numpy(values - mean),
        _tensor(begin, np.int64),
        _PRODUCT_ROUNDS,
        seed,
        torch.get_num_threads(),
    )
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
    return (
        load_extension()
        .encode_product(values, _tensor(begin, np.int64), means, torch.get_num_threads())
        .numpy()
    )


def _tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
    # torch warns of memory that is read-only
    return torch.from_numpy(np.require(values, dtype, ["C", "W"]))
