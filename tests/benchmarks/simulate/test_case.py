"""``espnx bench simulate``, small: both walk the same, and a wrong walk is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.simulate import heap
from espnx.benchmarks.simulate.case import CASE, Heap, Ours
from espnx.benchmarks.simulate.work import page_reads
from espnx.cli.main import main
from espnx.errors import MissingDependencyError
from espnx.simulate.queues import walk

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@needs_compiler
def test_small(tmp_path: Path) -> None:
    words = ["bench", "simulate", "--quick", "--pairs", "2", "--json", str(tmp_path / "s.json")]
    assert main(words) == 0
    ours, plain = rows_of(load(tmp_path / "s.json"))
    assert (ours.system, plain.system) == ("espnx", "plain-heap")
    assert ours.correct
    assert plain.correct
    assert ours.params["parts"] >= 6
    assert ours.metrics["reads_per_cpu_s"] > 0
    assert CASE.table([ours, plain])[1][0][0] == "espnx"


def test_each_read_passes_all_parts() -> None:
    """With the account of each on."""
    reads = page_reads(2000, 1)
    done = walk(reads.parts, reads.routes, reads.route, reads.client)
    assert all(len(steps) == reads.steps for steps in reads.routes)
    first = done.accounts[:6]
    assert all(account.n_served == 2000 for account in first)
    assert sum(account.n_served for account in done.accounts[6:]) == 4000
    assert done.accounts[1].held_s > 0
    assert all(account.idle_s >= 0 for account in done.accounts)


@needs_compiler
def test_other_ends_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = page_reads(500, 1)
    plain = Heap(reads, heap.compile_heap(tmp_path), tmp_path)
    assert Ours(reads, plain).verify() is None
    other = page_reads(500, 2)
    assert "s off" in str(Ours(other, plain).verify())
    monkeypatch.setattr(plain, "ended_s", lambda: np.array([1.0, -1.0]))
    assert plain.verify() == "a command without an end"


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="no C\\+\\+ compiler"):
        heap.compile_heap(tmp_path)


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", "--reads", "0"]) == 2
    assert "--reads; got 0" in capsys.readouterr().err
