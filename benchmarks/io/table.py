"""Rows of the disk benchmark as a table, for the terminal and for documents."""

from __future__ import annotations

from collections.abc import Sequence

from espnx.sizes import format_size

from ..harness.cells import baselines_of, number, ratio
from ..harness.doubts import is_unsteady
from ..harness.result import Row


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row."""
    baselines = sorted(baselines_of(rows), key=lambda name: ("-" in name, name))
    shown = [name for name in baselines if "-" not in name]
    headers = [
        "what",
        "system",
        "path",
        "cache",
        "MB/s",
        "k items/s",
        "run ms (IQR)",
        "CPU us/item",
        "moved/asked",
        "n",
        "correct",
    ]
    return headers + [f"vs {name} [IQR]" for name in shown], [_cells(row, shown) for row in rows]


def _cells(row: Row, baselines: Sequence[str]) -> list[str]:
    metrics = row.metrics
    path = (
        row.effective_path
        if row.effective_path == row.requested_path
        else f"{row.requested_path} -> {row.effective_path}"
    )
    time = (
        "-"
        if row.median_s is None or row.iqr_s is None
        else f"{row.median_s * 1e3:.0f} ({row.iqr_s * 1e3:.0f})"
    )
    time += " unsteady" if is_unsteady(row) else ""
    cells = [
        what(row),
        row.system,
        path,
        row.cache,
        number(metrics.get("bytes_per_s"), 1e6, 0),
        number(metrics.get("iops"), 1e3, 1),
        time,
        number(metrics.get("cpu_us_per_item"), 1, 2),
        f"{row.bytes_moved / row.bytes_asked:.2f}" if row.bytes_asked else "-",
        str(row.n),
        "yes" if row.correct else "NO",
    ]
    return cells + [ratio(row, name) for name in baselines]


def what(row: Row) -> str:
    """``random read 4 KiB QD128``, with what is out of the ordinary."""
    params = row.params
    text = (
        f"{params['pattern']} {params['op']} {format_size(params['block_bytes'])} "
        f"QD{params['queue_depth']}"
    )
    if params.get("throttle_bytes_per_s"):
        text += f" at {params['throttle_bytes_per_s'] / 1e6:g} MB/s"
    return text if params.get("checksums", True) else text + " no CRC"
