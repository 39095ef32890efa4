"""``espnx bench walks``, small; the law that `espnx simulate` has is that of the result file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.walks.case import CASE
from espnx.benchmarks.walks.law import EF, VECTORS, fit_law
from espnx.cli.main import main
from espnx.errors import InvalidInputError
from espnx.simulate.specs.load import load_preset
from espnx.simulate.specs.rag import GraphWalkSpec

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "hnsw-walks.json"


def test_small(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    for name, n in (("base", 900), ("queries", 5)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((n, 16)).astype(np.float32))
    words = ["bench", "walks", "--sizes", "400,800", "--ef", "100,150", "--dim", "8"]
    words += ["--base", str(tmp_path / "base.npy"), "--queries", str(tmp_path / "queries.npy")]
    assert main([*words, "--json", str(tmp_path / "w.json")]) == 0
    rows = rows_of(load(tmp_path / "w.json"))
    points = [(row.params["data"], row.params["n"], row.params["ef"]) for row in rows]
    assert points == [
        (data, n, ef) for data in ("recipe", "base.npy") for n in (400, 800) for ef in (100, 150)
    ]
    for row in rows:
        assert row.correct
        assert row.params["ef"] <= row.metrics["hops"] <= row.params["ef"] + 20
        assert row.metrics["hops"] < row.metrics["distances"] <= 1.2 * row.params["n"]
        assert row.metrics["recall"] > 0.8
    assert CASE.table(rows)[1][0][0] == "recipe"


def row(data: str, n: int, ef: int, distances: float) -> dict[str, object]:
    return {
        "params": {"data": data, "n": n, "ef": ef},
        "metrics": {"distances": distances, "hops": ef + 5.0},
    }


def test_a_law_is_found_again() -> None:
    rows = [
        row("a", n, ef, 9000 * (n / VECTORS) ** 0.1 * (ef / EF) ** 0.8)
        for n in (50_000, 200_000)
        for ef in (300, 600)
    ]
    law = fit_law([*rows, row("a", 2000, 600, 1900.0)])  # which sees nearly all
    assert law.distances["a"] == pytest.approx(9000)
    assert law.more_vectors["a"] == pytest.approx(0.1)
    assert law.more_ef["a"] == pytest.approx(0.8)
    assert law.off["a"] == pytest.approx(0, abs=1e-9)
    assert law.descent == 5
    for few in (rows[:1], []):
        with pytest.raises(InvalidInputError, match="a law of walks"):
            fit_law(few)


def test_the_law_that_comes_along() -> None:
    """Of `espnx bench walks --law benchmarks/results/hnsw-walks.json`: the middle of the kinds of
    vectors, which lie within its range."""
    law, spec = fit_law(json.loads(RESULTS.read_text())["rows"]), load_preset(GraphWalkSpec, "hnsw")
    assert (spec.vectors.value, spec.ef.value) == (VECTORS, EF)
    for name, step in (("distances", 2.0), ("more_vectors", 1e-3), ("more_ef", 1e-3)):
        own, figure = getattr(law, name).values(), getattr(spec, name)
        assert figure.value == pytest.approx((min(own) + max(own)) / 2, abs=step), name
        assert figure.low <= min(own) + step
        assert figure.high >= max(own) - step
    assert spec.descent.value == round(law.descent)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "none"], "--sizes; got 'none'"),
        (["--base", "a.npy"], "--base and --queries; got one of them"),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "walks", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "walks", "--law", str(tmp_path / "none.json")]) == 1
    assert "no such result" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("[1]")
    assert main(["bench", "walks", "--law", str(tmp_path / "x.json")]) == 1
    assert "no result file" in capsys.readouterr().err
