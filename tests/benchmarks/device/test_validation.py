"""A disk beside its emulation at toy size: all works in both kinds, and what counts as within."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from espnx.benchmarks.device import validation as bench
from espnx.benchmarks.device.case import table
from espnx.benchmarks.harness.result import make_document
from tests.benchmarks.common import MACHINE

WORKS = [*bench._READS, "walk, W = 1", "walk, W = 4", "decode"]


def test_a_quick_run(folder: Path) -> None:
    said: list[str] = []
    toy = {
        "file_bytes": 8 << 20,
        "run_s": 0.01,
        "vectors": 300,
        "walks": 2,
        "layers": 2,
        "heads": 2,
        "tokens": 130,
    }
    rows = bench.measure(bench.Work(folder, 3, **toy), said.append)  # type: ignore[arg-type]
    assert len(said) == 3
    assert [(row.params["work"], row.kind) for row in rows] == [
        (work, kind) for work in WORKS for kind in ("measured", "emulated")
    ]
    assert all(row.n == 3 and row.correct and row.median_s and row.bytes_asked for row in rows)
    make_document("c", None, None, MACHINE, rows)
    for some in (rows, rows[::2], rows[1::2]):
        headers, cells = table(some)
        assert [line[0] for line in cells] == WORKS
        assert {len(line) for line in cells} == {len(headers)}
    assert "measured us" not in table(rows[1::2])[0]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("measured", "emulated", "within"),
    [
        ([1.0, 1.0, 1.0], [1.14] * 3, True),
        ([1.0, 1.0, 1.0], [1.16] * 3, False),
        ([1.0, 1.0, 1.0], [0.84] * 3, False),
        ([1.0] * 4, [0.9, 1.1, 1.4, 1.5], True),
        ([1.0] * 5, [1.4, 1.4, 1.4, 1.5, 9.0], False),
    ],
)
def test_what_is_within(measured: list[float], emulated: list[float], within: bool) -> None:
    """15 %, or the middle half of what the emulated times differ by."""
    disk, row = bench._rows("x", measured, emulated, 4096, "uring")
    assert (disk.kind, row.kind, row.ratio.keys()) == ("measured", "emulated", {bench.DISK})
    assert bench.is_within(row) is within
    assert table([disk, row])[1][0][-1] == ("yes" if within else "NO")
    assert bench.is_within(replace(row, metrics={**row.metrics, "of_measured": 1.0}))
