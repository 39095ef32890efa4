"""Rows of the retrieval benchmark, built from named samples in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..harness.result import Row
from ..harness.runner import interquartile_range


def simple_row(
    params: Mapping[str, Any],
    system: str,
    seconds: Sequence[float],
    metrics: Mapping[str, float],
    *,
    kind: str = "measured",
    path: str = "uring",
    requested_path: str | None = None,
    cache: str = "cold",
    bytes_asked: float = 0,
    bytes_moved: float = 0,
    correct: bool = True,
    ratio: Mapping[str, Sequence[float]] | None = None,
) -> Row:
    """A row. `ratio`: baseline -> its times over ours, one for each pair."""
    pairs = {name: values for name, values in (ratio or {}).items() if len(values)}
    spread = {f"ratio_iqr_{name}": interquartile_range(values) for name, values in pairs.items()}
    return Row(
        case="retrieval",
        params=dict(params),
        system=system,
        kind=kind,
        requested_path=requested_path or path,
        effective_path=path,
        cache=cache,
        n=len(seconds),
        median_s=statistics.median(seconds) if seconds else None,
        p99_s=float(np.percentile(seconds, 99)) if seconds else None,
        iqr_s=interquartile_range(seconds) if seconds else None,
        bytes_asked=round(bytes_asked),
        bytes_moved=round(bytes_moved),
        correct=correct,
        metrics={**metrics, **spread},
        ratio={name: statistics.median(values) for name, values in pairs.items()}
        if correct
        else {},
    )
