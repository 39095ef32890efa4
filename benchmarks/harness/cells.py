"""Cells of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .doubts import doubtful, said
from .result import Row

ABSENT = "-"


def ratio(row: Row, baseline: str) -> str:
    """The ratio to a baseline and its spread, or why there is none."""
    if baseline in row.ratio:
        return f"{row.ratio[baseline]:.2f}x [{row.metrics.get(f'ratio_iqr_{baseline}', 0.0):.2f}]"
    return said(row, baseline) or ABSENT


def baselines_of(rows: Sequence[Row]) -> set[str]:
    """Those that a row is compared with, or would be if the ratio were steady."""
    return {name for row in rows for name in (*row.ratio, *doubtful(row))}


def number(value: float | None, unit: float = 1, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value / unit:.{digits}f}"


def metric(name: str, unit: float = 1, digits: int = 2) -> Callable[[Row], str]:
    return lambda row: number(row.metrics.get(name), unit, digits)
