"""Ratios that are withheld: of a spread that says nothing, of baselines that more threads made
slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from espnx.benchmarks.harness import cells, doubts
from espnx.benchmarks.harness.doubts import doubtful, without_doubtful
from espnx.benchmarks.harness.result import Row, make_document
from espnx.benchmarks.io.table import table as io_table
from tests.benchmarks.common import MACHINE

OURS = Row(
    "maxsim",
    {"threads": 1, "d": 32},
    "espnx",
    "measured",
    "memory",
    "memory",
    "warm",
    3,
    1.0,
    1.0,
    0.0,
    100,
    100,
    True,
)
THEIRS = replace(OURS, system="torch", median_s=2.0)


@pytest.fixture(autouse=True)
def no_doubts() -> None:
    """In place of the one of all benchmarks: these are about the doubts."""
    assert (doubts.WIDE_SHARE, doubts.SLOWER) == (0.5, 1.1)


def compared(ratio: float, iqr: float, **params: int) -> Row:
    return replace(
        OURS,
        params={**OURS.params, **params},
        ratio={"torch": ratio},
        metrics={"ratio_iqr_torch": iqr, "over_torch": 1 / ratio},
    )


@pytest.mark.parametrize(
    ("iqr_s", "marked"), [(0.0, False), (0.5, False), (0.51, True), (None, False)]
)
def test_runs_that_spread_are_marked(iqr_s: float | None, marked: bool) -> None:
    row = replace(
        OURS,
        params={"op": "read", "pattern": "random", "block_bytes": 4096, "queue_depth": 1},
        iqr_s=iqr_s,
    )
    assert doubts.is_unsteady(row) == marked
    assert any("unsteady" in cell for cell in io_table([row])[1][0]) == marked


@pytest.mark.parametrize(("iqr", "is_kept"), [(0.0, True), (1.0, True), (1.01, False)])
def test_a_wide_spread(iqr: float, is_kept: bool) -> None:
    [row, _] = without_doubtful([compared(2.0, iqr), THEIRS])
    assert row.ratio == ({"torch": 2.0} if is_kept else {})
    assert doubtful(row) == ([] if is_kept else ["torch"])
    assert cells.ratio(row, "torch") == (f"2.00x [{iqr:.2f}]" if is_kept else "unsteady")
    assert ("over_torch" in row.metrics) == is_kept
    assert cells.baselines_of([row]) == {"torch"}
    make_document("c", None, None, MACHINE, [row])


def test_a_baseline_that_more_threads_make_slower() -> None:
    """In the row of those threads alone; a little slower may be chance."""
    rows = [
        compared(2.0, 0.1),
        THEIRS,
        compared(60.0, 0.1, threads=2),
        replace(THEIRS, params={"threads": 2, "d": 32}, median_s=60.0),
    ]
    one, _, two, _ = without_doubtful(rows)
    assert (one.ratio, two.ratio) == ({"torch": 2.0}, {})
    assert two.metrics["slower_with_threads_torch"] == 30.0
    assert cells.ratio(two, "torch") == "torch 30.0x slower with more threads"
    rows[3] = replace(rows[3], median_s=2.1)
    assert without_doubtful(rows)[2].ratio == {"torch": 60.0}
    rows[3] = replace(rows[3], median_s=60.0, params={"threads": 2, "d": 128})
    assert without_doubtful(rows)[2].ratio == {"torch": 60.0}, "another point"


def test_what_has_no_times_or_no_threads() -> None:
    wrong = replace(THEIRS, median_s=None, n=0, bytes_asked=0, correct=False)
    rows = [replace(compared(2.0, 0.1), params={}), wrong, replace(OURS, params={"threads": None})]
    assert without_doubtful(rows) == rows
    assert cells.ratio(OURS, "torch") == "-"
