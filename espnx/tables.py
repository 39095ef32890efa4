"""Tables of plain text: what `summary()` returns and the command line prints."""

from __future__ import annotations

from collections.abc import Sequence


def render_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> str:
    """Plain text columns, two spaces apart.

    Args:
        headers: one per column; empty strings give no header line.
        rows: cells, printed by ``str``; None prints as ``-``.
        right: headers of the columns to align on the right (numbers).
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    lines = [list(headers), *cells] if any(headers) else cells
    aligned = []
    for line in lines:
        parts = (
            cell.rjust(width) if header in right else cell.ljust(width) for cell, width, header in zip(line, widths, headers, strict=True)
        )
        aligned.append("  ".join(parts).rstrip())
    return "\n".join(aligned)
