"""Tables of plain text, which `summary()` returns and the command line prints, and JSON that is
read and compared line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_SHOWN_AS = "\ufffd"
#: Characters that act on a terminal, but for line ends and tabs (C0, DEL, C1).
_ACTS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), _SHOWN_AS)


def printable(text: str) -> str:
    """Text in which nothing acts on a terminal: a document may have escape sequences in it, which
    would clear the screen or write over what stands there."""
    return text.replace("\r\n", "\n").translate(_ACTS)


def render_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
) -> str:
    """Plain text columns, two spaces apart.

    Args:
        headers: one per column; empty strings give no header line.
        rows: cells, printed by ``str``, as `printable` text; None prints as ``-``.
        right: headers of the columns to align on the right (numbers).
    """
    cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    lines = [list(headers), *cells] if any(headers) else cells
    aligned = []
    for line in lines:
        parts = (
            cell.rjust(width) if header in right else cell.ljust(width)
            for cell, width, header in zip(line, widths, headers, strict=True)
        )
        aligned.append("  ".join(parts).rstrip())
    return "\n".join(aligned)


def render_json(document: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and where a value is a list of objects a line for each of
    those: a row of a result is one line of a diff. Raises ValueError for NaN and infinity, which
    JSON lacks."""
    lines = [f"{json.dumps(key)}: {_render_value(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"


def _render_value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return (
            "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value) + "\n]"
        )
    return json.dumps(value, allow_nan=False)
