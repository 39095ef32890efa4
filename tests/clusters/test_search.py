"""Searches of lists: what NumPy finds in the same files, and in all vectors where all lists are
read; the same from every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx.clusters
from espnx import errors
from espnx.device import open as open_device
from espnx.device.clusters import open_clusters
from tests.clusters.oracle import Files, read_files

N, DIM = 900, 12
DTYPES: dict[str, Any] = {
    "uint8": np.uint8,
    "int8": np.int8,
    "float16": np.float16,
    "float32": np.float32,
}


def whole(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> np.ndarray:
    """Whole numbers, in overlapping groups, so that distances are exact in every format."""
    rng = np.random.default_rng(seed)
    middles = np.random.default_rng(7).integers(20, 80, (25, shape[1]))
    values = middles[rng.integers(0, 25, shape[0])] + rng.integers(-15, 16, shape)
    return values.astype(DTYPES[dtype])


def exact(base: np.ndarray, query: np.ndarray, k: int, metric: str) -> list[tuple[float, int]]:
    a, b = base.astype(np.float64), query.astype(np.float64)
    far = -(a @ b) if metric == "ip" else np.square(a - b).sum(axis=1)
    order = np.lexsort((np.arange(len(far)), far))[:k]
    return [(float(far[row]), int(row)) for row in order]


def found_by(found: espnx.clusters.ListNeighbours, query: int) -> list[tuple[float, int]]:
    return [
        (float(far), int(row))
        for far, row in zip(found.distances[query], found.ids[query], strict=True)
        if row >= 0
    ]


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lists") / "c"
    espnx.clusters.build(
        whole((N, DIM), 1), path, n_lists=60, list_bytes=1024, vector_dtype="float32", threads=1
    )
    return path


@pytest.fixture(scope="module")
def files(lists: Path) -> Files:
    return read_files(lists)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_lists_have_the_nearest_of_all_vectors(folder: Path, metric: str, dtype: str) -> None:
    base, queries = whole((300, 7), 2, dtype), whole((9, 7), 3, dtype)
    espnx.clusters.build(
        base, folder / "c", metric=metric, n_lists=20, vector_dtype=dtype, threads=1
    )
    with espnx.clusters.open(folder / "c") as index:
        found = index.search(queries, 6, n_lists=index.facts.n_lists)
        assert index.verify() == index.facts.n_lists
    for query in range(9):
        assert found_by(found, query) == exact(base, queries[query], 6, metric)
    assert (found.lists == index.facts.n_lists).all()


def test_cosine(folder: Path) -> None:
    base, queries = whole((300, 7), 2), whole((9, 7), 3)
    espnx.clusters.build(base, folder / "c", metric="cosine", n_lists=20, vector_dtype="float32")
    with espnx.clusters.open(folder / "c") as index:
        found = index.search(queries, 6, n_lists=index.facts.n_lists)
    a, b = (each / np.linalg.norm(each.astype(float), axis=1)[:, None] for each in (base, queries))
    far = 1 - b @ a.T
    np.testing.assert_allclose(found.distances, np.sort(far, axis=1)[:, :6], atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(far, found.ids, 1), found.distances, atol=1e-6)


@pytest.mark.parametrize(("n_lists", "ratio"), [(1, None), (3, None), (9, None), (9, 1.5)])
def test_a_search_reads_the_nearest_lists(
    lists: Path, files: Files, n_lists: int, ratio: float | None
) -> None:
    """Results, lists, pages (each once), vectors and rounds are those of the files."""
    queries = whole((40, DIM), 4)
    with espnx.clusters.open(lists) as index:
        found = index.search(queries, 5, n_lists=n_lists, max_dist_ratio=ratio)
    for query in range(len(queries)):
        near, far = files.nearest_lists(queries[query].astype(np.float64), n_lists)
        if ratio is not None:
            near = near[far <= ratio * far[0]]
        assert found_by(found, query) == files.nearest(queries[query].astype(float), near, 5)
        assert found.lists[query] == len(near)
        assert found.pages[query] == files.pages(near)
        assert found.measured[query] == files.counts[near].sum()
        assert found.bytes_moved[query] >= files.size_bytes[near].sum()
    assert (found.rounds == 1).all()
    assert (found.requests >= 1).all()
    assert (found.head_pages == 0).all()
    assert not found.code_pages.any()
    if ratio is not None:
        assert found.lists.mean() < n_lists - 0.5


def test_lists_of_an_hnsw_are_nearly_the_nearest(folder: Path) -> None:
    """Where lists are many, their heads are found by walks."""
    base = whole((1500, DIM), 1)
    espnx.clusters.build(base, folder / "c", n_lists=400, vector_dtype="float32", threads=1)
    files, queries = read_files(folder / "c"), whole((50, DIM), 4)
    with espnx.clusters.open(folder / "c") as index:
        found = index.search(queries, 5, n_lists=8)
    same = [
        found_by(found, query)
        == files.nearest(
            queries[query].astype(float), files.nearest_lists(queries[query].astype(float), 8)[0], 5
        )
        for query in range(50)
    ]
    assert np.mean(same) > 0.9


def test_every_device_gives_the_same(lists: Path) -> None:
    queries = whole((20, DIM), 5)
    with espnx.clusters.open(lists, in_flight=1, threads=1) as index:
        wanted = index.search(queries, 7, n_lists=6)
    devices: list[Any] = ["ssd", "cosmos-async-pe", "cosmos-conventional"]
    with open_clusters(lists, engine="posix") as clusters:
        plain = open_device("ssd", lists)
        for device in [*devices, plain, clusters]:
            with espnx.clusters.open(lists, device=device) as index:
                found = index.search(queries, 7, n_lists=6)
            for name in ("ids", "distances", "pages", "lists", "measured", "rounds"):
                np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
        assert len(clusters.distances(torch.zeros(DIM), [0]).finish())  # it stays the caller's
        plain.close()


def test_heads_in_a_graph(folder: Path) -> None:
    """The same lists are found, by reads that wait for one another; nothing of the heads is in
    memory."""
    base, queries = whole((1200, DIM), 1), whole((30, DIM), 6)
    options = {"n_lists": 100, "vector_dtype": "float32", "threads": 1}
    espnx.clusters.build(base, folder / "m", **options)
    espnx.clusters.build(base, folder / "g", heads="graph", **options)
    assert (folder / "m" / "clusters.bin").read_bytes() == (
        folder / "g" / "clusters.bin"
    ).read_bytes()
    assert not (folder / "g" / "heads.bin").read_bytes()
    with (
        espnx.clusters.open(folder / "m") as memory,
        espnx.clusters.open(folder / "g", heads="graph") as graph,
    ):
        wanted, found = (index.search(queries, 5, n_lists=10) for index in (memory, graph))
        assert np.mean(wanted.ids == found.ids) > 0.95
        assert (found.head_pages > 0).all()
        assert (found.rounds == found.head_pages + 1).all()
        everything = graph.search(queries, 5, n_lists=graph.facts.n_lists)
        np.testing.assert_array_equal(
            everything.ids, memory.search(queries, 5, n_lists=memory.facts.n_lists).ids
        )
        assert graph.verify() == graph.facts.n_lists
        assert len(graph.path_report()) > len(memory.path_report())
    with pytest.raises(errors.InvalidInputError, match=r"got 'memory'; expected 'graph'.*heads="):
        espnx.clusters.open(folder / "g", heads="memory")


def test_filters(lists: Path) -> None:
    """Lists are read until there are enough: all, if need be."""
    base, queries = whole((N, DIM), 1), whole((15, DIM), 8)
    rows = np.array([3, 17, 400, 401, 899])
    mask = np.random.default_rng(3).random(N) < 0.3
    with espnx.clusters.open(lists) as index:
        few = index.search(queries, 4, n_lists=1, include=rows)
        some = index.search(queries, 4, n_lists=60, include=mask)
        none = index.search(queries, 4, n_lists=2, include=[])
        others = index.search(queries, 4, n_lists=index.facts.n_lists, exclude=rows)
    for query in range(15):
        far = np.square(base[rows].astype(float) - queries[query]).sum(axis=1)
        reached = {row for _, row in found_by(few, query)}
        assert len(reached) == 4
        assert reached <= set(rows.tolist())
        assert few.rounds[query] > 1
        assert set(found_by(few, query)) <= {
            (float(each), int(row)) for each, row in zip(far, rows, strict=True)
        }
        assert mask[some.ids[query]].all()
        without = [each for each in exact(base, queries[query], 9, "l2") if each[1] not in rows]
        assert found_by(others, query) == without[:4]
    assert (none.ids == -1).all()
    assert np.isinf(none.distances).all()
    with espnx.clusters.open(lists) as index:
        assert (none.lists == index.facts.n_lists).all()


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_rounded_vectors(folder: Path, metric: str) -> None:
    """Values of one of 255 steps: distances of that precision, nearly the same neighbours."""
    rng = np.random.default_rng(1)
    base = rng.standard_normal((800, 24)).astype(np.float32) * 3 + 50
    base[5, 3] = 500  # one far out does not make the others coarse: it is cut
    queries = rng.standard_normal((25, 24)).astype(np.float32) * 3 + 50
    espnx.clusters.build(base, folder / "c", metric=metric, n_lists=30, vector_dtype="int8")
    with espnx.clusters.open(folder / "c") as index:
        assert index.facts.is_rounded
        found = index.search(queries, 10, n_lists=index.facts.n_lists, exclude=[5])
    a, b = base.astype(float), queries.astype(float)
    if metric == "cosine":
        a, b = (each / np.linalg.norm(each, axis=1)[:, None] for each in (a, b))
    far = -(b @ a.T) if metric == "ip" else np.square(b[:, None] - a[None]).sum(axis=-1)
    far = far / 2 if metric == "cosine" else far
    far[:, 5] = np.inf
    true = np.argsort(far, axis=1)[:, :10]
    share = np.mean(
        [len(set(x) & set(y)) / 10 for x, y in zip(found.ids.tolist(), true.tolist(), strict=True)]
    )
    assert share > 0.9
    at = np.take_along_axis(far, found.ids, axis=1)
    spread = np.ptp(np.delete(far, 5, axis=1), axis=1, keepdims=True)
    assert (np.abs(found.distances - at) < 0.02 * spread).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": np.zeros((2, DIM + 1))}, r"queries; got float64 \[2, 13\]"),
        ({"queries": np.full((2, DIM), np.nan)}, "not finite"),
        ({"queries": np.array(["a"])}, "queries; got"),
        ({"k": 0}, "k, neighbours wanted; got 0"),
        ({"n_lists": 0}, "n_lists, lists of a query; got 0"),
        ({"max_dist_ratio": 0.5}, "got 30.0 and 0.5"),
        ({"max_dist_ratio": np.inf}, "max_dist_ratio"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"include": [N]}, "rows to include"),
        ({"n_list": 3}, "n_lists"),
    ],
)
def test_what_is_refused(lists: Path, change: dict[str, Any], message: str) -> None:
    with (
        espnx.clusters.open(lists) as index,
        pytest.raises((errors.InvalidInputError, TypeError), match=message),
    ):
        index.search(**{"queries": np.zeros((2, DIM)), **change})


def test_devices_that_do_not_fit(lists: Path, folder: Path) -> None:
    espnx.clusters.build(whole((50, DIM), 1), folder / "c", threads=1)
    with (
        open_clusters(folder / "c") as other,
        pytest.raises(errors.InvalidInputError, match="device of the lists in"),
    ):
        espnx.clusters.open(lists, device=other)
    with pytest.raises(errors.InvalidInputError, match="device of lists; got 7"):
        espnx.clusters.open(lists, device=7)
    with pytest.raises(errors.InvalidInputError, match="heads of lists; got 'disk'"):
        espnx.clusters.open(lists, heads="disk")


def test_no_queries_and_closed_lists(lists: Path) -> None:
    index = espnx.clusters.open(lists)
    found = index.search(np.zeros((0, DIM)), 3)
    assert found.ids.shape == (0, 3)
    assert "0 queries" in repr(found)
    assert "900 vectors of 12 dimensions" in repr(index)
    index.close()
    index.close()
    with pytest.raises(errors.EngineClosedError):
        index.search(np.zeros((1, DIM)), 3)
    with pytest.raises(errors.EngineClosedError):
        index.verify()
