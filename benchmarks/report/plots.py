"""Plots in documents, drawn from result files (one from the record of the demo's model) as the tables are rendered from them:
docs/plots/*.svg."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from espnx.errors import MissingDependencyError

from ..harness.result import Row, rows_of
from . import training

FOLDER = "docs/plots"
_SIZE_INCHES = (6.4, 3.6)


def draw_all(root: Path, results: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """Draws every plot that the results have rows for. Returns the files.

    Raises MissingDependencyError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib", got=str(error), fix="pip install 'espnx[bench]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "espnx"  # the same results give the same file
    rows = [row for document in results.values() for row in rows_of(document) if row.case == "retrieval" and row.correct]
    figures = {name: draw([row for row in rows if row.params.get("show") == name]) for name, draw in PLOTS.items()}
    record = training.load_record(root)
    figures[training.PLOT] = None if record is None else training.loss_curve(record)
    drawn = []
    for name, figure in figures.items():
        if figure is not None:
            path = root / FOLDER / f"{name}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None})
            drawn.append(path)
    return drawn


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def hit_rate(rows: Iterable[Row]) -> Any:
    """Hit rate over the prefetch step, a line for each corpus and recall; None without rows."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        name = f"{row.params['corpus']}, recall {row.params['recall_wanted']:g}, nprobe {row.params['nprobe']}"
        lines[name].append((100 * row.params["prefetch_step"], row.metrics["hit_rate"]))
    if not lines:
        return None
    figure, axes = _axes("Candidates known after a share of the lists", "prefetch step, % of the lists", "hit rate")
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="small")
    return figure


def formats(rows: Iterable[Row]) -> Any:
    """nDCG@10 over bytes a document, a point for each way to search, a colour for each collection; None without rows."""
    points: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for row in rows:
        if "bytes_per_document" in row.metrics and "nDCG@10" in row.metrics:
            points[row.params["corpus"]].append((row.system, row.metrics["bytes_per_document"], row.metrics["nDCG@10"]))
    if not points:
        return None
    figure, axes = _axes("Quality of record formats", "bytes a document on SSD", "nDCG@10")
    for corpus, found in points.items():
        axes.plot(*zip(*(point[1:] for point in found), strict=True), "o", label=corpus)
        for name, size, quality in found:
            axes.annotate(name, (size, quality), textcoords="offset points", xytext=(4, 4), fontsize="x-small")
    axes.set_xscale("log")
    axes.legend(fontsize="small")
    return figure


PLOTS: dict[str, Callable[[Iterable[Row]], Any]] = {"hit-rate": hit_rate, "formats": formats}
