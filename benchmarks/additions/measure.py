"""Additions of one document each, counted: see case.py."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

import espnx

from ..harness.registry import Say
from ..harness.result import Row
from ..machine.counters import Counters, read_counters

TOKENS, DIM, D_CLS = 8, 32, 128
_SEARCHES = 50


def documents(count: int, first: int) -> Iterator[espnx.Document]:
    """Random vectors; ids from `first` on."""
    rng = np.random.default_rng(first)
    for begin in range(0, count, 1000):
        cls = rng.normal(size=(1000, D_CLS)).astype(np.float32)
        tokens = rng.normal(size=(1000, TOKENS, DIM)).astype(np.float32)
        for i in range(min(1000, count - begin)):
            vectors = espnx.Encoded(torch.from_numpy(cls[i]), torch.from_numpy(tokens[i]))
            yield espnx.Document(first + begin + i, f"text {first + begin + i}", vectors)


@contextlib.contextmanager
def _open_files(count: int) -> Iterator[None]:
    """No more than that at a time, in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def measure(path: str, docs: int, additions: int, open_files: int, say: Say) -> Row:
    """The row. Raises what the library raises; ReadError names the limit where `open_files` are too
    few."""
    store = os.path.join(path, "additions")
    if not os.path.exists(os.path.join(store, "MANIFEST.json")):
        say(f"building a store of {docs:,} documents")
        espnx.build(store, documents(docs, 0), dims=(D_CLS, DIM))
    with espnx.open(store) as index:
        before, effective_path = len(index), index.store.effective_path
    new = list(documents(additions, docs + before))
    # what an interrupted run has added
    espnx.delete(store, [document.id for document in new], missing_ok=True)
    wall_s, costs, parts = list[float](), list[Counters](), 0
    with _open_files(open_files), espnx.open(store):
        for count, document in enumerate(new, 1):
            begun, counters = time.perf_counter(), read_counters()
            parts = espnx.add(store, [document]).parts
            costs.append(read_counters() - counters)
            wall_s.append(time.perf_counter() - begun)
            if count % 100 == 0:
                say(
                    f"{count} of {additions}: {sum(each.cpu_s for each in costs):.1f} s of "
                    "processor time"
                )
    written = np.array([each.device_written_bytes or 0 for each in costs])
    cpu_s = [each.cpu_s for each in costs]
    return Row(
        case="additions",
        params={
            "docs": docs,
            "tokens": TOKENS,
            "dim": DIM,
            "d_cls": D_CLS,
            "format": "fp16",
            "additions": additions,
        },
        system="espnx",
        kind="measured",
        requested_path="auto",
        effective_path=effective_path,
        cache="warm",
        n=additions,
        median_s=float(np.median(wall_s)),
        p99_s=float(np.percentile(wall_s, 99)),
        iqr_s=float(np.subtract(*np.percentile(wall_s, (75, 25)))),
        bytes_asked=int(written.mean()),
        bytes_moved=int(written.mean()),
        correct=_found(store, new),
        metrics={
            "cpu_s": sum(cpu_s),
            "cpu_s_p50": float(np.median(cpu_s)),
            "cpu_s_p99": float(np.percentile(cpu_s, 99)),
            "written_bytes_p50": float(np.median(written)),
            "written_bytes_mean": float(written.mean()),
            "written_bytes_p99": float(np.percentile(written, 99)),
            "open_files_allowed": open_files,
            "parts": parts,
        },
    )


def _found(store: str, new: Sequence[espnx.Document]) -> bool:
    """Whether a new index has all of the documents, and a search for the vectors of some of them
    finds these."""
    with espnx.open(store) as index:
        asked = new[:: max(1, len(new) // _SEARCHES)]
        nearest = [
            index.search(each.vectors, k=1, nprobe=10**6, candidates=10**6).hits[0].id
            for each in asked
            if each.vectors
        ]
        return all(each.id in index for each in new) and nearest == [each.id for each in asked]
