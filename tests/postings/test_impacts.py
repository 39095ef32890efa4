"""Sparse vectors: exact searches beside a product of matrices, two-step searches beside exact
ones."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import espnx.postings
from espnx import errors
from espnx.postings import CsrArrays, Postings
from espnx.postings.build.impacts import LAYERED_FROM
from espnx.postings.stored import segment as stored_segment
from espnx.postings.stored import terms as stored_terms

N, V = 12_000, 300


def vectors(n: int, size: int, seed: int) -> CsrArrays:
    """Gamma weights of terms whose frequencies fall off slowly: many lists are long."""
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, V + 1) ** 0.7
    indices = np.concatenate(
        [random.choice(V, size, replace=False, p=share / share.sum()) for _ in range(n)]
    )
    return CsrArrays(
        np.arange(n + 1) * size, indices, random.gamma(2, 0.4, n * size).astype(np.float32)
    )


def dense(given: CsrArrays) -> np.ndarray:
    found = np.zeros((len(given.indptr) - 1, V), np.float32)
    for row, vector in enumerate(given):
        found[row, list(vector)] = list(vector.values())
    return found


def step_of(largest: float) -> float:
    """The least power of two of which 255 are as much, by trying."""
    step = 2.0**-126
    while 255 * step < largest and step < 2.0**120:
        step *= 2
    return step


def in_bytes(weights: np.ndarray) -> np.ndarray:
    """What one-byte weights [records, terms] hold of these."""
    found = weights.astype(np.float64)
    for column in found.T:
        step = step_of(float(column.max()))
        there = column > 0
        column[there] = np.clip(np.rint(column[there] / step), 1, 255) * step
    return found


@pytest.fixture(scope="module")
def corpus() -> CsrArrays:
    return vectors(N, 40, 0)


@pytest.fixture(scope="module")
def queries() -> list[dict[int, float]]:
    return list(vectors(12, 20, 1))


@pytest.fixture(scope="module", params=[False, True], ids=["bytes", "floats"])
def path(
    request: pytest.FixtureRequest, corpus: CsrArrays, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    made = tmp_path_factory.mktemp("impacts") / "small.splade"
    report = Postings.build(made, vectors=corpus, exact=request.param)
    assert report.n_records == N
    return made


def test_exact_searches_are_products(
    path: Path, corpus: CsrArrays, queries: list[dict[int, float]]
) -> None:
    with Postings.open(path) as postings:
        found = postings.search(queries, k=100)
        stored = dense(corpus).astype(np.float64)
        if postings.facts.kind == "impact":
            stored = in_bytes(stored)
    for row, query in enumerate(queries):
        scores = stored[:, list(query)] @ np.array(list(query.values()), np.float64)
        assert found.scores[row] == pytest.approx(np.sort(scores)[::-1][:100], rel=1e-5)
        assert scores[found.numbers[row]] == pytest.approx(found.scores[row], rel=1e-5)


def test_two_steps_find_nearly_all_and_score_them_as_one(
    path: Path, queries: list[dict[int, float]]
) -> None:
    with Postings.open(path) as postings:
        whole = postings.search(queries, k=N)
        found = postings.search_two_step(queries, k=10, query_terms=8, candidates=400)
        few = postings.search_two_step(queries, k=10, query_terms=2, candidates=10)
    for row in range(len(queries)):
        scores = dict(zip(whole.numbers[row].tolist(), whole.scores[row].tolist(), strict=True))
        assert [scores[number] for number in found.numbers[row].tolist()] == found.scores[
            row
        ].tolist()
        assert [scores[number] for number in few.numbers[row].tolist()] == few.scores[row].tolist()
    hits = [
        len(set(a[:10].tolist()) & set(b.tolist()))
        for a, b in zip(whole.numbers, found.numbers, strict=True)
    ]
    assert sum(hits) >= 0.95 * 10 * len(queries)


def test_every_candidate_and_every_term_give_the_exact_result(
    path: Path, queries: list[dict[int, float]]
) -> None:
    with Postings.open(path) as postings:
        whole = postings.search(queries[:2], k=50)
        found = postings.search_two_step(queries[:2], k=50, query_terms=100, candidates=N)
    assert found.numbers.tolist() == whole.numbers.tolist()
    assert found.scores.tolist() == whole.scores.tolist()


def test_the_heaviest_lists_may_be_read_whole(path: Path, queries: list[dict[int, float]]) -> None:
    with Postings.open(path) as postings:
        whole = postings.search(queries, k=10)
        postings.search_two_step(queries, query_terms=1)  # names of terms are read once
        costs = []
        for whole_terms in (0, 2, 8, 100):
            found = postings.search_two_step(
                queries, k=10, query_terms=8, candidates=20, whole_terms=whole_terms
            )
            costs.append(int(found.bytes_asked.sum()))
        every = postings.search_two_step(
            queries, k=10, query_terms=1000, candidates=10, whole_terms=1000
        )
        with pytest.raises(errors.InvalidInputError, match="whole_terms"):
            postings.search_two_step(queries, whole_terms=-1)
    assert costs[0] < costs[1] < costs[2]
    assert costs[2] == pytest.approx(costs[3], rel=0.02)  # other candidates, as large
    # the lists alone give the best, and forward records the same scores
    assert every.numbers.tolist() == whole.numbers.tolist()
    assert every.scores.tolist() == whole.scores.tolist()


def test_long_lists_have_a_first_layer(path: Path) -> None:
    with Postings.open(path) as postings:
        held = postings._segments[0].dictionary
        assert held.first_layer is not None
        assert ((held.first_layer > 0) == (held.df >= LAYERED_FROM)).all()
        assert 0 < (held.first_layer > 0).sum() < len(held)


def test_filters_hold_in_both_steps(path: Path, queries: list[dict[int, float]]) -> None:
    with Postings.open(path) as postings:
        chosen = range(0, N, 7)
        for search in (postings.search, postings.search_two_step):
            found = search(queries, k=20, include=chosen)
            assert (found.numbers % 7 == 0).all()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e39])
def test_weights_that_cannot_be_stored_are_refused(tmp_path: Path, weight: float) -> None:
    with pytest.raises(errors.InvalidInputError, match="weight of a term"):
        Postings.build(tmp_path / "x", vectors=[{"a": 1.0}, {"a": weight}])


def test_bm25_has_no_second_step(postings_path: Path) -> None:
    with (
        Postings.open(postings_path) as postings,
        pytest.raises(errors.InvalidInputError, match="two-step"),
    ):
        postings.search_two_step([["w1"]])


def test_zeros_and_nothing_at_all(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", vectors=[{}, {"a": 0.0}, {"b": 1e-30, "a": 2.0}])
    with Postings.open(tmp_path / "x") as postings:
        found = postings.search([{"a": 1.0, "b": 1.0, "c": 1.0}, {}], k=3)
        again = postings.search_two_step([{"a": 1.0, "b": 1.0}, {}], k=3, candidates=3)
    assert found.numbers.tolist() == again.numbers.tolist() == [[2, -1, -1], [-1, -1, -1]]
    assert found.scores[0, 0] == pytest.approx(2.0)


def test_arrays_are_the_mappings_that_they_hold(
    tmp_path: Path, queries: list[dict[int, float]]
) -> None:
    given = vectors(3000, 12, 5)
    Postings.build(tmp_path / "a", vectors=given, memory_bytes=1 << 20)
    Postings.build(tmp_path / "b", vectors=list(given))
    with Postings.open(tmp_path / "a") as a, Postings.open(tmp_path / "b") as b:
        assert a.search(queries, k=50).numbers.tolist() == b.search(queries, k=50).numbers.tolist()
        assert a.search(queries, k=50).scores.tolist() == b.search(queries, k=50).scores.tolist()


@pytest.mark.parametrize(
    ("indptr", "indices", "data"),
    [
        ([0, 2], [1, 1], [1.0, 2.0]),
        ([0, 3], [1, 2], [1.0, 1.0]),
        ([1, 2], [0], [1.0]),
        ([0, 1], [-1], [1.0]),
        ([0, 1], [0.5], [1.0]),
        ([], [], []),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, indptr: list[int], indices: list[float], data: list[float]
) -> None:
    with pytest.raises(errors.InvalidInputError, match="CSR arrays"):
        Postings.build(
            tmp_path / "x", vectors=CsrArrays(np.array(indptr), np.array(indices), np.array(data))
        )


def test_weights_of_numpy_are_numbers(tmp_path: Path) -> None:
    """In a query as in a vector."""
    Postings.build(tmp_path / "p", vectors=[{"a": np.float32(1.5), "b": 0.5}, {"a": 0.5}])
    with Postings.open(tmp_path / "p") as postings:
        plain, scalars = (
            postings.search([query], k=2) for query in ({"a": 2.0}, {"a": np.float32(2)})
        )
        assert plain.numbers.tolist() == scalars.numbers.tolist() == [[0, 1]]
        assert plain.scores.tolist() == scalars.scores.tolist()


def test_a_term_that_a_vector_has_twice_is_refused(tmp_path: Path) -> None:
    for vector in ({1: 0.5, "1": 0.25}, {"1": 0.5, np.int32(1): 0.25}):
        with pytest.raises(errors.InvalidInputError, match="twice"):
            Postings.build(tmp_path / "x", vectors=[{"2": 1.0}, vector])
    # a weight of 0 is as good as none
    Postings.build(tmp_path / "x", vectors=[{1: 0.5, "1": 0.0, "2": 1.0}])
    with Postings.open(tmp_path / "x") as postings:
        assert postings.verify().postings == 2


def test_terms_of_lists_that_are_not_read_are_known_by_more_than_their_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two steps the lists of a few terms are read, the forward records say what the others
    weigh: whose they are, no list has said."""
    whole = stored_terms.hash_of
    monkeypatch.setattr(
        stored_terms, "hash_of", lambda data: whole(b"log" if data == b"unknown" else data)
    )
    Postings.build(
        tmp_path / "x", vectors=[{"disk": 2.0, "log": 0.5, "page": 0.25}, {"disk": 1.5}], exact=True
    )
    espnx.postings.add(
        tmp_path / "x", vectors=[{"disk": 1.0, "log": 0.5}, {"disk": 0.5, "unknown": 0.25}]
    )
    queries = [
        {"disk": 1.0, "unknown": 1.0},
        {"disk": 1.0, "log": 1.0},
        {"disk": 1.0, "page": 1.0, "unknown": 2.0, "log": 1.0},
    ]
    with Postings.open(tmp_path / "x") as postings:
        exact = postings.search(queries, k=4)
        first, again = (
            postings.search_two_step(queries, k=4, query_terms=1, candidates=4) for _ in range(2)
        )
    assert first.numbers.tolist() == again.numbers.tolist() == exact.numbers.tolist()
    assert first.scores.tolist() == again.scores.tolist() == exact.scores.tolist()
    assert (again.requests < first.requests).any()  # names are read once
    assert (again.requests <= first.requests).all()


