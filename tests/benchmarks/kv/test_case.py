"""``espnx bench kv`` from end to end at toy size, its options and its table."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espnx.benchmarks.harness.processes import Worker, WorkerError
from espnx.benchmarks.harness.result import Row, load, rows_of
from espnx.benchmarks.io import fio as fio_module
from espnx.benchmarks.io.fio import FioSystem, Variant
from espnx.benchmarks.io.work import Work
from espnx.benchmarks.kv import measure as kv_measure
from espnx.benchmarks.kv import sweeps as kv_sweeps
from espnx.benchmarks.kv import table as kv_table
from espnx.benchmarks.kv.fleet import Fleet, Limit, Spec
from espnx.benchmarks.kv.measure import Plan, Verdict, judged
from espnx.benchmarks.kv.sweeps import sweep
from espnx.benchmarks.kv.systems.models import Task
from espnx.benchmarks.kv.table import table
from espnx.benchmarks.machine.cgroup import MemoryGroup
from espnx.cli.main import main
from espnx.kv import schedule
from tests.benchmarks.common import row

CONFIG = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 256,
    "word_embed_proj_dim": 64,
    "vocab_size": 300,
}


@pytest.fixture
def alone(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, whose threads and processors stay as they are."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, chosen: None)


def bench(path: Path, *words: str) -> int:
    config = path / "tiny.json"
    config.write_text(json.dumps(CONFIG))
    return main(
        [
            "bench",
            "kv",
            "--quick",
            "--memory",
            "ample",
            "--path",
            str(path),
            "--model",
            str(config),
            *words,
        ]
    )


@pytest.mark.usefixtures("alone")
def test_decoding_beside_a_memory_mapped_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "r.json"
    words = [
        "--pairs",
        "2",
        "--steps",
        "2",
        "--context",
        "301",
        "--batch",
        "2",
        "--format",
        "same,int8",
        "--baseline",
        "memmap",
    ]
    assert bench(tmp_path, *words, "--json", str(result)) == 0
    found = {row.system: row for row in rows_of(load(result))}
    assert set(found) == {"espnx", "espnx-int8", "memmap"}
    for name, one in found.items():
        assert (one.case, one.n, one.correct) == ("kv", 2, True)
        assert (one.params["model"], one.params["batch"], one.params["context"]) == ("tiny", 2, 301)
        assert one.params["prefill"] == "seeded rows"
        # One warm-up step, then the first turn's: K and V of 303 and of 304 tokens, two sequences,
        # two layers, 64 wide, fp16.
        assert one.bytes_asked == 2 * 2 * 2 * 64 * 2 * (303 + 304)
        assert set(one.ratio) == (set() if name == "memmap" else {"memmap"})
    assert found["espnx"].metrics["bytes_moved_per_step"] > 0
    captured = capsys.readouterr()
    assert "No prefill" in captured.err
    assert "vs memmap" in captured.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "tiny.json"]


@pytest.mark.usefixtures("alone")
def test_fio_reads_the_file_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of a drive differs from file to file, so that one of fio's own would say little."""
    read: list[tuple[Path, bool]] = []

    def look(work: Work, variant: Variant) -> FioSystem:
        with work.data.path.open("rb") as file:
            read.append((work.data.path, any(file.read(work.bytes_asked))))
        return FioSystem(work, variant)

    monkeypatch.setattr(kv_measure, "FioSystem", look)
    monkeypatch.setattr(kv_measure, "SEQUENTIAL_STEP_BYTES", 960 << 10)
    monkeypatch.setattr(fio_module, "require_fio", lambda: "fio")
    spec = Spec("espnx", "espnx", {"x_rows": 0})
    task = Task("tiny", {**CONFIG, "num_hidden_layers": 4}, 4, 1100, 3, "fp32", 1, False)
    plan = Plan(1, 1, 1, tmp_path, Limit("ample"), None, 1, with_fio=True)
    with Fleet(task, [spec], tmp_path, plan.limit, 1, [], lambda text: None) as fleet:
        systems = kv_measure._fio_systems(fleet, [spec], plan, pytest.fail)
        assert {path.parent for path, _ in read} == {Path(f"/proc/{os.getpid()}/fd")}
        assert all(is_written for _, is_written in read)
        assert len(systems) == len(read) == 3


