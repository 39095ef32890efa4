"""Plots come from result rows alone, and the same rows give the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.harness.result import Row
from espnx.benchmarks.report import plots

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra [bench])")


def row(show: str, system: str, params: dict[str, Any], metrics: dict[str, float]) -> Row:
    return Row(
        "retrieval", {"show": show, "corpus": "B", "nprobe": 64, **params}, system, "measured", "auto", "uring", "cold", 3, 0.1, 0.1, 0.0,
        1, 1, True, metrics, {},
    )  # fmt: skip


def results(rows: list[Row]) -> dict[Path, dict[str, Any]]:
    from dataclasses import asdict

    return {Path("r.json"): {"rows": [asdict(each) for each in rows]}}


def test_each_plot_has_its_rows(tmp_path: Path) -> None:
    rows = [row("hit-rate", "espnx", {"prefetch_step": step, "recall_wanted": 0.95}, {"hit_rate": step + 0.4}) for step in (0.3, 0.1)]
    assert plots.draw_all(tmp_path, results(rows)) == [tmp_path / "docs/plots/hit-rate.svg"]
    rows += [row("formats", fmt, {}, {"bytes_per_document": size, "nDCG@10": 0.4}) for fmt, size in (("fp16", 1e4), ("bit1", 1e3))]
    assert len(plots.draw_all(tmp_path, results(rows))) == 2


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    found = results([row("formats", "fp16", {}, {"bytes_per_document": 10.0, "nDCG@10": 0.4})])
    [path] = plots.draw_all(tmp_path, found)
    first = path.read_bytes()
    plots.draw_all(tmp_path, found)
    assert path.read_bytes() == first


def test_wrong_or_other_rows_draw_nothing(tmp_path: Path) -> None:
    rows = [row("table", "espnx", {}, {"hit_rate": 1.0}), row("formats", "fp16", {}, {})]
    assert plots.draw_all(tmp_path, results(rows)) == []
