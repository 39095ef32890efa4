"""A process that has imported everything and started no thread: it forks children that keep caches, which tests then kill at any moment.

Reads one JSON job a line from standard input and answers with one line: the process id of a new child, or the exit code of an old one.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from espnx.integrations import transformers as module
from espnx.integrations.transformers import KVCache
from espnx.kv import folders, kept
from espnx.storage import NativeEngine
from tests.integrations.kv_models import enabled, expected, generate, prompt
from tests.retrieval.common import memory_folder

ROOT = Path(__file__).resolve().parents[2]
LENGTHS, NEW = [21, 20], 24
LOSSY_LENGTHS = [300, 280]  # more than a block of int8 rows
OWNERS: dict[str, Any] = {"engine": NativeEngine, "os": os, "kept": kept, "module": module, "folders": folders}


def lengths_of(lossy: str | None) -> list[int]:
    return LOSSY_LENGTHS if lossy else LENGTHS


@functools.cache
def wanted(name: str, lossy: str | None = None) -> torch.Tensor:
    """What is generated without an interruption: by the framework, or, where rows are lossy, with a cache that is not kept."""
    if lossy is None:
        return expected(name, LENGTHS, max_new_tokens=NEW)
    with tempfile.TemporaryDirectory() as folder, KVCache(enabled(name).config, folder, format=lossy, x_rows=0) as cache:
        return generate(enabled(name), prompt(LOSSY_LENGTHS), cache, max_new_tokens=NEW)


def inputs(ids: torch.Tensor, lossy: str | None = None) -> dict[str, torch.Tensor]:
    """Of the prompt and what came after it."""
    mask = torch.ones_like(ids)
    asked = prompt(lengths_of(lossy))["attention_mask"]
    mask[:, : asked.shape[1]] = asked
    return {"input_ids": ids, "attention_mask": mask}


def go_on(name: str, cache: KVCache, *, until: int = NEW, step: int = NEW, lossy: str | None = None, **options: Any) -> None:
    """Generates on from what the cache holds, up to `until` new tokens; saves after every `step`. Any other token than without an
    interruption is an error."""
    right, longest = wanted(name, lossy), max(lengths_of(lossy))
    held = cache.get_seq_length()
    if held:
        assert cache.tokens is not None
        assert torch.equal(cache.tokens[:, :held], right[:, :held]), "other tokens were kept"
    while True:
        ids = right[:, : max(held + 1, longest)]
        n = min(step, longest + until - ids.shape[1])
        if n <= 0:
            return
        got = generate(enabled(name), inputs(ids, lossy), cache, max_new_tokens=n, **options)
        assert torch.equal(got, right[:, : got.shape[1]]), f"other tokens after {held}"
        held = cache.get_seq_length()
        cache.save()


def held(name: str, storage: list[Path]) -> int:
    """Tokens that are found in a copy; from them on, all that is generated is right."""
    with memory_folder() as folder:
        again = [folder / str(number) for number in range(len(storage))]
        for path, other in zip(storage, again, strict=True):
            shutil.copytree(path, other)
        with KVCache(enabled(name).config, again, name="c", x_rows=0) as cache:
            found = cache.get_seq_length()
            go_on(name, cache)
    return found


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


def run(job: dict[str, Any]) -> int:
    name, lossy = job["model"], job.get("format")
    if "at" in job:
        owner, function, nth, after = job["at"]
        killed_at(OWNERS[owner], function, nth, after)
    options = {"x_rows": job.get("x_rows", 0), "format": lossy, "spill_interval": job.get("spill_interval")}
    with KVCache(enabled(name).config, job["storage"], name=job.get("name", "c"), **options) as cache:
        go_on(name, cache, until=job.get("until", NEW), step=job.get("step", NEW), lossy=lossy, **job.get("generate", {}))
        if "hold" in job:
            Path(job["hold"]).touch()
            time.sleep(60)
    return 0


def serve() -> None:
    torch.set_num_threads(1)
    for name in ("llama", "opt"):
        enabled(name), wanted(name)
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
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)


class Forks:
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
def forks() -> Iterator[Forks]:
    words = [sys.executable, "-m", "tests.integrations.kv_forks"]
    with subprocess.Popen(
        words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Forks(process)
        assert process.stdin is not None
        process.stdin.close()


if __name__ == "__main__":
    serve()
