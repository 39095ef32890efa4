"""Samples that `espnx graph advise` draws: what they hold, what is right in them, and what is
refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espnx.clusters.advice.samples import Sample, draw_samples
from espnx.errors import EspnxError, FileMissingError, InvalidInputError


def drawn(source: object, queries: object = None, **changes: object) -> list[tuple[Sample, Sample]]:
    options: dict[str, object] = {"k": 3, "metric": "l2", "folds": 2, "sample": 64, "seed": 0}
    return draw_samples(source, queries, **{**options, **changes})[1]  # type: ignore[arg-type]


def vectors(n: int = 200, dim: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def far(metric: str, base: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """float64 [q, m]."""
    base, queries = base.astype(np.float64), queries.astype(np.float64)
    if metric == "ip":
        return -(queries @ base.T)
    if metric == "cosine":
        base, queries = (
            each / np.linalg.norm(each, axis=1, keepdims=True) for each in (base, queries)
        )
    return np.square(queries[:, None] - base[None]).sum(axis=2)


def test_queries_are_in_no_sample_and_the_smaller_is_a_part() -> None:
    base = vectors()
    folds = drawn(base)
    assert len(folds) == 2
    for large, small in folds:
        assert (len(large.base), len(small.base), len(large.queries)) == (64, 16, 40)
        rows = {tuple(row) for row in large.base.tolist()}
        assert len(rows) == 64
        assert not rows & {tuple(row) for row in large.queries.tolist()}
        assert np.array_equal(small.base, large.base[:16])
        assert np.array_equal(small.queries, large.queries)
    assert not np.array_equal(folds[0][0].base, folds[1][0].base)
    again = drawn(base)
    assert all(np.array_equal(a[0].base, b[0].base) for a, b in zip(folds, again, strict=True))


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.int8])
def test_what_is_right(metric: str, dtype: type) -> None:
    scale = 1 if np.dtype(dtype).kind == "f" else 20
    base = vectors() * scale + (128 if dtype == np.uint8 else 0)
    for large, small in drawn(base.astype(dtype), metric=metric):
        for sample in (large, small):
            distances = far(metric, sample.base, sample.queries)
            order = np.argsort(distances, axis=1)
            nearest = np.take_along_axis(distances, order, axis=1)
            assert sample.farthest == pytest.approx(nearest[:, 2], rel=1e-4, abs=1e-5)
            hits = sample.hits(order[:, :3])
            assert hits.tolist() == [3] * len(sample.queries)
            missed = order[:, [0, 9, 1]].copy()
            missed[:, 0] = -1
            is_tie = nearest[:, 9] <= nearest[:, 2]
            assert np.array_equal(sample.hits(missed), 1 + is_tie)
        by_euclid = np.sort(
            far("cosine" if metric == "cosine" else "l2", large.base, large.queries), axis=1
        )
        wanted = np.sqrt(by_euclid[:, 2] / by_euclid[:, 11])
        assert large.contrast == pytest.approx(wanted, rel=1e-3)


def test_copies_have_the_same_contrast() -> None:
    """Turned, scaled: what a query is like does not depend on it."""
    base = vectors(300)
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))[0]
    wanted = np.concatenate([large.contrast for large, _ in drawn(base)])
    for copy in (base * 4096, base * 3.7e-3, base @ turn):
        found = np.concatenate([large.contrast for large, _ in drawn(copy.astype(np.float32))])
        assert found == pytest.approx(wanted, rel=1e-3)


def test_what_is_built_is_about_one_whatever_it_is_measured_in() -> None:
    for scale in (1e-20, 1.0, 1e15):
        for large, _ in drawn((vectors() * scale).astype(np.float32)):
            assert 0.5 < np.sqrt(np.square(large.base).mean()) < 2


def test_vectors_that_are_all_alike() -> None:
    for value in (0.0, 3.0):
        for large, _ in drawn(np.full((200, 6), value, np.float32)):
            assert large.contrast.tolist() == [1.0] * len(large.queries)
            assert large.hits(np.tile([5, 60, 0], (len(large.queries), 1))).tolist() == [3] * 40


def test_queries_that_are_given(tmp_path: Path) -> None:
    queries = vectors(9, seed=5)
    np.save(tmp_path / "q.npy", queries)
    for large, _ in drawn(vectors(64), str(tmp_path / "q.npy")):
        assert len(large.base) == 64
        scale = large.queries[0, 0] / queries[np.isclose(queries, large.queries[0, 0])][:1]
        assert len(scale) in (0, 1)
        ratio = np.sort(np.abs(large.queries).ravel()) / np.sort(np.abs(queries).ravel())
        assert ratio == pytest.approx(np.full(54, ratio[0]))


@pytest.mark.parametrize(
    ("source", "queries", "changes", "what"),
    [
        (np.full((100, 4), np.nan, np.float32), None, {}, "vector 0"),
        (np.where(np.arange(800).reshape(200, 4) == 777, np.inf, 1.0), None, {}, "vector 194"),
        (vectors(), np.full((3, 6), np.nan, np.float32), {}, "query 0"),
        (vectors(), vectors(3, 5), {}, "queries"),
        (vectors(), np.empty((0, 6), np.float32), {}, "queries"),
        (vectors().astype(np.uint8), vectors(3), {}, "dtype of queries"),
        (vectors(10), None, {"k": 10}, "vectors, of which samples"),
        (vectors(17), None, {}, "vectors, of which samples"),
        (vectors(), None, {"sample": 15}, "vectors, of which samples"),
        (np.empty((0, 4), np.float32), None, {}, "vectors, of which samples"),
        (vectors()[0], None, {}, "shape of vectors"),
        (vectors().astype(np.complex64), None, {}, "dtype of vectors"),
    ],
)
def test_what_is_refused(
    source: np.ndarray, queries: np.ndarray | None, changes: dict[str, object], what: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        drawn(source, queries, **changes)
    assert caught.value.what.startswith(what)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError):
        drawn(str(tmp_path / "v.npy"))
    (tmp_path / "v.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(EspnxError, match=r"not a \.npy file"):
        drawn(str(tmp_path / "v.npy"))


def test_the_least_that_is_enough() -> None:
    """20 vectors: 4 are queries, of the others a quarter has the 3 nearest and one more."""
    [(large, small)] = drawn(vectors(20), folds=1)
    assert (len(large.queries), len(large.base), len(small.base)) == (4, 16, 4)
    with pytest.raises(InvalidInputError):
        drawn(vectors(18), folds=1)
