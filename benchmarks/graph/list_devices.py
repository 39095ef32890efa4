"""Distances of lists in the thesis' mixes of sizes through devices: this machine's SSD, and COSMOS+
emulated without processing elements, with ones that are set up after one another, and with ones
that are set up ahead (Sung, 2025, chapters 3 and 4).

Emulated times are those of the device alone: what its bandwidths and pages say, whatever the host
takes. How long a command's set-up takes is not published, so the bubbles between commands, which
part the two kinds of elements, are in the predictions of a time model (``espnx simulate --system
cosmos``), and not here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import espnx
from espnx.device.clusters import (
    SsdClusterDevice,
    nearest_by_command,
    nearest_by_read,
    open_clusters,
    write_clusters,
)
from espnx.device.emulation.device import EmulatedDevice
from espnx.device.vectors.interface import ClusterDevice

from ..harness.cells import metric, number
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import interquartile_range
from .data import lists_by_mix

DIM, K = 128, 10
#: Algorithm 2, a command for each list, and algorithm 1, which reads them.
COMMAND, READ = "ssd-command", "ssd-read"
EMULATED = ("cosmos-conventional", "cosmos-sync-pe", "cosmos-async-pe")
SYSTEMS = (COMMAND, READ, *EMULATED)
THREADS = (1, 2, 4, 8, 16, 32)

Find = Callable[[torch.Tensor, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class DevicesPlan:
    """Attributes: path: of a directory. mixes: of `LIST_MIXES`. n_lists: of each. n_queries,
    per_query: asked one after another, and lists of each, drawn at random. threads: of the host.
    pairs: passes that are timed on this machine's SSD."""

    path: Path
    mixes: Sequence[str]
    n_lists: int
    n_queries: int
    per_query: int
    threads: Sequence[int]
    pairs: int
    seed: int


@dataclass(frozen=True, eq=False)
class Asked:
    """Queries, uint8 [q, dim], the lists of each, int64 [q, m], and what is right: ids int64
    [q, k], the nearest first, ties by id."""

    queries: torch.Tensor
    lists: np.ndarray
    nearest: np.ndarray


def measure_devices(plan: DevicesPlan, say: Say) -> list[Row]:
    """A row for each mix, system and number of threads; each finds what a search of the vectors in
    memory does, or has no time."""
    found = list[Row]()
    for mix in plan.mixes:
        with tempfile.TemporaryDirectory(prefix="espnx-bench-lists-", dir=plan.path) as folder:
            asked = _write(plan, mix, Path(folder))
            for system in SYSTEMS:
                found += [
                    _row(plan, mix, system, threads, folder, asked) for threads in plan.threads
                ]
                say(f"{mix}, {system}: {found[-1].metrics.get('commands_per_s', 0):.0f} lists/s")
    return found


def _write(plan: DevicesPlan, mix: str, folder: Path) -> Asked:
    vectors, list_of, queries = lists_by_mix(mix, plan.n_lists, plan.n_queries, plan.seed, DIM)
    write_clusters(folder / "lists", np.arange(len(vectors), dtype=np.int32), vectors, list_of)
    rng = np.random.default_rng(plan.seed + 1)
    m = min(plan.per_query, plan.n_lists)
    lists = np.stack([rng.permutation(plan.n_lists)[:m] for _ in queries])
    nearest = []
    for query, some in zip(queries, lists, strict=True):
        ids = np.flatnonzero(np.isin(list_of, some))
        far = np.square(vectors[ids].astype(np.int64) - query.astype(np.int64)).sum(axis=1)
        nearest.append(ids[np.lexsort((ids, far))[:K]])
    return Asked(torch.from_numpy(queries), lists, np.array(nearest))