@pytest.mark.usefixtures("alone")
def test_every_system_of_x_rows_starts_from_projected_rows(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    words = [
        "--pairs",
        "1",
        "--context",
        "100",
        "--batch",
        "2",
        "--x-rows",
        "0,2",
        "--baseline",
        "host,dynamic",
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *words) == 0
    found = {row.system: row for row in rows_of(load(result))}
    assert set(found) == {"espnx", "espnx-x2", "host", "dynamic"}
    assert all(
        one.correct and one.params["prefill"] == "seeded X, projected" for one in found.values()
    )
    assert (found["espnx"].metrics["x_rows"], found["espnx-x2"].metrics["x_rows"]) == (0, 2)


@pytest.mark.usefixtures("alone")
def test_a_prediction_stands_beside_every_number_of_x_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "SMALL_BYTES", 0)
    monkeypatch.setattr(schedule, "measure", lambda *_: schedule.Costs(1e6, 1e9, 1e-9, 0.0))
    result = tmp_path / "r.json"
    words = [
        "--show",
        "x-sweep",
        "--pairs",
        "1",
        "--context",
        "100",
        "--batch",
        "2",
        "--baseline",
        "host",
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *words) == 0
    found = {row.system: row.metrics for row in rows_of(load(result))}
    # On so slow a disk X, half of the bytes, is kept of all sequences.
    assert found["espnx-auto"]["x_rows"] == 2
    assert [found[name]["is_scheduled"] for name in ("espnx", "espnx-x1", "espnx-auto")] == [
        0,
        0,
        1,
    ]
    assert found["espnx"]["predicted_s"] == pytest.approx(2 * found["espnx-auto"]["predicted_s"])
    assert "predicted_s" not in found["host"]


@pytest.mark.parametrize(
    ("system", "metrics", "cell"),
    [
        ("espnx", {"x_rows": 0}, "-"),
        ("espnx", {"x_rows": 0, "is_scheduled": 0.0}, "0"),
        ("espnx-x1", {"x_rows": 1}, "1"),
        ("espnx-x1", {"x_rows": 1, "is_scheduled": 1.0}, "1 *"),
        ("espnx-auto", {"x_rows": 0}, "0 *"),  # nothing was predicted: X is larger than K and V
        ("fio", {}, "-"),
    ],
)
def test_the_mark_of_what_was_chosen(system: str, metrics: dict[str, float], cell: str) -> None:
    assert kv_table._x_rows(row(system=system, metrics=metrics)) == cell


