"""The checks of scripts/gpu_check.sh: one process and one time limit each, all results in one JSON
file.

A check that fails, crashes or hangs is a row with ``correct: false`` and the reason in its
``params``; the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

#: Name -> limit in seconds; together with the build they stay below twenty minutes. Most of that is
#: for compiling: a kernel's variant takes one to five seconds the first time, and comes from
#: Triton's cache (TRITON_CACHE_DIR, which outlives the steps) from then on.
LIMITS_S = {
    "tests": 270,
    "memcheck": 120,
    "gds": 60,
    "maxsim": 110,
    "crc32c": 60,
    "search": 60,
    "attention": 120,
    "kv": 180,
}
OUTPUT_SHOWN = 60_000  # characters of a check that failed
OK, FAILED, NO_GPU = 0, 1, 3


def check_row(name: str, seconds: float, failures: Sequence[str]) -> dict[str, Any]:
    """The row that says whether a check passed, in the schema of `benchmarks.harness.result`."""
    passed = not failures
    return {
        "case": f"gpu-check/{name}",
        "params": {"failures": list(failures)},
        "system": "espnx",
        "kind": "measured",
        "requested_path": "none",
        "effective_path": "none",
        "cache": "warm",
        "n": 1 if passed else 0,
        "median_s": seconds if passed else None,
        "p99_s": seconds if passed else None,
        "iqr_s": 0.0 if passed else None,
        "bytes_asked": 0,
        "bytes_moved": 0,
        "correct": passed,
        "metrics": {"seconds": seconds},
        "ratio": {},
    }


def run_check(
    name: str, command: Sequence[str], results: Path, limit_s: float
) -> tuple[list[dict[str, Any]], list[str], str]:
    """Runs one check in a process group of its own, which ends with it, and with this process.

    Returns:
        Its rows, also those before it was ended; its failures (empty: it passed), and the end of
        its output.
    """
    results.unlink(missing_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        ended: str | None = "was interrupted"
        try:
            process.wait(limit_s)
            ended = None if process.returncode == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:g} s"
        finally:
            if ended is not None:
                # The whole group: pytest or a compiler of the check may have outlived it.
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")[-OUTPUT_SHOWN:]
    rows, failures, is_whole = [], [], False
    if results.exists():
        found = json.loads(results.read_text())
        rows, failures, is_whole = found["rows"], found["failures"], found["is_whole"]
    if not is_whole or (ended is not None and not failures):
        last = output.strip().splitlines()[-1] if output.strip() else "no output"
        failures.append(f"{ended or 'wrote no result'}: {last}")
    rows, problems = fitting(rows)
    failures += problems
    return [*rows, check_row(name, time.monotonic() - started, failures)], failures, output


def fitting(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows that fit the schema, and what is wrong with the others: one that does not (a figure
    that is no number, say) must not take the results of all checks with it."""
    from benchmarks.harness.result import row_problem

    problems = [row_problem(row) for row in rows]
    right = [row for row, problem in zip(rows, problems, strict=True) if problem is None]
    wrong = [
        f"a row that does not fit the schema: {problem}: {row}"
        for row, problem in zip(rows, problems, strict=True)
        if problem is not None
    ]
    return right, wrong


class Kept(list[Any]):
    """Rows or failures, which are written down as they come: a check that is ended at its limit,
    or crashes, keeps what it had found out."""

    def __init__(self, write: Callable[[], None]):
        super().__init__()
        self._write = write

    def append(self, each: Any) -> None:
        super().append(each)
        self._write()

    def extend(self, some: Iterable[Any]) -> None:
        super().extend(some)
        self._write()

    def __iadd__(self, some: Iterable[Any]) -> Self:  # type: ignore[misc]
        self.extend(some)
        return self


def run_one(name: str, work: Path, results: Path) -> int:
    """The other side of `run_check`: one check in this process."""
    import gpu_check_steps

    lock = threading.Lock()  # checks have threads

    def write(*, is_whole: bool = False) -> None:
        with lock:
            partial = results.with_suffix(".part")
            found = {"rows": rows, "failures": failures, "is_whole": is_whole}
            partial.write_text(json.dumps(found))
            partial.replace(results)

    rows, failures = Kept(write), Kept(write)
    try:
        getattr(gpu_check_steps, f"check_{name}")(work, rows, failures)
    except Exception as error:
        traceback.print_exc()
        failures.append(f"{type(error).__name__}: {error}")
    write(is_whole=True)
    return OK if not failures else FAILED


