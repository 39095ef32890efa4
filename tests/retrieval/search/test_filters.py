"""Subsets and exclusions: nothing outside is found, everything inside is ranked as without the
rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import espnx
from espnx import errors
from espnx.retrieval.search.index import Index
from tests.retrieval.common import EVERYTHING, queries


@pytest.fixture(scope="module")
def index(store: Path) -> Iterator[Index]:
    with espnx.open(store) as opened:
        yield opened


@pytest.mark.parametrize("count", [1, 2, 30, 299, 300])
def test_a_subset_small_enough_is_ranked_whole(
    index: Index, documents: list[espnx.Document], count: int
) -> None:
    """Whatever nprobe says: a document that was named is not missed because its list is far
    away."""
    chosen = {document.id for document in documents[:: 300 // count][:count]}
    for query in queries(4):
        everything = index.search(query, k=300, candidates=300, nprobe=EVERYTHING).hits
        hits = index.search(query, k=300, candidates=300, nprobe=1, include=chosen).hits
        assert hits == [hit for hit in everything if hit.id in chosen]
        assert len(hits) == count


def test_a_large_subset_is_searched_as_ever(index: Index, documents: list[espnx.Document]) -> None:
    chosen = [document.id for document in documents[:200]]
    hits = index.search(queries(1)[0], k=20, candidates=50, nprobe=EVERYTHING, include=chosen).hits
    assert len(hits) == 20
    assert {hit.id for hit in hits} <= set(chosen)


def test_exclusion(index: Index) -> None:
    for query in queries(4):
        everything = index.search(query, k=300, candidates=300, nprobe=EVERYTHING).hits
        gone = {hit.id for hit in everything[:10]} | {"no such document"}
        rest = index.search(query, k=300, candidates=300, nprobe=EVERYTHING, exclude=gone).hits
        assert rest == everything[10:]
        both = index.search(
            query, k=300, include=[hit.id for hit in everything[:20]], exclude=gone
        ).hits
        assert both == everything[10:20]


def test_filters_that_leave_nothing(index: Index, documents: list[espnx.Document]) -> None:
    query, everyone = queries(1)[0], [document.id for document in documents]
    for options in (
        {"include": []},
        {"include": ["unknown", 7]},
        {"exclude": everyone},
        {"include": everyone, "exclude": everyone},
    ):
        result = index.search(query, **options)
        assert (result.hits, result.candidates, result.reranked, result.requests) == ([], 0, 0, 0)
    assert index.search([query, query], include=[])[1].hits == []


def test_in_a_batch(index: Index, documents: list[espnx.Document]) -> None:
    chosen = [document.id for document in documents[::3]]
    wanted = queries(9)
    together = index.search(wanted, k=15, include=chosen)
    assert [result.hits for result in together] == [
        index.search(query, k=15, include=chosen).hits for query in wanted
    ]


def test_one_id_is_no_collection(index: Index) -> None:
    with pytest.raises(errors.InvalidInputError, match="include"):
        index.search(queries(1)[0], include="doc-1")
