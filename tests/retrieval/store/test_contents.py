"""What an index says of its documents beside ranking them: their number, ids and texts; and what
may be asked of it in which shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from tests.retrieval.common import DIM, EVERYTHING, build, corpus, queries, toy_encoder


@pytest.fixture
def changed(folder: Path) -> Path:
    """1,200 documents in three parts, ids of both kinds, some deleted and one replaced."""
    documents = [
        espnx.Document(i if i % 2 else f"doc-{i}", f"text {i}", d.vectors)
        for i, d in enumerate(corpus(1200, tokens=(1, 2)))
    ]
    build(folder / "s", documents[:1100])
    espnx.add(folder / "s", documents[1100:1190])
    espnx.add(folder / "s", documents[1190:])
    espnx.delete(folder / "s", [1, 3, "doc-1198", *(f"doc-{i}" for i in range(100, 200, 2))])
    espnx.add(folder / "s", [espnx.Document(7, "another text", documents[7].vectors)], replace=True)
    return folder / "s"


def test_length_membership_ids_and_texts(changed: Path) -> None:
    gone = {1, 3, "doc-1198", *(f"doc-{i}" for i in range(100, 200, 2))}
    expected = {i if i % 2 else f"doc-{i}" for i in range(1200)} - gone
    with espnx.open(changed) as index:
        listed = list(index)
        assert len(index) == len(listed) == len(expected) == 1147
        assert set(listed) == expected == set(index.ids())
        assert all(hit.id in expected for hit in index.search(queries(1)[0], k=EVERYTHING))
        for identifier in ("doc-0", 5, np.int64(5), torch.tensor(5), 7, 1199):
            assert identifier in index
        for identifier in (
            "doc-1",
            "5",
            1,
            "doc-1198",
            "doc-100",
            2**70,
            None,
            5.5,
            b"doc-0",
            ["doc-0"],
            True,
        ):
            assert identifier not in index
        assert index.get("doc-0") == "text 0"
        assert index.get(np.int64(5)) == "text 5"
        assert index.get(7) == "another text"
        assert index.get("5") is None
        assert index.get(["doc-0", 3, "doc-0", 1197, "nobody"]) == [
            "text 0",
            None,
            "text 0",
            "text 1197",
            None,
        ]
        assert index.get(np.array([5, 1])) == ["text 5", None]
        assert index.get([]) == []
        for wrong in (None, 5.5, [None], b"doc-0"):
            with pytest.raises(errors.InvalidInputError):
                index.get(wrong)  # type: ignore[call-overload]
    for ask in (lambda: 5 in index, lambda: index.get(5), lambda: next(index.ids())):
        with pytest.raises(errors.EngineClosedError):
            ask()


def test_listing_ends_where_the_index_is_closed(changed: Path) -> None:
    index = espnx.open(changed)
    ids = index.ids()
    next(ids)
    index.close()
    with pytest.raises(errors.EngineClosedError):
        list(ids)


def test_an_empty_store(folder: Path) -> None:
    build(folder / "s", [])
    with espnx.open(folder / "s") as index:
        assert (len(index), list(index), index.get("a"), "a" in index) == (0, [], None, False)
        assert list(index.search(queries(1)[0])) == []


def test_a_result_is_its_hits(store: Path) -> None:
    with espnx.open(store) as index:
        result = index.search(queries(1)[0], k=4)
        assert list(result) == result.hits
        assert len(result) == 4
        assert [hit.id for hit in result] == [hit.id for hit in result.hits]


def test_named_queries_give_named_results(store: Path) -> None:
    wanted = dict(zip(["a", 7, ("x", 1)], queries(3), strict=True))
    with espnx.open(store) as index:
        found = index.search(wanted, k=3)
        assert list(found) == list(wanted)
        assert [result.hits for result in found.values()] == [
            result.hits for result in index.search(list(wanted.values()), k=3)
        ]
        assert index.search({}) == {}
        with pytest.raises(errors.InvalidInputError, match="a query"):
            index.search({"a": 5})  # type: ignore[dict-item]
    with espnx.open(store) as index:
        assert index.store.manifest.encoder.name is None, "any encoder will do"
        index.use_encoder(toy_encoder())
        assert (
            index.search({"q": "text of 3"}, k=2)["q"].hits == index.search("text of 3", k=2).hits
        )


@pytest.mark.parametrize(
    "number",
    [
        np.int64,
        np.int32,
        np.uint8,
        lambda value: torch.tensor(value),
        lambda value: np.array(value),
    ],
)
def test_numbers_of_numpy_and_torch(store: Path, number: Any) -> None:
    query = queries(1)[0]
    with espnx.open(store, threads=number(2), hot=number(100)) as index:
        plain = {"k": 3, "candidates": 50, "nprobe": 2}
        given = {name: number(value) for name, value in plain.items()}
        for extra in ({}, {"rerank": 10}):
            asked = {name: number(value) for name, value in extra.items()}
            assert (
                index.search(query, **given, **asked).hits
                == index.search(query, **plain, **extra).hits
            )
        options = {
            "prefetch_step": np.float32(0.5),
            "cls_weight": np.float32(0.5),
            "deadline_s": np.float64(5),
        }
        expected = index.search(query, prefetch_step=0.5, cls_weight=0.5, deadline_s=5.0).hits
        assert index.search(query, **options).hits == expected
        for name in ("k", "candidates", "rerank", "nprobe"):
            for wrong in (
                np.float64(3.0),
                np.bool_(True),
                torch.tensor(True),
                np.array([3]),
                number(0) if name != "rerank" else None,
            ):
                if wrong is not None:
                    with pytest.raises(errors.InvalidInputError):
                        index.search(query, **{name: wrong})


def test_vectors_that_require_grad(store: Path) -> None:
    query = queries(1)[0]
    learning = espnx.Encoded(
        query.cls.clone().requires_grad_(), query.tokens.clone().requires_grad_() * 1
    )
    with espnx.open(store) as index:
        assert index.search(learning, k=3).hits == index.search(query, k=3).hits
        assert index.search(espnx.Encoded(learning.cls, torch.empty(0, DIM)), k=3).hits


@pytest.mark.parametrize("path", [None, b"store", 5, ["a"]])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match="path of a store"):
        espnx.open(path)
