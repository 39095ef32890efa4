"""scripts/gpu_check.sh where there is no GPU, and its machinery: isolation of checks, rows of the
schema, the references it judges by."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.result import Row, make_document, validate
from espnx.errors import FormatError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import gpu_check_kv  # noqa: E402
import gpu_check_steps  # noqa: E402
import gpu_timing  # noqa: E402

MACHINE = dict.fromkeys(
    ("cpu", "cores", "memory_bytes", "kernel", "disk", "fs", "fio", "python", "torch")
)


def document(rows: list[dict[str, object]]) -> dict[str, object]:
    return make_document("gpu_check", None, None, MACHINE, [Row(**row) for row in rows])  # type: ignore[arg-type]


def no_gpu() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def test_without_a_gpu_the_command_says_so_and_ends_with_3(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=no_gpu(), cwd=tmp_path, timeout=60
    )
    assert done.returncode == 3
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no GPU" in done.stderr
    assert f"({sys.executable}: torch {torch.__version__}" in done.stderr  # and what it says
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_limits_fit_the_promise() -> None:
    """The whole run, build included, ends within twenty minutes even if every step uses up its
    limit."""
    build_limit_s = int(
        re.search(r"BUILD_LIMIT_S=(\d+)", (ROOT / "scripts/gpu_check.sh").read_text()).group(1)
    )  # type: ignore[union-attr]
    assert sum(gpu_check.LIMITS_S.values()) + build_limit_s <= 20 * 60 - 30
    for name in gpu_check.LIMITS_S:
        assert callable(getattr(gpu_check_steps, f"check_{name}"))


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("pass", "wrote no result: no output"),
        ("import sys; print('broken'); sys.exit(7)", "ended with status 7: broken"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "ended with status -11: no output",
        ),
        ("import time; time.sleep(60)", "did not end within 0.3 s: no output"),
    ],
)
def test_a_check_that_crashes_or_hangs_is_a_failed_row(
    tmp_path: Path, code: str, failure: str
) -> None:
    rows, failures, _ = gpu_check.run_check(
        "x", [sys.executable, "-c", code], tmp_path / "x.json", 0.3 if "sleep" in code else 30.0
    )
    assert failures == [failure]
    assert rows[-1]["correct"] is False
    assert rows[-1]["params"]["failures"] == [failure]
    document(rows)


def test_a_hanging_check_takes_its_children_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    code = (
        f"import subprocess, time; subprocess.Popen(['sh', '-c', 'sleep 1; touch {mark}']); "
        "time.sleep(60)"
    )
    gpu_check.run_check("x", [sys.executable, "-c", code], tmp_path / "x.json", 0.5)
    time.sleep(0.8)
    assert not mark.exists()


def test_a_check_that_raises_keeps_the_rows_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_maxsim(work: Path, rows: list[dict[str, object]], failures: list[str]) -> None:
        rows.append(gpu_timing.row("case", {}, "espnx", [0.1, 0.2, 0.3]))
        there = json.loads(results.read_text())  # already, if nothing more were to come
        assert (there["rows"], there["failures"], there["is_whole"]) == (rows, [], False)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(gpu_check_steps, "check_maxsim", check_maxsim)
    results = tmp_path / "r.json"
    assert gpu_check.run_one("maxsim", tmp_path, results) == 1
    found = json.loads(results.read_text())
    assert found["is_whole"]
    assert found["failures"] == ["RuntimeError: out of luck"]
    assert (found["rows"][0]["n"], found["rows"][0]["median_s"]) == (3, 0.2)
    code = f"import shutil; shutil.copy({str(results)!r}, {str(tmp_path / 'again.json')!r})"
    rows, failures, _ = gpu_check.run_check(
        "maxsim", [sys.executable, "-c", code], tmp_path / "again.json", 30.0
    )
    assert failures == ["RuntimeError: out of luck"]
    assert len(rows) == 2


def test_a_check_that_is_ended_keeps_what_it_had_found(tmp_path: Path) -> None:
    """Rows and failures from before its limit, and that it came."""
    results = tmp_path / "r.json"
    row = gpu_timing.row("case", {}, "espnx", [0.1])
    found = {"rows": [row], "failures": ["early"], "is_whole": False}
    code = (
        f"import pathlib, time; pathlib.Path({str(results)!r}).write_text({json.dumps(found)!r}); "
        "time.sleep(60)"
    )
    rows, failures, _ = gpu_check.run_check("x", [sys.executable, "-c", code], results, 3.0)
    assert rows[0] == row
    assert failures == ["early", "did not end within 3 s: no output"]
    document(rows)


def test_a_row_that_does_not_fit_is_a_failure_of_its_check_alone(tmp_path: Path) -> None:
    results = tmp_path / "r.json"
    right, wrong = (
        gpu_timing.row("case", {}, "espnx", [0.1], metrics={"share": each})
        for each in (0.5, float("nan"))
    )
    found = {"rows": [wrong, right], "failures": [], "is_whole": True}
    code = f"import pathlib; pathlib.Path({str(results)!r}).write_text({json.dumps(found)!r})"
    rows, failures, _ = gpu_check.run_check("x", [sys.executable, "-c", code], results, 30.0)
    assert rows[:-1] == [right]
    assert len(failures) == 1
    assert "metrics must map names to numbers" in failures[0]
    document(rows)


def test_a_check_ends_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, or a machine that is taken back: no process stays on the GPU."""
    started = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_check("x", command, tmp_path / "x.json", 30.0)
    assert started[0].poll() == -9


