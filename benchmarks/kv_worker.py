"""One system of the KV benchmark in a process of its own: commands and answers are lines of JSON on stdin and stdout.

    python -m espnx.benchmarks.kv_worker [--procs FILE]

With ``--procs`` the process first puts itself into a control group. Answers have ``error`` where a command failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
from pathlib import Path
from typing import TextIO


def main() -> int:
    parser = argparse.ArgumentParser(description="A process of the KV benchmark; see the module.")
    parser.add_argument("--procs", help="the cgroup.procs file of the group to join")
    args = parser.parse_args()
    if args.procs:
        Path(args.procs).write_text(str(os.getpid()))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Whatever prints goes to stderr: stdout carries the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with out:
        serve(sys.stdin, out)
    return 0


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answers commands until there are none."""
    from espnx.errors import EspnxError

    from .kv_session import Session

    with contextlib.closing(Session()) as session:
        for line in commands:
            gc.collect()  # outside the measured time
            try:
                answer = session.handle(json.loads(line))
            except (EspnxError, OSError, MemoryError, RuntimeError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    raise SystemExit(main())
