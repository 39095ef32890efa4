"""A graph for each cluster: what is found, where, and what is left when things go wrong."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx.graph
from espnx import errors
from espnx.graph import recall
from espnx.graph.format import MAGIC, VERSION, GraphFacts, GraphSections
from espnx.graph.global_index import builder
from espnx.graph.layout import rows_of
from espnx.graph.native import native_view
from espnx.graph.pages.checked import open_pages, read_pages
from espnx.graph.pages.directory import read_graph
from espnx.graph.parts import Clusters
from espnx.graph.search.probing import Probing, choose_clusters, units_of
from espnx.graph.write import pages_of
from espnx.ops._native import load_extension
from espnx.storage import NativeEngine
from espnx.storage.manifest import NAME, read_manifest
from tests.forks import Forks
from tests.graph.conftest import clustered, exact, recall_of
from tests.sweeps import at_length

Options = dict[str, Any]
FEW: Options = {"max_degree": 16, "list_size": 40, "threads": 1}
ONE = np.ones((1, 1))


@pytest.fixture(scope="module")
def index_path(base: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clusters") / "g"
    espnx.graph.build(base, path, clusters=12, **FEW)
    return path


def members(facts: GraphFacts) -> list[np.ndarray]:
    """Rows of each cluster, as its pages have them."""
    with NativeEngine("posix") as engine:
        pages = np.arange(facts.parts.n_pages)
        nodes = read_pages(engine, open_pages(engine, facts), facts, pages, 30.0)
    places = pages[:, None] * facts.layout.nodes_per_page + np.arange(facts.layout.nodes_per_page)
    rows, is_node = rows_of(nodes), facts.parts.is_node(places)
    part = facts.parts.of_pages(pages)
    return [rows[part == each][is_node[part == each]] for each in range(len(facts.parts.nodes))]


def plain_probing(
    query: np.ndarray, centroids: np.ndarray, metric: str, probing: Probing
) -> list[int]:
    """The clusters of one query, by float64, one by one."""
    far = []
    for number, centroid in enumerate(centroids.astype(np.float64)):
        apart = query.astype(np.float64)
        value = -(apart @ centroid) if metric == "ip" else ((apart - centroid) ** 2).sum()
        far.append((float(value), number))
    far.sort()
    if probing.count is not None:
        return [number for _, number in far[: probing.count]]
    unit = float(np.linalg.norm(query)) if metric == "ip" else 1.0
    limit = far[0][0] + unit * probing.margin
    return [number for value, number in far if value <= limit]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("nprobe", [1, 3, 12])
def test_a_long_list_finds_all_that_is_near_in_the_clusters_it_goes_through(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path, metric: str, nprobe: int
) -> None:
    espnx.graph.build(
        base, tmp_path / "g", clusters=12, metric=metric, vector_dtype="float32", **FEW
    )
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(queries, 10, list_size=3000, nprobe=nprobe)
        clusters, rows = index.facts.clusters, members(index.facts)
    assert clusters is not None
    assert found.clusters is not None
    assert (found.clusters == nprobe).all()
    asked = queries
    if metric == "cosine":
        asked = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    for query, near, ids in zip(queries, asked, found.ids, strict=True):
        chosen = plain_probing(near, clusters.centroids, metric, Probing(nprobe))
        among = np.sort(np.concatenate([rows[each] for each in chosen]))
        true = among[exact(base[among], query[None], 10, metric)[0]]
        assert set(ids.tolist()) == set(true.tolist())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "bfloat16"])
def test_vectors_of_every_kind(tmp_path: Path, dtype: str) -> None:
    vectors = clustered(900, 16) * 8
    if dtype in ("uint8", "int8"):
        limits = np.iinfo(dtype)
        vectors = np.clip(np.rint(vectors), limits.min, limits.max).astype(dtype)
    espnx.graph.build(vectors, tmp_path / "g", clusters=5, vector_dtype=dtype, **FEW)
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        stored = index.vectors(np.arange(900))
        assert np.allclose(stored.astype(np.float32), vectors, rtol=2**-8)
        found = index.search(vectors[:40], 1, list_size=900, nprobe=5)
    apart = np.square(stored[found.ids[:, 0]].astype(np.float64) - vectors[:40]).sum(axis=1)
    assert (apart <= np.square(stored[:40].astype(np.float64) - vectors[:40]).sum(axis=1)).all()


def test_every_row_is_in_one_cluster_and_is_found_there(index_path: Path, base: np.ndarray) -> None:
    with espnx.graph.open(index_path) as index:
        assert index.verify().pages == index.facts.parts.n_pages
        rows = np.concatenate(members(index.facts))
        assert np.array_equal(np.sort(rows), np.arange(len(base)))
        assert np.array_equal(index.vectors(rows), base.astype(np.float16)[rows])
        sizes = [len(each) for each in members(index.facts)]
        assert max(sizes) <= 2 * 3000 // 12
        centroids = index.facts.clusters.centroids  # type: ignore[union-attr]
    nearest = np.square(base[:, None] - centroids[None]).sum(axis=-1).argmin(axis=1)
    home = np.repeat(np.arange(12), sizes)[np.argsort(rows)]
    assert (home == nearest).mean() > 0.9  # the rest found no room, or k-means has moved on


def at_centroids(centroids: np.ndarray) -> Clusters:
    none = np.zeros(len(centroids), np.int64)
    return Clusters(centroids, none, none, 1, none, none, none.astype(np.uint64), [])


def test_probing_goes_by_borders_and_not_by_how_far_a_query_is_from_all_of_them() -> None:
    centroids = np.random.default_rng(4).integers(-9, 9, (30, 6)).astype(np.float32)
    queries = np.repeat(centroids[:5] + 1, 4, axis=0)
    centroids = np.pad(centroids, ((0, 0), (0, 1)))
    queries = np.pad(queries, ((0, 0), (0, 1)))
    queries[:, -1] = np.tile([0, 1, 16, 256], 5)  # away from all alike
    far = np.square(queries[:, None] - centroids).sum(axis=-1)
    units = units_of(torch.from_numpy(queries), "l2")
    spread = at_centroids(centroids).spread
    near = Probing(margin=spread / 2)
    chosen, begin = choose_clusters(far, units, near, np.ones(far.shape[1]), 1)
    parts = [each.tolist() for each in np.split(chosen, begin[1:-1])]
    for first in range(0, 20, 4):
        assert parts[first : first + 4] == [parts[first]] * 4
    assert 1 < np.mean([len(each) for each in parts]) < 20
    # and twice as long a query by inner product
    far, wide = -(queries @ centroids.T), torch.from_numpy(queries)
    once, twice = (
        choose_clusters(
            far * by, units_of(wide * by, "ip"), Probing(margin=spread**0.5), np.ones(30), 1
        )
        for by in (1, 2)
    )
    assert np.array_equal(once[0], twice[0])
    # all alike: all are as near
    assert (units_of(0 * wide, "ip") > 0).all()
    assert (
        len(choose_clusters(np.ones((20, 4)), units, Probing(margin=0.1), np.ones(4), 1)[0]) == 80
    )


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_probing_is_that_of_the_plain_model(metric: str) -> None:
    numbers = np.random.default_rng(3)
    centroids = numbers.standard_normal((40, 7)).astype(np.float32)
    queries = numbers.standard_normal((30, 7)).astype(np.float32)
    if metric == "ip":
        far = -(queries @ centroids.T)
    else:
        far = np.square(queries[:, None] - centroids[None]).sum(axis=-1)
    units = units_of(torch.from_numpy(queries), metric)
    for probing in (Probing(1), Probing(7), Probing(40), Probing(margin=3.0), Probing(margin=0.0)):
        chosen, begin = choose_clusters(far, units, probing, np.ones(far.shape[1]), 1)
        for i, query in enumerate(queries):
            expected = plain_probing(query, centroids, metric, probing)
            assert chosen[begin[i] : begin[i + 1]].tolist() == expected


def test_probing_goes_on_to_clusters_that_have_what_a_filter_allows() -> None:
    far = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    counts = np.array([0, 2, 1, 5])
    for least, expected in ((1, [1]), (2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (99, [1, 2, 3])):
        chosen, begin = choose_clusters(far, ONE, Probing(1), counts, least)
        assert (chosen.tolist(), begin.tolist()) == (expected, [0, len(expected)])
    chosen, begin = choose_clusters(far, ONE, Probing(1), np.zeros(4, np.int64), 3)
    assert (chosen.tolist(), begin.tolist()) == ([], [0, 0])


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_k_rows_are_found_where_there_are_as_many(tmp_path: Path, metric: str) -> None:
    """Queries whose nearest cluster has fewer than k vectors, and the shortest list."""
    few = clustered(6, 8) + 100  # a cluster, or some, far from the others
    base = np.concatenate([clustered(600, 8), few])
    espnx.graph.build(base, tmp_path / "g", clusters=8, max_degree=16, metric=metric, threads=1)
    queries = np.concatenate([few, base[:20]])
    with espnx.graph.open(tmp_path / "g") as graph:
        assert graph.facts.parts.nodes.min() < 10
        for nprobe in (1, 2, "auto"):
            for options in ({"list_size": 10}, {"recall": 0.8}, {"list_size": 10, "exclude": [7]}):
                found = graph.search(queries, 10, nprobe=nprobe, **options)
                assert (found.ids >= 0).all()
                assert all(len(np.unique(ids)) == 10 for ids in found.ids)
        every = graph.search(queries, len(base) + 5, list_size=1000, nprobe=1)
        assert ((every.ids >= 0).sum(axis=1) == len(base)).all()


def test_recall_chooses_lists_and_clusters(
    index_path: Path, base: np.ndarray, queries: np.ndarray
) -> None:
    true = exact(base.astype(np.float16), queries, 10)
    with espnx.graph.open(index_path) as index:
        points = index.facts.recall
        assert [each.recall for each in points] == sorted({each.recall for each in points})
        assert all(0 < (each.clusters or 0) <= 12 for each in points)
        for wanted in (0.8, 0.9, 0.97):
            found = index.search(queries, 10, recall=wanted)
            point = index.list_size_for(wanted)
            assert recall_of(found.ids, true) > wanted - 0.05
            assert found.pages.mean() < 1.3 * point.pages + 2
        usual = index.search(queries, 10)
        assert recall_of(usual.ids, true) > 0.9
        auto = index.search(queries, 10, nprobe="auto")
        assert np.array_equal(usual.ids, auto.ids)
        with pytest.raises(errors.InvalidInputError, match="recall"):
            index.search(queries, 10, recall=1.0 if points[-1].recall < 1 else 2.0)


def test_what_is_near_in_a_cluster_whose_entry_point_is_far_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours lie in several clusters here, and 20 nodes of the nearest are nearer than any
    entry point of the others."""
    monkeypatch.setattr(recall, "_FILTERED_MIN", 1 << 30)  # what filters find is not asked here
    rng = np.random.default_rng(3)
    centres, spread = rng.standard_normal((100, 24)), rng.standard_normal((24, 64))
    latent = centres[rng.integers(0, 100, 6_100)] + rng.standard_normal((6_100, 24))
    drawn = (latent @ spread).astype(np.float32)
    base, queries = drawn[:6_000], drawn[6_000:]
    espnx.graph.build(base, tmp_path / "g", clusters=6, num_entry_points=24, max_degree=32)
    truth = exact(base, queries, 10)
    with espnx.graph.open(tmp_path / "g") as graph:
        few = graph.search(queries, 10, list_size=20, nprobe=1)
        found = graph.search(queries, 10, list_size=20, nprobe=6)
    assert recall_of(few.ids, truth) < 0.8
    assert recall_of(found.ids, truth) >= 0.95
    # A list of 20, and in each of the others a way of about three pages to its nearest two.
    assert found.pages.mean() <= 20 + 6 * 5