def test_a_folder_that_is_not_there_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "_run_all", lambda *given: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["--out", str(tmp_path / "missing" / "out.json")])
    assert caught.value.code == 2
    assert "is no folder to write to" in capsys.readouterr().err


def test_rows_fit_the_schema() -> None:
    rows = [
        gpu_check.check_row("gds", 1.5, []),
        gpu_check.check_row("gds", 1.5, ["bad"]),
        gpu_timing.row(
            "gds-read",
            {"point": "end"},
            "espnx-gds",
            [0.5],
            requested_path="gds",
            effective_path="gds-compat",
            bytes_asked=5,
        ),
        gpu_timing.row("gds-read", {"refused": "no"}, "espnx-gds", []),
    ]
    made = document(rows)
    assert json.loads(json.dumps(made)) == made
    assert [row["correct"] for row in made["rows"]] == [True, False, True, True]  # type: ignore[attr-defined]
    made["rows"][0]["kind"] = "guessed"  # type: ignore[index]
    with pytest.raises(FormatError):
        validate(made)


def test_kernels_are_timed_as_the_benchmark_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its points, verified; a wrong result is a failure."""
    from espnx.benchmarks.kernels import bounds
    from espnx.benchmarks.kernels.catalogue import points

    rows: list[dict[str, object]] = []
    failures: list[str] = []
    names = (*gpu_check_kv._TIMED, *gpu_check_steps._TIMED_MAXSIM, *gpu_check_steps._TIMED_RANGES)
    assert set(names) <= {point.name for point in points()}
    gpu_timing.time_kernels(["decode fp16 d 128, 8 x 4"], rows, failures, "cpu")
    document(rows)
    assert failures == []
    assert [(row["case"], row["system"], row["n"]) for row in rows] == [("gpu-kernels", "espnx", 1)]
    assert rows[0]["metrics"]["share_of_roofline"] > 0  # type: ignore[index]
    monkeypatch.setattr(bounds, "problem", lambda *args: "off")
    gpu_timing.time_kernels(["MaxSim fp16 d 384, 180 tokens"], rows, failures, "cpu")
    assert failures == ["MaxSim fp16 d 384, 180 tokens: a wrong result"]
    assert rows[-1]["correct"] is False


def test_files_of_gpu_tests_are_found() -> None:
    assert gpu_check_steps.gpu_test_files()[0].startswith("tests/ops/")
    assert "tests/device/gpu/test_cuda.py" in gpu_check_steps.gpu_test_files()


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("print('2 passed in 1s')", None),
        ("print('3 skipped in 1s')", "x: no test marked gpu ran"),
        (
            "print('FAILED tests/x.py::y'); print('1 failed'); raise SystemExit(1)",
            "FAILED tests/x.py::y",
        ),
        ("raise SystemExit(9)", "x: ended with status 9"),
        ("import time; time.sleep(60)", "x did not end within 0.3 s"),
        (
            "import time; print('x.py::y PASSED\\nx.py::z ', flush=True); time.sleep(60)",
            "x did not end within 5 s, in x.py::z",
        ),
    ],
)
def test_a_file_of_tests_is_judged_rightly(code: str, failure: str | None) -> None:
    rows: list[dict[str, object]] = []
    failures: list[str] = []
    limit_s = (5.0 if "print" in code else 0.3) if "sleep" in code else 30.0
    gpu_check_steps.run_tests(
        "x", [sys.executable, "-c", code], "gpu-tests", limit_s, rows, failures
    )
    assert failures == ([] if failure is None else [failure])
    assert rows[-1]["correct"] is (failure is None)
    document(rows)


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_maxsim_is_judged_rightly(fmt: str) -> None:
    """The check's own float64 reference agrees with the CPU op, and does not with scores that are
    off by a little more than rounding."""
    from espnx.ops import maxsim

    torch.manual_seed(3)
    counts = torch.tensor([0, 1, 5, 64, 17])
    buffer, offsets, tokens = gpu_check_steps._records(counts, 72, fmt)
    query = torch.randn(3, 5, 72)
    scores = maxsim(query, buffer, offsets, counts, fmt).double()
    assert gpu_check_steps._maxsim_error(query.double(), tokens, counts, scores) <= 1.0
    for damage in (
        scores * (1 + 1e-3),
        scores.flip(0),
        torch.where(scores == -torch.inf, 0.0, scores),
        scores * torch.nan,
    ):
        assert gpu_check_steps._maxsim_error(query.double(), tokens, counts, damage) > 1.0


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16", "int8"])
def test_attention_is_judged_rightly(monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    """The CPU op is within the check's bound, and results off by a little more than rounding are
    not."""
    import espnx.ops

    right = espnx.ops.attention
    assert gpu_check_kv.attention_error(fmt, 2, 3, 64, 32, 70, "cpu") <= 1.0
    monkeypatch.setattr(
        espnx.ops,
        "attention",
        lambda *args, **options: tuple(1.01 * each for each in right(*args, **options)),
    )
    assert gpu_check_kv.attention_error(fmt, 2, 3, 64, 32, 70, "cpu") > 1.0


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_generation_is_judged_rightly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class NotHereError(Exception):
        pass

    rows: list[dict[str, object]] = []
    failures: list[str] = []
    monkeypatch.setattr(gpu_check_kv, "_NEW_TOKENS", 6)

    def check(points: list[dict[str, object]]) -> None:
        gpu_check_kv.generate_all(
            name, torch.float32, points, tmp_path, rows, failures, NotHereError, device="cpu"
        )

    check([{}, {"x_rows": 2}])
    assert failures == []
    document(rows)
    assert [row["correct"] for row in rows] == [True, True]
    check([{"format": "int8"}] if name == "llama" else [{"spill_interval": 5000}])
    assert bool(failures) == (rows[-1]["metrics"]["same_tokens"] < 1.0)  # type: ignore[index]


def test_rankings_are_judged_rightly() -> None:
    def hits(*pairs: tuple[str, float]) -> list[SimpleNamespace]:
        return [SimpleNamespace(id=name, score=score) for name, score in pairs]

    expected = hits(("a", 9.0), ("b", 8.0), ("c", 8.0), ("d", 5.0))
    judge = gpu_check_steps._ranking_problem
    assert (
        judge(0, expected, hits(("a", 9.0), ("c", 8.00001), ("b", 8.0), ("e", 5.0))) == []
    )  # ties may change places, and the last its name
    assert judge(0, expected, hits(("a", 9.0), ("b", 8.0), ("x", 8.0), ("d", 5.0)))
    assert judge(0, expected, hits(("a", 9.0), ("b", 8.5), ("c", 8.0), ("d", 5.0)))
    assert judge(0, expected, expected[:3])
    assert judge(0, [], []) == []
