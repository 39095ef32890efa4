"""Plots in documents, drawn from result files (one from the record of the demo's model) as the tables are rendered from them:
docs/plots/*.svg. A page shows them between ``<!-- plots:NAME,... -->`` and ``<!-- /plots -->``, those that results have rows for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError, MissingDependencyError

from ..harness.result import Row, rows_of
from . import training

FOLDER = "docs/plots"
BLOCK = re.compile(r"(<!-- plots:(?P<names>[\w,-]+) -->\n).*?(<!-- /plots -->)", re.DOTALL)
_SIZE_INCHES = (6.4, 3.6)
_HALF_INCHES = (4.8, 3.8)  # two beside one another
_SYSTEMS: Mapping[str, tuple[str, str, str]] = {  # of the two on the front page: label, colour, marker
    "memory": ("in memory", "tab:blue", "o"),
    "dynamic": ("in memory (DynamicCache)", "tab:blue", "o"),
    "mmap-1": ("mmap", "tab:red", "v"),
    "mmap-willneed": ("mmap, MADV_WILLNEED", "tab:orange", "^"),
    "memmap": ("memory-mapped files", "tab:red", "v"),
    "flexgen-disk": ("FlexGen", "tab:orange", "^"),
    "espnx": ("espnx", "tab:green", "s"),
    "cascade-ram-64": ("espnx, cascade (RAM)", "tab:olive", "D"),
    "cascade-ssd-64": ("espnx, cascade (disk)", "tab:cyan", "d"),
}


@dataclass(frozen=True)
class Found:
    """A row for a plot, and the memory of the machine that it was measured on."""

    row: Row
    machine_bytes: int


@dataclass(frozen=True)
class Plot:
    """A plot of the rows of one case and show.

    Attributes:
        alt: what it shows, in words.
        width: as a page shows it.
        draw: None where nothing can be drawn of the rows.
    """

    case: str
    show: str
    alt: str
    draw: Callable[[Sequence[Found]], Any]
    width: str = "80%"

    def rows(self, results: Mapping[Path, Mapping[str, Any]]) -> list[Found]:
        documents = [(document["machine"]["memory_bytes"], row) for document in results.values() for row in rows_of(document)]
        return [
            Found(row, size) for size, row in documents if row.case == self.case and row.params.get("show") == self.show and row.correct
        ]


def fill(text: str, results: Mapping[Path, Mapping[str, Any]], folder: str) -> str:
    """The text with its marked blocks filled. `folder`: of the plots, as seen from the page. Raises InvalidInputError: an unknown plot."""

    def images(match: re.Match[str]) -> str:
        names = match["names"].split(",")
        if unknown := [name for name in names if name not in PLOTS]:
            raise InvalidInputError("a marked block names an unknown plot", got=unknown[0], expected=", ".join(PLOTS))
        drawn = [(name, PLOTS[name]) for name in names if PLOTS[name].rows(results)]
        lines = [f'<img src="{folder}/{name}.svg" alt="{plot.alt}" width="{plot.width}">' for name, plot in drawn]
        return match[1] + (f"\n{' '.join(lines)}\n\n" if lines else "") + match[3]

    return BLOCK.sub(images, text)


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
    figures = {name: plot.draw(rows) if (rows := plot.rows(results)) else None for name, plot in PLOTS.items()}
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


def _axes(title: str, x: str, y: str, size_inches: tuple[float, float] = _SIZE_INCHES) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def hit_rate(found: Sequence[Found]) -> Any:
    """Hit rate over the prefetch step, a line for each corpus and recall."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in (each.row for each in found):
        name = f"{row.params['corpus']}, recall {row.params['recall_wanted']:g}, nprobe {row.params['nprobe']}"
        lines[name].append((100 * row.params["prefetch_step"], row.metrics["hit_rate"]))
    figure, axes = _axes("Candidates known after a share of the lists", "prefetch step, % of the lists", "hit rate")
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="small", loc="lower right")
    return figure


