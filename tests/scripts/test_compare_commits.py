"""scripts/compare_commits.sh: the statistics on times whose ratio is known, and two commits with a
trivial command."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.retrieval.common import DIM, build, corpus

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import compare_commits  # noqa: E402
from compare_commits import Side, compare, measure, points, shared_keys, summary  # noqa: E402


def row(system: str, median_s: float | None, correct: bool = True, **params: Any) -> dict[str, Any]:
    return {"system": system, "params": params, "median_s": median_s, "correct": correct}


def test_a_drift_that_both_sides_share_cancels() -> None:
    drift = np.exp(np.random.default_rng(1).normal(0, 1, 30))
    found = compare(list(drift), list(1.25 * drift), seed=1)
    assert found == pytest.approx((1.25, 1.25, 1.25))


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """400 comparisons of 30 pairs with a ratio of 1.1 and noise of 5 %: 95 % of them would be 380,
    with a standard deviation of 4.4, and a percentile bootstrap of 30 values holds it about 2 %
    less often. Five standard deviations below that are 350."""
    rng, held = np.random.default_rng(2), 0
    for seed in range(400):
        found = compare(
            list(rng.lognormal(0, 0.035, 30)), list(1.1 * rng.lognormal(0, 0.035, 30)), seed
        )
        held += found.low <= 1.1 <= found.high
    assert 350 <= held < 400


def test_points_meet_by_the_parameters_that_both_sides_know() -> None:
    before = [
        row("espnx", 1.0, batch=1, rerank=None, old="x"),
        row("espnx", 2.0, batch=2, rerank=None, old="x"),
    ]
    after = [row("espnx", 3.0, batch=1, rerank=None), row("mmap", 4.0, batch=1, rerank=None)]
    shared = shared_keys([before, after])
    assert shared == {"batch", "rerank"}
    times = {"a": [points(before, shared)], "b": [points(after, shared)]}
    entries, missing = summary(times, seed=1)
    assert [(entry["point"], entry["a_s"], entry["b_s"]) for entry in entries] == [
        ("espnx batch=1", [1.0], [3.0])
    ]
    assert missing == ["espnx batch=2", "mmap batch=1"]


@pytest.mark.parametrize("wrong", [row("espnx", None), row("espnx", 1.0, correct=False)])
def test_wrong_results_are_not_compared(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wrong or without a time: espnx"):
        points([wrong], set())


def test_every_side_runs_once_a_turn_in_shuffled_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(Side, "run", lambda self: ran.append(self.folder.name) or float(len(ran)))
    sides = {name: Side(tmp_path / name, [], False) for name in "abs"}
    found = measure(sides, 20, random.Random(1))
    turns = [tuple(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert len(turns) == 21
    assert {frozenset(turn) for turn in turns} == {frozenset("abs")}
    assert len(set(turns)) > 3, "always in one order"
    assert [len(runs) for runs in found.values()] == [20] * 3
    assert min(turn["command"] for runs in found.values() for turn in runs) == 4.0, (
        "the first turn counts"
    )


def test_a_commit_beside_itself(tmp_path: Path) -> None:
    if (
        not (ROOT / ".git").exists()
        or shutil.which("git") is None
        or not (ROOT / ".venv" / "bin" / "python").exists()
    ):
        pytest.skip("not a clone with its own .venv")
    built = next((ROOT / "espnx").glob("_C*.so"))
    sources = [ROOT / "setup.py", *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    changed = (
        subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", "csrc", "setup.py"], cwd=ROOT
        ).returncode
        != 0
    )
    if changed or max(path.stat().st_mtime for path in sources) > built.stat().st_mtime:
        pytest.skip("the extension here is not that of HEAD, and compiling one takes minutes")
    said, result = tmp_path / "said", tmp_path / "r.json"
    code = (
        f"import espnx, os; open({str(said)!r}, 'a').write(f'{{os.path.basename(os.getcwd())}} "
        "{espnx.__file__}\\n')"
    )
    command = [
        "bash",
        "scripts/compare_commits.sh",
        "--pairs",
        "2",
        "--own-spread",
        "--bar",
        "1000",
        "--json",
        str(result),
        "HEAD",
        "HEAD",
    ]
    done = subprocess.run(
        [*command, "--", "python", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "1 points, 2 pairs: B over A" in done.stdout
    document = json.loads(result.read_text())
    assert document["commits"]["a"] == document["commits"]["b"]
    point = document["points"][0]
    assert [len(point[key]) for key in ("a_s", "b_s", "s_s")] == [2, 2, 2]
    assert point["low"] <= point["ratio"] <= point["high"]
    # Each side, once a turn, from a worktree of its own; and none is left.
    lines = [line.split(maxsplit=1) for line in said.read_text().splitlines()]
    assert sorted(side for side, _ in lines) == ["a"] * 3 + ["b"] * 3 + ["s"] * 3
    folders = {Path(file).parents[1] for _, file in lines}
    assert {folder.name for folder in folders} == {"a", "b", "s"}
    assert not any(folder.exists() for folder in folders)
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not any(str(folder) in listed for folder in folders)


def test_a_command_that_fails_ends_it(tmp_path: Path) -> None:
    side = Side(tmp_path, [sys.executable, "-c", "print('why'); raise SystemExit(3)"], False)
    with pytest.raises(SystemExit, match=r"exit code 3 in .*\nwhy"):
        side.run()
    with pytest.raises(SystemExit, match="nothing-of-that-name does not run"):
        Side(tmp_path, ["nothing-of-that-name"], False).run()


def test_a_point_above_the_bar_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Side, "run", lambda self: {"a": 1.0, "b": 1.04}[self.folder.name])
    words = [str(tmp_path), "a", "b", "--pairs", "2", "--", "--", "true"]
    assert compare_commits.main(["--bar=1.03", *words]) == 1
    assert "above 1.03: command" in capsys.readouterr().out
    assert compare_commits.main(["--bar=1.05", *words]) == 0


WORKER = """
import json, sys
for line in sys.stdin:
    turn, side = int(line), __import__("os").path.basename(__import__("os").getcwd())
    if turn == {fails_at}:
        sys.exit(3)
    found = [turn] if turn != {differs_at} else [side]
    seconds = {{"p": 1.0 + turn, "q": 2.0 if side == "b" else 1.0}}
    print(json.dumps({{"seconds": seconds, "results": found}}), flush=True)
