"""Searches: what they find beside an exact search, and, step by step, beside the same walk in plain
Python."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.graph.format import CODES, NODES, GraphFacts
from tests.graph.conftest import clustered, exact, recall_of
from tests.storage.common import in_child


def codes_of(facts: GraphFacts) -> np.ndarray | None:
    """uint8 [n, code_bytes] of all nodes; None where they lie beside their nodes."""
    layout = facts.layout
    if layout.codes_in == "inline":
        return None
    raw = np.fromfile(facts.path(CODES), np.uint8)
    if layout.paged_codes:
        raw = np.ascontiguousarray(
            raw.reshape(-1, 4096)[:, 16 : 16 + layout.codes_per_page * layout.code_bytes]
        ).ravel()
    return raw[: layout.n * layout.code_bytes].reshape(layout.n, -1)


def plain_walk(
    facts: GraphFacts, codes: np.ndarray | None, query: np.ndarray, k: int, list_size: int
) -> tuple[list[int], int]:
    """(rows found, pages read): the walk of csrc/graph/walk.cpp with one page under way, over the
    file's bytes."""
    layout, book = facts.layout, facts.codebook
    raw = np.fromfile(facts.path(NODES), np.uint8).reshape(-1, layout.page_bytes)
    nodes = (
        np.ascontiguousarray(raw[:, 16 : 16 + layout.nodes_per_page * layout.node_bytes])
        .view(layout.node_dtype)
        .ravel()[: layout.n]
    )
    turned = query
    if book.rotation is not None:
        turned = np.zeros(layout.dim, np.float32)
        for value, row in zip(query, book.rotation, strict=True):  # in order, as the format says
            turned += np.float32(value) * row
    table = np.zeros((layout.code_bytes, 256), np.float32)
    for part in range(layout.code_bytes):
        for each in range(book.begin[part], book.begin[part + 1]):
            table[part] += np.square(turned[each] - book.centroids[:, each])

    def estimate(code: np.ndarray) -> float:
        total = np.float32(0)
        for part, value in enumerate(code):
            total += table[part, value]
        return float(total)

    estimates = [estimate(code) for code in facts.entry_codes]
    first = int(np.argmin(estimates))
    listed = [(estimates[first], int(facts.entries[first]), True)]
    met, measured, read = {int(facts.entries[first])}, [], list[int]()

    def add(far: float, node: int, waits: bool) -> None:
        if len(listed) < list_size or far < listed[-1][0]:
            listed.append((far, node, waits))
            listed.sort(key=lambda each: each[:2])
            del listed[list_size:]

    while waiting := next((each for each in listed if each[2]), None):
        page = waiting[1] // layout.nodes_per_page
        read.append(page)
        later = list[int]()
        for number in range(
            page * layout.nodes_per_page, min(layout.n, (page + 1) * layout.nodes_per_page)
        ):
            node = nodes[number]
            vector = facts.coding.decode(node["vector"][None])[0]
            far = float(np.square(query.astype(np.float64) - vector.astype(np.float64)).sum())
            measured.append((far, int(node["row"])))
            met.add(number)
            place = next((i for i, each in enumerate(listed) if each[1] == number), None)
            if place is not None:
                listed[place] = (*listed[place][:2], False)
            elif len(listed) < list_size or far < listed[-1][0]:
                add(far, number, False)
            else:
                continue
            for i in range(node["n_neighbours"]):
                near = int(node["neighbours"][i])
                if near not in met:
                    met.add(near)
                    if i < layout.inline_pq:
                        add(estimate(node["codes"][i]), near, True)
                    elif layout.paged_codes:
                        later.append(near)
                    else:
                        add(estimate(codes[near]), near, True)
        for near in later:  # their codes are read when the page is done
            if near // layout.nodes_per_page not in read:
                add(estimate(codes[near]), near, True)
    return [row for _, row in sorted(measured)[:k]], len(read)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("list_size", [1, 5, 20, 64])
