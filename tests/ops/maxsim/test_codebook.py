"""Codebooks: what they refuse, and k-means and quantiles that find structure which is known to be
there."""

from __future__ import annotations

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops.maxsim import Codebook, kmeans, token_format
from espnx.ops.maxsim.kmeans import _shares, fit_centroids, nearest_centroids
from tests.ops.records import codebook_for

GOOD = (torch.zeros(5, 16), torch.tensor([-1.0, 0.0, 1.0]), torch.zeros(4))


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


def clustered(
    n_clusters: int, m: int, d: int, noise: float, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens around random directions, and those directions."""
    centres = unit(n_clusters, d, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    chosen = torch.randint(n_clusters, (m,), generator=generator)
    return torch.nn.functional.normalize(
        centres[chosen] + noise * torch.randn(m, d, generator=generator) / d**0.5, dim=1
    ), centres


def test_facts() -> None:
    codebook = Codebook(*GOOD)
    assert (codebook.nbits, codebook.d, codebook.n_centroids, codebook.format) == (
        2,
        16,
        5,
        "residual2",
    )
    assert codebook.to("cpu").bucket_cutoffs.tolist() == [-1, 0, 1]
    strided = Codebook(torch.arange(80.0).view(16, 5).T, *GOOD[1:])
    assert strided.centroids.is_contiguous()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, torch.zeros(5, 16, dtype=torch.float16)),
        (0, torch.zeros(80)),
        (0, torch.zeros(0, 16)),
        (0, torch.zeros(5, 0)),
        (0, torch.full((5, 16), torch.nan)),
        (1, torch.tensor([1.0, 0.0, -1.0])),
        (1, torch.zeros(4)),
        (1, torch.tensor([0.0, 1.0, torch.inf])),
        (2, torch.zeros(3)),
        (2, torch.zeros(8)),
        (2, torch.zeros(4, dtype=torch.float64)),
        (2, torch.zeros(2, 2)),
    ],
)
def test_tables_of_other_shapes_and_values(place: int, value: torch.Tensor) -> None:
    tables = list(GOOD)
    tables[place] = value
    with pytest.raises(InvalidInputError):
        Codebook(*tables)


@pytest.mark.parametrize(
    ("sample", "nbits", "n_centroids"),
    [
        (unit(10, 16), 3, 2),
        (unit(10, 16), 2, 11),
        (unit(10, 16), 2, 0),
        (torch.zeros(10, 0), 2, 2),
        (unit(10, 16).double(), 2, 2),
        (unit(16), 2, 2),
        (torch.full((10, 16), torch.nan), 2, 2),
    ],
)
def test_samples_that_cannot_be_fitted(sample: torch.Tensor, nbits: int, n_centroids: int) -> None:
    with pytest.raises(InvalidInputError, match=r"codebook|dimension"):
        Codebook.fit(sample, nbits, n_centroids)


def test_nearest_is_the_largest_dot_product_and_the_first_of_equals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, centroids = unit(100, 16), unit(9, 16, seed=1)
    centroids[5] = centroids[2]
    expected = (tokens @ centroids.T).argmax(dim=1)
    assert not (expected == 5).any()
    for products in (1, 9, 100, 10**6):
        monkeypatch.setattr(kmeans, "CHUNK_PRODUCTS", products)
        assert torch.equal(nearest_centroids(tokens, centroids), expected)


@pytest.mark.parametrize("n_centroids", [1, 20, 1500])
def test_centroids_have_length_1_and_come_again(n_centroids: int) -> None:
    sample = unit(3000, 16)
    first, second = (Codebook.fit(sample, 2, n_centroids, seed=7) for _ in range(2))
    assert first.centroids.shape == (n_centroids, 16)
    assert torch.allclose(first.centroids.norm(dim=1), torch.ones(n_centroids))
    for name in ("centroids", "bucket_cutoffs", "bucket_weights"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert (
        not torch.equal(first.centroids, Codebook.fit(sample, 2, n_centroids, seed=8).centroids)
        or n_centroids == 1
    )


def test_k_means_finds_clusters() -> None:
    sample, centres = clustered(8, 4000, 32, noise=0.1)
    centroids = fit_centroids(sample, 24, torch.Generator().manual_seed(0))
    assert (centres @ centroids.T).amax(dim=1).min() > 0.99


def test_two_levels_are_nearly_as_good_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, _ = clustered(400, 20_000, 32, noise=0.3)

    def fit() -> float:
        centroids = fit_centroids(sample, 500, torch.Generator().manual_seed(0))
        assert centroids.shape == (500, 32)
        return (sample * centroids[nearest_centroids(sample, centroids)]).sum(dim=1).mean().item()

    one_level = fit()
    monkeypatch.setattr(kmeans, "FLAT_MAX", 100)
    assert fit() > one_level - 0.01


def test_shares_are_whole_and_never_above_the_size() -> None:
    for sizes, total in (([5, 0, 100, 1], 20), ([3, 3, 3], 9), ([1, 1, 50], 40), ([10, 10], 1)):
        shares = _shares(torch.tensor(sizes), total)
        assert sum(shares) == total
        assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_cutoffs_and_weights_are_quantiles(nbits: int) -> None:
    """One centroid far from a cloud: residuals are known, and so is how many lie below a cutoff."""
    sample, _ = clustered(1, 20_000, 16, noise=0.5)
    codebook = Codebook.fit(sample, nbits, 1)
    residuals = (sample - codebook.centroids).view(-1)
    shares = (residuals[:, None] <= codebook.bucket_cutoffs).float().mean(dim=0)
    steps = 2**nbits
    assert (shares - torch.arange(1, steps) / steps).abs().max() < 0.02
    below = (residuals[:, None] <= codebook.bucket_weights).float().mean(dim=0)
    assert (below - (torch.arange(steps) + 0.5) / steps).abs().max() < 0.02


def test_more_bits_lose_less() -> None:
    sample, _ = clustered(50, 5000, 32, noise=0.5)
    kept = []
    for nbits in (1, 2, 4):
        codebook, token = Codebook.fit(sample, nbits, 50), token_format(f"residual{nbits}")
        decoded = token.decode(token.encode(sample, codebook), 32, codebook)
        assert torch.allclose(decoded.norm(dim=1), torch.ones(5000))
        kept.append((decoded * sample).sum(dim=1).mean().item())
    assert 0.9 < kept[0] < kept[1] < kept[2]
    assert kept[1] > 0.97
    assert kept[2] > 0.99


def test_equal_tokens_make_a_codebook_of_equal_weights() -> None:
    sample = unit(1, 16).expand(100, 16).contiguous()
    codebook = Codebook.fit(sample, 4, 3)
    decoded = token_format("residual4").decode(
        token_format("residual4").encode(sample, codebook), 16, codebook
    )
    assert (decoded - sample).abs().max() < 1e-6


def test_the_codebook_of_the_tests_fits_its_format() -> None:
    for name in ("residual1", "residual2", "residual4"):
        assert codebook_for(name, 16).format == name
    assert codebook_for("int8", 16) is None
