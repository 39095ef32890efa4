"""Searching an index that is spread over 1 to 16 emulated devices: each scores the records of
partitions of its own, and the best of all partitions are merged; beside the same disks, whose
records go to the host.

No device that was measured computes MaxSim. So what the accelerator would have to do is in
question, and two rates are tried: as many operations as HILOS's FPGA does for attention, and as
RAGX's engines would do; both are assumptions, and their rows say so by name. Partitions are drawn
at random, so that each has its share of every query's candidates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import espnx
from espnx.device.emulation.report import report
from espnx.device.model.reader import Figure
from espnx.device.model.spec import Accelerator, DeviceSpec
from espnx.device.near_storage import NearStorageDevice
from espnx.retrieval.build.documents import Document
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.search.index import Index

from ..corpora.mixtures import MIXTURES, Documents, Mixture, make_queries
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.traces import Steps
from . import emulated
from .emulated import WITHOUT, Stretches, Timed

PARTITIONS = 16
_WARM_UP = 1
_SOURCE = "{}, taken for MaxSim, which nobody has measured on such a device"


def _flops(gflops: float, model: str) -> Figure:
    return Figure(gflops * 1e9, gflops, "GFLOPS", _SOURCE.format(model), "assumed")


#: What the devices' accelerators do in a second; None: there are none, and records go to the host.
SYSTEMS = {
    WITHOUT: None,
    "maxsim-56": _flops(56.3, "HILOS table 3, its widest attention kernel"),
    "maxsim-2048": _flops(2048, "RAGX table 2, its 32 x 32 engines at 1 GHz"),
}

Hits = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Work:
    """Attributes: path: of the partitions. spec: of the devices. documents: in all partitions
    together. batch: queries of a search. candidates: of a query, in all partitions together.
    searches: that are timed. record: a folder for traces."""

    path: Path
    spec: DeviceSpec
    documents: int
    batch: int
    candidates: int
    searches: int
    k: int
    seed: int
    record: Path | None = None


@dataclass(frozen=True)
class _Run:
    """Attributes: hits: of each query of the timed searches, (id, score), the best first."""

    timed: Timed
    hits: Hits
    effective_path: str


def measure(
    work: Work, counts: Sequence[int], systems: Sequence[str], stretches: Stretches, say: Say
) -> list[Row]:
    """Rows of every system with every number of devices. Raises TimesNotValidError where no stretch
    makes the times the devices'."""
    corpus = Mixture("B", work.documents, MIXTURES["B"], work.seed)
    queries = make_queries(corpus, work.batch * (_WARM_UP + work.searches), work.seed + 1)
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="espnx-bench-search-", dir=work.path) as folder:
        say(f"building {PARTITIONS} partitions of {work.documents:,} documents")
        partitions = _build(corpus, Path(folder))
        wanted = _hits_of_plain(work, partitions, queries)
        for count in counts:
            baseline: Timed | None = None
            for name in systems:
                run = stretches.settled(
                    name, count, partial(_run, work, partitions, queries, count, name)
                )
                say(
                    f"{count} devices, {name}: {run.timed.median_s * 1e3:.3f} virtual ms a search, "
                    f"{run.timed.bound_s * 1e3:.3f} by {run.timed.bound_by} alone; stretch "
                    f"{run.timed.report.stretch:.3g}, host {run.timed.report.host_share:.0%}"
                )
                baseline = run.timed if name == WITHOUT else baseline
                rows.append(_row(work, count, name, run, baseline, is_correct=run.hits == wanted))
    return rows


def _build(corpus: Mixture, folder: Path) -> list[Path]:
    """Stores, each with every sixteenth document of the corpus, whose topics come in random
    order."""
    parts: list[list[Document]] = [[] for _ in range(PARTITIONS)]
    for number, document in enumerate(Documents(corpus)):
        parts[number % PARTITIONS].append(document)
    stores = [folder / f"partition-{number:02}" for number in range(PARTITIONS)]
    for store, documents in zip(stores, parts, strict=True):
        espnx.build(store, documents, dims=(corpus.d_cls, corpus.dim))
    return stores


