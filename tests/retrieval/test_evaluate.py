"""Quality metrics against hand-computed values, and `Index.evaluate` against `evaluate` of its own
rankings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import espnx
from espnx import errors
from espnx.retrieval.evaluate import evaluate, read_qrels
from tests.retrieval.common import queries

OTHER_KIND = (
    r"no query is judged; got query ids such as 1 \(int\); expected query ids such as '1' \(str\)"
)
QRELS = {"q1": {"a": 1, "b": 2, "c": 0}, "q2": {"d": 1}, "judged, nothing relevant": {"a": 0}}


def test_hand_computed() -> None:
    found = evaluate(
        {"q1": ["x", "a", "b"], "q2": ["y"]},
        QRELS,
        ["nDCG@10", "MRR@10", "recall@2", "recall@3", "nDCG@1"],
    )
    dcg, ideal = 1 / math.log2(3) + 2 / math.log2(4), 2 / math.log2(2) + 1 / math.log2(3)
    assert found["nDCG@10"] == pytest.approx(dcg / ideal / 2)
    assert found["MRR@10"] == pytest.approx(0.25)
    assert (found["recall@2"], found["recall@3"], found["nDCG@1"]) == (0.25, 0.5, 0)


def test_perfect_and_missing() -> None:
    assert evaluate({"q1": ["b", "a"], "q2": ["d"]}, QRELS) == {
        "nDCG@10": 1.0,
        "MRR@10": 1.0,
        "recall@100": 1.0,
    }
    assert evaluate({"q1": []}, QRELS) == {"nDCG@10": 0.0, "MRR@10": 0.0, "recall@100": 0.0}
    assert evaluate({"q2": ["d"]}, QRELS, ["mrr@10"]) == {"mrr@10": 0.5}


def test_depth_counts_only_so_far() -> None:
    assert evaluate({"q": [*list("abcdefghij"), "k"]}, {"q": {"k": 1}}, ["MRR@10", "MRR@11"]) == {
        "MRR@10": 0,
        "MRR@11": 1 / 11,
    }


@pytest.mark.parametrize(
    ("rankings", "qrels", "metrics", "message"),
    [
        ({}, {}, ["MRR@10"], "no query with a relevant document"),
        ({}, {"q": {"a": 0}}, ["MRR@10"], "no query with a relevant document"),
        ({"q": ["a", "a"]}, {"q": {"a": 1}}, ["MRR@10"], "a document twice"),
        ({}, {"q": {"a": 1}}, ["MRR@10"], "no query is judged; got no query ids"),
        ({1: ["a"]}, {"1": {"a": 1}}, ["MRR@10"], OTHER_KIND),
        ({}, {"q": {"a": 1}}, ["BLEU"], "nDCG@k, MRR@k, MAP@k"),
        ({}, {"q": {"a": 1}}, ["MRR@0"], "nDCG@k, MRR@k, MAP@k"),
    ],
)
def test_refused(rankings: dict, qrels: dict, metrics: list[str], message: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=message):
        evaluate(rankings, qrels, metrics)


def test_qrels_files(tmp_path: Path) -> None:
    beir, trec, wrong = tmp_path / "qrels.tsv", tmp_path / "qrels.trec", tmp_path / "wrong.tsv"
    beir.write_text(
        "query-id\tcorpus-id\tscore\n1\t184\t1\n1\t29\t0\n\n2\td 7\n".replace(
            "2\td 7\n", "2\td7\t2\n"
        )
    )
    trec.write_text("1 0 184 1\n1 0 29 0\n2 0 d7 2\n")
    assert (
        read_qrels(str(beir)) == read_qrels(str(trec)) == {"1": {"184": 1, "29": 0}, "2": {"d7": 2}}
    )
    wrong.write_text("1\t184\t1\n1\tand now\tfor something\n")
    with pytest.raises(errors.InvalidInputError, match="line 2"):
        read_qrels(str(wrong))
    with pytest.raises(errors.InvalidInputError, match="cannot read"):
        read_qrels(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("1\t5\t1\n", {"1": {"5": 1}}),
        ("\ufeff1\t5\t1\n", {"1": {"5": 1}}),
        ("\ufeffquery-id\tcorpus-id\tscore\na b\tc d\t-1\n", {"a b": {"c d": -1}}),
        ("a b\t0\tc d\t2\r\n", {"a b": {"c d": 2}}),
        ("1 5 1\n1 5 1\n \n", {"1": {"5": 1}}),
    ],
)
def test_lines_of_qrels(tmp_path: Path, content: str, wanted: dict) -> None:
    (tmp_path / "qrels").write_text(content, newline="")
    assert read_qrels(str(tmp_path / "qrels")) == wanted


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1\t5\t1.0\n", "line 1 .*whole number"),
        ("1 5 1\n1 5 2\n", "line 2 .*got 2 for query '1', document '5'; expected 1"),
        ("1 5 1\nq d relevance\n", "line 2"),
        ("a b\t1\n", "line 1"),
        ("\t5\t1\n", "line 1"),
    ],
)
def test_lines_that_are_no_judgements(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "qrels").write_text(content)
    with pytest.raises(errors.InvalidInputError, match=said):
        read_qrels(str(tmp_path / "qrels"))


def test_judgements_of_another_corpus(store: Path) -> None:
    query = queries(1)[0]
    with espnx.open(store) as index:
        for qrels, said in (
            ({"1": {"doc-1": 1}}, OTHER_KIND),
            (
                {1: {5: 1, 7: 0}},
                (
                    r"no judged document is in the store; got .* [57] \(int\); expected .* "
                    r"'doc-\d+' \(str\)"
                ),
            ),
            ({1: {None: 1}}, "qrels"),
        ):
            with pytest.raises(errors.InvalidInputError, match=said):
                index.evaluate({1: query}, qrels)  # type: ignore[dict-item]
        assert (
            index.evaluate({1: query, 2: query}, {1: {"doc-1": 1, 5: 1}}, ["recall@1000"])[
                "recall@1000"
            ]
            == 0.5
        )


def test_of_an_index(store: Path) -> None:
    wanted = {f"q{i}": query for i, query in enumerate(queries(6))}
    with espnx.open(store) as index:
        rankings = {
            name: [hit.id for hit in index.search(query, k=20).hits]
            for name, query in wanted.items()
        }
        qrels = {
            name: {ids[3]: 1, ids[15]: 2, "absent": 1}
            for name, ids in rankings.items()
            if name != "q5"
        }
        metrics = ["nDCG@10", "recall@20", "MRR@3"]
        assert index.evaluate(wanted, qrels, metrics) == evaluate(rankings, qrels, metrics)
        assert index.evaluate(wanted, qrels, metrics)["MRR@3"] == 0
        assert index.evaluate(wanted, {"q1": {rankings["q1"][0]: 1}}, ["MRR@1"], rerank=5) != {}
