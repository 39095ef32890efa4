"""One index of token vectors is built, or opened and searched: a process of `espnx bench
head-to-head`, in the environment of the program that is measured.

The job is JSON on standard input: what to `do` (build or search), the `system`, the folder of
`vectors` (tokens.npy, counts.npy, queries.npy, query_counts.npy), the folder of the `index`, `k`,
`pooling` of espnx's first stage, and the file `out` for what happened.
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
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

Job = dict[str, Any]
WARM_UP = 5  # queries that are asked before the first one that is measured
CORES = len(os.sched_getaffinity(0))


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


def parts(folder: str, tokens: str, counts: str) -> Iterator[torch.Tensor]:
    """float32 [n, dim], one after the other; the file is mapped."""
    rows, ends = (
        np.load(f"{folder}/{tokens}.npy", mmap_mode="r"),
        np.cumsum(np.load(f"{folder}/{counts}.npy")),
    )
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        yield torch.from_numpy(rows[begin:end].astype(np.float32))


class Espnx:
    """Records on the SSD, read past the page cache; the first stage, made of the same token
    vectors, in memory."""

    package = "espnx"
    efforts = (
        {"candidates": 50},
        {"candidates": 100},
        {"candidates": 250},
        {"candidates": 1000},
        {"candidates": 4000},
    )

    def __init__(self, job: Job):
        import espnx

        self.espnx, self.job = espnx, job
        self.format = "residual4" if job["system"] == "espnx-residual4" else "fp16"

    def encoded(self, tokens: torch.Tensor) -> Any:
        return self.espnx.Encoded(torch.zeros(0), tokens)

    def build(self) -> None:
        texts = parts(self.job["vectors"], "tokens", "counts")
        documents = (
            self.espnx.Document(number, "", self.encoded(tokens))
            for number, tokens in enumerate(texts)
        )
        dims = (0, np.load(f"{self.job['vectors']}/tokens.npy", mmap_mode="r").shape[1])
        self.espnx.build(
            self.job["index"],
            documents,
            dims=dims,
            format=self.format,
            pooling=self.job["pooling"],
            replace=True,
        )

    def open(self) -> None:
        self.index = self.espnx.open(self.job["index"])

    def search(self, tokens: torch.Tensor, effort: dict[str, int]) -> list[int]:
        self.found = self.index.search(self.encoded(tokens), k=self.job["k"], **effort)
        return [int(hit.id) for hit in self.found.hits]

    def search_all(self, queries: list[torch.Tensor], effort: dict[str, int]) -> list[list[int]]:
        found = self.index.search(
            [self.encoded(tokens) for tokens in queries], k=self.job["k"], **effort
        )
        return [[int(hit.id) for hit in each.hits] for each in found]

    def describe(self) -> dict[str, Any]:
        return {"path": self.found.effective_path, "moved_bytes": self.found.bytes_moved}


class FastPlaid:
    """fast-plaid by its own interface. Of the documents that its probes name, the quarter of
    `n_full_scores` with the best centroids are scored in full: most of its time on a CPU, where
    torch has few fast operations on half floats. So its efforts begin low."""

    package = "fast-plaid"
    efforts = tuple(
        {"n_ivf_probe": probes, "n_full_scores": scores}
        for probes, scores in (
            (2, 128),
            (4, 256),
            (4, 512),
            (8, 1024),
            (16, 1024),
            (8, 4096),
            (16, 4096),
            (32, 8192),
        )
    )
    # Its own choice is the largest batch, made for a GPU: on a CPU that is memory which the kernel
    # hands out anew for every query.
    options = tuple(
        {"threads": threads, "batch_size": size}
        for threads in sorted({1, CORES})
        for size in (1 << 18, 2048, 256, 32)
    )

    def __init__(self, job: Job):
        self.job = job
        self.batch_size = self.options[0]["batch_size"]

    def use(self, threads: int, batch_size: int) -> None:
        torch.set_num_threads(threads)
        self.batch_size = batch_size

    def build(self) -> None:
        from fast_plaid import search

        documents = list(parts(self.job["vectors"], "tokens", "counts"))
        search.FastPlaid(index=self.job["index"], device="cpu").create(
            documents_embeddings=documents, nbits=4
        )

    def open(self) -> None:
        from fast_plaid import search

        self.index = search.FastPlaid(index=self.job["index"], device="cpu")

    def search(self, tokens: torch.Tensor, effort: dict[str, int]) -> list[int]:
        return self.search_all([tokens], effort)[0]

    def search_all(self, queries: list[torch.Tensor], effort: dict[str, int]) -> list[list[int]]:
        found = self.index.search(
            queries, top_k=self.job["k"], show_progress=False, batch_size=self.batch_size, **effort
        )
        return [[int(number) for number, _ in each] for each in found]

    def describe(self) -> dict[str, Any]:
        return {"path": "mmap", "moved_bytes": 0}


class PyLate(FastPlaid):
    """PyLate's PLAID, over the fast-plaid that it pins."""

    package = "pylate"

    def _plaid(self, **options: Any) -> Any:
        from pylate import indexes

        where = Path(self.job["index"])
        return indexes.PLAID(
            index_folder=str(where.parent),
            index_name=where.name,
            nbits=4,
            device="cpu",
            show_progress=False,
            **options,
        )

    def build(self) -> None:
        documents = [tokens.numpy() for tokens in parts(self.job["vectors"], "tokens", "counts")]
        self._plaid(override=True).add_documents(
            [str(number) for number in range(len(documents))], documents
        )

    def open(self) -> None:
        self.opened: dict[str, int] = {}

    def search_all(self, queries: list[torch.Tensor], effort: dict[str, int]) -> list[list[int]]:
        from pylate import retrieve

        wanted = {**effort, "batch_size": self.batch_size}
        if wanted != self.opened:
            self.retriever, self.opened = retrieve.ColBERT(index=self._plaid(**wanted)), wanted
        found = self.retriever.retrieve(
            queries_embeddings=[tokens.numpy() for tokens in queries], k=self.job["k"], device="cpu"
        )
        return [[int(hit["id"]) for hit in each] for each in found]