@pytest.mark.usefixtures("alone")
def test_absorbed_beside_recomputed(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert (
        bench(tmp_path, "--show", "x", "--batch", "2", "--pairs", "1", "--json", str(result)) == 0
    )
    absorbed, recomputed = rows_of(load(result))
    assert (absorbed.system, recomputed.system, set(absorbed.ratio)) == (
        "absorbed",
        "recomputed",
        {"recomputed"},
    )
    assert absorbed.correct
    assert recomputed.correct
    # d times less arithmetic, but for the attention over the rows that were made again.
    assert recomputed.metrics["flop"] == 16 * absorbed.metrics["flop"] + 2 * 96 * 4 * 64


@pytest.mark.usefixtures("alone")
def test_spilling_sooner_writes_more(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert (
        bench(
            tmp_path,
            "--show",
            "spill",
            "--context",
            "300",
            "--batch",
            "1",
            "--new",
            "32",
            "--json",
            str(result),
        )
        == 0
    )
    found = {row.system: row.metrics for row in rows_of(load(result))}
    assert set(found) == {"espnx-spill-1", "espnx-spill-16", "dynamic"}
    # Every token, or every sixteenth, in each of two layers.
    assert found["espnx-spill-1"]["requests_written"] == 32 * 2
    assert found["espnx-spill-16"]["requests_written"] == 2 * 2
    assert (
        found["espnx-spill-1"]["write_amplification"]
        == 16 * found["espnx-spill-16"]["write_amplification"]
    )


@pytest.mark.usefixtures("alone")
def test_peak_memory_of_both_phases(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert (
        bench(tmp_path, "--show", "rss", "--context", "300", "--batch", "1", "--json", str(result))
        == 0
    )
    found = {row.system: row for row in rows_of(load(result))}
    assert set(found) == {
        f"{name}-{phase}" for name in ("espnx", "dynamic") for phase in ("decode", "prefill")
    }
    for one in found.values():
        assert one.correct
        assert one.metrics["base_bytes"] > 1 << 20
    # 256 of 300 tokens fill whole blocks (16 wide, fp16: 128 rows); what dynamic holds is counted
    # as the model made it.
    assert found["dynamic-decode"].metrics["stored_bytes"] == 2 * 2 * 64 * 2 * 300
    assert found["espnx-decode"].metrics["stored_bytes"] == 2 * 2 * 64 * 2 * 256


@pytest.mark.usefixtures("alone")
def test_sweeps_have_rows_for_each_point(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    words = [
        "--show",
        "batch",
        "--pairs",
        "1",
        "--context",
        "20",
        "--batch",
        "2",
        "--baseline",
        "static",
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *words) == 0
    assert [(row.system, row.params["batch"]) for row in rows_of(load(result))] == [
        ("espnx", 1),
        ("static", 1),
        ("espnx", 2),
        ("static", 2),
    ]


@pytest.mark.usefixtures("alone")
def test_what_would_not_fit_in_memory_takes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token of the tiny model takes 512 bytes: 40 of them fit, 80 do not."""
    result = tmp_path / "r.json"
    monkeypatch.setattr(kv_sweeps, "_PROCESS_BYTES", 0)
    monkeypatch.setattr(kv_sweeps, "available_bytes", lambda: 80 * 512)
    monkeypatch.setattr(kv_sweeps, "_LEAST_CONTEXT", 40)
    words = [
        "--show",
        "context",
        "--pairs",
        "1",
        "--context",
        "80",
        "--batch",
        "1",
        "--baseline",
        "static,host",
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *words) == 0
    assert [(row.system, row.params["context"]) for row in rows_of(load(result))] == [
        ("espnx", 40),
        ("static", 40),
        ("host", 40),
        ("espnx", 80),
        ("host", 80),
    ]
    assert "static left out at 1 x 80 tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("alone")
def test_attention_from_memory(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert bench(tmp_path, "--show", "attend", "--pairs", "1", "--json", str(result)) == 0
    rows = rows_of(load(result))
    of_one, of_several = ["espnx", "stream", "sdpa"], ["positions", "espnx"]
    assert [row.system for row in rows] == [*of_one, *of_several] * 5
    assert all(row.correct and row.metrics["bytes_per_s"] > 0 for row in rows)
    assert set(rows[0].ratio) == {"stream", "sdpa"}
    assert set(rows[3].ratio) == {"espnx"}
    assert rows[3].params["positions"] == 9


@pytest.mark.sweep
def test_a_process_answers_and_tells_its_errors() -> None:
    with Worker("kv", "attend") as worker:
        worker.ask(
            "attend_open",
            kind="rows",
            heads=2,
            groups=2,
            d=64,
            size_bytes=1 << 16,
            dtype="fp16",
            seed=1,
        )
        assert worker.ask("attend_check", name="espnx")["problem"] is None
        with pytest.raises(WorkerError, match="a command came before"):
            worker.ask("seed")
        assert worker.ask("attend_run", name="espnx")["seconds"] > 0


def test_the_limit_leaves_a_quarter_of_the_rows_for_page_cache(tmp_path: Path) -> None:
    """Beside what a process allocates; a cache in memory grows by its new tokens."""
    group = MemoryGroup(1, tmp_path)
    fleet = object.__new__(Fleet)
    fleet.task = Task("t", CONFIG, 1000, 4096, 1, "fp16", 1)
    room = fleet.task.kv_bytes(4096) // 4
    assert fleet._enough(Spec("espnx", "espnx"), 10**9) == 10**9 + room
    assert fleet._enough(
        Spec("dynamic", "dynamic"), 10**9
    ) == 10**9 + room + 2 * fleet.task.kv_bytes(1)
    fleet._limit(SimpleNamespace(group=group), 10**9)  # type: ignore[arg-type]
    assert int((tmp_path / "memory.limit_in_bytes").read_text()) == 10**9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "speed"], "unknown --show"),
        (["--baseline", "disk"], "unknown baseline"),
        (["--model", "opt-9t"], "opt-125m"),
        (["--batch", "0"], "batch"),
        (["--context", "0"], "context"),
        (["--new", "0"], "new"),
        (["--format", "fp4"], "unknown format"),
        (["--memory", "lots"], "lots"),
        (["--throttle", "0MB/s"], "throttle"),
        (["--x-rows", "9"], "x-rows"),
    ],
)
def test_bad_options_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert bench(tmp_path, *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "model_type"),
        ('{"model_type": "opt"}', "vocab_size"),
        (CONFIG | {"model_type": "?"}, "?"),
    ],
)
def test_a_bad_configuration_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Any, message: str
) -> None:
    config = tmp_path / "bad.json"
    config.write_text(text if isinstance(text, str) else json.dumps(text))
    assert main(
        [
            "bench",
            "kv",
            "--quick",
            "--memory",
            "ample",
            "--path",
            str(tmp_path),
            "--model",
            str(config),
        ]
    ) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("flexgen") is not None, reason="FlexGen is installed")
def test_flexgen_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--baseline", "flexgen-disk") == 3
    assert "pip install --no-deps flexgen==0.1.8" in capsys.readouterr().err


def test_sweeps_double_and_end_at_the_most() -> None:
    assert sweep(1, 4) == [1, 2, 4]
    assert sweep(512, 1500) == [512, 1024, 1500]
    assert sweep(8, 8) == [8]


@pytest.mark.parametrize(("runs", "steps"), [(1, 1), (15, 1), (4, 128), (3, 11)])
def test_logits_of_some_steps_are_kept(runs: int, steps: int) -> None:
    plan = Plan(runs, steps, 2, Path("."), Limit("ample"), None, 1, with_fio=False)
    kept = plan.kept()
    assert kept[0] == 0
    assert len(kept) <= 32
    assert kept[-1] < plan.all_steps
    assert kept == sorted(set(kept))


def result_row(system: str, median_s: float, asked: int = 1000, **changes: Any) -> Row:
    params = {
        "show": "decode",
        "model": "m",
        "batch": 2,
        "context": 9,
        "throttle_bytes_per_s": None,
    }
    metrics = {"step_s": median_s, "asked_per_step": float(asked), "tokens_per_s": 2 / median_s}
    fields = {"metrics": metrics, "ratio": {}, "bytes_asked": asked, "bytes_moved": asked} | changes
    return row(case="kv", params=params, system=system, median_s=median_s, **fields)


def test_a_wrong_system_has_no_times_and_no_ratio_to_it() -> None:
    said: list[str] = []
    rows = [
        result_row("espnx", 1.0, ratio={"memmap": 2.0, "dynamic": 3.0}),
        result_row("memmap", 2.0),
        result_row("dynamic", 3.0),
    ]
    verdicts = {
        "espnx": Verdict(None, 0.25, 1.0),
        "memmap": Verdict("step 0: off", None, 0.5),
        "dynamic": Verdict(None, 0.0, 1.0),
    }
    ours, wrong, other = judged(rows, verdicts, said.append)
    assert (ours.correct, ours.ratio, ours.metrics["logit_error"]) == (True, {"dynamic": 3.0}, 0.25)
    assert (wrong.correct, wrong.n, wrong.median_s) == (False, 0, None)
    assert other.correct
    assert "WRONG RESULT of memmap: step 0: off" in said[0]


@pytest.mark.parametrize(("waiting_s", "bound"), [(0.9, "disk"), (0.1, "compute")])
def test_what_bounds_a_step_is_named(waiting_s: float, bound: str) -> None:
    metrics = {"step_s": 1.0, "asked_per_step": 1000.0, "waiting_s_per_step": waiting_s}
    ours = result_row("espnx", 1.0, metrics=metrics, ratio={"fio": 0.8})
    fio = result_row("fio", 1.6, asked=2000)  # 0.8 s for as many bytes
    rows = judged([ours, fio], {"espnx": Verdict(None, 0.0, 1.0)}, lambda text: None)
    assert rows[0].metrics["fio_s"] == pytest.approx(0.8)
    assert rows[0].metrics["over_fio"] == pytest.approx(1.25)
    headers, lines = table(rows)
    assert lines[0][headers.index("bound")] == bound
    assert lines[1][headers.index("bound")] == "-"


def test_columns_that_say_nothing_are_left_out() -> None:
    headers, lines = table([result_row("espnx", 0.25)])
    assert "write amplification" not in headers
    assert lines[0][headers.index("what")] == "m, 2 x 9"
    assert lines[0][headers.index("tokens/s")] == "8.0"
