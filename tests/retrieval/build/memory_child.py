"""Builds more records than the budget has room for, and says what the process really took: a job of
zygote.py, for test_memory.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import espnx
from espnx.retrieval.build.budget import resident_bytes
from tests.retrieval.common import corpus

D_CLS, DIM = 32, 128


def documents(count: int, mean_tokens: int) -> Iterator[espnx.Document]:
    """Vectors cut from one random block, copied so that each document owns its own; one in a
    thousand is as long as a document can be."""
    rng = np.random.default_rng(0)
    block = torch.from_numpy(rng.normal(size=(70_000, DIM)).astype(np.float32) / DIM**0.5)
    centres = rng.normal(size=(16, D_CLS)).astype(np.float32)
    for i in range(count):
        n_tokens = 65_535 if i % 1000 == 999 else int(rng.integers(0, 2 * mean_tokens))
        begin = int(rng.integers(0, len(block) - n_tokens + 1))
        cls = torch.from_numpy(centres[i % 16] + 0.3 * rng.normal(size=D_CLS).astype(np.float32))
        yield espnx.Document(
            i, f"text {i}", espnx.Encoded(cls, block[begin : begin + n_tokens].clone())
        )


def whole_bytes() -> int:
    """Memory of this process that is in RAM now, pages of files too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def measured(
    path: str, result: str, room_mib: int, count: int, mean_tokens: int, pca: int | None
) -> int:
    """Writes to `result`, as JSON, what a build with so much room took."""
    # what the libraries themselves take, once
    espnx.build(f"{path}/warm", corpus(100), dims=(16, 8), nlist=4)
    base = resident_bytes()
    of_files = whole_bytes() - base
    # the corpus's own block is the generator's affair
    budget = base + (room_mib << 20) + 70_000 * DIM * 4
    Path("/proc/self/clear_refs").write_text("5")
    report = espnx.build(
        f"{path}/s", documents(count, mean_tokens), dims=(D_CLS, DIM), memory=budget, pca=pca
    )
    peak = peak_bytes() - of_files
    with espnx.open(f"{path}/s") as index:
        verified = index.store.verify()
    seen = {
        "base": base,
        "budget": budget,
        "peak": peak,
        "records": report.record_bytes,
        "verified": verified,
    }
    Path(result).write_text(json.dumps(seen))
    return 0
