"""An open index that goes over to the newest version: at once, for all searches that begin later,
and for none that began before."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.retrieval.search.opened.version import OpenVersion
from tests.retrieval.common import EVERYTHING, build, corpus, queries, toy_encoder

DOCUMENTS = corpus(140, tokens=(1, 3))
QUERY = queries(1)[0]


def found(index: espnx.Index) -> set[Any]:
    return {hit.id for hit in index.search(QUERY, k=EVERYTHING)}


def test_sees_what_was_published(folder: Path) -> None:
    build(folder / "s", DOCUMENTS[:100])
    with espnx.open(folder / "s", hot="1MiB") as index:
        assert index.reload() is False
        espnx.add(folder / "s", DOCUMENTS[100:])
        assert (len(index), len(found(index))) == (100, 100)
        assert index.reload() is True
        assert (len(index), len(found(index)), "doc-139" in index) == (140, 140, True)
        espnx.delete(folder / "s", ["doc-0", "doc-139"])
        espnx.compact(folder / "s")
        assert "doc-139" in index
        assert (index.reload(), index.reload()) == (True, False)
        assert (len(index), "doc-139" in index, index.get("doc-1")) == (138, False, "text of 1")
        build(folder / "s", DOCUMENTS[:20], replace=True)
        assert index.reload()
        assert found(index) == {document.id for document in DOCUMENTS[:20]}
    with pytest.raises(errors.EngineClosedError):
        index.reload()


def test_old_versions_are_let_go(folder: Path) -> None:
    build(folder / "s", DOCUMENTS[:100])
    with espnx.open(folder / "s", threads=1) as index:
        seen = []
        before = 0
        for i in range(4):
            seen.append(weakref.ref(index._versions.newest))
            espnx.add(folder / "s", DOCUMENTS[100 + i : 101 + i])
            espnx.compact(folder / "s")
            index.reload()
            found(index)
            gc.collect()  # of other tests, whose descriptors would go meanwhile
            before = before or len(os.listdir("/proc/self/fd"))
        gc.collect()
        assert [ref() for ref in seen] == [None] * 4
        assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_cannot_be_searched_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder / "s", DOCUMENTS[:50])
    with espnx.open(folder / "s") as index:
        index.use_encoder(toy_encoder())
        other = espnx.FunctionEncoder(
            lambda texts: toy_encoder().encode_documents(texts), "other@1", d_cls=16, dim=8
        )
        espnx.build(folder / "s", [("x", "y")], other, replace=True)
        with pytest.raises(errors.InvalidInputError, match="another encoder"):
            index.reload()
        assert len(found(index)) == 50
        build(folder / "s", DOCUMENTS[:60], replace=True)
        monkeypatch.setattr(
            "espnx.retrieval.search.opened.version.Filters",
            lambda *_: (_ for _ in ()).throw(errors.ReadError("injected")),
        )
        with pytest.raises(errors.ReadError, match="injected"):
            index.reload()
        monkeypatch.undo()
        assert len(found(index)) == 50
        assert index.reload()
        assert len(found(index)) == 60


def test_a_search_under_way_keeps_its_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are open until it has ended, and closed then."""
    build(folder / "s", DOCUMENTS[:50])
    with espnx.open(folder / "s") as index:
        inside, go_on, got = threading.Event(), threading.Event(), list[int]()
        old = index._versions.newest
        whole = old.store.texts.get

        def get(numbers: Any) -> Any:
            inside.set()
            go_on.wait()
            return whole(numbers)

        monkeypatch.setattr(old.store.texts, "get", get)
        searching = threading.Thread(target=lambda: got.append(len(found(index))))
        searching.start()
        inside.wait()
        espnx.add(folder / "s", DOCUMENTS[50:90])
        assert index.reload()
        assert len(found(index)) == 90
        assert old.store._files, "closed under a search"
        go_on.set()
        searching.join()
        assert got == [50]
        assert not old.store._files, "left open"


def test_ids_are_of_one_version(folder: Path) -> None:
    build(folder / "s", [espnx.Document(i, "", DOCUMENTS[0].vectors) for i in range(1200)])
    with espnx.open(folder / "s") as index:
        ids = index.ids()
        listed = [next(ids)]
        espnx.delete(folder / "s", range(600, 1200))
        assert index.reload()
        assert len(index) == 600
        assert sorted([*listed, *ids]) == list(range(1200))


def test_every_search_is_of_one_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads search, list and reload while versions come; each version is all of the documents
    below a limit."""
    build(folder / "s", DOCUMENTS[:100])
    allowed = {frozenset(document.id for document in DOCUMENTS[:end]) for end in range(100, 141, 4)}
    wrong: list[Any] = []
    stop = threading.Event()
    closed = []
    close = OpenVersion.close
    monkeypatch.setattr(OpenVersion, "close", lambda self: (closed.append(self), close(self)))
    with espnx.open(folder / "s") as index:

        def search() -> None:
            try:
                while not stop.is_set():
                    several = [
                        frozenset(hit.id for hit in result)
                        for result in index.search([QUERY, QUERY], k=EVERYTHING)
                    ]
                    if (
                        several[0] != several[1]
                        or several[0] not in allowed
                        or frozenset(index) not in allowed
                    ):
                        wrong.append(several)
            except BaseException as error:
                wrong.append(error)

        def reload() -> None:
            try:
                while not stop.is_set():
                    index.reload()
            except BaseException as error:
                wrong.append(error)

        threads = [
            threading.Thread(target=task) for task in (search, search, search, reload, reload)
        ]
        for thread in threads:
            thread.start()
        for end in range(104, 141, 4):
            espnx.add(folder / "s", DOCUMENTS[end - 4 : end])
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        index.reload()
        assert len(found(index)) == 140
    assert len(closed) >= 2
