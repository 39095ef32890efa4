"""Children that keep caches, which tests kill at any moment: the jobs of tests/forks.py, and what
must be generated."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy.ctypeslib  # noqa: F401 - as what `load` imports: for all children
import torch

import espnx
from espnx.device.rows import extents
from espnx.integrations.transformers import kept as module
from espnx.integrations.transformers.cache import KVCache
from espnx.kv.draft.pages import PageTier
from espnx.kv.kept import folders
from espnx.kv.kept import state as kept
from espnx.kv.rows import LayerRows
from espnx.storage import NativeEngine
from tests.forks import command_line, killed_at, serve
from tests.integrations.transformers.child import interrupted
from tests.integrations.transformers.tiny import enabled, expected, generate, prompt
from tests.kills import watch
from tests.retrieval.common import memory_folder

LENGTHS, NEW = [21, 20], 24
LOSSY_LENGTHS = [300, 280]  # more than a block of int8 rows
OWNERS: dict[str, Any] = {
    "engine": NativeEngine,
    "os": os,
    "kept": kept,
    "module": module,
    "folders": folders,
    "tier": PageTier,
    "rows": LayerRows,
}


def lengths_of(lossy: str | None) -> list[int]:
    return LOSSY_LENGTHS if lossy else LENGTHS


@functools.cache
def wanted(name: str, lossy: str | None = None) -> torch.Tensor:
    """What is generated without an interruption: by the framework, or, where rows are lossy, with a
    cache that is not kept."""
    if lossy is None:
        return expected(name, LENGTHS, max_new_tokens=NEW)
    with (
        tempfile.TemporaryDirectory() as folder,
        KVCache(enabled(name).config, folder, format=lossy, x_rows=0) as cache,
    ):
        return generate(enabled(name), prompt(LOSSY_LENGTHS), cache, max_new_tokens=NEW)


def inputs(ids: torch.Tensor, lossy: str | None = None) -> dict[str, torch.Tensor]:
    """Of the prompt and what came after it."""
    mask = torch.ones_like(ids)
    asked = prompt(lengths_of(lossy))["attention_mask"]
    mask[:, : asked.shape[1]] = asked
    return {"input_ids": ids, "attention_mask": mask}


def go_on(
    name: str,
    cache: KVCache,
    *,
    until: int = NEW,
    step: int = NEW,
    lossy: str | None = None,
    **options: Any,
) -> None:
    """Generates on from what the cache holds, up to `until` new tokens; saves after every `step`.
    Any other token than without an interruption is an error."""
    right, longest = wanted(name, lossy), max(lengths_of(lossy))
    if cache.draft is not None:
        options |= {"custom_generate": espnx.generate, "gamma": 4}
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
        with KVCache(enabled(name).config, again, name="c") as cache:
            found = cache.get_seq_length()
            go_on(name, cache)
    return found


def run(job: dict[str, Any]) -> int:
    watch(job)
    if "argv" in job:
        return command_line(job)
    if "stalled" in job:
        return interrupted(**job)
    name, lossy = job["model"], job.get("format")
    if "at" in job:
        owner, function, nth, after = job["at"]
        killed_at(OWNERS[owner], function, nth, after)
    options = {
        "x_rows": job.get("x_rows", 0),
        "format": lossy,
        "spill_interval": job.get("spill_interval"),
        "draft": job.get("draft"),
    }
    with KVCache(
        enabled(name).config, job["storage"], name=job.get("name", "c"), **options
    ) as cache:
        go_on(
            name,
            cache,
            until=job.get("until", NEW),
            step=job.get("step", NEW),
            lossy=lossy,
            **job.get("generate", {}),
        )
        if "hold" in job:
            Path(job["hold"]).touch()
            time.sleep(60)
    return 0


PACKAGES = (
    "espnx.cli",
    "espnx.device",
    "espnx.integrations.generate",
    "espnx.integrations.transformers",
    "espnx.kv",
    "espnx.ops",
)


def jobs() -> None:
    torch.set_num_threads(1)
    extents._GROW_BYTES = 1 << 20  # see tests/conftest.py
    for name in ("llama", "opt"):
        enabled(name), wanted(name)
    serve(run)
