"""A language model decodes, and continues a context that was read before, in one way: a process
of `espnx bench head-to-head`, in the environment of the program that is measured.

The job is JSON on standard input: what to `do` (decode, keep, resume), the `system`, `model` (a
folder of transformers), `gguf` (the file that it was made of), `prompts` (tokens), `context` (how
many of them the prompts share), `new` (tokens to generate), `runs`, `storage`, and the file `out`
for what happened.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

Job = dict[str, Any]
CACHES = {"dynamic": "transformers", "offloaded": "transformers", "accelerate-disk": "accelerate"}
CACHES |= {"quanto-4": "optimum-quanto", "quanto-8": "optimum-quanto", "hqq-8": "hqq"}


def memory() -> dict[str, int]:
    """What this process holds: allocated, and resident pages of files."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    sizes = dict(
        re.findall(r"^(Rss\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    )
    return {
        "held": 1024 * (int(sizes["RssAnon"]) + int(sizes["RssShmem"])),
        "mapped": 1024 * int(sizes["RssFile"]),
    }


class Transformers:
    """A model of transformers with one of its caches, or with espnx's."""

    def __init__(self, job: Job):
        import torch
        from transformers import AutoModelForCausalLM

        self.job, self.torch, self.system = job, torch, job["system"]
        self.is_ours = self.system.startswith("espnx")
        if self.system == "offloaded" and not torch.cuda.is_available():
            raise RuntimeError("DynamicCache(offloading=True) is for a GPU, and there is none")
        self.imported = memory()
        if self.system == "accelerate-disk":
            from accelerate import disk_offload

            self.model: Any = AutoModelForCausalLM.from_pretrained(
                job["model"], dtype=torch.float32
            )
            disk_offload(
                self.model, f"{job['storage']}/weights", execution_device=torch.device("cpu")
            )
        else:
            self.model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
        self.model.eval()
        if self.is_ours:
            import espnx

            espnx.enable_kv_cache(self.model)
        self.version = metadata.version("espnx" if self.is_ours else CACHES[self.system])

    @contextmanager
    def cache(self, name: str | None = None) -> Iterator[Any]:
        from transformers import DynamicCache, QuantizedCache

        config = self.model.config
        if self.is_ours and (name is not None or self.job["do"] == "decode"):
            import espnx

            with espnx.KVCache(
                config,
                self.job["storage"],
                name=name,
                format="int8" if self.system == "espnx-int8" else None,
            ) as cache:
                yield cache
        elif self.system.startswith("quanto"):
            yield QuantizedCache("quanto", config, nbits=int(self.system[-1]))
        elif self.system.startswith("hqq"):
            yield QuantizedCache(
                "hqq", config, nbits=int(self.system[-1]), axis_key=1, axis_value=1
            )
        else:
            yield DynamicCache(config=config, offloading=self.system == "offloaded")

    def step(self, tokens: list[int], cache: Any) -> int:
        with self.torch.no_grad():
            found = self.model(
                input_ids=self.torch.tensor([tokens]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return int(found.logits[0, -1].argmax())

    def keep(self) -> None:
        with self.cache("context") as cache:
            self.step(self.job["prompts"][0][: self.job["context"]], cache)

    @contextmanager
    def resumed(self, prompt: list[int]) -> Iterator[tuple[Any, int]]:
        with self.cache("context") as cache:
            known = cache.reuse_prefix(self.torch.tensor([prompt]))
            yield cache, known
            cache.crop(self.job["context"] - cache.get_seq_length())


class LlamaCpp:
    """llama.cpp through llama-cpp-python, with the same file of weights."""

    def __init__(self, job: Job):
        import llama_cpp
        import numpy as np

        self.job, self.np, self.lib = job, np, llama_cpp
        self.imported = memory()
        length = max(map(len, job["prompts"])) + job["new"] + 8
        threads = os.cpu_count() or 1
        self.llama = llama_cpp.Llama(
            job["gguf"], n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.version = metadata.version("llama-cpp-python")
        self.file = f"{job['storage']}/llama.state"

    @contextmanager
    def cache(self, name: str | None = None) -> Iterator[Any]:
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()
        yield None

    def step(self, tokens: list[int], cache: Any) -> int:
        self.llama.eval(tokens)
        logits = self.lib.llama_get_logits_ith(self.llama._ctx.ctx, -1)
        return int(self.np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),)).argmax())

    def keep(self) -> None:
        with self.cache():
            context = self.job["prompts"][0][: self.job["context"]]
            self.step(context, None)
            ids = (self.lib.llama_token * len(context))(*context)
            if not self.lib.llama_state_save_file(
                self.llama._ctx.ctx, self.file.encode(), ids, len(context)
            ):
                raise RuntimeError("llama_state_save_file failed")

    @contextmanager
    def resumed(self, prompt: list[int]) -> Iterator[tuple[Any, int]]:
        with self.cache():
            ids, count = (self.lib.llama_token * len(prompt))(), ctypes.c_size_t(0)
            if not self.lib.llama_state_load_file(
                self.llama._ctx.ctx, self.file.encode(), ids, len(prompt), ctypes.byref(count)
            ):
                raise RuntimeError("llama_state_load_file failed")
            if list(ids)[: count.value] != prompt[: count.value]:
                raise RuntimeError("the saved state is of another text")
            self.llama.n_tokens = count.value
            yield None, count.value


def follow(system: Any, first: int, cache: Any, new: int) -> tuple[list[int], list[float]]:
    """Greedily chosen tokens, the first included, and the seconds of each step behind it."""
    tokens, seconds = [first], list[float]()
    for _ in range(new - 1):
        begun = time.perf_counter()
        tokens.append(system.step(tokens[-1:], cache))
        seconds.append(time.perf_counter() - begun)
    return tokens, seconds


def decode(system: Any, job: Job) -> dict[str, Any]:
    loaded = memory()
    with system.cache() as cache:
        begun = time.perf_counter()
        first = system.step(job["prompts"][0], cache)
        first_s = time.perf_counter() - begun
        tokens, seconds = follow(system, first, cache, job["new"])
        now = memory()
        stats = cache.stats() if hasattr(cache, "stats") else {}
    found = {f"{kind}_bytes": now[kind] - system.imported[kind] for kind in now}
    found |= {
        "cache_bytes": now["held"] - loaded["held"],
        "first_s": first_s,
        "seconds": seconds,
        "tokens": tokens,
    }
    return found | {
        "path": stats.get("effective_path", "memory"),
        "moved_bytes": stats.get("bytes_moved", 0),
    }


def keep(system: Any, job: Job) -> dict[str, Any]:
    system.keep()
    return {}


def resume(system: Any, job: Job) -> dict[str, Any]:
    """The second prompt recomputed and resumed, in turn."""
    prompt, anew, resumed, is_same, known = job["prompts"][1], list[float](), list[float](), True, 0
    for _ in range(job["runs"]):
        begun = time.perf_counter()
        with system.cache() as cache:
            first = system.step(prompt, cache)
            anew.append(time.perf_counter() - begun)
            expected, _ = follow(system, first, cache, job["new"])
        begun = time.perf_counter()
        with system.resumed(prompt) as (cache, kept):
            first = system.step(prompt[kept:], cache)
            resumed.append(time.perf_counter() - begun)
            is_same, known = (
                follow(system, first, cache, job["new"])[0] == expected and is_same,
                kept,
            )
    return {
        "seconds": resumed,
        "anew": anew,
        "is_same": is_same,
        "known": known,
        "kept_bytes": folder_bytes(job["storage"]),
    }


def folder_bytes(folder: str) -> int:
    return sum(512 * path.stat().st_blocks for path in Path(folder).rglob("*") if path.is_file())


def answer(job: Job) -> dict[str, Any]:
    """What happened, or ``why`` nothing did."""
    try:
        system = (LlamaCpp if job["system"] == "llama-cpp" else Transformers)(job)
        found = {"keep": keep, "decode": decode, "resume": resume}[job["do"]](system, job)
        return {**found, "version": system.version}
    except Exception as error:  # whatever another program raises is what its row says
        return {"why": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    Path(given["out"]).write_text(json.dumps(answer(given)), encoding="utf-8")
