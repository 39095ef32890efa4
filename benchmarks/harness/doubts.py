"""Ratios that say more about the machine than about the systems: withheld, with the reason among
the metrics.

A baseline that more threads make slower was kept off the cores by something else. A spread of the
paired ratios above half of their median means that the next run may as well say the opposite.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from .result import Row

#: Of the median: an interquartile range above it is too wide.
WIDE_SHARE = 0.5
#: How many times as long a baseline may take with more threads than with fewer.
SLOWER = 1.1
#: Names of metrics that say why a ratio is missing: ``unsteady_BASELINE`` (the ratio),
#: ``slower_with_threads_BASELINE`` (the factor).
UNSTEADY, SLOWER_WITH_THREADS = "unsteady_", "slower_with_threads_"


def without_doubtful(rows: Sequence[Row]) -> list[Row]:
    """The same rows, doubtful ratios moved from `ratio` to `metrics`."""
    slower = _slower_baselines(rows)
    found = []
    for row in rows:
        ratio, metrics = dict(row.ratio), dict(row.metrics)
        for baseline, value in row.ratio.items():
            factor = slower.get((_point(row), baseline))
            if factor is not None:
                metrics[SLOWER_WITH_THREADS + baseline] = factor
            elif metrics.get(f"ratio_iqr_{baseline}", 0.0) > WIDE_SHARE * value:
                metrics[UNSTEADY + baseline] = value
            else:
                continue
            del ratio[baseline]
            metrics.pop(f"over_{baseline}", None)  # the same in another name
        found.append(dataclasses.replace(row, ratio=ratio, metrics=metrics))
    return found


def is_unsteady(row: Row) -> bool:
    """Whether the times of a row's own runs spread by more than half of their median: the next run
    may as well take twice as long."""
    return (
        bool(row.median_s)
        and row.iqr_s is not None
        and row.iqr_s > WIDE_SHARE * float(row.median_s or 0.0)
    )


def _point(row: Row, *, but: Sequence[str] = ()) -> str:
    """The point at which a row was measured, as a key."""
    params: dict[str, Any] = {name: value for name, value in row.params.items() if name not in but}
    return json.dumps([row.case, params], sort_keys=True, default=str)


def _slower_baselines(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """(point, baseline) -> its time over that with fewer threads, where it is longer."""
    found = {}
    for row in rows:
        if (
            row.ratio
            or not row.median_s
            or not row.bytes_asked
            or not isinstance(row.params.get("threads"), int)
        ):
            continue
        others = [
            other.median_s / other.bytes_asked
            for other in rows
            if other.system == row.system
            and other.median_s
            and other.bytes_asked
            and isinstance(other.params.get("threads"), int)
            and other.params["threads"] < row.params["threads"]
            and _point(other, but=["threads"]) == _point(row, but=["threads"])
        ]
        factor = row.median_s / row.bytes_asked / min(others) if others else 0.0
        if factor > SLOWER:
            found[_point(row), row.system] = factor
    return found


def doubtful(row: Row) -> list[str]:
    """Baselines of a row whose ratios were withheld."""
    return sorted(
        {
            name.removeprefix(mark)
            for mark in (UNSTEADY, SLOWER_WITH_THREADS)
            for name in row.metrics
            if name.startswith(mark)
        }
    )


def said(row: Row, baseline: str) -> str | None:
    """Why the ratio to a baseline is withheld, in a few words; None: it is not."""
    if (factor := row.metrics.get(SLOWER_WITH_THREADS + baseline)) is not None:
        return f"{baseline} {factor:.1f}x slower with more threads"
    return "unsteady" if UNSTEADY + baseline in row.metrics else None
