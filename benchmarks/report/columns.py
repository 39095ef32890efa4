"""What of a table stands in view on a page: what was measured, its recall and its ratios first, in
seven columns; the others are folded.

A reader looks for the ratio, and a wide table hides it at its end. Apart from render.py, which
knows documents and not what columns mean.
"""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 7
ROWS_SHOWN = 24
#: Columns that say what a row is of: those at a table's beginning with these names.
_NAMES = {
    "at equal", "by", "candidates", "cluster", "clusters", "corpus", "d", "devices", "documents",
    "dtype", "first stage", "first stages", "KiB", "model", "passages", "ranking", "recall@10",
    "records, GB", "retriever", "system", "threads", "vectors", "what", "work",
}  # fmt: skip
_QUALITIES = ("recall", "recall@10", "nDCG@10")  # a time says little without one
_VERDICTS = ("correct", "right")
_RATIOS = ("vs ", "x ", "of ", "sooner", "memory/stored")

Cells = Sequence[Sequence[str]]


def in_view(headers: Sequence[str], cells: Cells) -> tuple[list[int], list[int]]:
    """(numbers of the columns to show, in their order; numbers of those to fold, behind what names
    their rows)."""
    count = next((at for at, header in enumerate(headers) if header not in _NAMES), len(headers))
    names, rest = list(range(count)), list(range(count, len(headers)))
    ratios = [at for kind in _RATIOS for at in rest if headers[at].startswith(kind)]
    others = [at for at in rest if at not in ratios]
    if len(headers) <= SHOWN:
        return [*names, *ratios, *others], []
    if len(cells) > 1:  # what is the same in every row says nothing beside a ratio
        names = [at for at in names if len({line[at] for line in cells}) > 1] or names[:1]
    wrong = [
        at for at in others if headers[at] in _VERDICTS and any(line[at] != "yes" for line in cells)
    ]
    qualities = [*(at for at in others if headers[at] in _QUALITIES), *wrong]
    measures = [at for at in others if at not in qualities]
    room = SHOWN - len(names) - len(qualities)
    # the first measure beside its ratios, if it can be
    least = min(len(measures), max(room - len(ratios), 1 if room > 2 else 0))
    shown = [*names, *qualities, *ratios[: max(0, room - least)], *measures[:least]]
    return shown, [*names, *(at for at in range(len(headers)) if at not in shown)]


def full_names(headers: Sequence[str]) -> list[str]:
    """Headers that can stand apart from the one before: ``of one`` after ``reads`` is ``reads, of
    one``."""
    found, before = list[str](), ""
    for header in headers:
        leans = header.startswith("of ") or (header.startswith("x ") and headers.count(header) > 1)
        found.append(f"{before}, {header}" if leans and before else header)
        before = before if leans else header
    return found


def markdown(headers: Sequence[str], cells: Cells) -> list[str]:
    """Lines of the table in view, and of the folded one; a long table is folded whole."""
    named = full_names(headers)
    shown, folded = in_view(headers, cells)
    lines = _table(named, cells, shown)
    if len(cells) > ROWS_SHOWN:
        lines = _fold(f"{len(cells)} rows", lines)
    more = len(folded) - len(set(folded) & set(shown))
    return lines + (
        ["", *_fold(f"{more} more columns", _table(named, cells, folded))] if folded else []
    )


def _table(headers: Sequence[str], cells: Cells, chosen: Sequence[int]) -> list[str]:
    lines = [
        [headers[at] for at in chosen],
        ["---"] * len(chosen),
        *([line[at] for at in chosen] for line in cells),
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def _fold(title: str, lines: Sequence[str]) -> list[str]:
    """Folds lines as GitHub and the site open them: with empty lines around what is Markdown, which
    the site is told that it is."""
    return ['<details markdown="1">', f"<summary>{title}</summary>", "", *lines, "", "</details>"]