def formats(found: Sequence[Found]) -> Any:
    """nDCG@10 over bytes a document, a point for each way to search, a colour for each collection; None without such numbers."""
    points: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for row in (each.row for each in found):
        if "bytes_per_document" in row.metrics and "nDCG@10" in row.metrics:
            points[row.params["corpus"]].append((row.system, row.metrics["bytes_per_document"], row.metrics["nDCG@10"]))
    if not points:
        return None
    figure, axes = _axes("Quality of record formats", "bytes a document on SSD", "nDCG@10")
    for corpus, known in points.items():
        axes.plot(*zip(*(point[1:] for point in known), strict=True), "o", label=corpus)
        for name, size, quality in known:
            axes.annotate(name, (size, quality), textcoords="offset points", xytext=(4, 4), fontsize="x-small")
    axes.set_xscale("log")
    axes.legend(fontsize="small", loc="lower right")
    return figure


def search_sizes(found: Sequence[Found]) -> Any:
    """Milliseconds of a search over the size of the records, and where memory ends; what is in memory beyond that has more of it. Of the
    first corpus, under its least memory."""
    least = min(_memory_bytes(each, "memory_bytes") for each in found)
    found = [each for each in found if _memory_bytes(each, "memory_bytes") == least]
    found = [each for each in found if each.row.params["corpus"] == found[0].row.params["corpus"]]
    figure, axes = _axes("Searching, records on disk", "GB of records", "median ms", _HALF_INCHES)
    for system, rows in _by_system(found).items():
        points = sorted((row.metrics["record_bytes"] / 1e9, 1e3 * row.median_s) for row in rows if row.median_s)
        within = [point for point in points if system != "memory" or point[0] <= least / 1e9]
        _line(axes, system, within)
        if len(within) < len(points):
            axes.plot(*zip(*points[max(0, len(within) - 1) :], strict=True), color=_SYSTEMS[system][1], linestyle=":", alpha=0.7)
    _logarithmic(figure, least / 1e9, "{:.3g}".format)
    return figure


def kv_context(found: Sequence[Found]) -> Any:
    """Tokens a second over the context, beside what the disk's rate alone would allow, and where K and V fill the memory. Of the model,
    batch and memory of the first row; None where nothing of espnx is in them."""
    alike = [[each.row.params.get(name) for name in ("model", "batch", "dtype", "memory", "throttle_bytes_per_s")] for each in found]
    found = [each for each, what in zip(found, alike, strict=True) if what == alike[0] and "tokens_per_s" in each.row.metrics]
    systems = _by_system(found)
    if "espnx" not in systems:
        return None
    figure, axes = _axes("Decoding, K and V on disk", "tokens of context", "tokens a second", _HALF_INCHES)
    for system, rows in systems.items():
        _line(axes, system, sorted((row.params["context"], row.metrics["tokens_per_s"]) for row in rows))
    top = max(row.metrics["tokens_per_s"] for rows in systems.values() for row in rows)
    rates = [(row.params["context"], row.params["batch"] / row.metrics["fio_s"]) for row in systems["espnx"] if "fio_s" in row.metrics]
    if bound := sorted(point for point in rates if point[1] <= 1.5 * top):
        axes.plot(*zip(*bound, strict=True), color="grey", linestyle="--", linewidth=1, label="the disk's rate (fio)")
    last = max(systems["espnx"], key=lambda row: int(row.params["context"]))
    token_bytes = last.metrics["asked_per_step"] / last.params["context"]
    _logarithmic(figure, _memory_bytes(found[0], "memory") / token_bytes, _tokens)
    return figure


def devices(found: Sequence[Found]) -> Any:
    """Virtual time over the number of emulated devices, a line for each system. Of the first spec."""
    rows = [each.row for each in found if each.row.params["spec"] == found[0].row.params["spec"] and each.row.median_s]
    if not rows:
        return None
    what = {"topology": "step", "search": "search"}[rows[0].params["show"]]
    figure, axes = _axes(f"{rows[0].params['spec']}, emulated", "devices", f"virtual ms a {what}", _HALF_INCHES)
    for system in dict.fromkeys(row.system for row in rows):
        points = sorted((row.params["devices"], 1e3 * (row.median_s or 0)) for row in rows if row.system == system)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.5, label=system)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small", loc="upper right")
    return figure


