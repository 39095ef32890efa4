"""Additions, deletions and compactions: scores stay, to the bit, those of an index that was built
of what is left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import espnx.postings
from espnx import errors
from espnx.postings import VARIANTS, Postings, store
from tests.postings.common import corpus

QUERIES = corpus(30, seed=3, longest=8)


def check_equal(
    path: Path, documents: Sequence[list[str]], left: np.ndarray, tmp_path: Path, k: int = 60
) -> None:
    """The postings find what postings of the records that are left do, under their old numbers."""
    fresh = tmp_path / f"fresh-{len(os.listdir(tmp_path))}"
    Postings.build(fresh, terms=[documents[i] for i in left])
    with Postings.open(path) as changed, Postings.open(fresh) as expected:
        assert len(changed) == len(expected) == len(left)
        for variant in VARIANTS:
            a, b = (
                changed.search(QUERIES, k=k, variant=variant),
                expected.search(QUERIES, k=k, variant=variant),
            )
            numbers = np.where(b.numbers < 0, -1, left[np.maximum(b.numbers, 0)])
            assert a.numbers.tolist() == numbers.tolist()
            assert a.scores.tolist() == b.scores.tolist()


def test_scores_are_those_of_one_index(tmp_path: Path) -> None:
    documents = corpus(900, seed=2)
    path = tmp_path / "changed"
    Postings.build(path, terms=documents[:400])
    espnx.postings.add(path, terms=documents[400:401])
    espnx.postings.add(path, terms=documents[401:900])
    left = np.arange(900)
    check_equal(path, documents, left, tmp_path)

    gone = np.random.default_rng(0).choice(900, 250, replace=False)
    assert espnx.postings.delete(path, gone[:200].tolist()) == 200
    assert espnx.postings.delete(path, gone.tolist()) == 50  # some for the second time
    left = np.setdiff1d(left, gone)
    check_equal(path, documents, left, tmp_path)

    more = corpus(100, seed=4)
    espnx.postings.add(path, terms=more)
    documents += more
    left = np.concatenate([left, np.arange(900, 1000)])
    check_equal(path, documents, left, tmp_path)

    assert espnx.postings.compact(path) is not None
    check_equal(path, documents, left, tmp_path)
    assert espnx.postings.compact(path) is None
    assert espnx.postings.delete(path, [int(gone[0])]) == 0  # gone for good, its number too
    assert espnx.postings.delete(path, [950]) == 1
    left = left[left != 950]
    check_equal(path, documents, left, tmp_path)
    with Postings.open(path) as postings:
        assert len(postings.facts.segments) == 1


def test_an_open_search_keeps_its_version(tmp_path: Path) -> None:
    documents = corpus(300, seed=2)
    path = tmp_path / "x"
    Postings.build(path, terms=documents[:200])
    with Postings.open(path) as postings:
        before = postings.search(QUERIES)
        espnx.postings.add(path, terms=documents[200:])
        espnx.postings.delete(path, range(50))
        espnx.postings.compact(path)
        assert postings.search(QUERIES).scores.tolist() == before.scores.tolist()
    with Postings.open(path) as postings:
        assert len(postings) == 250
    assert len([name for name in os.listdir(path) if name.endswith(".postings")]) == 1


def test_everything_may_be_deleted(tmp_path: Path) -> None:
    documents = corpus(70, seed=2)
    path = tmp_path / "x"
    Postings.build(path, terms=documents)
    espnx.postings.delete(path, range(70))
    for _ in range(2):
        with Postings.open(path) as postings:
            assert len(postings) == 0
            assert (postings.search(QUERIES).numbers == -1).all()
        espnx.postings.compact(path)
    report = espnx.postings.add(path, terms=documents[:3])
    assert report.n_records == 3
    with Postings.open(path) as postings:
        found = postings.search([documents[1]], k=100)
        assert 71 in found.numbers[0]
        assert set(found.numbers[0].tolist()) <= {70, 71, 72, -1}


@pytest.mark.parametrize("exact", [False, True])
def test_vectors_are_merged_as_they_are(tmp_path: Path, exact: bool) -> None:
    random = np.random.default_rng(6)
    vectors = [
        {
            int(t): 0.5 + float(random.integers(1, 255)) / 255
            for t in random.choice(60, 12, replace=False)
        }
        for _ in range(400)
    ]
    vectors[0][0] = vectors[250][0] = 2.0  # one scale for both segments
    queries = [{int(t): 1.0 for t in random.choice(60, 5, replace=False)} for _ in range(10)]
    path, fresh = tmp_path / "x", tmp_path / "fresh"
    Postings.build(path, vectors=vectors[:200], exact=exact)
    espnx.postings.add(path, vectors=vectors[200:])
    espnx.postings.delete(path, range(10, 60))
    Postings.build(
        fresh,
        vectors=[{} if 10 <= i < 60 else vector for i, vector in enumerate(vectors)],
        exact=exact,
    )
    for _ in range(2):
        with Postings.open(path) as changed, Postings.open(fresh) as expected:
            a, b = changed.search(queries, k=40), expected.search(queries, k=40)
            two = changed.search_two_step(queries, k=40, query_terms=5, candidates=400)
        assert a.numbers.tolist() == two.numbers.tolist() == b.numbers.tolist()
        assert a.scores.tolist() == two.scores.tolist() == b.scores.tolist()
        espnx.postings.compact(path)


def test_wrong_changes_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    Postings.build(path, terms=[["a"], ["b"]])
    before = sorted((name, os.stat(path / name).st_size) for name in os.listdir(path))
    for numbers in (
        [2],
        [-1],
        [0.0],
        "0",
        b"0",
        ["0"],
        [True],
        np.array([True, False, False]),
        1,
        None,
        [[0]],
        [2**70],
    ):
        with pytest.raises(errors.InvalidInputError, match="numbers to delete"):
            espnx.postings.delete(path, numbers)
    with pytest.raises(errors.InvalidInputError, match="records to add"):
        espnx.postings.add(path, vectors=[{"a": 1.0}])
    with pytest.raises(errors.InvalidInputError, match="term"):
        espnx.postings.add(path, terms=[["c"], [1.5]])  # type: ignore[list-item]
    with pytest.raises(errors.StoreNotFoundError):
        espnx.postings.delete(tmp_path / "nothing", [0])
    assert sorted((name, os.stat(path / name).st_size) for name in os.listdir(path)) == before


@pytest.mark.parametrize(
    "given",
    [
        np.array([False, True, True]),
        np.uint8([2, 1, 2]),
        iter([1, 2]),
        {1, 2},
        range(1, 3),
        [True, 2],
    ],
)
def test_records_are_deleted_by_what_searches_include(tmp_path: Path, given: object) -> None:
    Postings.build(tmp_path / "x", terms=[["a"], ["a"], ["a"]])
    assert espnx.postings.delete(tmp_path / "x", given) == 2
    with Postings.open(tmp_path / "x") as postings:
        assert postings.search([["a"]], k=3).numbers.tolist() == [[0]]


@pytest.mark.parametrize("is_published", [True, False])
def test_opened_beside_a_change_it_is_the_new_version(tmp_path: Path, is_published: bool) -> None:
    """Files are gone that the manifest names: another process has published a version since it was
    read, or they are missing."""
    path, real, calls = tmp_path / "x", store.open_all, []
    Postings.build(path, terms=[["a"]])
    espnx.postings.add(path, terms=[["a", "b"]])

    def late(*given: Any) -> Any:
        calls.append(given)
        if is_published and len(calls) == 1:
            espnx.postings.compact(path)
        elif not is_published:
            (path / "s1.postings").unlink(missing_ok=True)
        return real(*given)

    with patch.object(store, "open_all", late):
        if is_published:
            with Postings.open(path) as postings:
                assert len(postings.facts.segments) == 1
                assert postings.search([["b"]], k=2).numbers.tolist() == [[1, -1]]
        else:
            with pytest.raises(errors.FileMissingError):
                Postings.open(path)
    assert len(calls) == 1 + is_published


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    from espnx.storage.lock import DirectoryLock

    path = tmp_path / "x"
    Postings.build(path, terms=[["a"], ["b"]])
    with DirectoryLock(path), pytest.raises(errors.StoreBusyError):
        espnx.postings.delete(path, [0])
