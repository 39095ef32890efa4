"""A ranking does not depend on how records lie: not where candidates are cut among equal scores,
nor where rankings are fused."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.first_stage.fusion import ranks_of
from espnx.retrieval.first_stage.ties import cut, settled
from espnx.retrieval.store import store
from espnx.storage.documents.ids import id_order
from espnx.storage.documents.rows import id_hash
from tests.retrieval.common import D_CLS, DIM, corpus

LINES = [
    "connection from peer closed",
    "disk full on node",
    "disk read slow",
    "user logged in again",
    "disk closed",
]
QUERIES = ["closed connection", "disk full"]
N = 900


def logs(count: int, alike: float, seed: int = 0) -> list[espnx.Document]:
    """Lines of which that share is one and the same, vectors too, under ids in no order."""
    draw, kinds = (
        random.Random(seed),
        [document.vectors for document in corpus(len(LINES), tokens=(1, 5), seed=3)],
    )
    lines = [0 if draw.random() < alike else draw.randrange(len(LINES)) for _ in range(count)]
    names: list[Any] = [f"d{number:05}" if number % 3 else number for number in range(count)]
    draw.shuffle(names)
    return [
        espnx.Document(name, LINES[line], kinds[line])
        for name, line in zip(names, lines, strict=True)
    ]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same documents: built at once, in another order, in parts, compacted after deletions, and
    over two directories."""
    folder, documents = tmp_path_factory.mktemp("layouts"), logs(N, 0.97)
    others = [
        espnx.Document(f"gone{i}", each.text, each.vectors)
        for i, each in enumerate(logs(200, 0.9, seed=4))
    ]
    for name in ("a", "b"):
        (folder / name).mkdir()

    def begin(name: str, some: Iterable[espnx.Document], **options: Any) -> Path:
        path = folder / name
        trained = espnx.Trained.load(folder / "trained")
        espnx.build(path, some, trained=trained, **options)
        return path

    espnx.train(
        folder / "trained",
        documents[:300],
        dims=(D_CLS, DIM),
        first_stages=("ivf", "bm25"),
        nlist=4,
        coarse="int8",
        language="none",
    )
    shuffled = random.Random(9).sample(documents, len(documents))
    made = {
        "built": begin("built", documents),
        "shuffled": begin("shuffled", shuffled, directories=[folder / "a", folder / "b"]),
    }
    made["parts"] = begin("parts", shuffled[:360])
    for first in range(360, N, 180):
        espnx.add(made["parts"], shuffled[first : first + 180])
    made["compacted"] = begin("compacted", [*others, *shuffled[420:]])
    espnx.add(made["compacted"], shuffled[:420])
    espnx.delete(made["compacted"], [each.id for each in others])
    made["deleted"] = begin("deleted", [*shuffled[300:], *others, *shuffled[:300]])
    espnx.delete(made["deleted"], [each.id for each in others])
    espnx.compact(made["compacted"])
    return made


def ranking(index: espnx.Index, query: str, **options: Any) -> list[Any]:
    vectors = corpus(1, tokens=(3, 3), seed=len(query))[0].vectors
    assert vectors is not None

    class Given:
        name, d_cls, dim = None, D_CLS, DIM

        def encode_queries(self, texts: Any) -> list[espnx.Encoded]:
            return [vectors for _ in texts]

        encode_documents = encode_queries

    index.use_encoder(Given())  # type: ignore[arg-type]
    return [
        (hit.id, hit.score, hit.reranked, dict(hit.found_by))
        for hit in index.search(query, **options).hits
    ]


