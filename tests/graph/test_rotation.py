"""Codes of rotated vectors: that the rotation is one and deals variances out, and is taken where
codes are better for it alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.graph.codes.codebook import codebook_bytes, may_rotate, train_codebook, unpack_codebook
from espnx.graph.codes.rotation import fit_rotation
from espnx.graph.format import CODEBOOK, DISK_CODEBOOK, MAGIC, VERSION
from espnx.graph.planning import plan_graph
from espnx.storage import NativeEngine
from espnx.storage.manifest import NAME, read_manifest, write_manifest
from tests.graph.conftest import exact, recall_of


def latent(n: int, dim: int, rank: int, seed: int = 0) -> np.ndarray:
    """float32 [n, dim]: mostly in `rank` directions that lie across all dimensions."""
    random = np.random.default_rng(seed)
    spread = np.random.default_rng(99).standard_normal((rank, dim))
    return (
        random.standard_normal((n, rank)) @ spread + 0.1 * random.standard_normal((n, dim))
    ).astype(np.float32)


def parts_of(dim: int, count: int) -> np.ndarray:
    return np.linspace(0, dim, count + 1).astype(np.int64)


@pytest.mark.parametrize(
    ("n", "dim", "count"),
    [(500, 24, 6), (500, 13, 5), (3, 16, 4), (1, 8, 2), (200, 7, 1), (17_000, 5, 2)],
)
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_it_is_a_rotation(n: int, dim: int, count: int, far: float) -> None:
    rotation = fit_rotation(latent(n, dim, 3) + np.float32(far), parts_of(dim, count))
    assert rotation.dtype == np.float32
    assert np.abs(rotation.T.astype(np.float64) @ rotation - np.eye(dim)).max() < 1e-5


def test_equal_vectors_have_one_too() -> None:
    rotation = fit_rotation(np.full((50, 6), 3, np.float32), parts_of(6, 3))
    assert np.abs(rotation.T @ rotation - np.eye(6)).max() < 1e-5


def test_variances_are_dealt_out() -> None:
    """Each part has its share of directions; the products of their variances differ by less than
    those of successive directions."""
    random = np.random.default_rng(0)
    scales = np.geomspace(100, 1, 12)
    turn = np.linalg.qr(random.standard_normal((12, 12)))[0]
    sample = (random.standard_normal((20_000, 12)) * scales @ turn).astype(np.float32)
    begin = parts_of(12, 4)
    rotated = sample @ fit_rotation(sample, begin)
    covariance = np.cov(rotated.T.astype(np.float64))
    variances = np.diag(covariance)
    assert np.abs(covariance - np.diag(variances)).max() < 0.02 * variances.max(), (
        "directions are principal"
    )
    assert np.sort(np.sqrt(variances))[::-1] == pytest.approx(scales, rel=0.05)
    products = np.log([variances[a:b].prod() for a, b in itertools.pairwise(begin)])
    in_order = np.log([np.square(scales)[a:b].prod() for a, b in itertools.pairwise(begin)])
    assert np.ptp(products) < 0.15 * np.ptp(in_order)


def test_a_rotation_is_taken_where_codes_are_better() -> None:
    vectors = latent(3000, 32, 8)
    plain, rotated = (train_codebook(vectors, 8, use_opq=use) for use in (False, True))
    assert plain.rotation is None
    assert rotated.rotation is not None
    others = latent(500, 32, 8, seed=5)
    error = [
        np.square(book.decode(book.encode(others)) - others).mean() for book in (plain, rotated)
    ]
    assert error[1] < 0.5 * error[0]


def test_a_rotation_is_left_out_where_they_are_not() -> None:
    """Sixteen combinations of four bits: each part's centroids are exactly these, until they are
    mixed with others."""
    vectors = np.random.default_rng(0).integers(0, 2, (4000, 32)).astype(np.float32)
    book = train_codebook(vectors, 8)
    assert book.rotation is None
    assert book.decode(book.encode(vectors)) == pytest.approx(vectors, abs=1e-5)


@pytest.mark.parametrize(
    ("n", "dim", "code_bytes", "use_opq", "may"),
    [
        (1000, 16, 16, True, False),
        (1000, 16, 15, True, True),
        (1000, 16, 4, False, False),
        (255, 16, 4, True, False),
        (256, 16, 4, True, True),
        (511, 64, 4, True, False),
        (512, 64, 4, True, True),
        (10**6, 2048, 64, True, True),
        (10**6, 2049, 64, True, False),
    ],
)
def test_where_one_is_tried(n: int, dim: int, code_bytes: int, use_opq: bool, may: bool) -> None:
    assert may_rotate(n, dim, code_bytes, use_opq=use_opq) == may


def test_where_there_is_nothing_to_choose() -> None:
    assert train_codebook(np.full((300, 6), 7, np.float32), 3).rotation is None
    assert train_codebook(np.zeros((300, 6), np.float32), 3).rotation is None
    assert train_codebook(latent(100, 8, 2), 4).rotation is None
    assert train_codebook(latent(100, 8, 2), 4, n=5000).rotation is not None, "a sample of more"


def test_not_of_vectors_that_differ_by_little_from_one_far_away() -> None:
    """Whose distances a rotation would round away."""
    near, far = (latent(1000, 16, 3) + np.float32(offset) for offset in (30, 3e4))
    assert train_codebook(near, 4).rotation is not None
    assert train_codebook(far, 4).rotation is None


def test_not_of_vectors_that_have_no_directions() -> None:
    for seed in range(4):
        vectors = np.random.default_rng(seed).standard_normal((4000, 16)).astype(np.float32)
        assert train_codebook(vectors, 4).rotation is None


def test_encoding_goes_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from espnx.graph.codes import codebook as module

    vectors = latent(301, 32, 8)
    book = train_codebook(vectors, 8)
    whole = book.encode(vectors)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 4 * 32 * 10)
    assert (book.encode(vectors) != whole).mean() < 1e-3, "what two products round differently"
    assert book.encode(vectors[:0]).shape == (0, 8)
    whole_numbers = vectors.round().clip(-100, 100).astype(np.int8)
    assert np.array_equal(book.encode(whole_numbers), book.encode(whole_numbers.astype(np.float32)))


def test_packed_and_unpacked() -> None:
    for use_opq in (False, True):
        book = train_codebook(latent(600, 12, 3), 4, use_opq=use_opq)
        packed = book.packed()
        assert packed.nbytes == codebook_bytes(12, is_rotated=use_opq)
        again = unpack_codebook(book.begin, packed, 12)
        assert np.array_equal(again.centroids, book.centroids)
        assert (again.rotation is None) == (not use_opq)
        assert not use_opq or np.array_equal(again.rotation, book.rotation)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("memory", [None, "8GiB"])
def test_fewer_pages_at_the_same_recall(tmp_path: Path, metric: str, memory: str | None) -> None:
    base, queries = latent(3000, 32, 10), latent(100, 32, 10, seed=3)
    pages, recall = [], []
    # Of one thread: the same graph in every run.
    options = {
        "max_degree": 24,
        "list_size": 50,
        "pq_bytes": 4,
        "metric": metric,
        "memory": memory,
        "threads": 1,
    }
    for use_opq in (False, True):
        espnx.graph.build(base, tmp_path / str(use_opq), use_opq=use_opq, **options)
        with espnx.graph.open(tmp_path / str(use_opq)) as index:
            index.verify()
            assert (index.facts.codebook.rotation is not None) == use_opq
            truth = exact(index.vectors(np.arange(len(base))), queries, 10, metric)
            found = [
                index.search(queries, 10, list_size=size) for size in (12, 16, 20, 28, 40, 80, 160)
            ]
            pages.append([each.pages.mean() for each in found])
            recall.append([recall_of(each.ids, truth) for each in found])
    assert all(each[0] < 0.95 <= each[-1] for each in recall)  # .95 lies within both curves
    assert np.interp(0.95, recall[1], pages[1]) < 0.8 * np.interp(0.95, recall[0], pages[0])


def test_plans_and_files(tmp_path: Path) -> None:
    base = latent(400, 32, 8)
    for use_opq in (False, True):
        options = {
            "max_degree": 8,
            "pq_bytes": 8,
            "disk_pq_bytes": 16,
            "num_entry_points": 10,
            "use_opq": use_opq,
        }
        report = espnx.graph.build(base, tmp_path / f"g{use_opq}", **options)
        plan = plan_graph(400, 32, vector_dtype="pq", **options)
        assert (
            plan.disk["total_bytes"]
            == report.folder_bytes - (tmp_path / f"g{use_opq}" / NAME).stat().st_size
        )
        assert plan.memory["total_bytes"] == report.memory_bytes
        with espnx.graph.open(tmp_path / f"g{use_opq}") as index:
            assert index.facts.rotated == ([CODEBOOK, DISK_CODEBOOK] if use_opq else [])


BOTH = [CODEBOOK, DISK_CODEBOOK]


@pytest.mark.parametrize(
    "rotated",
    [[CODEBOOK, "rows.bin"], CODEBOOK, [1], [CODEBOOK] * 2, BOTH[::-1], [*BOTH, CODEBOOK], None],
)
def test_a_manifest_that_cannot_be(tmp_path: Path, rotated: object) -> None:
    espnx.graph.build(latent(300, 8, 3), tmp_path / "g", max_degree=8, pq_bytes=4, disk_pq_bytes=4)
    _change(tmp_path / "g", rotated)
    with pytest.raises(errors.FormatError, match="rotated"):
        espnx.graph.open(tmp_path / "g")


def test_a_manifest_that_names_a_codebook_that_is_not_there(tmp_path: Path) -> None:
    espnx.graph.build(latent(300, 8, 3), tmp_path / "g", max_degree=8, pq_bytes=4)
    _change(tmp_path / "g", BOTH)
    with pytest.raises(errors.FormatError, match="rotated"):
        espnx.graph.open(tmp_path / "g")


@pytest.mark.parametrize("rotated", [[], [CODEBOOK], [DISK_CODEBOOK]])
def test_a_codebook_of_another_size(tmp_path: Path, rotated: list[str]) -> None:
    """Which of them have a rotation is in the manifest, and not in how long a file happens to
    be."""
    espnx.graph.build(latent(300, 8, 3), tmp_path / "g", max_degree=8, pq_bytes=4, disk_pq_bytes=4)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.facts.rotated == BOTH
    _change(tmp_path / "g", rotated)
    with pytest.raises((errors.FormatError, errors.TruncatedFileError)):
        espnx.graph.open(tmp_path / "g")


def _change(path: Path, rotated: object) -> None:
    with NativeEngine("posix") as engine:
        said = read_manifest(engine, path, MAGIC, VERSION)
        (path / NAME).unlink()
        del said["rotated"]
        write_manifest(
            engine, path, MAGIC, VERSION, said if rotated is None else {**said, "rotated": rotated}
        )


def test_a_damaged_rotation(tmp_path: Path) -> None:
    espnx.graph.build(latent(300, 8, 3), tmp_path / "g", max_degree=8, pq_bytes=4)
    path = tmp_path / "g" / CODEBOOK
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(errors.ChecksumError):
        espnx.graph.open(tmp_path / "g")