def test_names_that_are_asked_for_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Postings.build(tmp_path / "x", vectors=[dict.fromkeys(range(300), 1.0)])
    monkeypatch.setattr(stored_segment, "_NAMES_KEPT", 70)  # they are forgotten, and read again
    with Postings.open(tmp_path / "x") as postings:
        [segment] = postings.searcher.collection.segments
        for numbers in (
            np.array([299, 0, 64, 64]),
            np.arange(0),
            np.arange(0, 300, 3),
            np.arange(300),
        ):
            names, costs = segment.names(numbers)
            assert names == [segment.term(number) for number in numbers.tolist()]
            assert (costs > 0).all() == (len(numbers) > 0)
        assert segment.names(np.arange(300))[1].tolist() == [0, 0, 0]


def scores_of(path: Path, queries: list[dict[str, float]], k: int) -> list[dict[int, float]]:
    """Of each query, by number of record."""
    with Postings.open(path) as postings:
        found = postings.search(queries, k=k)
    return [
        {n: s for n, s in zip(*row, strict=True) if n >= 0}
        for row in zip(found.numbers.tolist(), found.scores.tolist(), strict=True)
    ]


def test_a_large_weight_harms_no_other_term_and_takes_no_record_away(tmp_path: Path) -> None:
    given = [{"a": 1000.0, "b": 1.0}, {"b": 1.0}, {"b": 1.9}, {"a": 1.0}, {"a": 1e-30}]
    with pytest.warns(UserWarning, match="2 of 6 weights are below half a step"):
        report = Postings.build(tmp_path / "x", vectors=given)
    assert (report.n_postings, report.n_raised) == (6, 2)
    ones, tens = scores_of(tmp_path / "x", [{"b": 1.0}, {"a": 1.0}], 5)
    assert ones == {0: 1.0, 1: 1.0, 2: pytest.approx(1.9, abs=1 / 256)}
    # a step of 1000 is 4, and what there is is one at least
    assert tens == {0: 1000.0, 3: 4.0, 4: 4.0}


