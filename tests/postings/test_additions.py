"""Many small additions: few segments, few files, and what is found is what plain Python finds."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.postings
from espnx import errors
from espnx.postings import BM25, Postings
from espnx.storage import NativeEngine
from espnx.storage.levels import PARTS_PER_LEVEL
from tests.postings.common import corpus, plain_bm25


@pytest.fixture
def few_files() -> Iterator[None]:
    """64 files at once, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # what the tests themselves have open stays; a program begins with a dozen or two
    free = 64 + len(os.listdir("/proc/self/fd")) - 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(free, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_additions_need_few_files(
    tmp_path: Path, few_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An addition opens what it merges, and nothing else, however many there were before."""
    documents, path, opened = corpus(100, seed=5, longest=9), tmp_path / "x", list[int]()
    plain_open, calls = NativeEngine.open, [0]

    def counting(self: NativeEngine, *args: Any) -> Any:
        calls[0] += 1
        return plain_open(self, *args)

    monkeypatch.setattr(NativeEngine, "open", counting)
    Postings.build(path, terms=documents[:1])
    for document in documents[1:]:
        calls[0] = 0
        report = espnx.postings.add(path, terms=[document])
        opened.append(calls[0])
    assert report.n_segments <= 1 + 3 * PARTS_PER_LEVEL
    assert len(os.listdir(path)) == report.n_segments + 2  # the manifest, and the lock
    assert min(opened[-20:]) == opened[0]  # most merge nothing
    with Postings.open(path) as postings:
        assert len(postings.facts.segments) == report.n_segments
        found = postings.search(documents[:30], k=200)
        for row, query in enumerate(documents[:30]):
            numbers, scores = plain_bm25(documents, query, BM25())
            assert found.numbers[row][: len(numbers)].tolist() == numbers.tolist()
            assert found.scores[row][: len(numbers)].tolist() == scores.tolist()
        espnx.postings.compact(path)
        # a reader goes on
        assert postings.search(documents[:30], k=200).scores.tolist() == found.scores.tolist()
    with Postings.open(path) as postings:
        assert len(postings.facts.segments) == 1
        assert postings.search(documents[:30], k=200).scores.tolist() == found.scores.tolist()


def test_too_many_files_names_the_right_command(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", ["a text"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(errors.EspnxError) as caught:
            espnx.postings.add(tmp_path / "x", ["another"])
        with pytest.raises(errors.EspnxError) as compacting:
            espnx.postings.compact(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if isinstance(caught.value, errors.StorageError):
        assert "espnx postings compact" in str(caught.value)
    assert "espnx postings compact" not in str(compacting.value)
    assert "ulimit -n" in str(compacting.value)


def check_program(
    path: Path,
    kind: str,
    alive: dict[str, tuple[int, Any]],
    queries: list[Any],
    largest: dict[str, float],
) -> None:
    """What the postings hold and find is what the model has."""
    with Postings.open(path) as postings:
        postings.verify()
        assert len(postings) == len(alive)
        assert sorted(postings.ids()) == sorted(alive)
        numbers = postings.numbers(alive)
        assert numbers.tolist() == [number for number, _ in alive.values()]
        found = postings.search(queries, k=1000)
        for row, query in enumerate(queries):
            hits = {hit.id: hit.score for hit in found[row]}
            assert list(hits) == [
                hit.id for hit in sorted(found[row], key=lambda hit: (-hit.score, hit.number))
            ]
            if kind == "bm25":
                order = sorted(alive.values())
                wanted, scores = plain_bm25([words for _, words in order], query, BM25())
                names = {number: name for name, (number, _) in alive.items()}
                assert hits == {
                    names[order[i][0]]: float(score)
                    for i, score in zip(wanted, scores, strict=True)
                }
                continue
            for name, (_, vector) in alive.items():
                there = [term for term in query if term in vector]
                assert (name in hits) == bool(there)
                if there:
                    # A weight is less than one step off, of the coarsest that its list had.
                    off = (
                        sum(query[term] * largest[term] * 2 / 255 for term in there)
                        if kind == "impact"
                        else 0.0
                    )
                    exact = sum(query[term] * vector[term] for term in there)
                    assert abs(hits[name] - exact) <= off + 1e-5 * exact


@pytest.mark.parametrize("kind", ["bm25", "impact", "float"])
@pytest.mark.parametrize("seed", [int(os.environ.get("ESPNX_SEED", "0"))])
def test_programs_of_changes(tmp_path: Path, kind: str, seed: int) -> None:
    """Random changes beside a plain model, by id: additions, replacements, deletions, compactions,
    readers that stay."""
    random = np.random.default_rng(seed)
    path, alive, everything = tmp_path / "x", dict[str, tuple[int, Any]](), list[Any]()

    def record() -> Any:
        words = [f"w{i}" for i in random.zipf(1.3, random.integers(1, 8)) if i < 40] or ["w1"]
        if kind == "bm25":
            return words
        return {word: float(np.float32(np.exp(random.normal(0, 1.5)))) for word in words}

    def given(records: list[tuple[str, Any]]) -> dict[str, Any]:
        if kind == "bm25":
            return {"texts": [(name, " ".join(words)) for name, words in records]}
        return {"vectors": records}

    def take(records: list[tuple[str, Any]]) -> None:
        for name, content in records:
            alive[name] = len(everything), content
            everything.append(content)

    largest = dict[str, float]()
    names = iter(range(10**6))
    first = [(f"d{next(names)}", record()) for _ in range(3)]
    readers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few weights, many may be below half a step
        Postings.build(
            path, **given(first), analyzer="none", **({"exact": True} if kind == "float" else {})
        )
        take(first)
        for step in range(36):
            what = random.choice(
                ["add", "add", "add", "replace", "delete", "compact"],
                p=[0.3, 0.2, 0.2, 0.14, 0.12, 0.04],
            )
            if what in ("add", "replace"):
                some = [
                    (f"d{next(names)}", record())
                    for _ in range(int(random.choice([1, 1, 1, 2, 9])))
                ]
                if what == "replace" and alive:
                    some[0] = str(random.choice(list(alive))), some[0][1]
                    with pytest.raises(errors.InvalidInputError, match="replace=True"):
                        espnx.postings.add(path, **given(some))
                report = espnx.postings.add(path, **given(some), replace=what == "replace")
                assert report.n_replaced == sum(name in alive for name, _ in some)
                take(some)
            elif what == "delete" and alive:
                gone = [str(each) for each in random.choice(list(alive), random.integers(1, 4))]
                assert espnx.postings.delete(path, gone) == len(set(gone))
                for name in set(gone):
                    del alive[name]
            elif what == "compact":
                espnx.postings.compact(path)
            for vector in everything if kind == "impact" else ():
                for term, weight in vector.items():
                    largest[term] = max(largest.get(term, 0.0), weight)
            if step % 6 == 0:
                check_program(path, kind, alive, [record() for _ in range(4)], largest)
                postings = Postings.open(path)
                readers.append(
                    (
                        postings,
                        postings.search(
                            ["w1 w2"] if kind == "bm25" else [{"w1": 1.0, "w2": 0.5}], k=1000
                        ),
                    )
                )
    check_program(path, kind, alive, [record() for _ in range(4)], largest)
    for postings, before in readers:
        with postings:
            again = postings.search(
                ["w1 w2"] if kind == "bm25" else [{"w1": 1.0, "w2": 0.5}], k=1000
            )
            assert again.scores.tolist() == before.scores.tolist()
            assert [hit.id for hit in again[0]] == [hit.id for hit in before[0]]


def test_deletions_of_merged_segments_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "x"
    Postings.build(path, terms=[["a"]])
    for number in range(7):
        espnx.postings.add(path, terms=[["a", f"b{number}"]])
    espnx.postings.delete(path, [0, 3])
    espnx.postings.add(path, terms=[["c"]])
    espnx.postings.add(path, terms=[["d"]])
    with Postings.open(path) as postings:
        assert len(postings.facts.segments) == 2
        assert len(postings) == 8
        # of the one that was built, which is left as it is
        assert postings._deletions.n_present == 1
        assert postings.search([["a"]], k=20).numbers[0].tolist() == [1, 2, 4, 5, 6, 7, -1, -1]
        assert (postings.search([["b2"]], k=20).numbers == -1).all()


def test_adding_nothing_publishes_nothing(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", ["a text"])
    before = sorted(os.listdir(tmp_path / "x")), (tmp_path / "x" / "MANIFEST.json").read_bytes()
    assert espnx.postings.add(tmp_path / "x", []).n_records == 0
    assert (
        sorted(os.listdir(tmp_path / "x")),
        (tmp_path / "x" / "MANIFEST.json").read_bytes(),
    ) == before
