"""Ids in every form that they come in mean the same everywhere: filters, deletions, documents. What
can be no id is refused."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.build.documents import to_document
from espnx.storage.documents.ids import document_id, document_ids
from tests.retrieval.common import EVERYTHING, build, corpus, queries

COUNT = 40


class Name(enum.StrEnum):
    ONE = "one"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[espnx.Index]:
    """Ids are 0, 1, 2, ..."""
    path = tmp_path_factory.mktemp("ids") / "s"
    build(
        path,
        [
            espnx.Document(i, document.text, document.vectors)
            for i, document in enumerate(corpus(COUNT))
        ],
    )
    with espnx.open(path) as opened:
        yield opened


def found(index: espnx.Index, **options: Any) -> set[Any]:
    return {hit.id for hit in index.search(queries(1)[0], k=EVERYTHING, **options).hits}


@pytest.mark.parametrize(
    "ids",
    [
        [1, 3, 5],
        (1, 3, 5),
        {1, 3, 5},
        range(1, 6, 2),
        {1: "a", 3: "b", 5: "c"},
        np.array([1, 3, 5]),
        np.array([1, 3, 5], np.uint8),
        torch.tensor([1, 3, 5]),
        list(np.array([5, 3, 1])),
        list(torch.tensor([5, 3, 1])),
        [np.int32(1), 3, torch.tensor(5), 3],
    ],
    ids=repr,
)
def test_every_kind_of_collection(index: espnx.Index, ids: Any) -> None:
    assert found(index, include=ids) == {1, 3, 5}
    assert found(index, exclude=ids) == set(range(COUNT)) - {1, 3, 5}
    assert document_ids(iter(document_ids(ids))) == document_ids(ids)


@pytest.mark.parametrize(
    "ids",
    [
        [True],
        [np.True_],
        [1.0],
        np.array([1.0]),
        [None],
        [b"1"],
        [{}],
        ["\ud800"],
        [2**63],
        [-(2**63) - 1],
        np.array([2**63], np.uint64),
        [[1]],
        np.array([[1]]),
        5,
        "1",
        b"1",
        None,
        np.int64(1),
        np.array(1),
        torch.tensor(1),
    ],
    ids=repr,
)
def test_what_cannot_be_ids(index: espnx.Index, ids: Any, folder: Path) -> None:
    with pytest.raises(errors.InvalidInputError, match="id"):
        espnx.delete(folder / "no store", ids)
    if ids is None:
        return
    for name in ("include", "exclude"):
        with pytest.raises(errors.InvalidInputError, match=name):
            index.search(queries(1)[0], **{name: ids})


def test_documents_and_deletions(folder: Path) -> None:
    vectors = [document.vectors for document in corpus(6)]
    ids = [np.int64(1), np.str_("two"), torch.tensor(3), Name.ONE, -(2**63), 2**63 - 1]
    build(folder / "s", [espnx.Document(i, "", each) for i, each in zip(ids, vectors, strict=True)])  # type: ignore[arg-type]
    with espnx.open(folder / "s") as index:
        assert index.store.verify() == 6
        assert found(index) == {1, "two", 3, "one", -(2**63), 2**63 - 1}
        assert {type(identifier) for identifier in found(index)} == {int, str}
    assert espnx.delete(folder / "s", np.array([1, 3, 3])) == 2
    assert espnx.delete(folder / "s", np.array(["two", "one"])) == 2
    with espnx.open(folder / "s") as index:
        assert found(index) == {-(2**63), 2**63 - 1}


def test_searches_without_a_filter_map_no_ids(
    index: espnx.Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    with espnx.open(index.store.path) as plain:
        monkeypatch.setattr(plain.store.texts, "numbers", asked.append)
        assert len(found(plain)) == COUNT
        assert asked == []
        assert set(vars(plain._versions.newest.filters)) == {"_store"}, (
            "a search without a filter made what only filters need"
        )


def test_an_id_is_what_python_has() -> None:
    for value, wanted in (
        (np.int8(-1), -1),
        (np.str_("a"), "a"),
        (Name.ONE, "one"),
        (torch.tensor(2), 2),
        (7, 7),
    ):
        made = document_id(value)
        assert made == wanted
        assert type(made) is type(wanted)


def test_a_title_does_not_make_a_text() -> None:
    for text in (None, 5):
        with pytest.raises(errors.InvalidInputError, match="text of document 1"):
            to_document({"id": 1, "title": "x", "text": text}, 0)
    assert to_document({"id": 1, "title": "x", "text": "y"}, 0).text == "x y"
