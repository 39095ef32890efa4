"""``espnx bench additions``, small: counts, no times."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from espnx.benchmarks.additions.case import CASE
from espnx.benchmarks.harness.result import load, rows_of
from espnx.cli.main import main


def test_a_quick_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    files = 40 + len(os.listdir("/proc/self/fd"))  # this process has more open than a benchmark
    options = [
        "bench",
        "additions",
        "--path",
        str(tmp_path),
        "--quick",
        "--open-files",
        str(files),
        "--json",
        str(result),
    ]
    for _ in range(2):  # the second adds to the store of the first
        assert main(options) == 0
        (row,) = rows_of(load(result))
        assert row.correct
        assert (row.n, row.params["docs"]) == (40, 2000)
        assert 0 < row.metrics["parts"] <= 1 + 3 * 8
    assert json.loads(result.read_text())["rows"][0]["case"] == CASE.name
    assert "CPU in all" in capsys.readouterr().out


def test_too_few_open_files_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "additions", "--path", str(tmp_path), "--quick", "--open-files", "5"]) != 0
    )
    assert "ulimit -n" in capsys.readouterr().err
