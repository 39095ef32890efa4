"""One system of a benchmark in a process of its own: commands and answers are lines of JSON on
stdin and stdout.

    python -m espnx.benchmarks.harness.worker retrieval|kv|graph|postings [--procs FILE]

With ``--procs`` the process first puts itself into a control group. Answers have ``error`` where a
command failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from espnx.errors import EspnxError

_FAILURES = (EspnxError, OSError, MemoryError)
#: Session -> what is answered as an error; anything else ends the process. A model raises
#: RuntimeError where memory is short.
SESSIONS: Mapping[str, tuple[type[Exception], ...]] = {
    "retrieval": _FAILURES,
    "kv": (*_FAILURES, RuntimeError),
    "graph": _FAILURES,
    "postings": _FAILURES,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="A process of a benchmark; see the module.")
    parser.add_argument("session", choices=SESSIONS, help="the benchmark")
    parser.add_argument("--procs", help="the cgroup.procs file of the group to join")
    args = parser.parse_args()
    if args.procs:
        Path(args.procs).write_text(str(os.getpid()))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Whatever prints goes to stderr: stdout carries the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with out:
        serve(args.session, sys.stdin, out)
    return 0


def serve(name: str, commands: TextIO, answers: TextIO) -> None:
    """Answers commands until there are none. `name`: one of `SESSIONS`; nothing that only another
    needs is imported."""
    opened: Any = importlib.import_module(f"espnx.benchmarks.{name}.session").Session()
    with contextlib.closing(opened) as session:
        for line in commands:
            gc.collect()  # outside the measured time
            try:
                answer = session.handle(json.loads(line))
            except SESSIONS[name] as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    raise SystemExit(main())