class Exact:
    """Every document scored with torch, all vectors in memory: what recall is measured against."""

    package = "torch"
    efforts = ({"documents": "all"},)

    def __init__(self, job: Job):
        self.job = job

    def build(self) -> None:
        pass

    def open(self) -> None:
        self.rows = torch.from_numpy(
            np.load(f"{self.job['vectors']}/tokens.npy").astype(np.float32)
        )
        counts = np.load(f"{self.job['vectors']}/counts.npy")
        self.begins = np.cumsum(counts) - counts

    def search(self, tokens: torch.Tensor, effort: dict[str, str]) -> list[int]:
        best = np.maximum.reduceat((self.rows @ tokens.T).numpy(), self.begins, axis=0)
        return torch.from_numpy(best.sum(1)).topk(self.job["k"]).indices.tolist()

    def search_all(self, queries: list[torch.Tensor], effort: dict[str, str]) -> list[list[int]]:
        return [self.search(tokens, effort) for tokens in queries]

    def describe(self) -> dict[str, Any]:
        return {"path": "memory", "moved_bytes": 0}


SYSTEMS = {
    "espnx": Espnx,
    "espnx-residual4": Espnx,
    "fast-plaid": FastPlaid,
    "pylate-plaid": PyLate,
    "exact": Exact,
}


def build(system: Any, job: Job) -> dict[str, Any]:
    begun = time.perf_counter()
    system.build()
    size = (
        sum(512 * path.stat().st_blocks for path in Path(job["index"]).rglob("*") if path.is_file())
        if Path(job["index"]).exists()
        else 0
    )
    return {"build_s": time.perf_counter() - begun, "index_bytes": size}


def fastest(system: Any, queries: list[torch.Tensor]) -> dict[str, int]:
    """Which of its options answer the first queries soonest, and they are in use. Nothing where it
    has none."""
    effort, taken = system.efforts[len(system.efforts) // 2], list[float]()
    for options in getattr(system, "options", ()):
        system.use(**options)
        system.search(queries[0], effort)
        begun = time.perf_counter()
        for tokens in queries[:WARM_UP]:
            system.search(tokens, effort)
        taken.append(time.perf_counter() - begun)
    if not taken:
        return {}
    best: dict[str, int] = system.options[taken.index(min(taken))]
    system.use(**best)
    return best


def search(system: Any, job: Job) -> Iterator[dict[str, Any]]:
    """A point for each effort: each query alone, one after the other, then all in one call."""
    queries = list(parts(job["vectors"], "queries", "query_counts"))
    before = memory()
    system.open()
    options = fastest(system, queries)
    for effort in system.efforts:
        for tokens in queries[:WARM_UP]:
            system.search(tokens, effort)
        seconds, found = list[float](), list[list[int]]()
        for tokens in queries:
            begun = time.perf_counter()
            found.append(system.search(tokens, effort))
            seconds.append(time.perf_counter() - begun)
        now = memory()
        grown = {f"{kind}_bytes": max(0, now[kind] - before[kind]) for kind in now}
        point = {
            "effort": effort,
            "options": options,
            "seconds": seconds,
            "found": found,
            **grown,
            **system.describe(),
        }
        begun = time.perf_counter()
        point["found_together"] = system.search_all(queries, effort)
        yield {**point, "together_s": (time.perf_counter() - begun) / len(queries)}


def answers(job: Job) -> Iterator[dict[str, Any]]:
    """What happened so far, with every point that is added to it; or ``why`` nothing did."""
    try:
        kind = SYSTEMS[job["system"]]
        found: dict[str, Any] = {"version": metadata.version(kind.package)}
        if job["do"] == "build":
            yield {**found, **build(kind(job), job)}
            return
        points = list[dict[str, Any]]()
        for point in search(kind(job), job):
            points.append(point)
            yield {**found, "points": points}
    except Exception as error:  # whatever another program raises is what its row says
        yield {"why": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    torch.set_num_threads(CORES)
    torch.set_grad_enabled(False)
    out = Path(given["out"])
    # kept as they come: a program whose time ends has measured what it has measured
    for answer in answers(given):
        part = out.with_suffix(".part")
        part.write_text(json.dumps(answer), encoding="utf-8")
        part.replace(out)