EVEN = [f"d{number:05}" for number in range(0, N, 2)]
OPTIONS: list[dict[str, Any]] = [
    {"first_stage": "bm25", "rerank": 0, "k": 5},
    {"first_stage": "bm25", "rerank": 0, "k": 40, "candidates": 40},
    {"first_stage": "bm25", "k": 30, "candidates": 100},
    {"first_stage": "ivf", "rerank": 0, "k": 25, "candidates": 50},
    {"first_stage": "ivf", "rerank": 20, "k": 30, "candidates": 70},
    {"first_stage": "ivf", "cascade": 20, "k": 30, "candidates": 70},
    {"first_stage": ("bm25", "ivf"), "rerank": 0, "k": 60, "candidates": 60},
    {"first_stage": ("bm25", "ivf"), "k": 50, "candidates": 64},
    {"first_stage": ("bm25", "ivf"), "fuse": "weighted", "rerank": 0, "k": 50},
    {"first_stage": ("ivf", "bm25"), "rerank": 7, "k": 50},
    {"first_stage": "bm25", "rerank": 0, "k": 5, "include": EVEN},
]


@pytest.mark.parametrize("by_id_max", [store._BY_ID_MAX, 10], ids=["ids", "hashes"])
def test_a_ranking_does_not_depend_on_how_records_lie(
    layouts: Mapping[str, Path], by_id_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_BY_ID_MAX", by_id_max)
    indexes = {name: espnx.open(path, None) for name, path in layouts.items()}
    try:
        for query in QUERIES:
            for options in OPTIONS:
                wanted = ranking(indexes["built"], query, nprobe=4, **options)
                assert wanted
                for name, index in indexes.items():
                    assert ranking(index, query, nprobe=4, **options) == wanted, (
                        name,
                        query,
                        options,
                    )
    finally:
        for index in indexes.values():
            index.close()


def test_the_first_by_id_are_found(layouts: Mapping[str, Path]) -> None:
    """Of 97 % of equal lines those whose ids come first, however many there are."""
    documents = logs(N, 0.97)
    wanted = sorted((each.id for each in documents if each.text == LINES[0]), key=id_order)
    with espnx.open(layouts["parts"], None) as index:
        found = index.search("connection peer", first_stage="bm25", rerank=0, k=5, candidates=20)
        assert [hit.id for hit in found] == wanted[:5]
        assert {place.rank for hit in found for place in hit.found_by.values()} == {1}


@pytest.mark.parametrize("by_id_max", [store._BY_ID_MAX, 10], ids=["ids", "hashes"])
def test_fused_ranks_are_those_of_the_rankings_alone(
    layouts: Mapping[str, Path], by_id_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_BY_ID_MAX", by_id_max)
    for path in layouts.values():
        with espnx.open(path, None) as index:
            for query in QUERIES:
                each = [
                    ranking(
                        index, query, nprobe=4, first_stage=kind, rerank=0, k=300, candidates=300
                    )
                    for kind in ("bm25", "ivf")
                ]
                fused = ranking(
                    index,
                    query,
                    nprobe=4,
                    first_stage=("bm25", "ivf"),
                    rerank=0,
                    k=300,
                    candidates=300,
                )
                own = own_rrf([[(hit[0], hit[1]) for hit in hits] for hits in each])
                assert [hit[1] for hit in fused] == [np.float32(score) for _, score in own[:300]]
                last = own[299][1] if len(own) > 300 else -1.0
                assert {hit[0] for hit in fused} >= {name for name, score in own if score > last}


@pytest.mark.parametrize(
    "options",
    [{}, {"rerank": 40}, {"cascade": 40}, {"include": EVEN}],
    ids=["all", "rerank", "cascade", "include"],
)
def test_maxsims_ranking_as_one_more(layouts: Mapping[str, Path], options: dict[str, Any]) -> None:
    """Three searches of one's own, and reciprocal ranks over them."""
    wanted: dict[str, list[Any]] = {}
    for path in layouts.values():
        with espnx.open(path, None) as index:
            for query in QUERIES:
                filters = {name: value for name, value in options.items() if name == "include"}
                deep = {"nprobe": 4, "k": 300, "candidates": 300}
                each = [
                    ranking(index, query, first_stage=kind, rerank=0, **deep, **filters)
                    for kind in ("bm25", "ivf")
                ]
                maxsim = [
                    hit
                    for hit in ranking(index, query, first_stage=("bm25", "ivf"), **deep, **options)
                    if hit[2]
                ]
                found = ranking(
                    index, query, first_stage=("bm25", "ivf"), fuse="rrf+maxsim", **deep, **options
                )
                own = own_rrf([[(hit[0], hit[1]) for hit in hits] for hits in (*each, maxsim)])
                assert [(hit[0], hit[1]) for hit in found] == own[:300]
                assert {hit[0] for hit in found if hit[2]} == {hit[0] for hit in maxsim} & {
                    hit[0] for hit in found
                }
                scores = {hit[0]: hit[1] for hit in maxsim}
                assert all(hit[3]["maxsim"].score == scores[hit[0]] for hit in found if hit[2])
                assert wanted.setdefault(query, found) == found
                alone = ranking(
                    index, query, first_stage="bm25", fuse="rrf+maxsim", **deep, **options
                )
                maxsim = [
                    hit
                    for hit in ranking(index, query, first_stage="bm25", **deep, **options)
                    if hit[2]
                ]
                assert [(hit[0], hit[1]) for hit in alone] == own_rrf(
                    [[(hit[0], hit[1]) for hit in hits] for hits in (each[0], maxsim)]
                )


def test_maxsims_ranking_wants_something_to_rank(layouts: Mapping[str, Path]) -> None:
    with (
        espnx.open(layouts["built"], None) as index,
        pytest.raises(errors.InvalidInputError, match=r"rrf\+maxsim.*rerank=0"),
    ):
        index.search("disk", first_stage="bm25", fuse="rrf+maxsim", rerank=0)


def own_rrf(rankings: list[list[tuple[Any, float]]]) -> list[tuple[Any, float]]:
    """Ranks by counting: one more than there are better scores."""
    sums: dict[Any, list[float]] = {}
    for hits in rankings:
        scores = np.array([score for _, score in hits])
        for name, score in hits:
            sums.setdefault(name, []).append(1.0 / (60 + 1 + int((scores > score).sum())))
    return sorted(
        ((name, sum(sorted(each))) for name, each in sums.items()),
        key=lambda pair: (-pair[1], id_order(pair[0])),
    )


def test_many_equal_ids_are_those_of_the_lowest_hashes(
    layouts: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_BY_ID_MAX", 10)
    for path in layouts.values():
        with espnx.open(path, None) as index:
            texts = index.store.texts
            names = list(index.ids())
            numbers = texts.numbers(names[::2])
            for count in (1, 7, 300, len(numbers) - 1, len(numbers)):
                chosen = {
                    index.store.texts.get([number])[0][0]
                    for number in texts.first_of(numbers, count).tolist()
                }
                assert chosen == set(sorted(names[::2], key=id_hash)[:count])


def test_ranks() -> None:
    assert ranks_of(np.array([3.0, 2, 2, 1, 1, 1, 0])).tolist() == [1, 2, 2, 4, 4, 4, 7]
    assert ranks_of(np.empty(0)).tolist() == []
    assert ranks_of(np.zeros(3)).tolist() == [1, 1, 1]


def test_cuts() -> None:
    def odd_first(numbers: np.ndarray, count: int) -> np.ndarray:
        return numbers[np.lexsort((numbers, numbers % 2 == 0))][:count]

    found = np.array([9, 2, 4, 5, 7, 8]), np.array([3, 1, 1, 1, 1, 0], np.float32)
    assert [cut(found, count, odd_first)[0].tolist() for count in range(7)] == [
        [],
        [9],
        [9, 5],
        [9, 5, 7],
        [9, 2, 5, 7],
        [9, 2, 4, 5, 7],
        [9, 2, 4, 5, 7, 8],
    ]
    assert settled(found, 2, odd_first)[0].tolist() == [9, 5, 2, 4, 7, 8]
    assert torch.equal(
        torch.from_numpy(settled(found, 2, odd_first)[1]), torch.from_numpy(found[1])
    )
