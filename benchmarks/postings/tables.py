"""Tables of ``espnx bench postings``."""

from __future__ import annotations

from collections.abc import Sequence

from ..harness.cells import ABSENT, baselines_of, metric, number, ratio
from ..harness.result import Row
from .names import BASELINES, NOT_INSTALLED, WHOLE


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row."""
    if rows and rows[0].params.get("show") == "splade":
        return learned(rows)
    shown = [name for name in BASELINES if name in baselines_of(rows)]
    headers = [
        "passages",
        "system",
        "path",
        "cache",
        "ms",
        "p99 ms",
        "CPU ms",
        "requests",
        "asked KB",
        "moved KB",
        "index MB",
        "n",
        "correct",
    ]
    cells = [
        [
            f"{row.params['passages']:,}",
            row.system,
            row.effective_path,
            row.cache if row.n else ABSENT,
            number(row.median_s, 1e-3, 3),
            metric("p99_ms")(row),
            metric("cpu_ms", 1, 3)(row),
            metric("requests", 1, 1)(row),
            metric("asked_bytes", 1e3, 1)(row),
            number(row.bytes_moved if row.n else None, 1e3, 1),
            metric("index_bytes", 1e6, 1)(row),
            str(row.n),
            _verdict(row),
            *(ratio(row, name) for name in shown),
        ]
        for row in rows
    ]
    return headers + [f"vs {name} [IQR]" for name in shown], cells


def _verdict(row: Row) -> str:
    if row.effective_path == NOT_INSTALLED:
        return ABSENT
    return "yes" if row.correct else "NO"


def sizes(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A table of what an index of espnx takes on disk and in memory."""
    headers = [
        "passages",
        "postings of a query, mean",
        "95th percentile",
        "bytes a posting",
        "resident MB",
        "24 B a term + 2 B a passage + 1 MB",
    ]
    cells = [
        [
            f"{row.params['passages']:,}",
            f"{row.params['query_postings_mean']:,.0f}",
            f"{row.params['query_postings_p95']:,.0f}",
            metric("bytes_a_posting")(row),
            metric("resident_bytes", 1e6)(row),
            metric("resident_allowed_bytes", 1e6)(row),
        ]
        for row in rows
        if row.system == "espnx"
    ]
    return headers, cells


def learned(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """What is found, and what it costs; bytes as a share of those of whole lists."""
    headers = [
        "passages", "system", "path", "recall@10", "of whole lists' best", "ms", "CPU ms",
        "requests", "moved KB", "of whole lists", "RAM MB", "n",
    ]  # fmt: skip
    whole = {repr(dict(row.params)): row.bytes_moved for row in rows if row.system == WHOLE}
    cells = []
    for row in rows:
        all_bytes = whole.get(repr(dict(row.params)), 0)
        share = (
            f"{100 * row.bytes_moved / all_bytes:.0f} %"
            if all_bytes and row.bytes_moved
            else ABSENT
        )
        cells.append(
            [
                f"{row.params['passages']:,}",
                row.system,
                row.effective_path,
                metric("recall", 1, 3)(row),
                metric("recall_of_whole", 1, 3)(row),
                number(row.median_s, 1e-3, 2),
                metric("cpu_ms")(row),
                metric("requests", 1, 1)(row),
                number(row.bytes_moved or None, 1e3, 0),
                share,
                metric("more_bytes", 1e6, 0)(row),
                str(row.n),
            ]
        )
    return headers, cells
