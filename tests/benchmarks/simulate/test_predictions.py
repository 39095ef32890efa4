"""``espnx bench simulate --show throttle,device``: what is recorded, beside what it predicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from espnx.benchmarks.device import topology
from espnx.benchmarks.device.emulated import Stretches
from espnx.benchmarks.harness.traces import Steps, read_steps
from espnx.benchmarks.machine.throttle import throttled
from espnx.benchmarks.simulate import emulated
from espnx.benchmarks.simulate.case import CASE
from espnx.benchmarks.simulate.compared import is_within, predicted_row, row
from espnx.cli.main import main
from espnx.device.emulation.report import Report
from espnx.device.emulation.topology import Times, Topology
from espnx.device.model.spec import load_spec
from espnx.errors import FormatError, PathUnavailableError


def of_devices(topology: Topology, since: Times) -> Report:
    """All time is the devices', where the wall has no part in it."""
    spent_s = topology.times().now_s - since.now_s
    return Report(1.0, spent_s, spent_s, 0.0)


def test_emulated_devices_take_as_long_as_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stretch of 0 times do not depend on this machine: attention on devices and on the
    host, rows written one by one, rows of X."""
    monkeypatch.setattr(topology, "report", of_devices)
    (traces := tmp_path / "traces").mkdir()
    names = ["without", "attention", "attention+x"]
    work = topology.Work(tmp_path, load_spec("smartssd"), 4, 1024, 2, 1, 256, 0, traces)
    stretches = Stretches(0.0, lambda text: None, is_checked=False)
    rows = topology.measure(work, [2], names, stretches, lambda text: None)
    for each in rows:
        ours, predicted = emulated._beside("topology", each, traces, lambda text: None)
        assert is_within(predicted), predicted.metrics
        assert predicted.metrics["allowed"] == emulated.WITHIN
        assert ours.median_s == each.median_s
        assert predicted.kind == "modelled"


def test_rows_side_by_side() -> None:
    params = {"show": "throttle", "what": "a", "under": "800 MB/s", "throttle_bytes_per_s": 8e8}
    measured = row(params, "throttled", "measured", [1.0, 1.2, 1.1], path="uring", size_bytes=10)
    near, far = (predicted_row(params, [value], measured, 0.05) for value in (1.1, 1.16))
    assert is_within(near)
    assert not is_within(far)
    wrong = row(params, "throttled", "measured", [1.0], path="x", size_bytes=1, correct=False)
    assert not is_within(predicted_row(params, [1.0], wrong, 0.05))
    free = replace(measured, system="free")
    _, lines = CASE.table([free, measured, near, measured, far])
    assert [line[-1] for line in lines] == ["yes", "NO"]
    assert [line[6] for line in lines] == ["1.000", "1.055"]


def test_steps_beside_a_trace(tmp_path: Path) -> None:
    steps = Steps()
    with steps.step():
        pass
    steps.forget()
    with steps.step():
        pass
    steps.write(str(tmp_path / "a.trace"), 0.0)
    ((begin, end),) = read_steps(tmp_path / "a.trace")
    assert 0 < begin <= end
    (tmp_path / "b.trace.steps.json").write_text("{}")
    for name in ("b.trace", "none.trace"):
        with pytest.raises(FormatError, match="steps of a trace"):
            read_steps(tmp_path / name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--show", "none"], "unknown --show"),
        (["--show", "throttle", "--throttle", "0"], "rate of a throttle"),
        (["--show", "throttle", "--documents", "0"], "--documents"),
        (["--show", "throttle", "--path", "/none"], "--path"),
        (["--show", "device", "--emulated", "x"], "unknown --emulated"),
    ],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.sweep
def test_a_quick_run(tmp_path: Path) -> None:
    """All of it, small: tokens and hits are the same under a throttle."""
    try:
        with throttled(tmp_path, 800_000_000):
            pass
    except PathUnavailableError as error:
        pytest.skip(f"[root] {error}")
    file = str(tmp_path / "s.json")
    words = ["bench", "simulate", "--quick", "--show", "throttle", "--path", str(tmp_path)]
    assert main([*words, "--json", file]) == 0
