"""``espnx bench maxsim`` at toy size: all systems right, wrong ones noticed, maxsim-cpu asked for
but missing."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.maxsim import case as maxsim_case
from espnx.benchmarks.maxsim import systems as maxsim_systems
from espnx.benchmarks.maxsim.systems import (
    CallSystem,
    Corpus,
    EspnxSystem,
    MaxsimCpuSystem,
    difference,
    torch_systems,
    torch_threads,
)
from espnx.cli.main import main
from espnx.errors import MissingDependencyError

TOY = ["bench", "maxsim", "--quick", "--pairs", "2", "--tokens", "7", "--query-tokens", "5"]
LENGTHS = torch.tensor([3, 1, 12, 7])
# A stand-in for the package, which tests do not need: what it computes, one document after the
# other, in NumPy.
STAND_IN = """
import numpy as np
def maxsim_scores_variable(query, documents):
    scores = [(query @ document.T).max(axis=1).sum() for document in documents]
    return np.array(scores, dtype=np.float32) + OFFSET
maxsim_scores = maxsim_scores_variable
"""


def corpus(d: int = 16, lengths: torch.Tensor = LENGTHS) -> Corpus:
    return Corpus.random(d, lengths, 5, threads=1, calls=2, seed=3)


@pytest.fixture
def stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """maxsim_cpu for this process and for the worker; with a parameter, one that is off by so
    much."""
    offset = getattr(request, "param", 0.0)
    (tmp_path / "maxsim_cpu.py").write_text(STAND_IN.replace("OFFSET", str(offset)))
    monkeypatch.syspath_prepend(str(tmp_path))
    root = str(Path(__file__).resolve().parents[3])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "maxsim_cpu", raising=False)


@pytest.mark.parametrize("ragged", [[], ["--ragged"]])
def test_a_quick_run(ragged: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    assert main([*TOY, "--dim", "32", "--threads", "1", "--json", str(result), *ragged]) == 0
    rows = rows_of(load(result))
    ours = [row for row in rows if row.system.startswith("espnx-")]
    assert [row.system for row in ours] == [f"espnx-{name}" for name in maxsim_case.FORMATS]
    assert {"torch-segment", "torch-padded", "torch-bf16"} <= {row.system for row in rows}
    for row in rows:
        assert (row.case, row.effective_path, row.cache, row.n, row.correct) == (
            "maxsim",
            "memory",
            "warm",
            2,
            True,
        )
        assert row.bytes_asked == rows[0].bytes_asked
    for row in ours:
        assert {"torch-segment", "torch-padded", "torch-bf16"} <= set(row.ratio)
        assert row.metrics["fp16_median_over_median"] > 0
    sizes = {row.system: row.metrics["bytes_per_document"] for row in ours}
    assert (
        sizes["espnx-fp32"]
        == 2 * sizes["espnx-fp16"]
        == 2 * sizes["espnx-bf16"]
        == 32 * sizes["espnx-bit1"]
    )
    table = capsys.readouterr().out
    assert "vs torch-padded [IQR]" in table
    assert "espnx-residual4" in table


def test_maxsim_cpu_asked_for_but_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(maxsim_systems, "find_spec", lambda name: None)
    assert main([*TOY, "--baseline", "maxsim-cpu"]) == 3
    assert "pip install maxsim-cpu" in capsys.readouterr().err
    with pytest.raises(MissingDependencyError):
        MaxsimCpuSystem(corpus())


@pytest.mark.parametrize(
    "words",
    [
        ["--dim", "12"],
        ["--dim", "0"],
        ["--threads", "x"],
        ["--format", "fp8"],
        ["--baseline", "numpy"],
    ],
)
def test_options_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TOY, *words]) != 0
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [LENGTHS, torch.full((4,), 6)])
@pytest.mark.parametrize("name", ["torch-segment", "torch-padded", "torch-bf16"])
def test_torch_baselines_are_right_and_noticed_when_wrong(name: str, lengths: torch.Tensor) -> None:
    given = corpus(lengths=lengths)
    for system in torch_systems(name, given):
        assert system.verify() is None
        before = torch.get_num_threads()
        assert system.prepare(0) == "warm"
        assert system.run().bytes_asked == given.fp32_bytes
        assert torch.get_num_threads() == before
        right = system.call()
        system.call = lambda right=right: right + 1
        assert "document 0 scores" in (system.verify() or "")


@pytest.mark.parametrize("fmt", maxsim_case.FORMATS)
def test_espnx_is_right_and_noticed_when_wrong(fmt: str) -> None:
    system = EspnxSystem(fmt, corpus(), seed=1)
    assert system.verify() is None
    assert system.run().bytes_moved == system.buffer.numel()
    system.offset_bytes = system.offset_bytes.flip(0).contiguous() * 0
    expected = EspnxSystem(fmt, corpus(), seed=1).expected()
    system.expected = lambda: expected  # type: ignore[method-assign]
    assert system.verify() is not None


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("lengths", [LENGTHS, torch.full((4,), 6)])
def test_maxsim_cpu_runs_in_its_own_process(lengths: torch.Tensor) -> None:
    given = corpus(lengths=lengths)
    system = MaxsimCpuSystem(given)
    try:
        assert system.verify() is None
        assert system.prepare(0) == "warm"
        sample = system.run()
        assert (sample.bytes_asked, sample.bytes_moved) == (given.fp32_bytes, given.fp32_bytes)
        assert sample.seconds > 0
    finally:
        system.close()
    assert system._process.returncode == 0


@pytest.mark.parametrize("stand_in", [0.5], indirect=True)
@pytest.mark.usefixtures("stand_in")
def test_a_wrong_maxsim_cpu_is_noticed() -> None:
    system = MaxsimCpuSystem(corpus())
    try:
        assert "document 0" in (system.verify() or "")
    finally:
        system.close()


def test_difference() -> None:
    scores = torch.tensor([1.0, 2.0])
    assert difference(scores, scores, 0.0) is None
    assert difference(scores + 0.5, scores, 0.5) is None
    assert "document 1" in (difference(torch.tensor([1.0, torch.nan]), scores, 1.0) or "")
    assert "instead of [2]" in (difference(scores[:1], scores, 1.0) or "")


def test_threads_of_torch_come_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_a_wrong_system_gets_no_ratio() -> None:
    from espnx.benchmarks.harness.runner import compare

    given = corpus()
    wrong = CallSystem(
        "espnx-fp16", "espnx-fp16", given, lambda: torch.zeros(4), bytes_moved=1, tolerance=1e-3
    )
    rows = compare(
        "maxsim",
        {},
        [wrong],
        torch_systems("torch-segment", given),
        pairs=1,
        seed=1,
        say=lambda text: None,
    )
    assert (rows[0].correct, rows[0].ratio) == (False, {})
    assert maxsim_case._beside_fp16(rows) == rows
    assert isinstance(maxsim_case.CASE.table, types.FunctionType)
    assert np.isfinite(rows[1].median_s)