def with_maxsim(spec: DeviceSpec, rate: Figure | None) -> DeviceSpec:
    """The same disk, whose accelerator computes MaxSim at that rate and nothing else; None: the
    disk alone."""
    return replace(spec, accelerator=None if rate is None else Accelerator(("maxsim",), peak=rate))


def _hits_of_plain(work: Work, partitions: Sequence[Path], queries: Sequence[Encoded]) -> Hits:
    """The hits of the timed searches, on this machine's disk without emulation, one partition after
    the other."""
    with ExitStack() as opened:
        indexes = [opened.enter_context(espnx.open(each, None)) for each in partitions]
        found = [
            _merged(work, [_asked(work, index, some) for index in indexes])
            for some in _batches(work, queries)
        ]
    return [hits for each in found[_WARM_UP:] for hits in each]


def _batches(work: Work, queries: Sequence[Encoded]) -> list[Sequence[Encoded]]:
    return [queries[begin : begin + work.batch] for begin in range(0, len(queries), work.batch)]


def _asked(work: Work, index: Index, queries: Sequence[Encoded]) -> Hits:
    """The best of one partition."""
    found = index.search(list(queries), k=work.k, candidates=-(-work.candidates // PARTITIONS))
    return [[(int(hit.id), hit.score) for hit in each.hits] for each in found]


def _merged(work: Work, parts: Sequence[Hits]) -> Hits:
    """The best of all partitions, for each query."""
    return [
        sorted((hit for hits in of_query for hit in hits), key=lambda hit: (-hit[1], hit[0]))[
            : work.k
        ]
        for of_query in zip(*parts, strict=True)
    ]


def _run(
    work: Work,
    partitions: Sequence[Path],
    queries: Sequence[Encoded],
    count: int,
    system: str,
    stretch: float,
) -> _Run:
    spec = with_maxsim(work.spec, SYSTEMS[system])
    folder = str(partitions[0].parent)
    record, steps = emulated.trace_file(work.record, count, system), Steps()
    with (
        emulated.opened(spec, [folder] * count, stretch=stretch, record=record, steps=steps) as (
            devices,
            topology,
        ),
        ExitStack() as opened,
    ):
        indexes = [
            opened.enter_context(_opened(each, devices[i % count]))
            for i, each in enumerate(partitions)
        ]
        pool = opened.enter_context(ThreadPoolExecutor(PARTITIONS, "espnx-partition"))
        before, since = topology.traffic(), topology.times()
        hits, times = Hits(), list[float]()
        for number, some in enumerate(_batches(work, queries)):
            if number == _WARM_UP:
                before, since = topology.traffic(), topology.times()
            begun_s = topology.now()
            with steps.step():
                parts = list(pool.map(lambda index, some=some: _asked(work, index, some), indexes))
                found = _merged(work, parts)
            if number < _WARM_UP:
                steps.forget()
            if number >= _WARM_UP:
                times.append(topology.now() - begun_s)
                hits += found
        timed = emulated.timed(report(topology, since), times, before, topology.traffic())
        return _Run(timed, hits, indexes[0].store.effective_path)


def _opened(partition: Path, device: NearStorageDevice) -> Index:
    return espnx.open(partition, None, device=device)


def _row(
    work: Work, count: int, name: str, run: _Run, baseline: Timed | None, *, is_correct: bool
) -> Row:
    params = {
        "spec": work.spec.name,
        "devices": count,
        "documents": work.documents,
        "partitions": PARTITIONS,
        "batch": work.batch,
        "candidates": work.candidates,
        "k": work.k,
    }
    metrics = {"queries_per_s": work.batch / run.timed.median_s}
    return emulated.row(
        "search",
        params,
        name,
        run.timed,
        baseline,
        path=run.effective_path,
        is_correct=is_correct,
        metrics=metrics,
    )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells. MB are of a search, of all devices together."""
    return emulated.headers("search", "queries/s"), [
        emulated.cells(row, f"{row.metrics['queries_per_s']:.0f}") for row in rows
    ]
