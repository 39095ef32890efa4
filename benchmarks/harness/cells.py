"""Cells of tables."""

from __future__ import annotations

from collections.abc import Callable

from .result import Row

ABSENT = "-"


def number(value: float | None, unit: float = 1, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value / unit:.{digits}f}"


def metric(name: str, unit: float = 1, digits: int = 2) -> Callable[[Row], str]:
    return lambda row: number(row.metrics.get(name), unit, digits)
