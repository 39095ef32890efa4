"""How plots look: the style file beside this one, a colour and a name for each system, names at the
ends of lines instead of a legend, a title that says what was found, and ticks that are plain
numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_name("style.mplstyle")
WHOLE_INCHES = (6.8, 3.7)
HALF_INCHES = (5.0, 3.7)  # two beside one another
_CHARACTERS_PER_INCH = 10.4  # of a title
_LABEL_SHARE = 0.065  # of the height of the axes, that a name takes

ESPNX, MEMORY, MMAP, WILLNEED, OTHER = "#0b8f6a", "#4a7fc1", "#c9603f", "#a8781f", "#757b84"


@dataclass(frozen=True)
class Look:
    """How a system is drawn: its name, and its line."""

    name: str
    colour: str
    line: str = "-"

    @property
    def weight(self) -> str:
        return "bold" if self.colour == ESPNX else "normal"


#: In the order in which they are drawn: what is ours lies on top.
SYSTEMS = {
    "flexgen-disk": Look("FlexGen", WILLNEED),
    "mmap-1": Look("mmap", MMAP),
    "memmap": Look("mapped files", MMAP),
    "mmap-willneed": Look("mmap + MADV_WILLNEED", WILLNEED),
    "memory": Look("in memory", MEMORY),
    "dynamic": Look("in memory", MEMORY),
    "kept-in-ram": Look("kept in memory", MEMORY),
    "recomputed": Look("read again", OTHER),
    "one-by-one": Look("one by one", MEMORY),
    "lookup": Look("drafts by lookup", ESPNX, "--"),
    "4bit": Look("drafts in four bits", ESPNX, ":"),
    "pages-1/16": Look("drafts over 1/16", ESPNX),
    "espnx": Look("espnx", ESPNX),
    "espnx-kept": Look("espnx, kept on disk", ESPNX),
    "cascade-ssd-64": Look("espnx, cascade", ESPNX, "--"),
    "cascade-ram-64": Look("espnx, cascade in RAM", ESPNX, ":"),
}


def use_style() -> None:
    """Sets the style of every figure of this process from here on. Raises ImportError without
    matplotlib."""
    import matplotlib
    import matplotlib.style

    matplotlib.use("Agg")
    matplotlib.style.use(STYLE)


def new_axes(
    title: str, x: str, y: str, size_inches: tuple[float, float] = HALF_INCHES
) -> tuple[Any, Any]:
    """A figure and its axes. `title`: the finding, broken into lines as it needs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    entitle(figure, title)
    return figure, axes


