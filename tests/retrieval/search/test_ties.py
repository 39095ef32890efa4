"""Equal scores are ordered by document id: a store split in eight, merged by score, gives the
ranking of the whole one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx.retrieval.search.hits import ScoredCandidates, rank
from espnx.storage.documents.ids import id_order
from tests.retrieval.common import EVERYTHING, build, corpus, queries

PARTS = 8


@pytest.fixture(scope="module")
def duplicates() -> list[espnx.Document]:
    """Forty vectors, eleven documents of each, whose ids are in no order that the vectors or their
    arrival have."""
    names: list[Any] = [*range(-20, 200), *(f"d{i:03}" for i in range(220))]
    random.Random(3).shuffle(names)
    kinds = [document.vectors for document in corpus(40, tokens=(1, 9))]
    return [espnx.Document(name, f"text of {name}", kinds[i % 40]) for i, name in enumerate(names)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"rerank": 0}, {"rerank": 100}, {"cascade": 100}], ids=repr
)
@pytest.mark.parametrize("k", [1, 7, 15, 440])
def test_eight_parts_rank_as_one(
    tmp_path_factory: pytest.TempPathFactory, duplicates: list[espnx.Document], k: int, options: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ties"
    if not folder.exists():
        folder.mkdir()
        build(folder / "whole", duplicates, coarse="int8", nlist=1, format="fp32")
        for part in range(PARTS):
            build(
                folder / str(part), duplicates[part::PARTS], coarse="int8", nlist=1, format="fp32"
            )
    # which are scored exactly is another choice in a part than in the whole: all of each, so that
    # they are one
    if options:
        options = {name: 0 if not count else EVERYTHING for name, count in options.items()}
    for query in queries(3):
        wanted = search(folder / "whole", query, k, options)
        parts = [
            hit for part in range(PARTS) for hit in search(folder / str(part), query, k, options)
        ]
        merged = sorted(parts, key=lambda hit: (-hit.score, id_order(hit.id)))[:k]
        assert [(hit.id, hit.score, hit.text) for hit in merged] == [
            (hit.id, hit.score, hit.text) for hit in wanted
        ]
        assert k < 2 or len({hit.score for hit in wanted}) < len(wanted), "no tie was seen"


def search(path: Path, query: espnx.Encoded, k: int, options: dict[str, Any]) -> list[espnx.Hit]:
    with espnx.open(path) as index:
        return index.search(query, k=k, candidates=EVERYTHING, nprobe=EVERYTHING, **options).hits


def test_only_tied_documents_are_looked_up() -> None:
    asked: list[int] = []

    def texts(numbers: Any) -> Any:
        asked.extend(numbers)
        return [(f"id {99 - number}", "") for number in numbers]

    numbers, exact = np.array([3, 1, 4, 15, 9, 2, 6]), np.array([5, 7, 5, 1, 1, 1, 0.5], "f4")
    similarities = np.array([9, 9, 9, 9, 9, 9, 9, 4, 3, 3, 2], "f4")
    candidates = ScoredCandidates(np.r_[numbers, 20, 21, 22, 23], similarities, exact, 0.0)
    assert rank(candidates, 1, texts)[0].tolist() == [1]
    assert asked == []
    assert rank(candidates, 2, texts)[0].tolist() == [1, 4]
    assert sorted(asked) == [3, 4]
    chosen, scores, n_exact, known = rank(candidates, 9, texts)
    by_id = sorted([15, 9, 2], key=lambda number: f"id {99 - number}")
    assert chosen.tolist() == [1, 4, 3, *by_id, 6, 20, 22]
    assert scores.tolist() == [7, 5, 5, 1, 1, 1, 0.5, 4, 3]
    assert (n_exact, sorted(known)) == (7, [2, 3, 4, 9, 15, 21, 22])
    assert rank(candidates, 400, texts)[0].tolist()[-3:] == [22, 21, 23]
    none = ScoredCandidates(np.empty(0, np.int64), np.empty(0, "f4"), np.empty(0, "f4"), 0.0)
    assert rank(none, 3, texts)[0].tolist() == []


def test_numbers_come_before_texts(tmp_path: Path) -> None:
    vectors = espnx.Encoded(torch.ones(16), torch.ones(2, 8))
    names: list[Any] = ["10", "b", 10, 9, -3, "a", "\u00e4", "Z"]
    build(tmp_path / "s", [espnx.Document(name, "", vectors) for name in names], nlist=1)
    assert [hit.id for hit in search(tmp_path / "s", vectors, 8, {})] == [
        -3,
        9,
        10,
        "10",
        "Z",
        "a",
        "b",
        "\u00e4",
    ]