def graph_rates(found: Sequence[Found]) -> Any:
    """Queries a second over recall. Of each list size the fastest threads and width count."""
    return _over_recall(found, "Neighbours at equal recall", "queries a second", "queries_per_s", max)


def graph_reads(found: Sequence[Found]) -> Any:
    """Reads of a query over recall, of the systems that count them. Of each list size the threads and width with the fewest count."""
    return _over_recall([each for each in found if each.row.metrics.get("reads")], "Reads at equal recall", "reads a query", "reads", min)


def _over_recall(found: Sequence[Found], title: str, what: str, name: str, best: Callable[..., Row]) -> Any:
    """Of the vectors that most systems were measured with, a line for each; None without points at a recall that anybody wants."""
    systems: dict[str, set[str]] = defaultdict(set)
    for each in found:
        systems[each.row.params["data"]].add(each.row.system)
    most = max(systems, key=lambda data: len(systems[data]), default=None)
    rows = [each.row for each in found if each.row.params["data"] == most and each.row.metrics["recall"] >= 0.8]
    if not rows:
        return None
    figure, axes = _axes(f"{title}, {rows[0].params['n']:,} vectors", "recall@10", what, _HALF_INCHES)
    for system in dict.fromkeys(row.system for row in rows):
        sizes: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            if row.system == system:
                sizes[row.params["list_size"]].append(row)
        chosen = [best(here, key=lambda row: row.metrics[name]) for _, here in sorted(sizes.items())]
        points = [(row.metrics["recall"], row.metrics[name]) for row in chosen]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.5, label=system)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small")
    return figure


def _memory_bytes(found: Found, name: str) -> int:
    """What systems could use: the limit of that name where it is a number, else the machine's memory."""
    limit = found.row.params[name]
    return limit if isinstance(limit, int) else found.machine_bytes


def _by_system(found: Sequence[Found]) -> dict[str, list[Row]]:
    """Rows of the systems that have a look of their own, in that order."""
    lines: dict[str, list[Row]] = {system: [each.row for each in found if each.row.system == system] for system in _SYSTEMS}
    return {system: rows for system, rows in lines.items() if rows}


def _line(axes: Any, system: str, points: Sequence[tuple[float, float]]) -> None:
    label, colour, marker = _SYSTEMS[system]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.5, label=label)


def _logarithmic(figure: Any, memory_ends_at: float, show: Callable[[float], str]) -> None:
    """Both axes; and a line where memory ends, or words at the right edge that say where, if that is far beyond the points. `show`: the
    text of a value of x."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    [axes] = figure.axes
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, text in ((axes.xaxis, show), (axes.yaxis, "{:g}".format)):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="both", alpha=0.2)
    place: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": "small", "color": "dimgrey"}
    if memory_ends_at <= 2 * axes.get_xlim()[1]:
        axes.axvline(memory_ends_at, color="dimgrey", linewidth=1, linestyle="-.")
        axes.annotate("memory ends ", (memory_ends_at, 0.99), xycoords=("data", "axes fraction"), rotation=90, **place)
    else:
        axes.annotate(f"memory ends at {show(memory_ends_at)} \u2192", (0.99, 0.99), xycoords="axes fraction", **place)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")


def _tokens(count: float) -> str:
    """``500``, ``20K``, ``3.1M``."""
    for size, unit in ((1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


PLOTS: dict[str, Plot] = {
    "search-sizes": Plot("retrieval", "sizes", "time of a search over the size of the records", search_sizes, "49%"),
    "kv-context": Plot("kv", "context", "tokens a second over the context", kv_context, "49%"),
    "device-topology": Plot("device", "topology", "virtual time of a decode step over the number of devices", devices, "49%"),
    "device-search": Plot("device", "search", "virtual time of a search over the number of devices", devices, "49%"),
    "graph-rates": Plot("graph", "sweep", "queries a second over recall, by system", graph_rates, "49%"),
    "graph-reads": Plot("graph", "sweep", "reads a query over recall, by system", graph_reads, "49%"),
    "hit-rate": Plot("retrieval", "hit-rate", "hit rate over the prefetch step", hit_rate),
    "formats": Plot("retrieval", "formats", "nDCG@10 over bytes a document", formats),
}
