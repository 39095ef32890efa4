"""A process that has imported everything and started no thread: it forks builders, which tests then kill at any moment they like.

Reads one JSON job a line from standard input and answers with one line: the process id of a new child, or the exit code of an old one.
Forking is not done from the test process itself, whose threads a child would not have.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss

import espnx
from espnx.cli import main as cli
from espnx.retrieval import build as module
from espnx.retrieval import generations, publish
from espnx.retrieval.texts import TextWriter
from espnx.storage import NativeEngine
from tests.retrieval.common import build, corpus, toy_encoder

ROOT = Path(__file__).resolve().parents[2]
OWNERS: dict[str, Any] = {
    "engine": NativeEngine,
    "texts": TextWriter,
    "build": module,
    "generations": generations,
    "publish": publish,
    "arrange": module.arrange,
    "remove": generations.shutil,
    "writer": module.SegmentWriter,
}


def killed_at(owner: Any, name: str, nth: int, after: bool) -> None:
    """This process is gone, as by kill -9, before or after the nth call of a function."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **options)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


def small_pieces() -> None:
    """Frequent checkpoints, and data files of some kilobytes."""
    whole = module.pieces
    module.CHECKPOINT_S = 0.01
    module.segment_bytes = lambda total_bytes, devices: 16_384
    module.pieces = lambda order, sizes, limit_bytes, room: whole(order, sizes, 8192, room)  # type: ignore[assignment]


def run(job: dict[str, Any]) -> int:
    faiss.omp_set_num_threads(1)
    small_pieces()
    if "at" in job:
        owner, name, nth, after = job["at"]
        killed_at(OWNERS[owner], name, nth, after)
    if "argv" in job:
        sys.stdout, sys.stderr = open(job["stdout"], "w"), open(job["stderr"], "w")  # noqa: SIM115 - until the process ends
        espnx.load_encoder = lambda name, **options: toy_encoder(job.get("delay_s", 0.0))
        code = cli.main(job["argv"])
        sys.stdout.flush()
        sys.stderr.flush()
        return code
    build(job["path"], iter(corpus(job["count"], seed=job["seed"])), replace=True, directories=job.get("directories", ()))
    return 0


def serve() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            _, status = os.waitpid(job["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = run(job)
            finally:
                os._exit(code)
        print(child, flush=True)


class Zygote:
    """The tests' end."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def _ask(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job, default=str) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, **job: Any) -> int:
        return self._ask(job)

    def wait(self, child: int) -> int:
        """Exit code, negative for a signal."""
        return self._ask({"wait": child})


@contextmanager
def zygote() -> Iterator[Zygote]:
    words = [sys.executable, "-m", "tests.retrieval.zygote"]
    with subprocess.Popen(
        words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Zygote(process)
        assert process.stdin is not None
        process.stdin.close()


if __name__ == "__main__":
    serve()
