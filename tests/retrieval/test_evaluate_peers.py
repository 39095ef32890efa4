"""`espnx.evaluate` and run files against ir-measures (pytrec_eval), on random judgements and on
Cranfield, whose folder ``ESPNX_CRANFIELD`` names; the bootstrap interval against NumPy's own
draws."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.importers.trec import read_run, write_run
from espnx.retrieval.evaluate import compare_rankings, depth_of, evaluate, evaluate_each

NAMES = {"nDCG": "nDCG", "MRR": "RR", "MAP": "AP", "recall": "R", "P": "P", "success": "Success"}
METRICS = [f"{kind}@{depth}" for kind in NAMES for depth in (1, 3, 10, 100)]


def theirs(qrels, run):
    """metric -> query -> value, by ir-measures."""
    measures = pytest.importorskip(
        "ir_measures", reason="ir-measures is not installed (extra [dev])"
    )
    wanted = {
        metric: measures.parse_measure(
            NAMES[metric.partition("@")[0]] + "@" + metric.partition("@")[2]
        )
        for metric in METRICS
    }
    found = {metric: {} for metric in METRICS}
    by_measure = {measure: metric for metric, measure in wanted.items()}
    for value in measures.iter_calc(list(wanted.values()), qrels, run):
        found[by_measure[value.measure]][value.query_id] = value.value
    return found


def check_equal(qrels, run, tmp_path):
    ours = evaluate_each(run, qrels, METRICS)
    scores = {query: dict(ranking) for query, ranking in run.items()}
    wanted = theirs(qrels, scores)
    for metric, values in ours.items():
        assert values.keys() == wanted[metric].keys()
        assert list(values.values()) == pytest.approx(
            [wanted[metric][query] for query in values], abs=1e-9, rel=0
        ), metric
    means = evaluate(run, qrels, METRICS)
    assert means == pytest.approx(
        {metric: np.mean(list(values.values())) for metric, values in wanted.items()},
        abs=1e-9,
        rel=0,
    )
    write_run(tmp_path / "run", run)
    assert evaluate(read_run(tmp_path / "run"), qrels, METRICS) == means
    import ir_measures

    again = ir_measures.read_trec_run(str(tmp_path / "run"))
    assert ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, again)[
        ir_measures.nDCG @ 10
    ] == pytest.approx(means["nDCG@10"], abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_random_judgements(seed, tmp_path):
    rng = np.random.default_rng(seed)
    documents = [f"d{number}" for number in range(40)]
    qrels = {
        f"q{i}": {
            str(d): int(rng.integers(-1, 4)) for d in rng.choice(documents, 12, replace=False)
        }
        for i in range(12)
    }
    for number, judged in enumerate(qrels.values()):
        judged[f"only {number}".replace(" ", "-")] = 1  # a relevant document that nobody finds
    run = {}
    for number in range(11):  # the last query is not answered
        found = [
            str(document)
            for document in rng.choice(documents, int(rng.integers(1, 40)), replace=False)
        ]
        run[f"q{number}"] = list(
            zip(found, np.arange(len(found), 0, -1).astype(float), strict=True)
        )
    check_equal(qrels, run, tmp_path)


@pytest.mark.skipif(not os.environ.get("ESPNX_CRANFIELD"), reason="ESPNX_CRANFIELD names no folder")
def test_cranfield(tmp_path):
    collection = espnx.read_beir(os.environ["ESPNX_CRANFIELD"])
    assert len(collection.queries) == len(collection.qrels) == 225
    documents = [(str(document["id"]), document["text"]) for document in collection.corpus]
    vocabulary: dict[str, int] = {}
    bags = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in text.split()]
        for _, text in documents
    ]
    counts = np.zeros((len(documents), len(vocabulary)), np.float32)
    for row, bag in zip(counts, bags, strict=True):
        np.add.at(row, bag, 1)
    weights = np.log1p(counts) * np.log(len(documents) / np.maximum(1, (counts > 0).sum(0)))
    run = {}
    for query, text in collection.queries.items():
        scores = weights[:, [vocabulary[word] for word in text.split() if word in vocabulary]].sum(
            1
        )
        order = np.argsort(-scores, kind="stable")[:200]
        run[query] = [(documents[number][0], float(scores[number])) for number in order]
    write_run(tmp_path / "made", run)  # parts the ties, whose order is trec_eval's own
    check_equal(collection.qrels, read_run(tmp_path / "made"), tmp_path)
    comparison = compare_rankings(
        run, {query: ranking[::-1] for query, ranking in run.items()}, collection.qrels, ["nDCG@10"]
    )[0]
    assert comparison.low > 0.05


def test_ties_are_broken_as_trec_eval_does(tmp_path):
    (tmp_path / "run").write_text(
        "q Q0 b 1 2.5 x\nq Q0 c 2 2.5 x\nq Q0 a 3 2.5 x\nq Q0 z 4 9 x\nq Q0 m 5 2.50000001 x\n"
    )
    run = read_run(tmp_path / "run")
    # 2.50000001 is 2.5 in 32 bits, and m above c by its id
    assert [document for document, _ in run["q"]] == ["z", "m", "c", "b", "a"]
    qrels = {"q": {"b": 1}}
    scores = {
        "q": {
            line.split()[2]: float(line.split()[4])
            for line in (tmp_path / "run").read_text().splitlines()
        }
    }
    assert evaluate(run, qrels, ["MRR@5"])["MRR@5"] == pytest.approx(
        theirs(qrels, scores)["MRR@10"]["q"]
    )


def test_a_written_run_keeps_its_order(tmp_path):
    ranking = [("b", 1.0), ("c", 1.0), ("a", 1.0), ("z", 5.0), ("y", -1e-45), ("x", 0.0), (7, 0.0)]
    write_run(tmp_path / "run", {"q": ranking, 3: ["only", "ids"], "none": []}, tag="t")
    read = read_run(tmp_path / "run")
    assert [document for document, _ in read["q"]] == [str(document) for document, _ in ranking]
    assert read["3"] == [("only", 2.0), ("ids", 1.0)]
    assert (tmp_path / "run").read_text().splitlines()[0] == "q Q0 b 1 1 t"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("rankings", "said"),
    [
        ({"q": [("a b", 1.0)]}, "white space"),
        ({"q": [("a\u2003b", 1.0)]}, "white space"),
        ({"q": [("a\x00", 1.0)]}, "control"),
        ({"q": [("", 1.0)]}, "white space"),
        ({"q\n1 Q0 evil 1 9 x": [("a", 1.0)]}, "query"),
        ({"\ud800": [("a", 1.0)]}, "query"),
        ({"q": [("a", float("nan"))]}, "finite"),
        ({"q": [("a", 1e300)]}, "finite"),
        ({"q": [("a", "high")]}, "finite"),
        ({"q": [("7", 2.0), (7, 1.0)]}, "twice"),
        ({"7": [], 7: []}, "twice"),
        ({"q": [(None, 1.0)]}, "NoneType"),
        ({True: []}, "bool"),
    ],
)
def test_what_a_run_cannot_hold(tmp_path, rankings, said):
    (tmp_path / "run").write_text("as it was")
    with pytest.raises(errors.InvalidInputError, match=said):
        write_run(tmp_path / "run", rankings)
    assert (tmp_path / "run").read_text() == "as it was"
    with pytest.raises(errors.InvalidInputError, match="tag"):
        write_run(tmp_path / "run", {}, tag="two words")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"q Q0 a 1 1.5\n", "line 1"),
        (b"q Q0 a 1 1.5 x\nq Q0 b 2 1.0 x y\n", "line 2"),
        (b"q Q0 a 1 high x\n", "score high"),
        (b"q Q0 a 1 nan x\n", "score nan"),
        (b"q Q0 a 1 inf x\n", "score inf"),
        (b"q Q0 a 1 2 x\nq Q0 a 2 1 x\n", "line 2.*again"),
        (b"q Q0 \xff 1 2 x\n", "cannot read"),
        (b"\x1f\x8bcut", "cannot read"),
    ],
)
def test_lines_that_are_no_run(tmp_path, content, said):
    (tmp_path / "run").write_bytes(content)
    with pytest.raises(errors.InvalidInputError, match=said):
        read_run(tmp_path / "run")
    with pytest.raises(errors.InvalidInputError, match="cannot read"):
        read_run(tmp_path / "absent")


def test_compressed_and_odd_runs(tmp_path):
    import gzip

    text = "\ufeffq1 Q0 a 1 1.5 x\r\n\n  q1\tQ0\tb\t2\t2.5\tx\n".encode()
    for content in (text, gzip.compress(text)):
        (tmp_path / "run").write_bytes(content)
        assert read_run(tmp_path / "run") == {"q1": [("b", 2.5), ("a", 1.5)]}
    (tmp_path / "run").write_bytes(b"")
    assert read_run(tmp_path / "run") == {}


def beir(folder: Path, qrels: str = "qrels/test.tsv"):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        '{"_id": "d1", "title": "T", "text": "one"}\n{"_id": "d2", "title": "", "text": "two"}\n'
    )
    (folder / "queries.jsonl").write_text(
        '{"_id": "q1", "text": "first"}\n{"_id": "q2", "text": "of another split"}\n'
    )
    (folder / qrels).write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    return folder


def test_beir_folders(tmp_path):
    folder = beir(tmp_path / "one")
    collection = espnx.read_beir(folder)
    assert list(collection.corpus) == [
        {"id": "d1", "text": "one", "title": "T"},
        {"id": "d2", "text": "two"},
    ]
    assert (collection.queries, collection.qrels) == ({"q1": "first"}, {"q1": {"d1": 1}})
    for split in ("dev", "", "../test", 3):
        with pytest.raises(errors.InvalidInputError):
            espnx.read_beir(folder, split)
    (folder / "qrels" / "train.tsv").write_text("q9\td1\t1\n")
    with pytest.raises(errors.InvalidInputError, match="no query"):
        espnx.read_beir(folder, "train")
    for name in ("queries.jsonl", "corpus.jsonl"):
        (folder / name).unlink()
        with pytest.raises(errors.InvalidInputError, match=name):
            espnx.read_beir(folder)
    with pytest.raises(errors.InvalidInputError, match="no such folder"):
        espnx.read_beir(tmp_path / "absent")


def test_paired_bootstrap():
    rng = np.random.default_rng(1)
    qrels = {f"q{i}": {"right": 1} for i in range(60)}
    ours = {query: ["right", "x"] if rng.random() < 0.7 else ["x", "right"] for query in qrels}
    other = {query: ["right", "x"] if rng.random() < 0.4 else ["x", "right"] for query in qrels}
    comparison = compare_rankings(ours, other, qrels, ["MRR@10"])[0]
    gains = np.array(
        [
            evaluate_each(ours, qrels, ["MRR@10"])["MRR@10"][q]
            - evaluate_each(other, qrels, ["MRR@10"])["MRR@10"][q]
            for q in qrels
        ]
    )
    assert comparison.difference == pytest.approx(gains.mean())
    assert (comparison.better, comparison.worse, comparison.queries) == (
        (gains > 0).sum(),
        (gains < 0).sum(),
        60,
    )
    means = gains[rng.integers(0, 60, (20_000, 60))].mean(
        1
    )  # other draws: bounds agree within what draws differ by, a few hundredths of them
    assert (comparison.low, comparison.high) == pytest.approx(
        np.quantile(means, [0.025, 0.975]), abs=0.1 * means.std()
    )
    assert compare_rankings(ours, other, qrels, ["MRR@10"]) == [comparison]
    assert compare_rankings(ours, other, qrels, ["MRR@10"], seed=1, samples=50) != compare_rankings(
        ours, other, qrels, ["MRR@10"], samples=50
    )
    narrow = compare_rankings(ours, other, qrels, ["MRR@10"], confidence=0.5)[0]
    assert comparison.low < narrow.low < narrow.difference < narrow.high < comparison.high
    same = compare_rankings(ours, ours, qrels)[0]
    assert (same.difference, same.low, same.high, same.better, same.worse) == (0, 0, 0, 0, 0)
    assert "against" in str(comparison)
    for options in (
        {"confidence": 1.0},
        {"confidence": 95},
        {"samples": 0},
        {"seed": -1},
        {"metrics": ["x@1"]},
    ):
        with pytest.raises(errors.InvalidInputError):
            compare_rankings(ours, other, qrels, **options)


def test_their_names_are_computed_by_them():
    """And agree with ours where both have a name for it; 7 and "7" are two documents, and a query
    that found nothing has a zero."""
    pytest.importorskip("ir_measures", reason="ir-measures is not installed (extra [metrics])")
    rng = np.random.default_rng(3)
    documents = [7, "7", *(f"d{number}" for number in range(30))]
    order = [rng.permutation(len(documents))[:20] for _ in range(6)]
    run = {
        f"q{number}": [documents[place] for place in places] for number, places in enumerate(order)
    }
    qrels = {
        f"q{number}": {each: int(rng.integers(0, 3)) for each in documents} for number in range(7)
    }
    for judged in qrels.values():
        judged[7], judged["7"] = 2, 0
    pairs = {"RR@3": "MRR@3", "AP@10": "MAP@10", "R@5": "recall@5"}
    found = evaluate_each(run, qrels, [*pairs, *pairs.values(), "Bpref", "ERR@20"])
    for theirs_, ours in pairs.items():
        assert list(found[theirs_]) == list(found[ours]) == list(qrels)
        assert list(found[theirs_].values()) == pytest.approx(
            list(found[ours].values()), abs=1e-9, rel=0
        )
        assert found[theirs_]["q6"] == 0
    assert 0 < sum(found["Bpref"].values()) < 7
    assert depth_of(["nDCG@10", "RR@30"]) == 30
    assert depth_of(["Bpref"]) == 1000
    [compared] = compare_rankings(run, run, qrels, ["ERR@20"])
    assert compared.difference == 0


@pytest.mark.parametrize(
    "metric", ["nope@10", "foo bar", "", "RBP(p=0.8,rel=2)", "alpha_nDCG@10", "INST"]
)
def test_what_ir_measures_does_not_compute(metric):
    pytest.importorskip("ir_measures", reason="ir-measures is not installed (extra [metrics])")
    with pytest.raises(errors.InvalidInputError, match="metric; got"):
        evaluate({"q": ["a"]}, {"q": {"a": 1}}, [metric])


def test_without_ir_measures_their_names_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(
        errors.InvalidInputError,
        match=r"got 'ERR@20'; expected nDCG@k.*pip install 'espnx\[metrics\]'",
    ):
        evaluate({"q": ["a"]}, {"q": {"a": 1}}, ["ERR@20"])
    assert evaluate({"q": ["a"]}, {"q": {"a": 1}}, ["nDCG@10"]) == {"nDCG@10": 1.0}