def new_panels(n: int, size_inches: tuple[float, float], *, share_y: bool) -> tuple[Any, Any]:
    """A figure without a title yet, and so many axes beside one another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches)
    return figure, figure.subplots(1, n, sharey=share_y, squeeze=False)[0]


def entitle(figure: Any, title: str) -> None:
    """The finding above a figure, broken into lines as it needs."""
    width = round(figure.get_size_inches()[0] * _CHARACTERS_PER_INCH)
    text = textwrap.fill(title, width, break_on_hyphens=False)
    figure.suptitle(text, x=0.01, ha="left", size=11, weight="bold")


def line(axes: Any, look: Look, points: Sequence[tuple[float, float]], **more: Any) -> None:
    """A line with its name at its end, once `name_ends` is called."""
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=look.colour,
            linestyle=look.line,
            marker="o",
            label=look.name,
            **more,
        )


def name_ends(axes: Any, *, with_leaders: bool = False) -> None:
    """The name of each line beside its last point, apart from one another; of a line that ends
    before the others do, below it, or `with_leaders` in the same column, a thin line leading there.
    Called when scales and limits are what they will be."""
    named = [each for each in axes.lines if not each.get_label().startswith("_")]
    places = {each: _within(axes, each.get_xydata()[-1]) for each in named}
    last = max((x for x, _ in places.values()), default=0.0)
    beside = [each for each in named if with_leaders or places[each][0] > last - 0.05]
    beside.sort(key=lambda each: places[each][1])
    heights = _apart([places[each][1] for each in beside])
    for each in named:
        x, y = each.get_xydata()[-1]
        words = {
            "color": each.get_color(),
            "weight": "bold" if each.get_color() == ESPNX else "normal",
            "annotation_clip": False,
        }
        if each in beside:
            height, right = heights[beside.index(each)], 1.03 if with_leaders else last
            beyond = {
                "xycoords": "axes fraction",
                "xytext": (8, 0),
                "textcoords": "offset points",
                "va": "center",
            }
            axes.annotate(each.get_label(), (right, height), **beyond, **words)
            if with_leaders:
                ends = {"xycoords": "data", "textcoords": "axes fraction", "annotation_clip": False}
                leader = {
                    "arrowstyle": "-",
                    "color": each.get_color(),
                    "alpha": 0.4,
                    "linewidth": 0.8,
                    "shrinkA": 0,
                    "shrinkB": 3,
                }
                axes.annotate("", (x, y), xytext=(right + 0.01, height), arrowprops=leader, **ends)
        else:
            axes.annotate(
                each.get_label(),
                (x, y),
                xytext=(-9, -4),
                textcoords="offset points",
                ha="right",
                va="top",
                **words,
            )


def _within(axes: Any, point: Sequence[float]) -> tuple[float, float]:
    """A point of the data as shares of the axes."""
    x, y = axes.transAxes.inverted().transform(axes.transData.transform(point))
    return float(x), float(y)


def _apart(heights: Sequence[float]) -> list[float]:
    """Rising heights, moved as little as keeps each a label's height above the one before, about
    the middle of those that touch."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _top(groups[-2]) + _LABEL_SHARE > _top(
            groups[-1]
        ) - _LABEL_SHARE * (len(groups[-1]) - 1):
            joined = groups.pop()
            groups[-1] += joined
    return [
        _top(group) - _LABEL_SHARE * (len(group) - 1 - number)
        for group in groups
        for number in range(len(group))
    ]


def _top(group: Sequence[float]) -> float:
    """The height of the highest label of some that touch: about the mean of their points."""
    return sum(group) / len(group) + _LABEL_SHARE * (len(group) - 1) / 2


def logarithmic(
    axes: Any,
    x: Callable[[float], str] | None,
    y: Callable[[float], str] | None,
    subs: Sequence[float] = (1, 2, 5),
) -> None:
    """The axes that have a text for their values; their ticks are those texts."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for axis, text, scale in ((axes.xaxis, x, axes.set_xscale), (axes.yaxis, y, axes.set_yscale)):
        if text is not None:
            scale("log")
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
            axis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """``0.5``, ``20``, ``3,000``: never a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def memory_ends(axes: Any, at: float, words: str = "memory ends") -> None:
    """A line there, and the words beside it."""
    axes.axvline(at, color=OTHER, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        words,
        (at, 0.6),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="bottom",
        size=9,
    )


def bars(axes: Any, rows: Sequence[tuple[Look, float, str]]) -> None:
    """Lying bars from the top down: (look, length, the words at its end)."""
    names = [look.name for look, *_ in rows]
    drawn = axes.barh(
        range(len(rows)),
        [length for _, length, _ in rows],
        color=[look.colour for look, *_ in rows],
        height=0.62,
    )
    axes.bar_label(drawn, labels=[words for *_, words in rows], padding=6, weight="bold")
    axes.set_yticks(range(len(rows)), names)
    for tick, (look, *_) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(color=look.colour, weight=look.weight)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def grouped_bars(
    axes: Any,
    groups: Sequence[str],
    rows: Sequence[tuple[Look, float, Sequence[float], Sequence[str]]],
) -> None:
    """Standing bars, a group for each word: (look, opacity, heights, the words above them) for each
    bar of a group."""
    width = 0.8 / len(rows)
    for number, (look, opacity, heights, words) in enumerate(rows):
        places = [group + (number - (len(rows) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(
            places, heights, width=0.92 * width, color=look.colour, alpha=opacity, label=look.name
        )
        axes.bar_label(drawn, labels=list(words), padding=2, size=9, weight=look.weight)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
