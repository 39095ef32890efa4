"""``espnx simulate --plot``: the picture of an answer, drawn from its JSON document alone."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import InvalidInputError, MissingDependencyError
from ..output import check_writable, write_whole

SUFFIX = ".svg"
_PLOT, _OTHER = "cannot write a plot", "name another file after --plot"
#: Of stages in a stack, from the one that is passed first.
COLOURS = (
    "#4a7fc1",
    "#8d6bb8",
    "#a8781f",
    "#c9603f",
    "#0b8f6a",
    "#757b84",
    "#b8b33f",
    "#3fa8b8",
    "#b83f7d",
    "#5b4a3f",
)
_PANELS_INCHES, _STEP_INCHES = (8.6, 3.9), (7.6, 3.7)
MS = 1e3
_LINES = ("-", "--", ":", "-.")


def check_plot(path: str) -> None:
    """Whether `write_plot` could draw and write there: asked before the work whose picture it is.

    Raises:
        InvalidInputError: another kind of file.
        WriteError: as `check_writable` has it.
        MissingDependencyError: without matplotlib.
    """
    from ...benchmarks.report.looks import use_style

    if not path.endswith(SUFFIX):
        raise InvalidInputError("--plot", got=path, expected=f"a file whose name ends in {SUFFIX}")
    check_writable(path, _PLOT, _OTHER)
    try:
        use_style()
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib", got=str(error), fix="pip install 'espnx[bench]'"
        ) from error


def write_plot(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Raises WriteError; InvalidInputError: nothing is drawn of such a document."""
    write_whole(path, drawn(document), _PLOT, _OTHER)


