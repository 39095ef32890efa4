"""One HTML page of result files: for each the machine, the command that made it, its tables, and
pictures of the same numbers.

The page needs nothing beside it: styles and pictures are inside. Without matplotlib there are
tables alone, and the page says so.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from espnx.errors import MissingDependencyError
from espnx.sizes import format_size

from ..harness.registry import cases
from ..harness.result import KINDS, Row, rows_of
from .looks import use_style

_STYLE = """
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
body { font: 15px/1.45 system-ui, sans-serif }
table { border-collapse: collapse; margin: .8rem 0; font-size: 13px }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd }
th { text-align: left; background: #f4f4f4 }
td.number { text-align: right; font-variant-numeric: tabular-nums }
td.bad { color: #b00; font-weight: bold }
figure { margin: .8rem 0; overflow-x: auto } .scroll { overflow-x: auto }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: 13px }
dt { color: #666 } dd { margin: 0 }
code { background: #f4f4f4; padding: .1rem .3rem }
p.note { border-left: 3px solid #c90; padding-left: .6rem }
"""
_BARS_MOST, _POINTS_LEAST = 60, 3
Progress = Callable[[int, int], None]
_MACHINE = (
    "cpu",
    "cores",
    "memory_bytes",
    "kernel",
    "disk",
    "fs",
    "python",
    "torch",
    "fio",
    "load_average",
)


def render_page(
    results: Mapping[Path, Mapping[str, Any]], progress: Progress = lambda done, total: None
) -> str:
    """The page of these result files, each validated, in their order. `progress`: is told of how
    many are done, of how many."""
    progress(0, len(results))
    why_no_plots = _missing_matplotlib()
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        "<title>espnx: results</title>",
        f"<style>{_STYLE}</style>",
        "<h1>espnx: results</h1>",
        *([f'<p class="note">{escape(why_no_plots)}</p>'] if why_no_plots else []),
        _contents(results),
    ]
    for number, (path, document) in enumerate(results.items()):
        parts += _section(number, path, document, with_plots=not why_no_plots)
        progress(number + 1, len(results))
    return "\n".join([*parts, "</html>", ""])


def _missing_matplotlib() -> str | None:
    try:
        use_style()  # the same results give the same page
    except ImportError as error:
        return (
            "There are no pictures here: "
            f"{MissingDependencyError('they need matplotlib', fix=_FIX)} ({error})."
        )
    return None


_FIX = "pip install 'espnx[bench]'"


def _contents(results: Mapping[Path, Mapping[str, Any]]) -> str:
    lines = (
        f'<li><a href="#f{number}">{escape(path.name)}</a></li>'
        for number, path in enumerate(results)
    )
    return f"<ul>{''.join(lines)}</ul>" if len(results) > 1 else ""


def _section(
    number: int, path: Path, document: Mapping[str, Any], *, with_plots: bool
) -> Iterator[str]:
    commit = document["commit"]
    version = (
        f"{commit[:10]}{', with changes' if document['dirty'] else ''}" if commit else "unknown"
    )
    yield f'<h2 id="f{number}">{escape(path.name)}</h2>'
    yield f"<p><code>{escape(document['command'])}</code> at commit {escape(version)}</p>"
    if "note" in document:
        yield f'<p class="note">{escape(document["note"])}</p>'
    yield _machine(document["machine"])
    known = cases()
    rows = rows_of(document)
    for name in dict.fromkeys(row.case for row in rows):
        for kind in KINDS:
            chosen = [row for row in rows if row.case == name and row.kind == kind]
            if chosen:
                yield f"<h3>{escape(name)}: {kind}</h3>"
                yield (
                    _table(known[name].table(chosen))
                    if name in known
                    else "<p>This case is not known here.</p>"
                )
                yield from _figures(chosen) if with_plots else ()


def _machine(machine: Mapping[str, Any]) -> str:
    facts = [(name, machine[name]) for name in _MACHINE if machine.get(name) is not None]
    shown = [
        (name.removesuffix("_bytes"), format_size(value) if name.endswith("_bytes") else value)
        for name, value in facts
    ]
    return (
        "<dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in shown)
        + "</dl>"
    )


def _table(made: tuple[list[str], list[list[str]]]) -> str:
    headers, lines = made
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "\n".join("<tr>" + "".join(_cell(cell) for cell in line) + "</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _cell(text: str) -> str:
    looks = (
        ' class="number"'
        if text[:1].isdigit()
        else ' class="bad"'
        if text in ("NO", "WRONG")
        else ""
    )
    return f"<td{looks}>{escape(text)}</td>"


def _figures(rows: Sequence[Row]) -> Iterator[str]:
    """Pictures of right results that have times: over a parameter that has several values, else a
    bar for each; and by recall."""
    timed = [row for row in rows if row.correct and row.median_s]
    swept = _swept(timed)
    drawn = [(_curves(timed, swept) if swept else None) or _bars(timed), _by_recall(timed)]
    for figure in drawn:
        if figure is not None:
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            svg = text.getvalue()
            yield f"<figure>{svg[svg.index('<svg') :]}</figure>"


def _swept(rows: Sequence[Row]) -> str | None:
    """The parameter with the most values, if they are numbers and there are some."""
    values: dict[str, set[Any]] = defaultdict(set)
    for row in rows:
        for name, value in row.params.items():
            if not isinstance(value, (dict, list)):
                values[name].add(value)
    numeric = {
        name: len(found)
        for name, found in values.items()
        if all(
            isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            for value in found
        )
    }
    best = max(numeric, key=lambda name: numeric[name], default=None)
    return best if best is not None and numeric[best] >= _POINTS_LEAST else None


def _label(row: Row, rows: Sequence[Row], but: Sequence[str] = ()) -> str:
    """The system, and the parameters that are not the same everywhere."""
    differing = [
        name
        for name in row.params
        if name not in but
        and not isinstance(row.params[name], (dict, list))
        and len({str(each.params.get(name)) for each in rows}) > 1
    ]
    return ", ".join([row.system, *(_parameter(name, row.params[name]) for name in differing)])


def _parameter(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return (
            f"{name.removesuffix('_bytes')} "
            f"{format_size(value) if value else 'ample' if value is None else 0}"
        )
    return f"{name} {'all' if value is None else value}"


def _curves(rows: Sequence[Row], name: str) -> Any:
    """None where a line would be a single point, unless there are too many rows for bars: then the
    others."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        found[_label(row, rows, but=[name])].append(
            (float(row.params[name]), float(row.median_s or 0))
        )
    lines = {label: points for label, points in found.items() if len({x for x, _ in points}) > 1}
    if not lines or (len(lines) < len(found) and len(rows) <= _BARS_MOST):
        return None
    figure, axes = _axes(0.45 * len(lines) / 2 + 3.4, name, "median time of a run, s")
    for label, points in lines.items():
        axes.plot(
            *zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=1, label=label
        )
    axes.set(xscale="log", yscale="log")
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bars(rows: Sequence[Row]) -> Any:
    if not 1 < len(rows) <= _BARS_MOST:
        return None
    figure, axes = _axes(
        0.28 * len(rows) + 1.2, "median time of a run, s, and its interquartile range", ""
    )
    axes.barh(
        [_label(row, rows) for row in rows],
        [row.median_s for row in rows],
        xerr=[(row.iqr_s or 0) / 2 for row in rows],
        height=0.6,
    )
    axes.invert_yaxis()
    return figure


def _by_recall(rows: Sequence[Row]) -> Any:
    found = [row for row in rows if "recall" in row.metrics]
    if len({row.metrics["recall"] for row in found}) < _POINTS_LEAST:
        return None
    figure, axes = _axes(4, "recall", "median time of a run, s")
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in found:
        lines[_label(row, found, but=["nprobe", "recall_wanted"])].append(
            (row.metrics["recall"], float(row.median_s or 0))
        )
    for label, points in lines.items():
        if len(points) > 1:
            axes.plot(
                *zip(*sorted(points), strict=True),
                marker="o",
                markersize=3,
                linewidth=1,
                label=label,
            )
    axes.set(yscale="log")
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _axes(height: float, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height))
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    return figure, axes
