"""What postings say of themselves, and what is taken over from others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import espnx.postings
from espnx import errors
from espnx.postings import VARIANTS, Analyzer, Postings, read_bm25s, read_vector_lines
from espnx.postings.stored import terms as stored_terms
from tests.postings.common import corpus


@pytest.mark.parametrize("variant", VARIANTS)
def test_explanations_add_up(tmp_path: Path, variant: str) -> None:
    Postings.build(tmp_path / "x", terms=corpus(80, seed=1))
    espnx.postings.add(tmp_path / "x", terms=corpus(80, seed=2))
    with Postings.open(tmp_path / "x") as postings:
        for query in corpus(8, seed=3, longest=7):
            found = postings.search([query], k=160, variant=variant)
            for number in range(0, 160, 9):
                explained = postings.explain(query, number, variant=variant)
                place = np.flatnonzero(found.numbers[0] == number)
                assert explained.score == (float(found.scores[0, place[0]]) if len(place) else None)
                total = np.float32(0)
                for each in explained.terms:
                    total = np.float32(total + np.float32(each.score))
                assert np.float32(total + np.float32(explained.constant)) == (
                    explained.score or np.float32(explained.constant)
                )
                assert f"record {number}" in explained.summary()


def test_explanations_of_vectors(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", vectors=[{"a": 1.0, "b": 2.0}, {"b": 0.5}])
    with Postings.open(tmp_path / "x") as postings:
        explained = postings.explain({"b": 3.0, "a": 1.0, "c": 9.0}, 1)
        assert explained.score == postings.search([{"b": 3.0, "a": 1.0}], k=2).scores[0, 1]
    assert [(each.term, each.weight) for each in explained.terms] == [("b", 3.0), ("a", 1.0)]
    assert [each.value for each in explained.terms] == pytest.approx([0.5, 0.0], abs=2 / 255)


def test_a_deleted_record_is_not_found(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", ["disk log", "disk page", "log"])
    espnx.postings.delete(tmp_path / "x", [0])
    for _ in range(2):
        with Postings.open(tmp_path / "x") as postings:
            explained = postings.explain("disk", 0)
            assert explained.score is None
            assert explained.is_deleted
            assert "deleted: not found" in explained.summary()
            assert postings.explain("disk", 1).score == postings.search("disk").scores[0, 0]
            assert not postings.explain("disk", 1).is_deleted
        espnx.postings.compact(tmp_path / "x")


@pytest.mark.parametrize("kind", ["counts", "vectors"])
def test_a_term_of_the_same_hash_explains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole = stored_terms.hash_of
    monkeypatch.setattr(
        stored_terms, "hash_of", lambda data: whole(b"log" if data == b"unknown" else data)
    )
    if kind == "counts":
        Postings.build(tmp_path / "x", ["disk log", "page", "disk"])
    else:
        Postings.build(
            tmp_path / "x", vectors=[{"disk": 2.0, "log": 0.5}, {"page": 1.0}, {"disk": 1.0}]
        )
    with Postings.open(tmp_path / "x") as postings:
        query = ("disk", "unknown") if kind == "counts" else {"disk": 1.0, "unknown": 1.0}
        explained = postings.explain(query, 0, variant="bm25l")
        found = postings.search([query], k=3, variant="bm25l")
        assert explained.score == found.scores[0, found.numbers[0].tolist().index(0)]
        assert [each.term for each in explained.terms] == ["disk"]


def test_an_analyzer_of_other_stop_words_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Postings.build(tmp_path / "x", ["the log is written"], analyzer=Analyzer(stop_words="english"))
    with Postings.open(tmp_path / "x") as postings:
        assert postings.facts.analyzer == Analyzer(stop_words="english")
        assert (postings.search("the is").numbers == -1).all()
    monkeypatch.setitem(espnx.postings.analyzer.STOP_WORDS, "english", ("the",))
    with pytest.raises(errors.FormatError, match="digest"):
        Postings.open(tmp_path / "x")


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "("},
        {"pattern": "(a)(b)"},
        {"pattern": 3},
        {"stop_words": "klingon"},
        {"stop_words": None},
        {"stop_words": ["\ud800"]},
        {"lower": 1},
        {"stemmer": 1},
    ],
)
def test_wrong_analyzers_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidInputError, match="analyzer"):
        Analyzer(**options)  # type: ignore[arg-type]


def test_an_unknown_language_is_refused() -> None:
    pytest.importorskip("Stemmer")
    with pytest.raises(errors.InvalidInputError, match="stemmer"):
        Analyzer(stemmer="klingon").terms("word")


def test_folders_of_bm25s_give_its_scores(tmp_path: Path) -> None:
    bm25s = pytest.importorskip("bm25s")
    documents, queries = corpus(150, seed=1), corpus(10, seed=2, longest=6)
    reference = bm25s.BM25(method="atire", k1=1.1, b=0.3)
    reference.index(documents, show_progress=False)
    reference.save(str(tmp_path / "theirs"))
    Postings.build(tmp_path / "ours", vectors=read_bm25s(tmp_path / "theirs"), exact=True)
    with Postings.open(tmp_path / "ours") as postings:
        assert len(postings) == 150
        found = postings.search(queries, k=150)
    for row, query in enumerate(queries):
        scores = reference.get_scores(query)
        there = found.numbers[row] >= 0
        assert found.scores[row][there].tolist() == scores[found.numbers[row][there]].tolist()
        assert there.sum() == (scores > 0).sum()
    with pytest.raises(errors.InvalidInputError, match="folder of bm25s"):
        list(read_bm25s(tmp_path / "nothing"))
    (tmp_path / "theirs" / "data.csc.index.npy").write_bytes(b"no array")
    with pytest.raises(errors.FormatError, match="array of bm25s"):
        list(read_bm25s(tmp_path / "theirs"))


def test_lines_of_vectors(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text('{"id": "a", "vector": {"log": 1.5, "disk": 2}}\n\n{"vector": {}}\n')
    assert list(read_vector_lines(path)) == [("a", {"log": 1.5, "disk": 2.0}), ("1", {})]
    for bad in (
        '{"id": 1}',
        '{"vector": {"a": -1}}',
        '{"vector": {"a": true}}',
        "[]",
        "{",
        json.dumps({"id": [], "vector": {}}),
    ):
        path.write_text(bad + "\n")
        with pytest.raises(errors.FormatError, match="line 1 of vectors"):
            list(read_vector_lines(path))
    with pytest.raises(errors.InvalidInputError, match="cannot read vectors"):
        list(read_vector_lines(tmp_path / "none"))
