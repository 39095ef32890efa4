"""``espnx bench graph --show changes`` at toy size: a graph that changes beside a fresh one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import espnx.graph
from espnx.benchmarks.graph.case import CASE
from espnx.benchmarks.graph.changes import DRIFT, MERGE, SEARCH, SHOW, _Known
from espnx.benchmarks.graph.data import by_recipe
from espnx.benchmarks.harness.result import load, rows_of
from espnx.cli.main import main

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def short_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espnx.benchmarks.graph.changes._PAIRS_S", 0.02)


@pytest.mark.parametrize("clusters", [None, 3])
def test_a_quick_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clusters: int | None
) -> None:
    options = ["--quick", "--pairs", "1", "--threads", "1", "--show", "changes"]
    options += [] if clusters is None else ["--clusters", str(clusters)]
    file = tmp_path / "changes.json"
    assert main(["bench", "graph", *options, "--path", str(tmp_path), "--json", str(file)]) == 0
    assert "of a fresh build" in capsys.readouterr().out
    rows = rows_of(load(file))
    assert all(row.correct for row in rows)
    assert {row.params.get("clusters") for row in rows} == {clusters}
    by_show = {
        show: [row for row in rows if row.params["show"] == show]
        for show in (SHOW, DRIFT, MERGE, SEARCH)
    }
    assert [len(each) for each in by_show.values()] == [3, 3, 2, 6]
    for row in by_show[SHOW]:
        assert row.metrics["recall"] >= row.metrics["fresh_recall"] - 0.1
        assert 0.8 < row.metrics["reads_over_fresh"] < 1.3
    assert [row.params["round"] for row in by_show[DRIFT]] == [0, 1, 2]
    built, merged = by_show[MERGE]
    assert (built.params["what"], merged.params["what"]) == ("build", "merge")
    assert merged.metrics["seconds_over_build"] == pytest.approx(
        merged.metrics["seconds"] / built.metrics["seconds"]
    )
    assert all(row.metrics["cpu_over_plain"] > 0.2 for row in by_show[SEARCH])
    for each in by_show.values():
        headers, cells = CASE.table(each)
        assert len(cells) == len(each)
        assert all(len(line) == len(headers) for line in cells)
    assert {path.name for path in tmp_path.iterdir()} == {"changes.json"}


def test_a_deleted_vector_that_is_found_is_noticed(tmp_path: Path) -> None:
    data = by_recipe(120, 8, 5, 0, dim=8)
    known = _Known(data, 100)
    espnx.graph.build(data.base[:100], tmp_path / "g", max_degree=12, threads=1)
    with espnx.graph.open(tmp_path / "g") as graph:
        assert known.point(graph, 20, True)[1]
        nearest = graph.search(data.queries, 1).ids[:, 0]
        known.change(np.unique(nearest), np.arange(100, 120))  # which the graph does not know
        assert not known.point(graph, 20, True)[1]