def _row(plan: DevicesPlan, mix: str, system: str, threads: int, folder: str, asked: Asked) -> Row:
    with ExitStack() as stack:
        now = time.perf_counter
        flash_bytes: Callable[[], float]
        if system in EMULATED:
            device = espnx.device.open(system, folder, stretch=0)
            assert isinstance(device, EmulatedDevice)
            stack.callback(device.close)
            clusters = device.open_clusters(Path(folder) / "lists")
            stack.callback(clusters.close)
            find: Find = partial(_find_by_command, clusters)
            now, passes = device.topology.now, 1
            flash_bytes = partial(_flash_bytes, device)
        else:
            plain = stack.enter_context(open_clusters(Path(folder) / "lists"))
            find = partial(_find_plain, plain, system)
            passes = plan.pairs
            flash_bytes = partial(_read_bytes, plain)
        first = _pass(find, asked, threads)
        is_correct = np.array_equal(first, asked.nearest)
        seconds, before = list[float](), flash_bytes()
        for _ in range(passes if is_correct else 0):
            begun = now()
            _pass(find, asked, threads)
            seconds.append(now() - begun)
        moved = round((flash_bytes() - before) / max(1, len(seconds)))
        path = "emulated" if system in EMULATED else plain.path_report()[0].effective_path
    params: dict[str, Any] = {
        "show": "list-devices",
        "mix": mix,
        "n_lists": plan.n_lists,
        "queries": plan.n_queries,
        "lists": int(asked.lists.shape[1]),
        "threads": threads,
        "k": K,
    }
    kind = "emulated" if system in EMULATED else "measured"
    return _timed(params, system, kind, path, seconds, moved, asked, is_correct=is_correct)


def _find_by_command(
    device: ClusterDevice, query: torch.Tensor, lists: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    return nearest_by_command(device, query, lists, K, threads=threads)


def _find_plain(
    device: SsdClusterDevice, system: str, query: torch.Tensor, lists: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    if system == COMMAND:
        return _find_by_command(device, query, lists, threads)
    return nearest_by_read(device, query, lists, K, threads=threads)


def _read_bytes(device: SsdClusterDevice) -> float:
    return float(device.engine.stats().bytes_moved)


def _flash_bytes(device: EmulatedDevice) -> float:
    return sum(
        use.amount for link, use in device.topology.traffic().items() if link.endswith("flash read")
    )


def _pass(find: Find, asked: Asked, threads: int) -> np.ndarray:
    return np.array(
        [
            find(query, lists, threads)[0]
            for query, lists in zip(asked.queries, asked.lists, strict=True)
        ]
    )


def _timed(
    params: dict[str, Any],
    system: str,
    kind: str,
    path: str,
    seconds: Sequence[float],
    moved: int,
    asked: Asked,
    *,
    is_correct: bool,
) -> Row:
    median = statistics.median(seconds) if seconds else None
    metrics = {"flash_bytes": moved / len(asked.queries)}
    if median:
        metrics["queries_per_s"] = len(asked.queries) / median
        metrics["commands_per_s"] = asked.lists.size / median
    return Row(
        case="graph",
        params=params,
        system=system,
        kind=kind,
        requested_path="auto",
        effective_path=path,
        cache="warm",
        n=len(seconds),
        median_s=median,
        p99_s=max(seconds) if seconds else None,
        iqr_s=interquartile_range(seconds) if seconds else None,
        bytes_asked=moved,
        bytes_moved=moved,
        correct=is_correct,
        metrics=metrics,
    )


def devices_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "mix", "system", "threads", "lists/s", "queries/s", "ms a pass (IQR)",
        "MiB of flash a query", "lists", "n", "correct",
    ]  # fmt: skip
    cells = [
        [
            row.params["mix"],
            row.system,
            str(row.params["threads"]),
            metric("commands_per_s", 1, 0)(row),
            metric("queries_per_s", 1, 1)(row),
            f"{number(row.median_s, 1e-3)} ({number(row.iqr_s, 1e-3)})",
            metric("flash_bytes", 2**20)(row),
            str(row.params["lists"]),
            str(row.n),
            "yes" if row.correct else "NO",
        ]
        for row in rows
    ]
    return headers, cells