def test_a_walk_is_shown_before_its_end(index_path: Path, queries: np.ndarray) -> None:
    with espnx.graph.open(index_path, threads=1) as index:
        search = index.start(queries, 5, list_size=60, nprobe=6)
        ids, far = search.partial(2)
        whole = search.finish()
    assert (far >= whole.distances - 1e-6).all()
    assert (ids == whole.ids).sum() > 0
    assert ids.shape == (60, 5)


@pytest.mark.parametrize("share", [0.004, 0.1, 0.6])
@pytest.mark.parametrize("is_region", [False, True])
def test_filters_allow_what_they_say(
    index_path: Path, base: np.ndarray, queries: np.ndarray, share: float, is_region: bool
) -> None:
    if is_region:
        allowed = np.square(base - base[17]).sum(axis=1).argsort()[: int(share * 3000)]
    else:
        allowed = np.random.default_rng(5).permutation(3000)[: int(share * 3000)]
    stored = base.astype(np.float16)
    with espnx.graph.open(index_path) as index:
        for options in ({}, {"list_size": 1500, "nprobe": 12}):
            found = index.search(queries, 10, include=allowed, **options)
            assert np.isin(found.ids, allowed).all()
            true = np.sort(allowed)[exact(stored[np.sort(allowed)], queries, 10)]
            assert recall_of(found.ids, true) > 0.9
        mask = np.ones(3000, bool)
        mask[allowed] = False
        other = index.search(queries, 10, exclude=mask, list_size=1500, nprobe=12)
        assert np.array_equal(other.ids, found.ids)


