"""Product quantisation beside plain numpy and FAISS."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from espnx.ops._native import load_extension
from espnx.ops.centroids import encode_product, fit_product_quantizer
from tests.graph.conftest import clustered

# Widths that the compiler knows, one that it does not, and a wide one.
BEGIN = np.cumsum([0, 1, 2, 3, 4, 5, 6, 8, 11])


@pytest.fixture(params=range(3))
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    extension = load_extension()
    if extension.set_cpu_level(-1) < request.param:
        pytest.skip("this processor cannot")
    extension.set_cpu_level(request.param)
    yield request.param
    extension.set_cpu_level(-1)


def decoded(begin: np.ndarray, centroids: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return centroids[
        codes[:, np.repeat(np.arange(len(begin) - 1), np.diff(begin))], np.arange(begin[-1])
    ]


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 700])
def test_codes_are_the_nearest(level: int, n: int) -> None:
    random = np.random.default_rng(n)
    vectors, centroids = (random.standard_normal((m, 40)).astype(np.float32) for m in (n, 256))
    codes = encode_product(vectors, BEGIN, centroids)
    assert codes.shape == (n, 8)
    for part in range(8):
        own = slice(BEGIN[part], BEGIN[part + 1])
        far = np.square(vectors[:, None, own].astype(np.float64) - centroids[None, :, own]).sum(
            axis=-1
        )
        assert np.allclose(far[np.arange(n), codes[:, part]], far.min(axis=1), rtol=1e-5, atol=1e-9)


def test_of_several_as_near_the_first(level: int) -> None:
    centroids = np.repeat(np.arange(128, dtype=np.float32), 2)[:, None]
    assert encode_product(np.arange(128)[:, None], np.array([0, 1]), centroids)[
        :, 0
    ].tolist() == list(range(0, 256, 2))


def test_centroids_are_the_means_of_their_vectors(level: int) -> None:
    vectors = clustered(600, 40)
    centroids = (
        load_extension()
        .fit_product(torch.from_numpy(vectors), torch.from_numpy(BEGIN), 1000, 0, 2)
        .numpy()
    )
    codes = encode_product(vectors, BEGIN, centroids)
    for part in range(8):
        own = slice(BEGIN[part], BEGIN[part + 1])
        assert len(np.unique(codes[:, part])) > 200
        for c in np.unique(codes[:, part]):
            members = vectors[codes[:, part] == c, own].astype(np.float64)
            assert np.allclose(members.mean(axis=0), centroids[c, own], rtol=1e-4, atol=1e-4)


def test_as_good_as_those_of_faiss() -> None:
    faiss = pytest.importorskip("faiss")
    vectors, begin = clustered(12_000, 24), np.arange(0, 25, 3)
    theirs = faiss.ProductQuantizer(24, 8, 8)
    theirs.train(vectors)
    ours = fit_product_quantizer(vectors, begin)
    error = np.square(decoded(begin, ours, encode_product(vectors, begin, ours)) - vectors).mean()
    assert error < 1.03 * np.square(theirs.decode(theirs.compute_codes(vectors)) - vectors).mean()


def test_the_same_for_any_number_of_threads() -> None:
    vectors, begin = torch.from_numpy(clustered(500, 40)), torch.from_numpy(BEGIN)
    found = [load_extension().fit_product(vectors, begin, 5, 3, threads) for threads in (1, 2, 16)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], load_extension().fit_product(vectors, begin, 5, 4, 1))


@pytest.mark.parametrize(
    "vectors",
    [
        np.ones((1, 40)),
        np.ones((5000, 40)),
        np.repeat(np.eye(40), 20, axis=0),
        np.full((300, 40), 1e4),
    ],
)
def test_few_different_vectors_are_kept_exactly(vectors: np.ndarray) -> None:
    centroids = fit_product_quantizer(vectors, BEGIN)
    assert np.isfinite(centroids).all()
    assert np.allclose(
        decoded(BEGIN, centroids, encode_product(vectors, BEGIN, centroids)),
        vectors,
        rtol=1e-5,
        atol=1e-6,
    )


def test_far_from_zero_as_good_as_near_it() -> None:
    vectors = clustered(2000, 40)
    errors = []
    for offset in (0.0, 4096.0):
        moved = vectors + np.float32(offset)
        centroids = fit_product_quantizer(moved, BEGIN)
        errors.append(
            np.square(
                decoded(BEGIN, centroids, encode_product(moved, BEGIN, centroids)) - moved
            ).mean()
        )
    assert errors[1] < 1.02 * errors[0]


@pytest.mark.parametrize("begin", [[0], [1, 40], [0, 39], [0, 20, 20, 40], [0, 30, 20, 40]])
def test_refuses_parts(begin: list[int]) -> None:
    with pytest.raises(ValueError):
        fit_product_quantizer(np.zeros((3, 40), np.float32), np.array(begin))
    with pytest.raises(ValueError):
        encode_product(
            np.zeros((3, 40), np.float32), np.array(begin), np.zeros((256, 40), np.float32)
        )


def test_refuses_shapes() -> None:
    with pytest.raises(ValueError):
        fit_product_quantizer(np.zeros((0, 40), np.float32), BEGIN)
    with pytest.raises(ValueError):
        encode_product(np.zeros((3, 40), np.float32), BEGIN, np.zeros((255, 40), np.float32))