"""


def compared_workers(folder: Path, differs_at: int = -1, fails_at: int = -1) -> dict[str, Any]:
    (folder / "worker.py").write_text(WORKER.format(differs_at=differs_at, fails_at=fails_at))
    sides = {name: folder / name for name in "ab"}
    for side in sides.values():
        side.mkdir()
    return compare_commits.measure_workers(
        sides, [sys.executable, str(folder / "worker.py")], 3, random.Random(1)
    )


def test_workers_stay_for_all_turns(tmp_path: Path) -> None:
    """The first turn is not counted."""
    entries, missing = summary(compared_workers(tmp_path), seed=1)
    assert {entry["point"]: (entry["a_s"], entry["ratio"]) for entry in entries} == {
        "p": ([2.0, 3.0, 4.0], 1.0),
        "q": ([1.0] * 3, 2.0),
    }
    assert missing == []


def test_workers_are_started_anew(tmp_path: Path) -> None:
    """Each process has a first turn that is not counted, and is drawn as a whole."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(differs_at=-1, fails_at=-1))
    sides = {name: tmp_path / name for name in "ab"}
    for side in sides.values():
        side.mkdir()
    times = compare_commits.measure_workers(
        sides, [sys.executable, str(worker)], 4, random.Random(1), processes=2
    )
    assert [turn["p"] for turn in times["a"]] == [2.0, 3.0, 4.0, 5.0]
    pairs = compare([1.0] * 6, [1.0, 4.0] * 3, seed=1)
    processes = compare([1.0] * 6, [1.0, 4.0] * 3, seed=1, processes=3)
    assert processes.low == pytest.approx(2.0) == processes.high
    assert pairs.low < 1.5
    assert pairs.ratio == pytest.approx(2.0) == processes.ratio


@pytest.mark.parametrize("words", ["--processes=1 -- --worker x", "--processes=2 -- kv"])
def test_processes_are_of_workers(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_commits.main(["work", "a", "b", "--pairs=4", *words.split()])
    assert "--processes: at least 2, of a --worker" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare_commits.main(
            ["work", "a", "b", "--pairs=5", "--processes=2", "--", "--worker", "x"]
        )
    assert "a multiple of --processes" in capsys.readouterr().err


def test_workers_that_find_other_results_or_end(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "end").mkdir()
    with pytest.raises(SystemExit, match="different results in turn 2"):
        compared_workers(tmp_path / "other", differs_at=2)
    with pytest.raises(SystemExit, match=r"the worker of . gave no answer in turn 1"):
        compared_workers(tmp_path / "end", fails_at=1)


def test_searches_of_a_store_beside_itself(tmp_path: Path) -> None:
    """The worker that is kept, on a small store."""
    documents = corpus(60)
    build(tmp_path / "s", documents, coarse="bit1")
    vectors = [document.vectors for document in documents if document.vectors is not None]
    save_file(
        {
            "cls": torch.stack([each.cls for each in vectors[:7]]).float(),
            "tokens": torch.randn(7, 4, DIM),
        },
        tmp_path / "q.safetensors",
    )
    command = [
        sys.executable,
        str(ROOT / "scripts" / "compare_searches.py"),
        str(tmp_path / "s"),
        str(tmp_path / "q.safetensors"),
    ]
    worker = compare_commits.Worker(
        ROOT, [*command, "--callers", "2", "--per-turn", "3", "--coarse"]
    )
    try:
        first, second = worker.turn(0), worker.turn(1)
    finally:
        worker.end()
    assert set(first["seconds"]) == {
        f"{way}, {by}"
        for way in ("exact", "re-rank 64", "cascade 64")
        for by in ("1 caller", "2 callers", "batch")
    }
    assert all(seconds > 0 for seconds in first["seconds"].values())
    assert [len(hits) for hits in first["results"]["exact, batch"]] == [10] * 3
    assert (
        first["results"]["exact, batch"]
        == first["results"]["exact, 2 callers"]
        != second["results"]["exact, batch"]
    )
