"""Centroids of token vectors by the largest dot product: assignment in bounded memory, and seeded
k-means in one or two levels."""

from __future__ import annotations

import torch

ITERATIONS = 6
# above this many centroids in two levels, whose cost grows with the root of their number
FLAT_MAX = 1024
CHUNK_PRODUCTS = 4 << 20  # 16 MiB of dot products at a time


def nearest_centroids(tokens: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The number of the centroid with the largest dot product for each token (the first of equals).

    Args:
        tokens: float32 ``[n, d]``.
        centroids: float32 ``[K, d]``.

    Returns:
        int64 ``[n]``.
    """
    numbers = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
    chunk = max(1, CHUNK_PRODUCTS // len(centroids))
    for part, out in zip(tokens.split(chunk), numbers.split(chunk), strict=True):
        out.copy_((part @ centroids.T).max(dim=1).indices)
    return numbers


def fit_centroids(
    sample: torch.Tensor, n_centroids: int, generator: torch.Generator
) -> torch.Tensor:
    """Seeded spherical k-means: float32 ``[n_centroids, d]`` of length 1.

    Above `FLAT_MAX` the sample is first divided in about ``sqrt(n_centroids)`` groups, and each
    group gets a share of the centroids by its size: ``m * sqrt(K)`` instead of ``m * K`` dot
    products a round.
    """
    if n_centroids <= FLAT_MAX:
        return _lloyd(sample, n_centroids, generator)
    groups = _lloyd(sample, round(n_centroids**0.5), generator)
    numbers = nearest_centroids(sample, groups)
    order = numbers.argsort(stable=True)
    sizes = numbers.bincount(minlength=len(groups))
    parts = sample[order].split(sizes.tolist())
    shares = _shares(sizes, n_centroids)
    return torch.cat(
        [_lloyd(part, share, generator) for part, share in zip(parts, shares, strict=True) if share]
    )


def _shares(sizes: torch.Tensor, total: int) -> list[int]:
    """Whole shares of ``total`` in proportion to ``sizes``, none above its size: the largest
    fractions are rounded up."""
    exact = sizes.double() * total / sizes.sum()
    shares = torch.minimum(exact.floor().long(), sizes)
    while (missing := total - int(shares.sum())) > 0:
        fraction = torch.where(shares < sizes, exact - shares, -torch.inf)
        chosen = fraction.argsort(descending=True, stable=True)[
            : min(missing, int((shares < sizes).sum()))
        ]
        shares[chosen] += 1
    return [int(share) for share in shares]


def _lloyd(sample: torch.Tensor, n_centroids: int, generator: torch.Generator) -> torch.Tensor:
    first = torch.randperm(len(sample), generator=generator)[:n_centroids]
    centroids = torch.nn.functional.normalize(sample[first], dim=1)
    for _ in range(ITERATIONS):
        numbers = nearest_centroids(sample, centroids)
        sums = torch.zeros_like(centroids).index_add_(0, numbers, sample)
        empty = numbers.bincount(minlength=n_centroids) == 0
        # A centroid that nobody chose starts again at a random token.
        again = torch.randint(len(sample), (int(empty.sum()),), generator=generator)
        sums[empty] = sample[again]
        centroids = torch.nn.functional.normalize(sums, dim=1)
    return centroids
