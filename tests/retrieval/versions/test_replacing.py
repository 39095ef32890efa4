"""`add(replace=True)`: documents take the place of those with their ids, in one version, or nothing
changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.build.changes import adding
from espnx.retrieval.versions import draft
from tests.retrieval.common import assert_ranks_as_written, build, corpus, leftovers

OLD, OTHER = corpus(90), corpus(90, seed=9)


def renewed(number: int) -> espnx.Document:
    """The document with that id, as of another corpus."""
    return espnx.Document(f"doc-{number}", f"new text of {number}", OTHER[number].vectors)


def generation(path: Path) -> int:
    return int(json.loads((path / "MANIFEST.json").read_text())["generation"])


def check(path: Path, documents: list[espnx.Document]) -> None:
    with espnx.open(path) as index:
        assert index.store.verify() == index.store.count == len(documents)
        assert_ranks_as_written(index, documents)


def test_replaced_in_one_version(folder: Path) -> None:
    path = folder / "s"
    build(path, OLD[:70])
    numbers = [0, 5, 69, 80]  # the last is new
    report = espnx.add(path, map(renewed, numbers), replace=True)
    assert (report.documents, report.generation, generation(path)) == (4, 2, 2)
    expected = [document for i, document in enumerate(OLD[:70]) if i not in numbers] + [
        renewed(number) for number in numbers
    ]
    check(path, expected)
    espnx.delete(path, ["doc-1"])
    # of a deleted id; and a replaced one, once more
    espnx.add(path, [renewed(1), renewed(5)], replace=True)
    check(path, [*(document for document in expected if document.id != "doc-1"), renewed(1)])
    espnx.compact(path)
    check(path, [*(document for document in expected if document.id != "doc-1"), renewed(1)])
    assert len(leftovers(path)) == 1


def test_new_documents_alone_delete_nothing(folder: Path) -> None:
    build(folder / "s", OLD[:70])
    espnx.add(folder / "s", OLD[70:], replace=True)
    assert json.loads((folder / "s" / "MANIFEST.json").read_text())["deleted"] is None
    check(folder / "s", OLD)


def bad() -> espnx.Document:
    vectors = renewed(3).vectors
    assert vectors is not None
    return espnx.Document(
        "doc-3", "", espnx.Encoded(torch.full_like(vectors.cls, torch.nan), vectors.tokens)
    )


@pytest.mark.parametrize(
    "documents",
    [
        lambda: [renewed(2), bad()],
        lambda: [renewed(2), renewed(3), renewed(2)],
        lambda: [renewed(2), ("x", "no vectors")],
        lambda: [5],
    ],
    ids=["NaN", "twice", "no vectors", "no document"],
)
def test_refused_as_a_whole(folder: Path, documents: Callable[[], list[Any]]) -> None:
    build(folder / "s", OLD[:70])
    with pytest.raises(errors.InvalidInputError):
        espnx.add(folder / "s", documents(), replace=True)
    assert generation(folder / "s") == 1
    assert leftovers(folder / "s") == {"gen-000001"}
    check(folder / "s", OLD[:70])


@pytest.mark.parametrize("place", ["finish_part", "publish"])
def test_a_failure_leaves_the_old_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    build(folder / "s", OLD[:70])

    def fail(*args: Any, **options: Any) -> None:
        raise errors.WriteError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(adding if place == "finish_part" else draft, place, fail)
        with pytest.raises(errors.WriteError):
            espnx.add(folder / "s", [renewed(2)], replace=True)
    assert leftovers(folder / "s") == {"gen-000001"}
    check(folder / "s", OLD[:70])
