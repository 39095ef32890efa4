"""``espnx evaluate`` from the outside: the library's own numbers, for files of queries and
judgements as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

import espnx

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")

from tests.cli.commands.test_search import TEXTS
from tests.cli.documents import strict_json
from tests.cli.test_index import run
from tests.retrieval.common import build, toy_encoder

QUERIES = {"q1": "red green", "q2": "two three", "q3": "one"}
#: 3 is a number in the store, which a file cannot say.
QRELS = {
    "q1": {"a": 2, "other": 0},
    "q2": {"b": 1, "unknown": 1},
    "q3": {3: 1, "b": 1},
    "q9": {"a": 1},
}


@pytest.fixture(autouse=True)
def encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espnx.encoders.load_encoder", lambda name, **options: toy_encoder())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build(tmp_path / "store", TEXTS, encoder=toy_encoder(), dims=None, nlist=2)
    (tmp_path / "q.jsonl").write_text(
        "\n".join(f'{{"_id": "{name}", "text": "{text}"}}' for name, text in QUERIES.items())
    )
    lines = [
        (query, str(document), gain)
        for query, relevant in QRELS.items()
        for document, gain in relevant.items()
    ]
    (tmp_path / "beir.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{g}\n" for q, d, g in lines)
    )
    (tmp_path / "trec.txt").write_text("".join(f"{q} 0 {d} {g}\n" for q, d, g in lines))
    return tmp_path / "store"


@pytest.mark.parametrize("qrels", ["beir.tsv", "trec.txt"])
def test_the_librarys_numbers(store: Path, capsys: pytest.CaptureFixture[str], qrels: str) -> None:
    words = [
        "evaluate",
        store,
        "--queries",
        store.parent / "q.jsonl",
        "--qrels",
        store.parent / qrels,
        "--encoder",
        "toy",
    ]
    with espnx.open(store, toy_encoder()) as index:
        expected = index.evaluate(QUERIES, QRELS, ["nDCG@3", "recall@1"])
    code, out, _ = run(capsys, *words, "--metrics", "nDCG@3,recall@1", "--json", "-")
    document = strict_json(out)
    assert (code, document["command"], document["judged_queries"], document["not_asked"]) == (
        0,
        "evaluate",
        4,
        1,
    )
    assert document["metrics"] == expected
    out = run(capsys, *words, "--metrics", "nDCG@3,recall@1")[1]
    assert f"{expected['nDCG@3']:.4f}" in out
    assert "1 (they count as having found nothing)" in out
    assert run(capsys, *words, "--nprobe", 1, "--rerank", 2, "--candidates", 3)[0] == 0


def test_what_it_cannot_do(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", store, "--queries", tmp_path / "q.jsonl", "--encoder", "toy"]
    for text, said in (
        ("q1\tnobody\t1\n", "no judged document"),
        ("q7\ta\t1\n", "no query is judged"),
        ("q1\n", "line 1"),
    ):
        (tmp_path / "qrels").write_text("q1\ta\t1\nq1\n" if said == "line 1" else text)
        code, out, err = run(capsys, *words, "--qrels", tmp_path / "qrels")
        assert (code, out) == (2, "")
        assert said.replace("line 1", "line 2") in err
    code, _, err = run(capsys, *words, "--qrels", tmp_path / "beir.tsv", "--metrics", "BLEU")
    assert (code, "metric" in err) == (2, True)


def test_runs_saved_and_compared(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "evaluate",
        store,
        "--queries",
        tmp_path / "q.jsonl",
        "--qrels",
        tmp_path / "beir.tsv",
        "--encoder",
        "toy",
    ]
    code, out, err = run(capsys, *words, "--save-run", tmp_path / "a.run", "--json", "-")
    assert code == 0, err
    found = strict_json(out)
    assert found["metrics"] == strict_json(run(capsys, *words, "--json", "-")[1])["metrics"]
    assert {line.split()[0] for line in (tmp_path / "a.run").read_text().splitlines()} == {
        "q1",
        "q2",
        "q3",
    }
    code, out, _ = run(
        capsys, "evaluate", tmp_path / "a.run", "--qrels", tmp_path / "beir.tsv", "--json", "-"
    )
    assert strict_json(out)["metrics"] == found["metrics"]
    (tmp_path / "b.run").write_text("q1 Q0 a 1 1.0 other\n")
    code, out, _ = run(
        capsys, *words, "--against", tmp_path / "b.run", "--metrics", "MRR@10", "--json", "-"
    )
    compared = strict_json(out)["against"]["comparisons"]
    assert [each["metric"] for each in compared] == ["MRR@10"]
    assert compared[0]["difference"] == pytest.approx(compared[0]["value"] - 0.25)
    text = run(
        capsys,
        "evaluate",
        tmp_path / "a.run",
        "--qrels",
        tmp_path / "beir.tsv",
        "--against",
        tmp_path / "a.run",
    )[1]
    assert "+0.0000, 95% interval +0.0000 to +0.0000" in text


def test_measures_of_ir_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By their own names, commas in brackets among them."""
    pytest.importorskip("ir_measures", reason="ir-measures is not installed (extra [metrics])")
    (tmp_path / "a.run").write_text("q Q0 a 1 2.0 x\nq Q0 b 2 1.0 x\n")
    (tmp_path / "qrels").write_text("q 0 a 1\nq 0 b 2\n")
    words = [
        "evaluate",
        tmp_path / "a.run",
        "--qrels",
        tmp_path / "qrels",
        "--json",
        "-",
        "--metrics",
    ]
    code, out, _ = run(capsys, *words, "nDCG@10,AP(rel=2,judged_only=True)@10,RR(rel=2)")
    found = strict_json(out)["metrics"]
    assert code == 0
    assert list(found) == ["nDCG@10", "AP(rel=2,judged_only=True)@10", "RR(rel=2)"]
    assert list(found.values())[1:] == [0.5, 0.5]
    assert run(capsys, *words, "nonsense")[0] == 2


def test_runs_and_stores_are_told_apart(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.run").write_text("q1 Q0 a 1 1.0 other\n")
    qrels = ["--qrels", tmp_path / "beir.tsv"]
    for words, said in (
        ([store], "--queries"),
        ([tmp_path / "a.run", "--queries", tmp_path / "q.jsonl"], "neither"),
        ([tmp_path / "beir.tsv"], "line 1"),
        ([tmp_path / "a.run", "--against", tmp_path / "absent"], "cannot read run"),
        ([tmp_path / "absent", "--queries", tmp_path / "q.jsonl"], "no published store"),
    ):
        code, out, err = run(capsys, "evaluate", *words, *qrels)
        assert (code != 0, out) == (True, ""), words
        assert said in err