def machine_facts(work: Path) -> dict[str, Any]:
    """The machine, for the result file: what `benchmarks.harness.result` asks for, and the GPU."""
    import platform

    import torch

    from espnx.cli import host

    mount = host.mount_of(work)
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "cpu": host.cpu()["model"],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": host.memory_bytes().get("total"),
        "kernel": platform.release(),
        "disk": host.disk_of(mount.device) if mount.device else None,
        "fs": mount.file_system,
        "fio": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": device
        and {
            "name": device.name,
            "memory_bytes": device.total_memory,
            "multiprocessors": device.multi_processor_count,
        },
        "driver": _first_line(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        ),
        "nvidia_fs": Path("/proc/driver/nvidia-fs").exists(),
        "udev": Path("/run/udev").exists(),
        "build_s": float(os.environ.get("ESPNX_BUILD_S", "0")),
    }


def _first_line(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        done.stdout.strip().splitlines()[0]
        if done.returncode == 0 and done.stdout.strip()
        else None
    )


def say(text: str) -> None:
    print(f"gpu_check: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description="Checks and measures what needs a CUDA device."
    )
    parser.add_argument(
        "--out", default="gpu_check.json", help="the result file (default: gpu_check.json)"
    )
    parser.add_argument(
        "--work", help="a folder on the disk to read from (default: a temporary one)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(LIMITS_S),
        default=list(LIMITS_S),
        help="some of the checks",
    )
    parser.add_argument("--step", choices=sorted(LIMITS_S), help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.step:
        return run_one(args.step, Path(args.work), Path(args.results))

    import torch

    if not torch.cuda.is_available():
        print("gpu_check: no GPU: this torch sees no CUDA device.", file=sys.stderr)
        return NO_GPU
    out = Path(os.environ.get("ESPNX_CALLED_FROM", ""), args.out)
    if not os.access(out.parent, os.W_OK):
        parser.error(f"--out {args.out}: {out.parent} is no folder to write to")
    # a machine that is taken back asks first: checks end with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    work = Path(tempfile.mkdtemp(prefix="espnx-gpu-check-", dir=args.work))
    # or cuFile writes one into the current folder
    os.environ["CUFILE_LOGFILE_PATH"] = str(work / "cufile.log")
    try:
        return _run_all(args.only, work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_all(names: Sequence[str], work: Path, out: Path) -> int:
    from benchmarks.harness.result import make_document
    from espnx.tables import render_json

    machine = machine_facts(work)
    say(
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, torch "
        f"{machine['torch']}"
    )
    dirty = _first_line(["git", "status", "--porcelain"]) is not None
    commit = _first_line(["git", "rev-parse", "HEAD"])
    rows: list[dict[str, Any]] = []
    failed: dict[str, list[str]] = {}
    for name in names:
        results = work / f"{name}.json"
        command = [
            sys.executable,
            str(Path(__file__)),
            "--step",
            name,
            "--work",
            str(work),
            "--results",
            str(results),
        ]
        new, failures, output = run_check(name, command, results, LIMITS_S[name])
        rows += new
        say(f"{name}: {'FAILED' if failures else 'ok'} ({new[-1]['metrics']['seconds']:.1f} s)")
        for row in new[:-1]:
            figures = ", ".join(f"{key} {value:.4g}" for key, value in row["metrics"].items())
            say(f"  {row['case']} {row['params']} {row['effective_path']}: {figures}")
        if failures:
            failed[name] = failures
            for failure in failures:
                say(f"  failure: {failure}")
            print(output, file=sys.stderr)
        # After each check: a machine that is lent for a while may be gone before the last.
        document = make_document("gpu_check", commit, dirty, machine, [_row(row) for row in rows])
        out.write_text(render_json(document))
    say(f"{len(names) - len(failed)} of {len(names)} checks passed; results in {out}")
    return FAILED if failed else OK


def _row(fields: dict[str, Any]) -> Any:
    from benchmarks.harness.result import Row

    return Row(**fields)


if __name__ == "__main__":
    sys.exit(main())
