"""Vectors at a border between clusters are in both: which they are, and that nothing is found
twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.graph.global_index.division import Division, border_of, divide
from espnx.graph.parts import NO_COPY
from espnx.graph.planning import plan_graph
from espnx.graph.search.probing import Probing
from tests.graph.conftest import clustered, exact, recall_of

FEW: dict[str, Any] = {"max_degree": 16, "list_size": 40, "threads": 1}


@pytest.fixture(scope="module")
def index_path(base: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replicas") / "g"
    espnx.graph.build(base, path, clusters=12, replicas=0.4, **FEW)
    return path


def places(path: Path) -> np.ndarray:
    """uint64 [n, 2]: the whole file of rows."""
    return np.fromfile(path / "rows.bin", "<u8").reshape(-1, 2)


def plain_division(
    vectors: np.ndarray, centres: np.ndarray, max_points: int, border: float
) -> tuple[list[int], list[int | None]]:
    """Homes and second clusters, one vector after the other, by float64; a piece of the input is
    divided at a time, so that all of it must be one piece."""
    far = np.square(vectors.astype(np.float64)[:, None] - centres[None]).sum(axis=-1)
    room = [max_points] * len(centres)
    homes: list[int | None] = [None] * len(vectors)
    while any(home is None for home in homes):  # who finds no room asks the next nearest
        wanted: dict[int, list[int]] = {}
        for i, home in enumerate(homes):
            if home is None:
                free = [c for c in range(len(centres)) if room[c]]
                wanted.setdefault(min(free, key=lambda c, i=i: far[i, c]), []).append(i)
        for cluster, asking in wanted.items():
            for i in asking[: room[cluster]]:
                homes[i] = cluster
            room[cluster] = max(0, room[cluster] - len(asking))
    seconds: list[int | None] = [None] * len(vectors)
    for i, home in enumerate(homes):
        assert home is not None
        second = min((c for c in range(len(centres)) if c != home), key=lambda c: far[i, c])
        if far[i, second] / far[i, home] - 1 <= border and room[second]:
            seconds[i], room[second] = second, room[second] - 1
    return [home for home in homes if home is not None], seconds


@pytest.mark.parametrize("max_points", [60, 95, 500])
@pytest.mark.parametrize("border", [0.0, 0.2, float("inf")])
def test_a_division_is_that_of_the_plain_model(
    tmp_path: Path, max_points: int, border: float
) -> None:
    vectors = clustered(500, 8)
    centres = vectors[::50] + np.float32(0.01)
    divide(lambda: [(0, vectors)], centres, max_points, border, tmp_path, vectors.dtype)
    counts = np.fromfile(tmp_path / "counts", np.int64)
    division = Division(tmp_path, counts, 8, vectors.dtype)
    homes, seconds = plain_division(vectors, centres, max_points, border)
    for cluster in range(len(centres)):
        own = [i for i, home in enumerate(homes) if home == cluster]
        guests = [i for i, second in enumerate(seconds) if second == cluster]
        rows = division.rows(cluster)
        assert rows.tolist() == sorted(own + guests)
        assert np.array_equal(division.vectors(cluster), vectors[rows])
    once = np.concatenate([rows for rows, _ in division.blocks()])
    assert np.array_equal(np.sort(once), np.arange(500))


def test_the_border_is_where_so_many_vectors_are() -> None:
    vectors = clustered(4000, 8)
    centres = vectors[::400].copy()
    far = np.sort(np.square(vectors[:, None] - centres[None]).sum(axis=-1), axis=1)
    beyond = far[:, 1] / np.maximum(far[:, 0], 1e-30) - 1
    for share in (0.1, 0.5, 0.9):
        assert (beyond <= border_of(vectors, centres, share)).mean() == pytest.approx(
            share, abs=5e-3
        )
    assert border_of(vectors, centres, 0.0) < 0
    assert border_of(vectors, centres, 1.0) == float("inf")
    assert border_of(vectors, centres[:1], 0.5) < 0


def test_every_row_is_in_one_cluster_or_two(index_path: Path, base: np.ndarray) -> None:
    with espnx.graph.open(index_path) as index:
        facts = index.facts
        assert index.verify().pages == facts.parts.n_pages
        assert facts.copies == 2
        assert np.array_equal(index.vectors(np.arange(3000)), base.astype(np.float16))
    found = places(index_path)
    has_two = found[:, 1] != NO_COPY
    assert has_two.mean() == pytest.approx(0.4, abs=0.05)
    assert facts.parts.nodes.sum() == 3000 + has_two.sum()
    part = facts.parts.of_pages(found[has_two].astype(np.int64) // facts.layout.nodes_per_page)
    assert (part[:, 0] != part[:, 1]).all()


@pytest.mark.parametrize("nprobe", [1, 4, 12])
def test_nothing_is_found_twice(
    index_path: Path, base: np.ndarray, queries: np.ndarray, nprobe: int
) -> None:
    with espnx.graph.open(index_path) as index:
        found = index.search(queries, 10, list_size=4000, nprobe=nprobe)
        early = index.start(queries, 10, list_size=4000, nprobe=nprobe)
        partial, _ = early.partial(6)
        early.finish()
    for ids in (*found.ids, *partial):
        assert len(set(ids[ids >= 0].tolist())) == (ids >= 0).sum()
    if nprobe == 12:
        true = exact(base.astype(np.float16), queries, 10)
        assert recall_of(found.ids, true) == 1.0


def test_lists_of_several_sizes_are_measured(tmp_path: Path) -> None:
    """From the shortest that finds ten rows among two copies of each."""
    base = np.random.default_rng(0).standard_normal((1500, 48)).astype(np.float32)
    espnx.graph.build(base, tmp_path / "g", clusters=3, replicas=0.4, **FEW)
    with espnx.graph.open(tmp_path / "g") as index:
        sizes = {each.list_size for each in index.facts.recall}
        assert min(sizes) == 20
        assert len(sizes) > 3


def test_replicas_find_more_through_as_few_clusters(
    index_path: Path, base: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    espnx.graph.build(base, tmp_path / "g", clusters=12, **FEW)
    true = exact(base.astype(np.float16), queries, 10)
    recalls = []
    for path in (index_path, tmp_path / "g"):
        with espnx.graph.open(path) as index:
            found = index.search(queries, 10, list_size=1000, nprobe=1)
            recalls.append(recall_of(found.ids, true))
    assert recalls[0] > recalls[1] + 0.02


@pytest.mark.parametrize("k", [1, 10, 70])
def test_a_list_as_short_as_k_finds_k_rows(tmp_path: Path, k: int) -> None:
    """Though both copies of a row may be among the candidates; a page holds one node."""
    base = clustered(600, 300, seed=4)
    espnx.graph.build(base, tmp_path / "g", clusters=4, replicas=1.0, vector_dtype="float32", **FEW)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.facts.layout.nodes_per_page == 1
        for given in ({}, {"exclude": [5]}):
            found = index.search(base[:100] + 0.1, k, list_size=k, nprobe=4, **given)
            assert all(len(np.unique(ids[ids >= 0])) == k for ids in found.ids)


@pytest.mark.parametrize("share", [0.004, 0.1, 0.6])
def test_filters_allow_what_they_say(
    index_path: Path, base: np.ndarray, queries: np.ndarray, share: float
) -> None:
    allowed = np.sort(np.random.default_rng(5).permutation(3000)[: int(share * 3000)])
    true = allowed[exact(base.astype(np.float16)[allowed], queries, 10)]
    with espnx.graph.open(index_path) as index:
        for options in ({}, {"list_size": 2000, "nprobe": 12}):
            found = index.search(queries, 10, include=allowed, **options)
            assert np.isin(found.ids, allowed).all()
            assert all(len(set(ids.tolist())) == 10 for ids in found.ids)
            assert recall_of(found.ids, true) > 0.9


def test_a_row_that_is_kept_from_a_walk_is_not_found_by_its_copy(
    index_path: Path, base: np.ndarray
) -> None:
    rows = np.flatnonzero(places(index_path)[:, 1] != NO_COPY)[:50]
    with espnx.graph.open(index_path) as index:
        found, _ = index.walk_without(rows, base[rows], 5, (500, 500), probing=Probing(12))
        with_them = index.walk(base[rows], 5, 500, Probing(12))
    assert not (found.ids == rows[:, None]).any()
    assert (with_them.ids[:, 0] == rows).all()


def test_one_cluster_has_no_borders(tmp_path: Path) -> None:
    vectors = clustered(50, 5)
    espnx.graph.build(vectors, tmp_path / "g", clusters=1, replicas=0.5, **FEW)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.facts.copies == 1
        assert index.search(vectors, 1).ids[:, 0].tolist() == list(range(50))


def test_places_that_cannot_be_are_refused(index_path: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(index_path, tmp_path / "copy"))
    whole = places(copy)
    for row, column, value in ((7, 0, NO_COPY), (7, 1, 1 << 40), (9, 0, int(whole[10, 0]))):
        wrong = whole.copy()
        wrong[row, column] = value
        wrong.tofile(copy / "rows.bin")
        with espnx.graph.open(copy) as index, pytest.raises(errors.FormatError):
            index.verify()


@pytest.mark.parametrize("replicas", [-0.1, 1.1, float("nan"), "many"])
def test_shares_that_make_no_sense_are_refused(tmp_path: Path, replicas: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match="replicas"):
        espnx.graph.build(clustered(20, 4), tmp_path / "g", clusters=2, replicas=replicas)
    with pytest.raises(errors.InvalidInputError, match="clusters"):
        espnx.graph.build(clustered(20, 4), tmp_path / "g", replicas=0.5)


@pytest.mark.parametrize("replicas", [0.0, 0.3])
def test_a_plan_is_what_a_build_takes(base: np.ndarray, tmp_path: Path, replicas: float) -> None:
    options: dict[str, Any] = {"max_degree": 16, "clusters": 10, "replicas": replicas}
    plan = plan_graph(3000, 24, **options)
    espnx.graph.build(base, tmp_path / "g", threads=1, list_size=40, **options)
    with espnx.graph.open(tmp_path / "g") as index:
        sizes = index.facts.file_sizes
    assert plan.disk["rows_bytes"] == sizes["rows.bin"]
    assert plan.disk["clusters_bytes"] == sizes["clusters.bin"] + sizes["centroids.bin"]
    assert plan.disk["codebook_bytes"] == sizes["codebook.bin"]
    assert plan.disk["total_bytes"] == pytest.approx(sum(sizes.values()), rel=0.05)
    assert plan.memory["total_bytes"] == pytest.approx(index.facts.memory_bytes, rel=0.05)


def test_a_plan_of_more_vectors_than_one_graph_has() -> None:
    with pytest.raises(errors.InvalidInputError, match="4294967294") as caught:
        plan_graph(4_800_000_000, 128)
    assert "--clusters" in (caught.value.fix or "")
    plan = plan_graph(4_800_000_000, 128, clusters=4096)
    assert plan.disk["rows_bytes"] == 8 * 4_800_000_000
    assert plan.memory["total_bytes"] < 4096 * 4096 + (1 << 20)
    assert plan.build["least_bytes"] < 10 << 30