def test_one_cluster_is_the_graph_of_all(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    options: Options = {"pq_bytes": 8, "num_entry_points": 20, "use_opq": False, **FEW}
    espnx.graph.build(base, tmp_path / "a", **options)
    espnx.graph.build(base, tmp_path / "b", clusters=1, **options)
    found = []
    for name in ("a", "b"):
        with espnx.graph.open(tmp_path / name, threads=1) as index:
            found.append(index.search(queries, 10, list_size=30))
    assert np.array_equal(found[0].ids, found[1].ids)
    assert np.array_equal(found[0].pages, found[1].pages)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_fewer_vectors_than_clusters(tmp_path: Path, n: int) -> None:
    vectors = clustered(20, 5)[:n]
    report = espnx.graph.build(vectors, tmp_path / "g", clusters=64, max_degree=8)
    assert report.clusters is not None
    assert report.clusters <= n
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        found = index.search(vectors, 12, nprobe=64)
    assert (np.sort(found.ids, axis=1)[:, -n:] == np.arange(n)).all()


def test_no_vectors_are_no_clusters(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidInputError, match="1 or more"):
        espnx.graph.build(np.empty((0, 4), np.float32), tmp_path / "g", clusters=3)
    assert not (tmp_path / "g").exists()


def test_all_vectors_equal(tmp_path: Path) -> None:
    vectors = np.ones((500, 6), np.float32)
    report = espnx.graph.build(vectors, tmp_path / "g", clusters=8, **FEW)
    assert report.clusters is not None
    assert report.cluster_points is not None
    assert report.cluster_points[1] <= 126  # twice the mean, whatever k-means says
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        found = index.search(vectors[:3], 10)
    assert (found.distances == 0).all()
    assert all(len(set(ids.tolist())) == 10 for ids in found.ids)


def test_a_cluster_that_holds_everything_and_empty_ones(tmp_path: Path) -> None:
    vectors = np.concatenate([np.ones((700, 6), np.float32), clustered(5, 6) + 1000])
    report = espnx.graph.build(vectors, tmp_path / "g", clusters=30, max_points=705, seed=1, **FEW)
    assert report.clusters is not None
    assert report.clusters < 30
    assert report.cluster_points is not None
    assert report.cluster_points[1] >= 699
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        found = index.search(vectors[700:], 1, nprobe=30, list_size=60)
    assert found.ids[:, 0].tolist() == [700, 701, 702, 703, 704]


def refused(path: Path, match: str, vectors: np.ndarray, **options: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match=match):
        espnx.graph.build(vectors, path, **options)


def test_what_makes_no_sense_is_refused(tmp_path: Path, base: np.ndarray) -> None:
    path = tmp_path / "g"
    refused(path, "clusters of a graph", base, clusters=0)
    refused(path, "clusters of a graph", base, max_points=10)
    refused(path, "max_points", base, clusters=10, max_points=299)
    refused(path, "codes of a graph with clusters", base, clusters=2, codes="paged")
    refused(path, "codes of a graph with clusters", base, clusters=2, codes="memory")
    refused(path, "vector_dtype", base, clusters=2, vector_dtype="pq", disk_pq_bytes=8)
    refused(path, "memory for a build", base, clusters=2, memory="1MiB")
    share = espnx.graph.GraphShare("0" * 32, 0, 1)
    refused(path, "share of a graph with clusters", base, clusters=2, share=share)
    wrong = base.copy()
    wrong[2222, 3] = np.nan
    refused(path, "vector 2222, value 3", wrong, clusters=2)
    espnx.graph.build(base[:300], tmp_path / "plain", **FEW)
    with (
        espnx.graph.open(tmp_path / "plain") as index,
        pytest.raises(errors.InvalidInputError, match="nprobe"),
    ):
        index.search(base[:2], 3, nprobe=2)


def test_searches_that_make_no_sense_are_refused(index_path: Path, base: np.ndarray) -> None:
    with espnx.graph.open(index_path) as index:
        for nprobe in (0, -1, "all", 2.5, True):
            with pytest.raises(errors.InvalidInputError, match="nprobe"):
                index.search(base[:2], 3, nprobe=nprobe)
        with pytest.raises(errors.InvalidInputError, match="queries"):
            index.search(base[:2, :5], 3)
        with pytest.raises(errors.InvalidInputError, match="queries"):
            index.search(np.full((1, 24), np.nan, np.float32), 3)
        assert index.search(base[:2], 3, nprobe=100).ids.shape == (2, 3)
        assert index.search(base[:0], 3).ids.shape == (0, 3)


@pytest.mark.parametrize("open_other", [espnx.graph.StoredGraph, None])
def test_what_knows_one_graph_refuses_several(
    index_path: Path, tmp_path: Path, open_other: Callable[[Path], Any] | None
) -> None:
    with pytest.raises(errors.InvalidInputError, match="clusters"):
        if open_other is None:
            espnx.graph.export_diskann(index_path, tmp_path / "out")
        else:
            open_other(index_path)


def test_sections_of_a_file_hold_one_graph(index_path: Path) -> None:
    with espnx.graph.open(index_path) as index:
        sections = GraphSections("file", index.facts.manifest(), index.facts.regions)
    with NativeEngine("posix") as engine, pytest.raises(errors.FormatError, match="n_clusters"):
        read_graph(engine, sections)


def test_too_little_memory_is_told_before_anything_is_written(
    base: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("espnx.graph.build"), "available_bytes", lambda: 1000
    )
    with pytest.raises(errors.OutOfMemoryError, match="up to 600 vectors") as caught:
        espnx.graph.build(base, tmp_path / "g", clusters=10, **FEW)
    assert caught.value.fix is not None
    assert "more clusters" in caught.value.fix
    assert not (tmp_path / "g").exists()


def test_an_older_reader_is_told_that_it_is_another_version(index_path: Path) -> None:
    with NativeEngine("posix") as engine, pytest.raises(errors.FormatError, match="version"):
        read_manifest(engine, index_path, MAGIC, VERSION)


@pytest.fixture
def copy(index_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_path, tmp_path / "copy"))


