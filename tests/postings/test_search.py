"""What searches find beside bm25s, and beside BM25 in plain NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espnx import errors
from espnx.postings import BM25, VARIANTS, Analyzer, Found, Postings
from tests.postings.common import plain_bm25


def check(found: Found, row: int, numbers: np.ndarray, scores: np.ndarray) -> None:
    """A row of a result is the beginning of these, bit for bit."""
    k = found.numbers.shape[1]
    n = min(k, len(numbers))
    assert found.numbers[row, :n].tolist() == numbers[:n].tolist()
    assert found.scores[row, :n].tolist() == scores[:n].tolist()
    assert (found.numbers[row, n:] == -1).all()
    assert np.isneginf(found.scores[row, n:]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (0.01, 0.0), (2.0, 1.0)])
def test_scores_are_those_of_bm25s_to_the_bit(
    postings_path: Path,
    documents: list[list[str]],
    queries: list[list[str]],
    variant: str,
    k1: float,
    b: float,
) -> None:
    bm25s = pytest.importorskip("bm25s")
    reference = bm25s.BM25(method=variant, k1=k1, b=b, delta=0.5, backend="numpy")
    reference.index(documents, show_progress=False)
    with Postings.open(postings_path) as postings:
        found = postings.search(queries, k=len(documents), variant=variant, k1=k1, b=b)
    for row, query in enumerate(queries):
        scores = reference.get_scores(query)
        has = np.array([i for i, document in enumerate(documents) if set(document) & set(query)])
        check(found, row, has[np.lexsort((has, -scores[has]))], np.sort(scores[has])[::-1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [1, 10, 100])
def test_the_best_are_those_of_the_plain_reference(
    postings_path: Path, documents: list[list[str]], queries: list[list[str]], variant: str, k: int
) -> None:
    with Postings.open(postings_path) as postings:
        found = postings.search(queries, k=k, variant=variant, threads=2)
    for row, query in enumerate(queries):
        check(found, row, *plain_bm25(documents, query, BM25(variant)))


def test_terms_are_those_of_bm25s() -> None:
    bm25s, stemmers = pytest.importorskip("bm25s"), pytest.importorskip("Stemmer")
    texts = [
        "The quick brown fox's jumping, over 2 lazy dogs!",
        "Überraschung: naïve ÉTUDES running_fast",
        "",
        "a b c",
        "of the and",
    ]
    for stop_words, stemmer in (
        ((), None),
        ("english", None),
        ("english", "english"),
        ((), "german"),
    ):
        stem = stemmers.Stemmer(stemmer) if stemmer else None
        expected = bm25s.tokenize(
            texts, stopwords=stop_words or None, stemmer=stem, return_ids=False, show_progress=False
        )
        analyzer = Analyzer(stop_words=stop_words, stemmer=stemmer)
        assert [analyzer.terms(text) for text in texts] == expected


def test_partial_results_come_before_complete_ones(
    postings_path: Path, documents: list[list[str]], queries: list[list[str]]
) -> None:
    query = next(query for query in queries if len(query) >= 4)
    with Postings.open(postings_path) as postings:
        state = postings.begin(query, k=20)
        for n_lists in range(1, state.n_lists + 1):
            sizes = state.list_bytes
            numbers, scores = state.partial(sizes[:n_lists].sum() / sizes.sum())
            expected = plain_bm25(
                documents,
                [term for term in query if any(term in each for each in documents)][:n_lists],
                BM25(),
            )
            assert numbers.tolist() == expected[0][:20].tolist()
            assert scores.tolist() == expected[1][:20].tolist()
        complete = state.complete()
        whole = postings.search([query], k=20)
    assert complete[0].tolist() == whole.numbers[0].tolist()
    assert complete[1].tolist() == whole.scores[0].tolist()


def test_filters_leave_the_scores_of_others_alone(
    postings_path: Path, documents: list[list[str]], queries: list[list[str]]
) -> None:
    marked = np.random.default_rng(5).random(len(documents)) < 0.3
    with Postings.open(postings_path) as postings:
        by_mask = postings.search(queries, k=50, include=marked)
        by_numbers = postings.search(queries, k=50, exclude=np.flatnonzero(~marked))
        nobody = postings.search(queries, k=50, include=np.zeros(0, np.int64))
    assert (nobody.numbers == -1).all()
    for row, query in enumerate(queries):
        numbers, scores = plain_bm25(documents, query, BM25())
        check(by_mask, row, numbers[marked[numbers]], scores[marked[numbers]])
        check(by_numbers, row, numbers[marked[numbers]], scores[marked[numbers]])


def test_one_request_for_each_list(postings_path: Path) -> None:
    with Postings.open(postings_path) as postings:
        found = postings.search([["w900", "w1500"], ["no such term"], []], k=3)
    assert found.requests.tolist()[1:] == [0, 0]
    assert 1 <= found.requests[0] <= 2  # one where both lie in a block
    assert (found.numbers[1:] == -1).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k1", [0.0, 1e-9])
def test_where_counts_and_lengths_are_worth_nothing(
    postings_path: Path, documents: list[list[str]], variant: str, k1: float
) -> None:
    """k1 and delta of 0: whoever has a term gets its idf, whoever has not gets nothing."""
    with Postings.open(postings_path) as postings:
        found = postings.search(
            [["w3"]], k=len(documents), variant=variant, k1=k1, b=0.0, delta=0.0
        )
    has = [i for i, document in enumerate(documents) if "w3" in document]
    idf = BM25(variant).idf(len(has), len(documents))
    assert sorted(found.numbers[0, : len(has)].tolist()) == has
    assert found.scores[0, : len(has)] == pytest.approx(idf, rel=1e-6)
    assert (found.numbers[0, len(has) :] == -1).all()


def test_norms_are_those_of_the_rule_whatever_other_threads_ask_for(
    postings_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Postings.open(postings_path) as postings:
        held, own, other = postings.searcher.collection, BM25(b=0.0), BM25(b=1.0)
        [right] = held.norms(own)
        real = BM25.__eq__

        def interrupted(self: BM25, given: object) -> bool:
            monkeypatch.setattr(BM25, "__eq__", real)
            held.norms(other)  # what another thread does meanwhile
            return real(self, given)

        monkeypatch.setattr(BM25, "__eq__", interrupted)
        [found] = held.norms(BM25(b=0.0))
        assert found.tolist() == right.tolist()
        assert found.tolist() != held.norms(other)[0].tolist()


@pytest.mark.parametrize(
    "given",
    [
        {"terms": ["the log"]},
        {"terms": "log"},
        {"texts": "the log"},
        {"terms": [["a"], b"the log"]},
    ],
)
def test_a_text_in_the_place_of_a_list_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError, match="record"):
        Postings.build(tmp_path / "x", **given)


@pytest.mark.parametrize(
    ("queries", "options", "match"),
    [
        ([["a"]], {"k": 0}, "k"),
        ([["a"]], {"variant": "bm26"}, "variant of BM25"),
        ([["a"]], {"b": 1.5}, "BM25"),
        ([["a"]], {"k1": float("nan")}, "k1 of BM25"),
        ([[1.5]], {}, "term"),
        ([{"a": float("inf")}], {}, "weight of a term"),
        ([["a"]], {"include": [-1]}, "include"),
        ([["a"]], {"exclude": [10**6]}, "exclude"),
        ([["a"]], {"threads": 0}, "threads"),
    ],
)
def test_wrong_arguments_are_refused(
    postings_path: Path, queries: list[object], options: dict[str, object], match: str
) -> None:
    with (
        Postings.open(postings_path) as postings,
        pytest.raises(errors.InvalidInputError, match=match),
    ):
        postings.search(queries, **options)  # type: ignore[arg-type]
