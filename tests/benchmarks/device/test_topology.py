"""Decoding on emulated topologies at toy size: every system is right, devices change no bit, and a run in which the host took too much is
refused."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from espnx import errors
from espnx.benchmarks.device import topology as bench
from espnx.benchmarks.device.case import CASE
from espnx.benchmarks.harness.result import make_document
from tests.benchmarks.common import MACHINE


def toy(folder: Path, *, is_checked: bool = False) -> bench.Work:
    return bench.Work(folder, "smartssd", batch=2, context=40, steps=2, layers=1, width=256, seed=1, is_checked=is_checked)


def test_every_system_is_right(folder: Path) -> None:
    rows = bench.measure(toy(folder), (1, 3), list(bench.SYSTEMS), 1.0, lambda text: None)
    assert [(row.params["devices"], row.system) for row in rows] == [(n, name) for n in (1, 3) for name in bench.SYSTEMS]
    for row in rows:
        assert row.correct, row.system
        assert row.kind == "emulated"
        assert set(row.ratio) == (set() if row.system == bench.WITHOUT else {bench.WITHOUT})
        assert (row.metrics["x_rows"] > 0) == bench.SYSTEMS[row.system].has_x_rows
    by = {(row.params["devices"], row.system): row.metrics for row in rows}
    # Rows pass the link to the host only where nothing computes beside them.
    assert by[1, "attention+writeback"]["uplink_out_bytes"] < by[1, bench.WITHOUT]["uplink_out_bytes"] / 10
    assert by[1, "attention"]["uplink_in_bytes"] > by[1, "attention+writeback"]["uplink_in_bytes"]
    make_document("c", None, None, MACHINE, rows)
    headers, cells = CASE.table(rows)
    assert all(len(line) == len(headers) for line in cells)
    assert list(folder.iterdir()) == []


def test_a_host_that_takes_too_much_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_RUNS_MAX", 1)
    with pytest.raises(errors.TimesNotValidError, match="stretch of"):
        bench.measure(toy(folder, is_checked=True), (1,), [bench.WITHOUT], 1e-3, lambda text: None)


def test_the_case(folder: Path) -> None:
    parser = ArgumentParser()
    CASE.configure(parser)
    args = parser.parse_args(["--path", str(folder), "--system", "without"])
    args.quick, args.seed, args.pairs = True, 1, 1
    assert [row.system for row in CASE.run(args, lambda text: None)] == ["without"] * 2
    args.system = "nothing"
    with pytest.raises(errors.InvalidInputError, match="--system"):
        CASE.run(args, lambda text: None)