NAMES = ("nodes", "rows", "codebook", "entries", "clusters", "centroids")


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_or_short_file_is_named(copy: Path, name: str) -> None:
    file = copy / f"{name}.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(errors.TruncatedFileError, match=f"{name}.bin"):
        espnx.graph.open(copy)
    file.unlink()
    with pytest.raises(errors.FileMissingError, match=f"{name}.bin"):
        espnx.graph.open(copy)


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_found_out(copy: Path, name: str, queries: np.ndarray) -> None:
    file = copy / f"{name}.bin"
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2 // 4096 * 4096 + 9] ^= 4
    file.write_bytes(whole)
    with (
        pytest.raises((errors.ChecksumError, errors.FormatError, errors.StaleDataError)),
        espnx.graph.open(copy) as index,
    ):
        index.verify()


def test_pages_of_another_cluster_are_found_out(copy: Path, queries: np.ndarray) -> None:
    """Each is whole, has the right number, and belongs to the same directory."""
    with espnx.graph.open(copy) as index:
        facts = index.facts
    file, size = copy / "nodes.bin", facts.layout.page_bytes
    pages = np.fromfile(file, np.uint8).reshape(-1, size)
    first = facts.parts.first_page
    pages[first[1]], pages[first[2]] = pages[first[2]].copy(), pages[first[1]].copy()
    pages.tofile(file)
    with espnx.graph.open(copy) as index:
        with pytest.raises(errors.StaleDataError):
            index.verify()
        with pytest.raises(errors.ChecksumError, match="another graph"):
            index.search(queries, 10, nprobe=12, list_size=3000)