def test_walk_is_the_plain_one(graph: Path, queries: np.ndarray, list_size: int) -> None:
    k = min(5, list_size)
    with espnx.graph.open(graph) as index:
        assert index.facts.codebook.rotation is not None
        found = index.search(queries, k, list_size=list_size, beam_width=1)
        codes = codes_of(index.facts)
        for i, query in enumerate(queries[:20]):
            rows, pages = plain_walk(index.facts, codes, query, k, list_size)
            assert found.ids[i][: len(rows)].tolist() == rows
            assert found.pages[i] == pages


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("codes", "inline_pq"),
    [("paged", 0), ("paged", 1), ("paged", 7), ("paged", 15), ("memory", 5), ("memory", 16)],
)
@pytest.mark.parametrize("memory", [None, "8GiB"])
def test_walk_with_some_codes_inline_is_the_plain_one(
    base: np.ndarray,
    queries: np.ndarray,
    tmp_path: Path,
    codes: str,
    inline_pq: int,
    memory: str | None,
) -> None:
    options = {
        "max_degree": 16,
        "list_size": 40,
        "num_entry_points": 20,
        "threads": 1,
        "pq_bytes": 12,
        "memory": memory,
    }
    espnx.graph.build(base, tmp_path / "g", codes=codes, inline_pq=inline_pq, **options)
    espnx.graph.build(base, tmp_path / "none", codes=codes, **options)
    with (
        espnx.graph.open(tmp_path / "g", code_cache_bytes=0) as index,
        espnx.graph.open(tmp_path / "none", code_cache_bytes=0) as other,
    ):
        layout = index.facts.layout
        assert layout.inline_pq == inline_pq
        assert layout.codes_in == ("inline" if inline_pq == 16 else codes)
        index.verify()
        found = index.search(queries, 5, list_size=20, beam_width=1)
        for i, query in enumerate(queries[:12]):
            rows, pages = plain_walk(index.facts, codes_of(index.facts), query, 5, 20)
            assert found.ids[i].tolist() == rows
            assert found.pages[i] == pages
        if codes == "paged" and inline_pq == 15:
            assert (
                found.code_pages.mean()
                < other.search(queries, 5, list_size=20, beam_width=1).code_pages.mean()
            )
        assert ("beside each node" in index.summary()) == (inline_pq in (1, 5, 7, 15))


def test_as_many_codes_inline_as_a_page_holds(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    wide = np.tile(base, (1, 5))  # 120 dimensions
    espnx.graph.build(
        wide, tmp_path / "g", codes="memory", inline_pq=-1, pq_bytes=60, max_degree=64, list_size=64
    )
    with espnx.graph.open(tmp_path / "g") as index:
        layout = index.facts.layout
        assert (layout.page_bytes, layout.nodes_per_page) == (4096, 1)
        assert layout.inline_pq == (4096 - 16 - 240 - 8 - 256) // 60 == 59
        true = exact(wide.astype(np.float16), np.tile(queries, (1, 5)), 10)
        assert recall_of(index.search(np.tile(queries, (1, 5)), 10, list_size=40).ids, true) > 0.95
    espnx.graph.build(base[:50], tmp_path / "all", codes="paged", inline_pq=-1, max_degree=8)
    with espnx.graph.open(tmp_path / "all") as index:
        assert index.facts.layout.codes_in == "inline", "all fit"


def test_finds_what_an_exact_search_does(
    graph: Path, base: np.ndarray, queries: np.ndarray
) -> None:
    true = exact(base.astype(np.float16), queries, 10)
    with espnx.graph.open(graph) as index:
        recalls = [
            recall_of(index.search(queries, 10, list_size=each).ids, true) for each in (10, 40, 200)
        ]
        whole = index.search(queries, 10, list_size=3000)
    assert recalls[0] < recalls[-1]
    assert recalls[1] > 0.9
    assert recalls[2] > 0.99
    assert recall_of(whole.ids, true) == 1, "a list of all nodes is an exact search"
    far = np.square(queries[:, None] - base.astype(np.float16).astype(np.float32)[whole.ids]).sum(
        axis=-1
    )
    # 24 squares of float32, each and their sum rounded.
    np.testing.assert_allclose(whole.distances, far, rtol=26 * 2.0**-24)


def test_results_do_not_depend_on_who_else_searches(graph: Path, queries: np.ndarray) -> None:
    with (
        espnx.graph.open(graph, threads=1, walks=1) as alone,
        espnx.graph.open(graph, threads=3, walks=7) as many,
    ):
        expected = alone.search(queries, 10, list_size=30, beam_width=1)
        found = dict[int, np.ndarray]()

        def search(number: int) -> None:
            part = queries[number * 10 : number * 10 + 10]
            found[number] = many.search(part, 10, list_size=30, beam_width=1).ids

        threads = [threading.Thread(target=search, args=(number,)) for number in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert np.array_equal(np.concatenate([found[number] for number in range(6)]), expected.ids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("beam_width", [2, 4, 64])
def test_wider_beams_find_as_much(
    graph: Path, base: np.ndarray, queries: np.ndarray, beam_width: int
) -> None:
    true = exact(base.astype(np.float16), queries, 10)
    with espnx.graph.open(graph) as index:
        narrow = index.search(queries, 10, list_size=60, beam_width=1)
        wide = index.search(queries, 10, list_size=60, beam_width=beam_width)
    assert recall_of(wide.ids, true) >= recall_of(narrow.ids, true) - 0.01


def test_stops_beyond(graph: Path, queries: np.ndarray) -> None:
    with espnx.graph.open(graph) as index:
        never = index.search(queries, 10, list_size=100, beam_width=1)
        far = index.search(queries, 10, list_size=100, beam_width=1, stop_beyond=1e9)
        near = index.search(queries, 10, list_size=100, beam_width=1, stop_beyond=0.0)
    assert np.array_equal(never.ids, far.ids)
    assert near.pages.mean() < never.pages.mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "float32"])
def test_metrics_and_dtypes(tmp_path: Path, metric: str, dtype: str) -> None:
    base, queries = clustered(800, 13), clustered(20, 13, seed=3)
    if dtype in ("uint8", "int8"):
        shift = 128 if dtype == "uint8" else 0
        base, queries = (
            np.clip(each * 8 + shift, shift - 128, shift + 127).astype(dtype)
            for each in (base, queries)
        )
    else:
        base, queries = base.astype(dtype), queries.astype(dtype)
    kept = "float32" if dtype == "float32" else "auto"
    espnx.graph.build(
        base, tmp_path / "g", metric=metric, max_degree=12, list_size=30, vector_dtype=kept
    )
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(queries, 5, list_size=800)
        stored = index.vectors(np.arange(800))
    true = exact(base, queries, 5, metric)
    # float16 of unit vectors may tie
    assert recall_of(found.ids, true) > (
        0.97 if metric == "cosine" and dtype != "float32" else 0.99
    )
    if metric != "cosine":
        assert np.array_equal(stored, base)
    values, asked = stored.astype(np.float64)[found.ids], queries.astype(np.float64)[:, None]
    if metric == "cosine":
        asked = asked / np.linalg.norm(asked, axis=-1, keepdims=True)
    far = {
        "l2": np.square(values - asked).sum(-1),
        "ip": -(values * asked).sum(-1),
        "cosine": np.square(values - asked).sum(-1) / 2,
    }[metric]
    scale = np.abs(values * asked).sum(-1) + np.square(values).sum(-1) + np.square(asked).sum(-1)
    assert (np.abs(found.distances - far) <= 16 * 2.0**-24 * scale).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 16, 17, 300])
