"""Rows of the benchmark of answers as tables, for the terminal and for documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from espnx.sizes import format_size

from ..harness.cells import ABSENT, metric, number, ratio
from ..harness.result import Row

Table = tuple[list[str], list[list[str]]]
Columns = Sequence[tuple[str, Callable[[Row], str]]]


def _param(name: str) -> Callable[[Row], str]:
    return lambda row: str(row.params.get(name, ABSENT))


def _seconds(row: Row) -> str:
    return ABSENT if row.median_s is None else f"{row.median_s:.3f} ({row.iqr_s or 0:.3f})"


def _against(baseline: str) -> Callable[[Row], str]:
    return lambda row: ratio(row, baseline)


def _share(name: str) -> Callable[[Row], str]:
    """A share in percent with its interval, where it has one."""

    def cell(row: Row) -> str:
        found = row.metrics
        if name not in found:
            return ABSENT
        text = f"{found[name]:.1%}"
        if f"{name}_low" in found:
            text += f" ({found[f'{name}_low']:.1%} to {found[f'{name}_high']:.1%})"
        return text

    return cell


def _points(name: str) -> Callable[[Row], str]:
    """A difference of shares in points with its interval, where there is one."""

    def cell(row: Row) -> str:
        found = row.metrics
        if name not in found:
            return ABSENT
        value, low, high = (100 * found[f"{name}{end}"] for end in ("", "_low", "_high"))
        return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"

    return cell


def _interval(name: str, digits: int = 3) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.metrics
        if name not in found or row.system == "full":
            return ABSENT
        low, high = found[f"{name}_low"], found[f"{name}_high"]
        return f"{found[name]:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"

    return cell


def _megabytes(row: Row) -> str:
    return number(row.bytes_moved, 1e6, 1) if row.n else ABSENT


def _what(row: Row) -> str:
    params = row.params
    return (
        f"{params['model']}, {params['tokens']:,} tokens in passages of {params['passage_tokens']}"
    )


def _right(row: Row) -> str:
    return "yes" if row.correct else "NO"


_TTFT: Columns = (
    ("what", _what),
    ("system", lambda row: row.system),
    ("vs recomputed", _against("recomputed")),
    ("vs kept-prefix", _against("kept-prefix")),
    ("vs rows-in-ram", _against("rows-in-ram")),
    ("first token s (IQR)", _seconds),
    ("x max(ram, fio)", metric("over_bound")),
    ("vs keys-rotated", _against("keys-rotated")),
    ("vs fio", _against("fio")),
    ("tokens computed", metric("computed_tokens", 1, 0)),
    ("CPU s", metric("cpu_s")),
    ("MB read", _megabytes),
    ("cache", lambda row: row.cache),
    ("same tokens", metric("same_tokens", 1, 3)),
    ("correct", _right),
)
_SHARED: Columns = (
    ("what", _what),
    ("system", lambda row: row.system),
    ("vs one-by-one", _against("one-by-one")),
    ("vs keys-rotated", _against("keys-rotated")),
    ("questions", _param("requests")),
    ("first tokens s (IQR)", _seconds),
    ("bytes asked / rows", metric("asked_over_rows")),
    ("least reads of a layer", metric("reads_least", 1, 0)),
    ("most", metric("reads_most", 1, 0)),
    ("MB forgotten", metric("forgotten_bytes", 1e6, 1)),
    ("MB read", _megabytes),
    ("correct", _right),
)
_ANSWERS: Columns = (
    ("model", _param("model")),
    ("passages", _param("passages")),
    ("system", lambda row: row.system),
    ("exact answers (95 %)", _share("exact")),
    ("right reference (95 %)", _share("named")),
    ("of exact answers", _share("named_exact")),
    ("passage of its words (95 %)", _share("named_origin")),
    ("right answer fed", _share("named_fed")),
    ("right reference, first token", _share("named_first")),
    ("passage of its words, first token", _share("origin_first")),
    ("words of one passage", _share("from_one")),
    ("words of a wrong one", _share("elsewhere")),
    ("wrong one named", _share("named_elsewhere")),
    ("retrieved", _share("retrieved")),
    ("sources", metric("sources")),
    ("references opened", _share("openable")),
    ("answers as in memory", _share("same_as_in_memory")),
    ("points below full (95 %)", _points("exact_below_full")),
    ("unknown markers", metric("unknown_markers", 1, 0)),
    ("heads", metric("heads", 1, 0)),
    ("of other questions", _share("calibrated_right")),
    ("best layer", _share("calibrated_layer_right")),
    ("mean of all heads", _share("calibrated_mean_right")),
    ("questions", _param("questions")),
    ("tokens computed", metric("computed_tokens", 1, 0)),
    ("data files", metric("data_files", 1, 0)),
    ("descriptors", metric("descriptors", 1, 0)),
    (
        "library",
        lambda row: (
            format_size(int(row.metrics["library_bytes"]))
            if "library_bytes" in row.metrics
            else ABSENT
        ),
    ),
    ("correct", _right),
)
_QUALITY: Columns = (
    ("model", _param("model")),
    ("what", lambda row: f"{row.params['task']}, prefix of {row.params['prefix_tokens']}"),
    ("system", lambda row: row.system),
    ("exact (95 %)", _share("exact")),
    ("nll", metric("nll", 1, 3)),
    ("nll beyond full (95 %)", _interval("nll_more")),
    ("KL to full (95 %)", _interval("kl", 4)),
    ("computed anew", _share("anew")),
    ("items", _param("questions")),
    ("text", _param("text")),
    ("correct", _right),
)
_BY_SHOW = {"ttft": _TTFT, "shared": _SHARED, "answers": _ANSWERS, "quality": _QUALITY}


def _made(rows: Sequence[Row], columns: Columns) -> Table:
    """Columns that have something to say in one of the rows."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [at for at in range(len(columns)) if any(line[at] != ABSENT for line in cells)]
    return [columns[at][0] for at in kept], [[line[at] for at in kept] for line in cells]


def table(rows: Sequence[Row]) -> Table:
    """Rows of one show in its columns; of several, what all have."""
    shows = {str(row.params["show"]) for row in rows}
    if len(shows) == 1:
        return _made(rows, _BY_SHOW[shows.pop()])
    return ["show", "model", "system", "s (IQR)", "correct"], [
        [str(row.params["show"]), str(row.params["model"]), row.system, _seconds(row), _right(row)]
        for row in rows
    ]


def _of(show: str) -> Callable[[Sequence[Row]], Table]:
    return lambda rows: _made([row for row in rows if row.params["show"] == show], _BY_SHOW[show])


VIEWS = {show: _of(show) for show in _BY_SHOW}