@pytest.mark.parametrize("exact", [False, True])
def test_a_weight_too_small_for_float32_is_the_least_that_it_can_hold(
    exact: bool, tmp_path: Path
) -> None:
    given = [{7: 1.0}, {3: 1e-46}, {3: 1e-300, 7: 0.0}]
    arrays = CsrArrays(
        np.array([0, 1, 2, 4]), np.array([7, 3, 3, 7]), np.array([1.0, 1e-46, 1e-300, 0.0])
    )
    for name, vectors in (("mappings", given), ("arrays", arrays)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of so few, all are below half a step
            report = Postings.build(tmp_path / name, vectors=vectors, exact=exact)
        assert (report.n_postings, report.n_raised) == (3, 0 if exact else 2)
        ones, tiny = scores_of(tmp_path / name, [{7: 1.0}, {3: 1.0}], 3)
        assert ones == {0: 1.0}
        assert tiny == dict.fromkeys((1, 2), 2.0**-149 if exact else 2.0**-126)


def test_compaction_takes_no_record_away(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", vectors=[{"b": 1.0}, {"b": 0.5}])
    espnx.postings.add(tmp_path / "x", vectors=[{"a": 1000.0}, {"b": 0.001}])
    before = scores_of(tmp_path / "x", [{"b": 1.0}, {"a": 1.0}], 5)
    with pytest.warns(UserWarning, match="1 of 4 weights"):
        report = espnx.postings.compact(tmp_path / "x")
    assert report is not None
    assert report.n_raised == 1
    after = scores_of(tmp_path / "x", [{"b": 1.0}, {"a": 1.0}], 5)
    assert [sorted(each) for each in after] == [sorted(each) for each in before]
    assert after[0] == {0: 1.0, 1: 0.5, 3: 2.0**-7}


def test_weights_at_both_ends_of_float32(tmp_path: Path) -> None:
    for place, weights in enumerate(
        [
            (1e-45, 3.4e38),
            (3.4028234e38, 1.0),
            (2.0**-126, 2.0**-133),
            (255 * 2.0**-8, 2.0**-8),
            (1.0, 0.3),
        ]
    ):
        given = [{"a": weight} for weight in weights]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of two weights one may well be raised
            Postings.build(tmp_path / str(place), vectors=given)
        (found,) = scores_of(tmp_path / str(place), [{"a": 1.0}], 2)
        expected = in_bytes(np.array(weights, np.float32)[:, None])[:, 0]
        assert [found[0], found[1]] == expected.tolist()
        # in float64, which 1e-45 is lost in
        assert np.abs(expected - np.array(weights, np.float32)).max() <= step_of(max(weights))


def test_however_often_it_is_merged_a_weight_is_less_than_a_step_off(tmp_path: Path) -> None:
    """The largest weight grows a little with each addition, so that lists are rounded again and
    again."""
    random, weights = np.random.default_rng(3), list[float]()
    for number in range(40):
        weights += [float(each) for each in np.exp(random.uniform(-3, 0, 5)) * 1.13**number]
        vectors = [{"a": weight} for weight in weights[-5:]]
        if number == 0:
            Postings.build(tmp_path / "x", vectors=vectors)
            continue
        espnx.postings.add(tmp_path / "x", vectors=vectors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            espnx.postings.compact(tmp_path / "x")
    (found,) = scores_of(tmp_path / "x", [{"a": 1.0}], len(weights))
    off = np.abs(np.array([found[i] for i in range(len(weights))]) - np.float32(weights))
    assert off.max() < step_of(max(weights))
