"""Distances near storage at toy size: all systems right, wrong ones noticed, and a table of all of
them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.device import distances as bench
from espnx.benchmarks.device.case import CASE
from espnx.benchmarks.harness.leftovers import remove
from espnx.benchmarks.harness.result import make_document
from tests.benchmarks.common import MACHINE

TOY = {
    "cluster_bytes": [4096, 12288],
    "threads": [1, 3],
    "size_bytes": 1 << 18,
    "n_queries": 2,
    "clusters_per_query": 16,
    "pairs": 2,
}


def test_a_quick_run(folder: Path) -> None:
    rows = bench.measure(folder, **TOY)  # type: ignore[arg-type]
    assert [row.system for row in rows[:5]] == [
        "espnx-command",
        "espnx-read",
        "espnx-kernel",
        "faiss-sq8",
        "faiss-fp32",
    ]
    assert len(rows) == 20
    for row in rows:
        assert row.correct, row.system
        assert row.n == 2
        assert row.metrics["distances_per_s"] > 0
        per_cluster = row.params["cluster_bytes"] // 132
        assert (
            row.bytes_asked
            == 2 * min(16, (1 << 18) // row.params["cluster_bytes"]) * per_cluster * 132
        )
        assert set(row.ratio) == (set(bench.BASELINES) if row.system.startswith("espnx") else set())
        assert ("conversion_s" in row.metrics) == (row.system == "faiss-fp32")
    make_document("c", None, None, MACHINE, rows)
    headers, cells = bench.table(rows)
    assert {len(line) for line in cells} == {len(headers)}
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}
    bench.measure(folder, **{**TOY, "baselines": []})  # type: ignore[arg-type]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")} == before, (
        "the files are used again"
    )
    left = CASE.leaves(folder)
    assert len(left) == 2
    (left[0] / "mine").touch()
    assert [remove(path) for path in left] == [False, True], "somebody's own file stays"
    assert [path.name for path in left[0].iterdir()] == ["mine"]


def test_a_wrong_system_is_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.nearest

    def wrong(replies: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids, far = right(replies, k)
        return ids, far + 1

    monkeypatch.setattr(bench, "nearest", wrong)
    rows = bench.measure(folder, **{**TOY, "cluster_bytes": [4096], "threads": [1]})  # type: ignore[arg-type]
    assert {row.system: row.correct for row in rows}["espnx-kernel"] is False
    assert not next(row for row in rows if row.system == "espnx-kernel").ratio


def test_differences() -> None:
    far, ids = np.array([1.0, 2.0, 2.0], np.float32), np.array([5, 6, 7])
    assert bench.difference(far, ids, far, ids) is None
    assert bench.difference(far, np.array([5, 7, 9]), far, ids) is None, (
        "others at the last distance may take its place"
    )
    assert "ids" in str(bench.difference(far, np.array([4, 6, 7]), far, ids))
    assert "distances" in str(bench.difference(far + 1, ids, far, ids))
