"""The programs that are compared: the Python that runs each, its processes, and the rows of what
they answered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from espnx.errors import InvalidInputError

from ..harness.result import Row
from ..harness.runner import interquartile_range
from ..report.render import source_root

#: System -> the environment that runs it; those that are missing here run in this Python.
ENVIRONMENTS = {
    "fast-plaid": "fast-plaid", "pylate-plaid": "pylate", "quanto-4": "kv", "quanto-8": "kv",
    "hqq-8": "kv", "offloaded": "kv", "accelerate-disk": "kv", "llama-cpp": "llama-cpp",
}  # fmt: skip

#: What a program is asked to do -> what it did not finish where its time ran out.
PHASES = {
    "build": "building",
    "search": "searching",
    "decode": "decoding",
    "keep": "keeping a context",
    "resume": "resuming",
}


def chosen(args: Namespace, systems: Sequence[str]) -> list[str]:
    """Those that were asked for. Raises InvalidInputError for a name that is none of them."""
    asked = args.system.split(",") if args.system else list(systems)
    if unknown := set(asked) - set(systems):
        raise InvalidInputError(
            "--system", got=", ".join(sorted(unknown)), expected=", ".join(systems)
        )
    return [name for name in systems if name in asked]


def ask(
    program: str,
    environments: Path,
    job: Mapping[str, Any],
    scratch: Path,
    *,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """What a process of ``scripts/head_to_head/PROGRAM.py`` answers, or ``why`` there is no answer;
    both where its time ended amid it.

    Args:
        job: with its ``system``, and what it is asked to ``do``, one of `PHASES`.
        limit_s: after which the process is ended, and all that it started.
    """
    name = ENVIRONMENTS.get(job["system"])
    python = Path(sys.executable) if name is None else environments / name / "bin" / "python"
    if not python.exists():
        return {"why": f"not installed: no environment {name!r}"}
    out, log = scratch / "answer.json", scratch / "log"
    out.unlink(missing_ok=True)
    root = source_root()
    command = [str(python), str(root / "scripts" / "head_to_head" / f"{program}.py")]
    own = {"PYTHONPATH": str(root) if name is None else "", "TQDM_DISABLE": "1"}
    try:
        with log.open("w") as said:
            code = _run(
                command, json.dumps({**job, "out": str(out)}), said, {**os.environ, **own}, limit_s
            )
    except subprocess.TimeoutExpired:
        so_far: dict[str, Any] = (
            json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
        )
        return {**so_far, "why": f"did not finish {PHASES[job['do']]} in {limit_s:g} s"}
    if code or not out.is_file():
        return {
            "why": (
                f"exit code {code}: "
                f"{(log.read_text(errors='replace').strip().splitlines() or [''])[-1]}"
            )
        }
    answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return answer


def _run(
    command: Sequence[str],
    text: str,
    said: IO[str],
    environment: Mapping[str, str],
    limit_s: float | None,
) -> int:
    """The exit code. Whatever ends the wait ends the process, and those that it started: they would
    disturb what is measured next. Raises TimeoutExpired."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        text=True,
        stdout=said,
        stderr=said,
        env=environment,
        start_new_session=True,
    )
    try:
        process.communicate(text, timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the usual end: nobody of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def row_of(
    params: Mapping[str, Any],
    system: str,
    answer: Mapping[str, Any],
    metrics: Mapping[str, float],
    *,
    correct: bool = True,
) -> Row:
    """The row of an answer: ``seconds``, ``path`` and ``moved_bytes``, or a ``why``."""
    seconds = [] if "why" in answer else answer["seconds"]
    path = answer.get("path", "none")
    is_cold = path.startswith(("uring", "posix")) and "buffered" not in path
    return Row(
        case="head-to-head",
        params={**params, "version": answer.get("version"), "why": answer.get("why")},
        system=system,
        kind="measured",
        requested_path=path,
        effective_path=path,
        cache="cold" if is_cold else "warm",
        n=len(seconds),
        median_s=statistics.median(seconds) if seconds else None,
        p99_s=float(np.percentile(seconds, 99)) if seconds else None,
        iqr_s=interquartile_range(seconds) if seconds else None,
        bytes_asked=0,
        bytes_moved=int(answer.get("moved_bytes", 0)),
        correct=correct,
        metrics=dict(metrics),
    )


def shown(row: Row) -> str:
    """A row for the terminal."""
    return (
        f"  {row.system}: {row.params['why']}"
        if row.median_s is None
        else f"  {row.system}: {1e3 * row.median_s:.2f} ms"
    )