@pytest.mark.parametrize("codes", ["inline", "memory", "paged"])
def test_few_vectors(tmp_path: Path, n: int, codes: str) -> None:
    base = clustered(max(n, 1), 5)[:n]
    espnx.graph.build(base, tmp_path / "g", max_degree=16, codes=codes)
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(clustered(4, 5, seed=8), 10)
        assert index.verify().pages == index.facts.layout.n_pages
    assert ((found.ids >= 0).sum(axis=1) == min(n, 10)).all()
    assert (found.ids[:, min(n, 10) :] == -1).all()
    assert np.isinf(found.distances[found.ids < 0]).all()
    if n:
        assert (
            recall_of(
                found.ids[:, : min(n, 10)],
                exact(base.astype(np.float16), clustered(4, 5, seed=8), min(n, 10)),
            )
            > 0.97
        )


@pytest.mark.parametrize("dim", [1, 2, 767, 4096])
def test_dimensions(tmp_path: Path, dim: int) -> None:
    base = clustered(200, dim)
    espnx.graph.build(base, tmp_path / "g", max_degree=8, list_size=20)
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(base[:10], 3, list_size=100)
        assert index.facts.layout.page_bytes >= 16 + index.facts.layout.node_bytes
    assert (found.ids[:, 0] == np.arange(10)).mean() > (0.0 if dim == 1 else 0.9)


def test_one_point_ten_thousand_times(tmp_path: Path) -> None:
    base = np.concatenate([np.ones((10_000, 8), np.float32), clustered(500, 8)])
    report = espnx.graph.build(base, tmp_path / "g", max_degree=16, list_size=30)
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(base[-20:], 1, list_size=100)
        same = index.search(base[:1], 100, list_size=200)
    assert (found.distances < 1e-4).mean() > 0.9, (
        f"others are found, too ({report.repaired} repaired)"
    )
    assert (same.distances[0] == 0).all()


