"""Plots come from result rows alone, and the same rows give the same file."""

from __future__ import annotations

from dataclasses import asdict, replace
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
    return {Path("r.json"): {"machine": {"memory_bytes": 4_000_000_000}, "rows": [asdict(each) for each in rows]}}


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


def sizes(system: str, limit: int | None = 1_000_000_000) -> list[Row]:
    found = [row("sizes", system, {"memory_bytes": limit}, {"record_bytes": gigabytes * 1e9}) for gigabytes in (0.5, 2, 3)]
    return [replace(each, median_s=0.01 * number) for number, each in enumerate(found, 1)]


def lines(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each line that has a label."""
    [axes] = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines if not line.get_label().startswith("_")}


def drawn(name: str, rows: list[Row]) -> Any:
    return plots.PLOTS[name].draw(plots.PLOTS[name].rows(results(rows)))


def words(figure: Any) -> list[str]:
    return [text.get_text().strip() for text in figure.axes[0].texts]


def test_what_is_in_memory_ends_where_memory_does() -> None:
    figure = drawn("search-sizes", [*sizes("memory"), *sizes("espnx"), *sizes("espnx-30%"), *sizes("mmap-1", None)])
    found = lines(figure)
    assert list(found) == ["in memory", "espnx"]  # one limit at a time, and systems that the plot knows
    assert found["in memory"] == [[0.5, pytest.approx(10)]]
    assert [point[0] for point in found["espnx"]] == [0.5, 2, 3]
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["-", ":", "-", "-."]
    assert figure.axes[0].lines[-1].get_xdata()[0] == 1.0
    assert words(figure) == ["memory ends"]


def test_without_a_limit_memory_is_the_machines() -> None:
    figure = drawn("search-sizes", sizes("memory", None))
    assert len(lines(figure)["in memory"]) == 3
    assert figure.axes[0].lines[-1].get_xdata()[0] == 4.0


def context(system: str, tokens: int, tokens_per_s: float, memory: Any = "auto", **metrics: float) -> Row:
    params = {"context": tokens, "batch": 2, "model": "m", "dtype": "bf16", "memory": memory, "throttle_bytes_per_s": None}
    found = row("context", system, params, {"tokens_per_s": tokens_per_s, "asked_per_step": 1000.0 * tokens, **metrics})
    return replace(found, case="kv")


def test_decoding_over_the_context() -> None:
    rows = [context("espnx", 1000, 20, fio_s=0.01), context("espnx", 4000, 10, fio_s=0.1), context("dynamic", 1000, 25)]
    figure = drawn("kv-context", [*rows, context("espnx", 9000, 1, memory=5_000_000)])
    assert lines(figure) == {
        "in memory (DynamicCache)": [[1000, 25]],
        "espnx": [[1000, 20], [4000, 10]],
        "the disk's rate (fio)": [[4000, 20]],  # far above what anything reaches it is left out
    }
    assert words(figure) == ["memory ends at 4M \u2192"]


def test_a_limit_of_memory_ends_it_within_the_plot() -> None:
    figure = drawn("kv-context", [context("espnx", tokens, 10, memory=2_000_000) for tokens in (1000, 4000)])
    assert figure.axes[0].lines[-1].get_xdata()[0] == pytest.approx(2000)
    assert drawn("kv-context", [context("dynamic", 1000, 10)]) is None


def test_devices_are_drawn_by_system() -> None:
    """A line for each, over the number of devices; wrong rows are in none."""
    rows = [
        Row(
            "device", {"show": "search", "spec": "smartssd", "devices": count}, system, "emulated", "auto", "uring", "cold", 3,
            1e-3 * factor / count, 0.1, 0.0, 1, 1, True, {}, {},
        )
        for system, factor in (("without", 8), ("maxsim", 4)) for count in (4, 1, 2)
    ]  # fmt: skip
    [axes] = plots.devices([plots.Found(row, 1) for row in rows]).axes
    found = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert found == {"without": [[1, 8], [2, 4], [4, 2]], "maxsim": [[1, 4], [2, 2], [4, 1]]}
    assert axes.get_ylabel() == "virtual ms a search"
    assert plots.devices([plots.Found(replace(rows[0], median_s=None), 1)]) is None
