"""``espnx bench postings`` at toy size: all systems right, wrong ones noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.postings import systems
from espnx.benchmarks.postings.corpus import make_passages, make_queries
from espnx.cli.main import main


def test_every_system_is_right(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    result = tmp_path / "r.json"
    names = ["mmap-willneed", "bm25s-mmap", "bm25s-memory", "fts5"]
    options = ["--baseline", ",".join(names), "--json", str(result)]
    assert main(["bench", "postings", "--quick", "--pairs", "2", "--path", str(tmp_path), *options]) == 0
    rows = {row.system: row for row in rows_of(load(result))}
    assert set(rows) == {"espnx", *names}
    assert all(row.correct and row.n == 2 for row in rows.values())
    assert set(rows["espnx"].ratio) == set(names)
    assert 0 < rows["espnx"].metrics["requests"] <= 10
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_wrong_scores_have_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ask = systems.MappedSystem.ask
    monkeypatch.setattr(systems.MappedSystem, "ask", lambda self, query: (ask(self, query)[0], ask(self, query)[1] * np.float32(1.001)))
    result = tmp_path / "r.json"
    main(["bench", "postings", "--quick", "--pairs", "1", "--path", str(tmp_path), "--baseline", "mmap-willneed", "--json", str(result)])
    rows = {row.system: row for row in rows_of(load(result))}
    assert not rows["mmap-willneed"].correct
    assert rows["espnx"].ratio == {}
    assert "WRONG RESULT of mmap-willneed" in capsys.readouterr().err


def test_the_recipe_is_the_same_for_a_seed() -> None:
    a, b = make_passages(300, 1), make_passages(300, 1)
    assert list(a) == list(b)
    assert make_queries(a, 20, 1) == make_queries(b, 20, 1)
    assert [len(terms) for terms in a] == a.lengths.tolist()