def test_k_beyond_n_and_one_query(graph: Path, base: np.ndarray) -> None:
    with espnx.graph.open(graph) as index:
        found = index.search(base[7], 4000, list_size=4000)
        none = index.search(np.empty((0, 24), np.float32), 3)
    assert found.ids.shape == (1, 4000)
    assert sorted(found.ids[0][:3000].tolist()) == list(range(3000))
    assert (found.ids[0][3000:] == -1).all()
    assert none.ids.shape == (0, 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001, 0.0])
def test_filters(graph: Path, base: np.ndarray, queries: np.ndarray, share: float) -> None:
    allowed = np.flatnonzero(np.random.default_rng(5).random(len(base)) < share)
    true = (
        allowed[exact(base.astype(np.float16)[allowed], queries, 10)]
        if len(allowed)
        else np.empty((len(queries), 0), np.int64)
    )
    with espnx.graph.open(graph) as index:
        found = index.search(queries, 10, list_size=40, include=allowed)
        others = index.search(
            queries, 10, list_size=40, exclude=np.setdiff1d(np.arange(len(base)), allowed)
        )
    assert set(found.ids.ravel().tolist()) <= {*allowed.tolist(), -1}
    assert np.array_equal(found.ids, others.ids)
    count = min(10, len(allowed))
    assert (found.ids[:, count:] == -1).all()
    if count:
        assert recall_of(found.ids[:, :count], true[:, :count]) >= 0.95


def test_refuses(graph: Path) -> None:
    with espnx.graph.open(graph) as index:
        for wrong in (
            {"queries": np.zeros((2, 23), np.float32)},
            {"queries": np.full((1, 24), np.nan, np.float32)},
            {"queries": np.zeros((1, 1, 24))},
            {"k": 0},
            {"k": 2.0},
            {"list_size": 5},
            {"list_size": 20, "recall": 0.9},
            {"recall": 1.5},
            {"beam_width": 0},
            {"beam_width": 65},
            {"stop_beyond": -1.0},
            {"deadline_s": 0.0},
            {"deadline_s": float("nan")},
            {"include": [3000]},
            {"exclude": [-1]},
            {"include": np.zeros(5, bool)},
            {"include": ["a"]},
        ):
            with pytest.raises(errors.InvalidInputError):
                index.search(**({"queries": np.zeros((2, 24), np.float32), "k": 10} | wrong))
        index.search(np.zeros((1, 24), np.float32))
    with pytest.raises(errors.EngineClosedError):
        index.search(np.zeros((1, 24), np.float32))
    index.close()


def test_list_size_for_a_recall(graph: Path, base: np.ndarray, queries: np.ndarray) -> None:
    true = exact(base.astype(np.float16), queries, 10)
    with espnx.graph.open(graph) as index:
        points = index.facts.recall
        assert [each.list_size for each in points] == sorted(each.list_size for each in points)
        if (most := max(each.recall for each in points)) < 1:
            with pytest.raises(errors.InvalidInputError, match="list_size above"):
                index.search(queries, 10, recall=most + 1e-6)
        assert index.list_size_for(0.5).list_size <= index.list_size_for(0.99).list_size
        assert recall_of(index.search(queries, 10, recall=0.99).ids, true) > 0.95
        assert "recall@10" in index.summary()


def test_pages_of_codes_are_read_once_while_they_are_kept(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    espnx.graph.build(base, tmp_path / "g", max_degree=16, list_size=40, codes="paged", pq_bytes=24)
    found = {}
    for cache_bytes in (0, 4096, 1 << 20):
        with espnx.graph.open(
            tmp_path / "g", threads=1, walks=1, code_cache_bytes=cache_bytes
        ) as index:
            found[cache_bytes] = index.search(queries, 10, list_size=30, beam_width=1)
            count = index.facts.layout.codes_bytes // 4096
    assert all(np.array_equal(each.ids, found[0].ids) for each in found.values())
    totals = [each.code_pages.sum() for each in found.values()]
    assert totals[0] > totals[1] > totals[2]
    assert totals[2] <= count
    assert (found[0].bytes_read == 4096 * (found[0].pages + found[0].code_pages)).all()


def test_private_graphs_in_a_child_and_after_close(tmp_path: Path) -> None:
    base = clustered(200, 8)
    espnx.graph.build_private(base, [tmp_path / "a", tmp_path / "b"], max_degree=8)
    graphs = espnx.graph.PrivateGraphs([tmp_path / "a", tmp_path / "b"])
    graphs.search(base[:2])  # its threads wait for work now

    def search() -> str:
        try:
            graphs.search(base[:2])
        except errors.InvalidInputError as error:
            return str(error)
        return "found"

    assert "after fork()" in in_child(search)
    graphs.close()
    with pytest.raises(errors.EngineClosedError):
        graphs.search(base[:1])