def drawn(document: Mapping[str, Any]) -> str:
    """The picture as SVG: the same document, the same text. Raises InvalidInputError: nothing is
    drawn of such a document."""
    from ...benchmarks.report.looks import use_style

    use_style()
    file = io.StringIO()
    _drawing(document)(document).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _drawing(document: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    if "sweep" in document:
        return _breakdown
    answers = document.get("answers") or [{}]
    for name, draw in (("phases_s", _services), ("tokens_per_s", _decoders), ("p95_s", _servers)):
        if name in answers[0]:
            return draw
    raise InvalidInputError(
        "--plot",
        got="neither a system's answer nor one of several",
        expected="--system and --workload",
    )


def _swept(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """The input over which is drawn: the one of several numbers, the first where none is. Raises
    InvalidInputError: several are swept."""
    many = [name for name in names if len(document["inputs"][name]) > 1]
    if len(many) > 1:
        raise InvalidInputError(
            "--plot", got=f"sweeps of {' and '.join(many)}", expected="a sweep of one of them"
        )
    return many[0] if many else names[0]


def _breakdown(document: Mapping[str, Any]) -> Any:
    """A command's time, waiting and served, over the threads: a panel for each element
    (the thesis's figures 2.7 and 3.7)."""
    from ...benchmarks.report import looks

    sweep, inputs = document["sweep"], document["inputs"]
    elements = list(sweep[0]["elements"])
    figure, panels = looks.new_panels(len(elements), _PANELS_INCHES, share_y=True)
    names = list(
        dict.fromkeys(
            stage["name"]
            for each in sweep
            for answer in each["elements"].values()
            for stage in answer["stages"]
        )
    )
    places = range(len(sweep))
    for axes, element in zip(panels, elements, strict=True):
        bottom = [0.0] * len(sweep)
        for name in names:
            own = [_stage_s(each["elements"][element], name) * MS for each in sweep]
            # a part that another element alone has is no part of this one's legend, nor of it
            axes.bar(places, own, bottom=bottom, color=_colour(names, name), label=name, width=0.7)
            bottom = [low + more for low, more in zip(bottom, own, strict=True)]
        axes.set_xticks(places, [f"{each['threads']}" for each in sweep])
        axes.set_title(element, size=10)
        axes.set_xlabel("threads")
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("a command's time, ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    last = sweep[-1]["elements"]
    rates = ", ".join(f"{last[name]['commands_per_s']:,.0f}" for name in elements)
    title = (
        f"{inputs['system']}, {inputs['title']}: {rates} commands/s with "
        f"{sweep[-1]['threads']} threads (modelled)"
    )
    looks.entitle(figure, title)
    return figure


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _stage_s(answer: Mapping[str, Any], name: str) -> float:
    """Seconds of a command before and in a stage; 0 where it does not pass it."""
    return sum(
        float(stage["waiting_s"] + stage["service_s"])
        for stage in answer["stages"]
        if stage["name"] == name
    )


def _services(document: Mapping[str, Any]) -> Any:
    """Queries a second over the passages or the batch (RAGX's figure 9)."""
    x = _swept(document, ("passages", "batch"))
    inputs = document["inputs"]
    title = f"{inputs['title']}, {inputs['generation']}: queries a second (modelled)"
    return _lines(document, x, "queries_per_s", "queries/s", title)


def _decoders(document: Mapping[str, Any]) -> Any:
    """Tokens a second over the context, the batch or the output."""
    x = _swept(document, ("context", "batch", "output"))
    inputs = document["inputs"]
    fixed = [f"{name} {inputs[name][0]:,}" for name in ("context", "batch", "output") if name != x]
    title = f"{inputs['title']}, {', '.join(fixed)}: tokens a second (modelled)"
    return _lines(document, x, "tokens_per_s", "tokens/s", title)


def _servers(document: Mapping[str, Any]) -> Any:
    """P95 and queries a second over the length of the list, beside one another (AiSAQ's figure 5,
    which has them over the recall that it leads to)."""
    from ...benchmarks.report import looks

    x = _swept(document, ("list_size", "streams"))
    figure, panels = looks.new_panels(2, _STEP_INCHES, share_y=False)
    for axes, name, factor, words in (
        (panels[0], "p95_s", MS, "P95, ms"),
        (panels[1], "queries_per_s", 1.0, "queries/s"),
    ):
        for look, points in _points(document, x, name):
            looks.line(axes, look, [(at, factor * value) for at, value in points])
        axes.set(xlabel=x.replace("_", " "), ylabel=words)
        axes.set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    looks.entitle(figure, f"{document['inputs']['title']} (modelled)")
    return figure


def _lines(document: Mapping[str, Any], x: str, y: str, words: str, title: str) -> Any:
    """A line for each system, on logarithmic axes; bars where nothing is swept."""
    from ...benchmarks.report import looks

    systems = _points(document, x, y)
    if all(len(points) == 1 for _, points in systems):
        figure, axes = looks.new_axes(title, words, "", _STEP_INCHES)
        looks.bars(axes, [(look, points[0][1], f"{points[0][1]:.3g}") for look, points in systems])
        axes.set_xlim(0, 1.15 * max(points[0][1] for _, points in systems))
        return figure
    figure, axes = looks.new_axes(title, x.replace("_", " "), words, _STEP_INCHES)
    for look, points in systems:
        looks.line(axes, look, points)
    looks.logarithmic(axes, looks.plain, looks.plain)
    swept = sorted({at for _, points in systems for at, _ in points})
    axes.set_xticks(swept, [_short(at) for at in swept])
    looks.name_ends(axes, with_leaders=True)
    return figure


def _short(value: float) -> str:
    """``500K``, ``50M``, ``16,384``: as few letters as say it whole."""
    for factor, letter in ((10**9, "G"), (10**6, "M"), (10**3, "K")):
        if value >= factor and value % (factor // 10) == 0:
            return f"{value / factor:g}{letter}"
    return f"{value:,.0f}"


def _points(
    document: Mapping[str, Any], x: str, y: str
) -> list[tuple[Any, list[tuple[float, float]]]]:
    """Each system's look, and its points from left to right; the first is ours."""
    from ...benchmarks.report.looks import ESPNX, MEMORY, MMAP, OTHER, WILLNEED, Look

    found: dict[str, list[tuple[float, float]]] = {}
    for answer in document["answers"]:
        found.setdefault(answer["system"], []).append((answer[x], answer[y]))
    others = (MEMORY, MMAP, WILLNEED, OTHER)
    looked = []
    for number, (name, points) in enumerate(found.items()):
        line = _LINES[(number - 1) // len(others) % len(_LINES)]
        look = Look(name, others[(number - 1) % len(others)], line) if number else Look(name, ESPNX)
        looked.append((look, sorted(points)))
    return looked
