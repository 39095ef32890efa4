"""BM25 over posting lists on 1 to 16 emulated devices: each scans its own lists, placed by passages
or by terms (RAGX, section 3.2); beside the same disks, whose lists go to the host.

Placed by passages, a device gives its k best records: 12 k bytes a device, however long lists are.
Placed by terms, no device knows the score of a record, and an exact result takes every posting's
part of it: 8 bytes a posting, however many devices there are. All results are those of one index,
bit for bit, or a row has no time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from espnx.device.emulation.report import report
from espnx.device.model.spec import DeviceSpec
from espnx.errors import InvalidInputError
from espnx.postings import Found, Postings, SplitFound, SplitPostings, build_split

from ..harness.registry import Say
from ..harness.result import Row
from ..harness.traces import Steps
from ..postings.corpus import df_of, make_passages, make_queries
from . import emulated
from .emulated import WITHOUT, Stretches, Timed

#: (placement, whether devices scan).
SYSTEMS = {WITHOUT: ("passages", False), "passages": ("passages", True), "terms": ("terms", True)}
_WARM_UP = 1


@dataclass(frozen=True)
class Work:
    """Attributes: path: of the collections. spec: of the devices. passages: of the corpus. batch:
    queries of a search. searches: that are timed. record: a folder for traces."""

    path: Path
    spec: DeviceSpec
    passages: int
    batch: int
    searches: int
    k: int
    seed: int
    record: Path | None = None


@dataclass(frozen=True)
class _Run:
    """Attributes: found: by the timed searches."""

    timed: Timed
    found: list[SplitFound]
    effective_path: str


def measure(
    work: Work, counts: Sequence[int], systems: Sequence[str], stretches: Stretches, say: Say
) -> list[Row]:
    """Rows of every system with every number of devices. Raises InvalidInputError for devices that
    do not scan, TimesNotValidError where no stretch makes the times the devices'."""
    if not work.spec.has("scan"):
        raise InvalidInputError(
            f"device {work.spec.name}",
            got="a spec whose accelerator does not scan",
            expected="scan among its verbs",
        )
    corpus = make_passages(work.passages, work.seed)
    queries = make_queries(
        corpus, work.batch * (_WARM_UP + work.searches), work.seed, df_of(corpus)
    )
    batches = [queries[begin : begin + work.batch] for begin in range(0, len(queries), work.batch)]
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="espnx-bench-scan-", dir=work.path) as folder:
        say(f"building one index of {work.passages:,} passages")
        one = Path(folder) / "one"
        Postings.build(one, terms=corpus)
        with Postings.open(one) as postings:
            wanted = [postings.search(batch, work.k) for batch in batches[_WARM_UP:]]
        for count in counts:
            for placement in dict.fromkeys(SYSTEMS[name][0] for name in systems):
                say(f"building {count} parts by {placement}")
                build_split(
                    _parts(Path(folder), placement, count), terms=corpus, placement=placement
                )
            baseline: Timed | None = None
            for name in systems:
                run = stretches.settled(
                    name, count, partial(_run, work, Path(folder), batches, count, name)
                )
                say(
                    f"{count} devices, {name}: {run.timed.median_s * 1e6:.1f} virtual us a search, "
                    f"{run.timed.bound_s * 1e6:.1f} by {run.timed.bound_by} alone; stretch "
                    f"{run.timed.report.stretch:.3g}, host {run.timed.report.host_share:.0%}"
                )
                baseline = run.timed if name == WITHOUT else baseline
                rows.append(
                    _row(work, count, name, run, baseline, is_correct=_is_same(run.found, wanted))
                )
    return rows


def _parts(folder: Path, placement: str, count: int) -> list[Path]:
    return [folder / f"{placement}-{count}-{part:02}" for part in range(count)]


def _run(
    work: Work,
    folder: Path,
    batches: Sequence[list[list[str]]],
    count: int,
    system: str,
    stretch: float,
) -> _Run:
    placement, scans = SYSTEMS[system]
    paths, record = (
        _parts(folder, placement, count),
        emulated.trace_file(work.record, count, system),
    )
    places, steps = [str(path) for path in paths], Steps()
    with (
        emulated.opened(
            work.spec, places, stretch=stretch, near_storage=scans, record=record, steps=steps
        ) as (devices, topology),
        SplitPostings(paths, device=devices) as postings,
    ):
        before, since = topology.traffic(), topology.times()
        found, times = list[SplitFound](), list[float]()
        for number, batch in enumerate(batches):
            if number == _WARM_UP:
                before, since = topology.traffic(), topology.times()
            begun_s = topology.now()
            with steps.step():
                result = postings.search(batch, work.k)
            if number < _WARM_UP:
                steps.forget()
            if number >= _WARM_UP:
                times.append(topology.now() - begun_s)
                found.append(result)
        timed = emulated.timed(report(topology, since), times, before, topology.traffic())
        return _Run(timed, found, postings.devices[0].path_report()[0].effective_path)


def _is_same(found: Sequence[SplitFound], wanted: Sequence[Found]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(
        np.array_equal(a.numbers, b.numbers) and a.scores.tobytes() == b.scores.tobytes()
        for a, b in pairs
    )


def _row(
    work: Work, count: int, name: str, run: _Run, baseline: Timed | None, *, is_correct: bool
) -> Row:
    params = {
        "spec": work.spec.name,
        "devices": count,
        "passages": work.passages,
        "batch": work.batch,
        "k": work.k,
        "placement": SYSTEMS[name][0],
    }
    traffic, queries = run.timed.traffic, work.batch
    metrics = {
        "queries_per_s": work.batch / run.timed.median_s,
        "to_devices_bytes": traffic.get("device_link_in_bytes", 0.0) / queries,
        "to_host_bytes": traffic.get("device_link_out_bytes", 0.0) / queries,
    }
    return emulated.row(
        "postings",
        params,
        name,
        run.timed,
        baseline,
        path=run.effective_path,
        is_correct=is_correct,
        metrics=metrics,
    )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells. Bytes are of a query, of all devices together; MB of a search."""
    headers = emulated.headers("search", "queries/s", "bytes to devices", "to host")
    names = ("queries_per_s", "to_devices_bytes", "to_host_bytes")
    return headers, [
        emulated.cells(row, *(f"{row.metrics[name]:,.0f}" for name in names)) for row in rows
    ]
