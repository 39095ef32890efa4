"""The programs that are compared: the Python that runs each, its processes, and the rows of what they answered."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from espnx.errors import InvalidInputError

from ..harness.result import Row
from ..harness.runner import interquartile_range
from ..report.render import source_root

#: System -> the environment that runs it; those that are missing here run in this Python.
ENVIRONMENTS = {
    "fast-plaid": "fast-plaid", "pylate-plaid": "pylate", "quanto-4": "kv", "quanto-8": "kv", "hqq-8": "kv", "offloaded": "kv",
    "accelerate-disk": "kv", "llama-cpp": "llama-cpp",
}  # fmt: skip


def chosen(args: Namespace, systems: Sequence[str]) -> list[str]:
    """Those that were asked for. Raises InvalidInputError for a name that is none of them."""
    asked = args.system.split(",") if args.system else list(systems)
    if unknown := set(asked) - set(systems):
        raise InvalidInputError("--system", got=", ".join(sorted(unknown)), expected=", ".join(systems))
    return [name for name in systems if name in asked]


def ask(program: str, environments: Path, job: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """What a process of ``scripts/head_to_head/PROGRAM.py`` answers, or ``why`` there is no answer. `job`: with its ``system``."""
    name = ENVIRONMENTS.get(job["system"])
    python = Path(sys.executable) if name is None else environments / name / "bin" / "python"
    if not python.exists():
        return {"why": f"not installed: no environment {name!r}"}
    out, log = scratch / "answer.json", scratch / "log"
    out.unlink(missing_ok=True)
    root = source_root()
    with log.open("w") as said:
        done = subprocess.run(
            [python, root / "scripts" / "head_to_head" / f"{program}.py"], input=json.dumps({**job, "out": str(out)}), text=True,
            stdout=said, stderr=said, env={**os.environ, "PYTHONPATH": str(root) if name is None else "", "TQDM_DISABLE": "1"},
        )  # fmt: skip
    if done.returncode or not out.is_file():
        return {"why": f"exit code {done.returncode}: {(log.read_text(errors='replace').strip().splitlines() or [''])[-1]}"}
    answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return answer


def row_of(params: Mapping[str, Any], system: str, answer: Mapping[str, Any], metrics: Mapping[str, float], *, correct: bool = True) -> Row:
    """Of an answer with ``seconds``, ``path`` and ``moved_bytes``, or of one with ``why``."""
    seconds = [] if "why" in answer else answer["seconds"]
    path = answer.get("path", "none")
    is_cold = path.startswith(("uring", "posix")) and "buffered" not in path
    return Row(
        case="head-to-head", params={**params, "version": answer.get("version"), "why": answer.get("why")}, system=system, kind="measured",
        requested_path=path, effective_path=path, cache="cold" if is_cold else "warm",
        n=len(seconds), median_s=statistics.median(seconds) if seconds else None,
        p99_s=float(np.percentile(seconds, 99)) if seconds else None, iqr_s=interquartile_range(seconds) if seconds else None,
        bytes_asked=0, bytes_moved=int(answer.get("moved_bytes", 0)), correct=correct, metrics=dict(metrics),
    )  # fmt: skip


def shown(row: Row) -> str:
    """For the terminal."""
    return f"  {row.system}: {row.params['why']}" if row.median_s is None else f"  {row.system}: {1e3 * row.median_s:.2f} ms"
