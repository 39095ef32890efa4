"""Predicted times beside those that they predict, as rows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..harness.cells import ABSENT
from ..harness.result import Row

PREDICTED = "predicted"


def row(
    params: Mapping[str, Any],
    system: str,
    kind: str,
    times: Sequence[float],
    *,
    path: str,
    size_bytes: int,
    correct: bool = True,
    metrics: Mapping[str, float] | None = None,
) -> Row:
    """One of `case` simulate. Wrong results have no times."""
    ordered = sorted(times)
    n = len(ordered)
    return Row(
        "simulate",
        params,
        system,
        kind,
        "auto",
        path,
        "cold",
        n if correct else 0,
        statistics.median(ordered) if correct else None,
        ordered[-1] if correct else None,
        ordered[n * 3 // 4] - ordered[n // 4] if correct else None,
        size_bytes,
        size_bytes,
        correct,
        dict(metrics or {}),
    )


def predicted_row(
    params: Mapping[str, Any],
    times: Sequence[float],
    beside: Row,
    allowed: float,
    *,
    more: Mapping[str, float] | None = None,
) -> Row:
    """The prediction of a row: its median over that row's, and how far that may be from 1."""
    metrics = {"allowed": allowed, **(more or {})}
    if beside.median_s:
        metrics["of_measured"] = statistics.median(times) / beside.median_s
    return row(
        params, PREDICTED, "modelled", times, path="simulated", size_bytes=beside.bytes_asked,
        metrics=metrics,
    )  # fmt: skip


def is_within(predicted: Row) -> bool:
    """Whether it is as near as it has to be; a row that has nothing beside it is not."""
    over = predicted.metrics.get("of_measured")
    return over is not None and abs(over - 1) <= predicted.metrics["allowed"]


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A line for each prediction, with the row before it, which it predicts."""
    headers = [
        "what",
        "under",
        "n",
        "took ms",
        "[IQR]",
        "predicted ms",
        "of it",
        "allowed",
        "within",
    ]
    lines = []
    for beside, predicted in itertools.pairwise(rows):
        if predicted.system != PREDICTED:
            continue
        over = predicted.metrics.get("of_measured")
        lines.append(
            [
                str(beside.params["what"]),
                str(beside.params["under"]),
                str(beside.n),
                _ms(beside.median_s),
                f"[{_ms(beside.iqr_s)}]",
                _ms(predicted.median_s),
                ABSENT if over is None else f"{over:.3f}",
                f"{predicted.metrics['allowed']:.0%}",
                "yes" if is_within(predicted) else "NO",
            ]
        )
    return headers, lines


def _ms(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{1e3 * seconds:,.3f}"