@pytest.mark.parametrize(
    ("name", "value"), [("n_clusters", 0), ("n_clusters", 13), ("n_clusters", "12"), ("n", 3001)]
)
def test_a_manifest_that_does_not_fit_is_refused(copy: Path, name: str, value: object) -> None:
    manifest = json.loads((copy / NAME).read_text())
    fields = {key: each for key, each in manifest.items() if key != "checksum"} | {name: value}
    from espnx.storage.manifest import _digest

    (copy / NAME).write_text(json.dumps(fields | {"checksum": _digest(fields)}))
    with pytest.raises((errors.FormatError, errors.TruncatedFileError)):
        espnx.graph.open(copy)


def test_rows_above_32_bits(index_path: Path, queries: np.ndarray) -> None:
    """As of an input of more vectors: pages with other rows, walked over as they are."""
    with espnx.graph.open(index_path, threads=1) as index:
        facts = index.facts
        plain = index.search(queries, 10, list_size=50, nprobe=4)
        far = 5 << 32
        with NativeEngine("posix") as engine:
            pages = np.arange(facts.parts.n_pages)
            nodes = read_pages(engine, open_pages(engine, facts), facts, pages, 30.0)
        nodes["row_high"] = 5
        moved = index_path.parent / "moved" / "nodes.bin"
        moved.parent.mkdir()
        with moved.open("wb") as file:
            for part, (begin, end) in enumerate(
                zip(facts.parts.first_page[:-1], facts.parts.first_page[1:], strict=True)
            ):
                salt = (facts.salt + part) % 2**64
                file.write(pages_of(nodes[begin:end].reshape(-1), facts.layout, 0, salt).data)
        layout = replace(facts.layout, n=1 << 40)
        many = replace(facts, where=str(moved.parent), layout=layout)
        native = load_extension()
        options = native.GraphSearchOptions(
            path="auto", direct=None, threads=1, walks=8, code_cache_bytes=0, rules=[], seed=0
        )
        searcher = native.GraphSearcher(native_view(many, None), options)
        wide = torch.from_numpy(queries)
        clusters = facts.clusters
        assert clusters is not None
        distances = np.square(queries[:, None] - clusters.centroids[None]).sum(axis=-1)
        chosen, begin = choose_clusters(distances, ONE, Probing(4), facts.parts.nodes, 1)
        found = searcher.start(
            queries=wide,
            queries_f32=wide,
            k=10,
            list_size=50,
            far_list_size=50,
            beam_width=1,
            stop_beyond=float("inf"),
            filter=None,
            absent=None,
            parts=(torch.from_numpy(chosen), torch.from_numpy(begin)),
            deadline_s=30.0,
        ).finish()
        searcher.close()
    assert np.array_equal(found[0].numpy().reshape(-1, 10), plain.ids + far)


