"""Searches among the rows that a filter allows: where those lie elsewhere than the query, in
pieces, or anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx.graph
from espnx import errors
from espnx.graph.filters import FilterReader, RowFilter
from espnx.graph.format import ROWS
from tests.graph.conftest import exact, recall_of
from tests.sweeps import at_length, some

N, DIM = 6000, 16


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 10, N)


@pytest.fixture(scope="module")
def vectors(labels: np.ndarray) -> np.ndarray:
    """float16 [n, dim]: ten clusters far from one another."""
    random = np.random.default_rng(1)
    return (
        3 * random.standard_normal((10, DIM))[labels] + random.standard_normal((N, DIM))
    ).astype(np.float16)


@pytest.fixture(scope="module", params=["inline", "memory", "paged"])
def ten(
    request: pytest.FixtureRequest, vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("filters") / request.param
    # One node to a page where codes are inline: most that a walk could read for nothing.
    espnx.graph.build(
        vectors,
        path,
        max_degree=64 if request.param == "inline" else 24,
        list_size=50,
        codes=request.param,
        seed=3,
    )
    return path


def regions(vectors: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """bool [n] by name."""
    random, far = (
        np.random.default_rng(2),
        np.square(vectors.astype(np.float32) - vectors[5].astype(np.float32)).sum(axis=1),
    )
    anywhere = random.random(N)
    return {
        "one cluster": labels == 1,
        "four clusters": labels > 5,
        "half": anywhere < 0.5,
        "a twentieth": anywhere < 0.05,
        "a region": far <= np.sort(far)[N // 5],
        "scattered in a region": (far <= np.sort(far)[N // 2]) & (anywhere < 0.1),
        "seven": np.isin(np.arange(N), random.permutation(N)[:7]),
        "none": np.zeros(N, bool),
        "all": np.ones(N, bool),
    }


def test_finds_what_is_allowed_wherever_it_lies(
    ten: Path, vectors: np.ndarray, labels: np.ndarray
) -> None:
    queries = vectors[labels == 0][:40]
    with espnx.graph.open(ten) as index:
        for name, allowed in regions(vectors, labels).items():
            rows = np.flatnonzero(allowed)
            found, count = (
                index.search(queries, 10, recall=0.95, include=allowed),
                min(10, len(rows)),
            )
            assert ((found.ids >= 0).sum(axis=1) == count).all(), name
            assert np.isin(found.ids[:, :count], rows).all(), name
            assert (
                np.sort(found.ids[:, :count], axis=1)[:, 1:]
                != np.sort(found.ids[:, :count], axis=1)[:, :-1]
            ).all(), name
            if count:
                assert (
                    recall_of(found.ids[:, :count], rows[exact(vectors[rows], queries, count)])
                    >= 0.93
                ), name
            others = index.search(queries, 10, recall=0.95, exclude=~allowed)
            assert np.array_equal(found.ids, others.ids)
            assert np.array_equal(found.distances, others.distances)
            assert others.filter_bytes == 0 < found.filter_bytes or not count, (
                "the second time nothing is read for the same filter"
            )


@pytest.mark.parametrize("ten", some(["inline", "memory", "paged"], 3), indirect=True)
@at_length("places", 1, 3)
def test_one_query_at_a_time(
    ten: Path, vectors: np.ndarray, labels: np.ndarray, places: int
) -> None:
    """Walks pay for one query where measuring all does not: of regions of any size they find as
    much, of rows drawn by lot at a price that grows with what is not allowed, and what begins them
    is counted, too."""
    random = np.random.default_rng(6)
    queries = vectors[random.permutation(N)[:120]]
    wide = vectors.astype(np.float32)
    filters = {f"lot {share}": random.random(N) < share for share in (0.5, 0.2, 0.05)}
    for share in (0.7, 0.5, 0.3, 0.15, 0.12, 0.1, 0.05):
        for centre in random.permutation(N)[:places]:
            far = np.square(wide - wide[centre]).sum(axis=1)
            filters[f"{share} around {centre}"] = far <= np.sort(far)[int(share * N)]
    with espnx.graph.open(ten, code_cache_bytes=0) as index:
        nodes = np.fromfile(index.facts.path(ROWS), "<u4")
        free = np.mean(
            [index.search(query[None], 10, recall=0.95, beam_width=1).pages[0] for query in queries]
        )
        for name, allowed in filters.items():
            rows, pages = np.flatnonzero(allowed), []
            all_pages = len(np.unique(nodes[allowed] // index.facts.layout.nodes_per_page))
            found = [
                index.search(query[None], 10, recall=0.95, beam_width=1, include=allowed)
                for query in queries
            ]
            for each in found:
                pages.append(int(each.pages[0] + each.code_pages[0]) + each.shared_pages)
                assert pages[-1] <= all_pages, name
            ids = np.concatenate([each.ids for each in found])
            assert recall_of(ids, rows[exact(vectors[rows], queries, 10)]) >= 0.93, name
            # codes cost pages there, with a filter and without
            if name.startswith("lot") and ten.name != "paged":
                assert np.mean(pages) <= 2 / (len(rows) / N) * free, name


def test_a_few_rows_that_lie_apart_from_most(tmp_path: Path) -> None:
    """A cluster and the few rows of others beside it: those are what is nearest to most queries,
    and hard to come by from the cluster."""
    random, n = np.random.default_rng(0), 9000
    labels = random.integers(0, 10, n)
    vectors = (
        2 * random.standard_normal((10, 32))[labels] + random.standard_normal((n, 32))
    ).astype(np.float16)
    espnx.graph.build(vectors, tmp_path / "g", max_degree=24, list_size=40, seed=3)
    wide, queries = vectors.astype(np.float32), vectors[random.permutation(n)[:60]]
    with espnx.graph.open(tmp_path / "g") as index:
        for label in range(0, 10, 2):
            far = np.square(wide - wide[labels == label].mean(axis=0)).sum(axis=1) + 1e9 * (
                labels == label
            )
            rows = np.flatnonzero((labels == label) | (far <= np.sort(far)[20]))
            found = [
                index.search(query[None], 10, recall=0.95, include=rows, beam_width=1).ids
                for query in queries
            ]
            assert (
                recall_of(np.concatenate(found), rows[exact(vectors[rows], queries, 10)]) >= 0.93
            ), label


@at_length("draws", 20, 100)
def test_whether_a_filter_is_scattered(ten: Path, labels: np.ndarray, draws: int) -> None:
    random = np.random.default_rng(7)
    lot = random.random(N)
    with espnx.graph.open(ten) as index:
        reader = FilterReader(index.facts, "auto")

        def is_scattered(mask: np.ndarray) -> bool:
            return reader.nodes_of(RowFilter.of(mask), 30.0)[0].is_scattered

        assert all(is_scattered(lot < share) for share in (1.1, 0.9, 0.5, 0.2, 0.05))
        for share in (0.95, 0.9, 0.5, 0.2, 0.05):  # by chance one of 30,000 is not
            assert all(is_scattered(random.permutation(N) < share * N) for _ in range(draws))
        for label in range(10):
            assert not is_scattered(labels == label)
            assert not is_scattered(labels != label)
        assert not is_scattered((labels < 5) & (lot < 0.3)), "everywhere in a half alone"
        assert not is_scattered(np.arange(N) == 5), "too few to tell"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("list_size", [10, 30])
def test_walks_read_no_more_than_measuring_all_would(
    ten: Path, vectors: np.ndarray, labels: np.ndarray, list_size: int
) -> None:
    queries = vectors[labels == 0][:30]
    with espnx.graph.open(ten, code_cache_bytes=0) as index:
        per_page = index.facts.layout.nodes_per_page
        nodes = np.fromfile(index.facts.path(ROWS), "<u4")
        for name, allowed in regions(vectors, labels).items():
            all_pages = len(np.unique(nodes[allowed] // per_page))
            found = [
                index.search(query[None], 10, list_size=list_size, include=allowed, beam_width=1)
                for query in queries[:10]
            ]
            found.append(index.search(queries, 10, list_size=list_size, include=allowed))
            for each in found:
                assert (each.pages + each.code_pages).max() <= all_pages, name
                assert each.shared_pages in (0, all_pages) or each.filter_bytes, name
                assert ((each.ids >= 0).sum(axis=1) == min(10, allowed.sum())).all(), name


def test_results_do_not_depend_on_threads(
    ten: Path, vectors: np.ndarray, labels: np.ndarray
) -> None:
    queries = vectors[labels == 3][:40]
    with (
        espnx.graph.open(ten, threads=1, walks=1) as alone,
        espnx.graph.open(ten, threads=3, walks=7) as many,
    ):
        for allowed in regions(vectors, labels).values():
            a, b = (
                index.search(queries, 10, list_size=14, include=allowed, beam_width=1)
                for index in (alone, many)
            )
            assert np.array_equal(a.ids, b.ids)
            assert np.array_equal(a.pages, b.pages)


def test_searches_of_many_rows_are_walks(
    ten: Path, vectors: np.ndarray, labels: np.ndarray
) -> None:
    half = np.random.default_rng(4).random(N) < 0.5
    with espnx.graph.open(ten) as index:
        assert [each.share for each in index.facts.filtered][:2] == [0.9, 0.5]
        free, found = (
            index.search(vectors[:30], 10, recall=0.95, include=include) for include in (None, half)
        )
        started = index.start(vectors[:30], 10, recall=0.95, include=half)
        early, _ = started.partial(3)
        assert np.isin(early, [*np.flatnonzero(half), -1]).all()
        assert np.array_equal(started.finish().ids, found.ids)
    # else there are dozens of rows to a page, and measuring all is cheaper
    if ten.name == "inline":
        assert found.shared_pages == 0
        assert found.pages.mean() <= 4 * free.pages.mean()


def test_a_file_of_rows_that_says_otherwise(
    ten: Path, vectors: np.ndarray, labels: np.ndarray, tmp_path: Path
) -> None:
    damaged = tmp_path / "g"
    shutil.copytree(ten, damaged)
    rows = np.fromfile(damaged / ROWS, "<u4")
    allowed = labels == 0
    a, b = np.flatnonzero(allowed)[0], np.flatnonzero(~allowed)[0]
    rows[[a, b]] = rows[[b, a]]
    rows.tofile(damaged / ROWS)
    with (
        espnx.graph.open(damaged) as index,
        pytest.raises((errors.ChecksumError, errors.FormatError)),
    ):
        index.search(vectors[[a, b]], 1, list_size=400, include=allowed)
        index.search(vectors[[a, b]], 1, list_size=4, include=allowed)
    rows[a] = rows[b]
    rows.tofile(damaged / ROWS)
    with espnx.graph.open(damaged) as index, pytest.raises(errors.FormatError):
        index.search(vectors[[a, b]], 1, include=allowed | (np.arange(N) == b))


def test_rows_in_any_collection(ten: Path, vectors: np.ndarray) -> None:
    rows = [5, 77, 300, 4000]
    with espnx.graph.open(ten) as index:
        wanted = index.search(vectors[:4], 3, include=np.array(rows)).ids
        for given in (
            rows,
            tuple(rows),
            set(rows),
            frozenset(rows),
            dict.fromkeys(rows),
            iter(rows),
            [np.int32(row) for row in rows],
        ):
            assert np.array_equal(index.search(vectors[:4], 3, include=given).ids, wanted)
        assert (index.search(vectors[:4], 3, include=set()).ids == -1).all()
        for wrong in ({"5"}, "5", b"5", [[1], [1, 2]], {-1}, {N}, {1.5}, 5, {None}, [2**70]):
            with pytest.raises(errors.InvalidInputError, match="rows to include"):
                index.search(vectors[:4], 3, include=wrong)


def test_deadlines(ten: Path, vectors: np.ndarray) -> None:
    with espnx.graph.open(ten) as index:
        for include in (np.arange(20), np.arange(N // 2)):
            with pytest.raises(errors.DeadlineExceededError):
                index.search(vectors[:200], 10, include=include, deadline_s=1e-7)
        assert (index.search(vectors[:3], 10, include=np.arange(20)).ids >= 0).all()


def test_numbers_arrays_and_paths_as_they_come(
    ten: Path, vectors: np.ndarray, tmp_path: Path
) -> None:
    with espnx.graph.open(ten) as index:
        plain = index.search(vectors[:4], 3)
        for k in (np.int64(3), torch.tensor(3)):
            assert np.array_equal(index.search(vectors[:4], k).ids, plain.ids)
        with pytest.raises(errors.InvalidInputError, match="length 4e"):
            index.search(np.full((1, DIM), 1e20, np.float32))
        masked = np.ma.masked_array(vectors[:4], mask=np.eye(4, DIM, dtype=bool))
        with pytest.raises(errors.InvalidInputError, match="masked"):
            index.search(masked)
    with pytest.raises(errors.InvalidInputError, match="masked"):
        espnx.graph.build(masked, tmp_path / "g")
    for path in (None, "a\0b", b"bytes"):
        for call in (
            lambda path: espnx.graph.build(vectors[:9], path),
            espnx.graph.open,
            lambda path: espnx.graph.build(path, tmp_path / "g"),
        ):
            with pytest.raises(errors.InvalidInputError):
                call(path)
    with pytest.raises(errors.InvalidInputError, match="32767"):
        espnx.graph.build(np.zeros((3, 32768), np.uint8), tmp_path / "g", metric="ip", max_degree=8)
    with pytest.raises(errors.InvalidInputError, match="tpu"):
        espnx.graph.build(vectors[:9], tmp_path / "g", device="tpu")
    with pytest.raises(errors.StoreNotFoundError, match="graph build"):
        espnx.graph.open(tmp_path / "none")


@pytest.mark.parametrize("codes", ["inline", "memory"])
def test_vectors_that_are_all_alike(tmp_path: Path, codes: str) -> None:
    """No vector lies outside any region of them: there is nothing to measure regions by, and a
    filter finds what it allows."""
    espnx.graph.build(
        np.ones((4200, 8), np.float32), tmp_path / "g", max_degree=16, list_size=32, codes=codes
    )
    with espnx.graph.open(tmp_path / "g") as index:
        for allowed in (np.arange(3), np.arange(600), np.arange(0, 4200, 7)):
            found = index.search(np.ones((4, 8), np.float32), 5, recall=0.95, include=allowed)
            want = min(5, len(allowed))
            assert np.isin(found.ids[:, :want], allowed).all()
            assert all(len(set(row.tolist())) == want for row in found.ids[:, :want])
