"""Rows of the retrieval benchmark as tables, for the terminal and for documents."""

from __future__ import annotations

from collections.abc import Sequence

from espnx.sizes import format_size

from .result import Row


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row."""
    headers = ["corpus", "what", "system", "memory", "ms", "IQR", "x memory", "x bound", "hit rate", "MB moved", "requests", "n", "correct"]
    baselines = [name for name in dict.fromkeys(row.system for row in rows) if name.startswith(("mmap", "swap", "no-prefetch"))]
    shown = [name for name in baselines if any(name in row.ratio for row in rows)]
    return headers + [f"vs {name}" for name in shown], [_cells(row, shown) for row in rows]


def _cells(row: Row, baselines: Sequence[str]) -> list[str]:
    metrics, params = row.metrics, row.params
    limit = params.get("memory_bytes")
    cells = [
        str(params.get("corpus", "-")),
        what(row),
        row.system,
        "ample" if limit is None else format_size(limit),
        _number(row.median_s, 1e-3, 2),
        _number(row.iqr_s, 1e-3, 2),
        f"{1 / row.ratio['memory']:.2f}" if "memory" in row.ratio else "-",
        _number(metrics.get("over_bound"), 1, 2),
        _number(metrics.get("hit_rate"), 1, 2) if row.system.startswith("espnx") else "-",
        _number(row.bytes_moved, 1e6, 1),
        _number(metrics.get("requests"), 1, 0),
        str(row.n),
        "yes" if row.correct else "NO",
    ]
    return cells + [f"{row.ratio[name]:.2f}x" if name in row.ratio else "-" for name in baselines]


def what(row: Row) -> str:
    """``exact 1000, nprobe 104``."""
    params = row.params
    text = f"exact {params.get('candidates')}" if params.get("rerank") is None else f"re-rank {params['rerank']}"
    text += f", nprobe {params.get('nprobe')}"
    if params.get("batch", 1) > 1:
        text += f", batch {params['batch']}"
    if params.get("threads"):
        text += f", {params['threads']} thread{'s' if params['threads'] > 1 else ''}"
    return text


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"