def test_threads_and_descriptors_do_not_grow_with_the_clusters(
    base: np.ndarray, tmp_path: Path
) -> None:
    counts = []
    for clusters in (8, 2, 64):  # the first opens what a process opens once, too
        path = tmp_path / str(clusters)
        espnx.graph.build(base[:1500], path, clusters=clusters, **FEW)
        before = [len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")]
        with espnx.graph.open(path) as index:
            index.search(base[:64], 10)
            after = [len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")]
        counts.append([more - less for more, less in zip(after, before, strict=True)])
        assert index.facts.memory_bytes < 2 << 20
    assert counts[1] == counts[2]


def test_a_cluster_takes_no_more_memory_than_it_may(index_path: Path) -> None:
    with espnx.graph.open(index_path) as index:
        facts = index.facts
        entry_bytes = 2 * facts.layout.code_bytes + 12
        assert (facts.parts.n_entries * entry_bytes <= 4096 - 128).all()


class StoppedError(BaseException):
    pass


@pytest.fixture(scope="module")
def uninterrupted(base: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("uninterrupted") / "g"
    espnx.graph.build(base, path, clusters=6, **FEW)
    return path


@pytest.mark.parametrize("stage", ["read", "divide", "edges", "pages"])
def test_a_build_goes_on_where_it_was(
    base: np.ndarray, tmp_path: Path, uninterrupted: Path, stage: str
) -> None:
    seen: list[str] = []
    built: list[int] = []

    def stop(what: str, done: int, total: int) -> None:
        if what == stage and (what != "edges" or done > total // 2):
            raise StoppedError

    def watch(what: str, done: int, total: int) -> None:
        seen.append(what)
        if what == "edges":
            built.append(done)

    with pytest.raises(StoppedError):
        espnx.graph.build(base, tmp_path / "g", clusters=6, progress=stop, **FEW)
    assert not (tmp_path / "g" / NAME).exists()
    espnx.graph.build(base, tmp_path / "g", clusters=6, progress=watch, **FEW)
    assert ("read" in seen) == (stage == "read")
    assert ("divide" in seen) == (stage in ("read", "divide"))
    whole = stage == "pages"
    assert (len(set(built)) <= 7) == whole, "graphs that were whole are not built again"
    assert not (tmp_path / "g" / "work").exists()
    for name in ("rows.bin", "codebook.bin", "entries.bin", "centroids.bin"):
        assert (tmp_path / "g" / name).read_bytes() == (uninterrupted / name).read_bytes()
    with espnx.graph.open(tmp_path / "g") as g, espnx.graph.open(uninterrupted) as other:
        mine, theirs = (each.facts.clusters for each in (g, other))
        assert mine is not None
        assert theirs is not None
        for name in ("nodes", "n_entries", "files", "file_pages"):
            assert (getattr(mine, name) == getattr(theirs, name)).all()


def test_a_build_replaces_a_graph_of_the_other_kind(base: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "g"
    for clusters in (None, 4, None):
        espnx.graph.build(base[:600], path, clusters=clusters, replace=True, **FEW)
        with espnx.graph.open(path) as index:
            index.verify()
            assert (index.facts.clusters is None) == (clusters is None)
            names = {os.path.basename(each.path) for each in index.facts.regions.values()}
            if clusters is not None:
                names |= {"clusters.v2.bin", "centroids.v2.bin", "nodes.v2.bin"}
        left = {each.name for each in path.iterdir() if each.suffix == ".bin"}
        assert left == names


@at_length("times", 5, 12)
def test_kills_at_random_moments_leave_it_whole_or_none(
    base: np.ndarray, tmp_path: Path, processes: Forks, times: int
) -> None:
    source = tmp_path / "v.npy"
    np.save(source, base)
    chance = random.Random(7)
    began = time.monotonic()
    assert processes.run(what="clusters", source=source, path=tmp_path / "whole") == 0
    took = time.monotonic() - began
    path = tmp_path / "g"
    for _ in range(times):
        pid = processes.start(what="clusters", source=source, path=path)
        time.sleep(chance.uniform(0, took / 2))
        os.kill(pid, signal.SIGKILL)
        processes.wait(pid)
        if (path / NAME).exists():
            break
    assert (path / NAME).exists() or processes.run(what="clusters", source=source, path=path) == 0
    with espnx.graph.open(path) as index:
        index.verify()
        assert (
            recall_of(index.search(base[:50], 1, list_size=100).ids, np.arange(50)[:, None]) == 1.0
        )


def test_memory_is_kept_to(
    base: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "resident_bytes", lambda: 0)
    options = {"clusters": 6, "max_points": 600, **FEW}
    with pytest.raises(errors.InvalidInputError, match="up to 600 vectors") as caught:
        espnx.graph.build(base, tmp_path / "g", memory=48 << 20, **options)
    assert caught.value.fix is not None
    assert "more clusters" in caught.value.fix
    espnx.graph.build(base, tmp_path / "g", memory=50 << 20, **options)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.verify().pages == index.facts.parts.n_pages
