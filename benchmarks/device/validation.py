"""Whether an emulated disk takes as long as the disk: this machine's, from a calibration made anew
before each run, beside itself.

Each run calibrates the directory's disk, does the works on it, and has the emulated one do the same
with a stretch of 0, where times depend on the calls alone. Both columns are the time of reads: what
the host computes between them is in neither.

- ``4 KiB``, ``64 KiB``: reads of a file at random places, one or 64 at a time; a read or a batch
  begins when the one before has come.
- ``walk``: over a graph on the disk, 1 or 4 nodes a round. The walk is done once; the disk is then
  asked for the reads of each round, one round after the other, with nothing computed between them.
  An emulated walk has the host compute in no time.
- ``decode``: the K and V rows of all layers of one step, read ahead as a KV cache does, and looked
  at by nobody. Blocks' checksums are computed as they arrive, beside the reads that are under way.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import espnx.graph
from espnx.device.emulation.device import Emulation
from espnx.device.graph import SsdGraphDevice
from espnx.device.interface import RowDevice, SegmentView
from espnx.device.model.disk import batches, disk_spec, measure_disk
from espnx.device.model.spec import DeviceSpec
from espnx.device.plain import SsdDevice
from espnx.device.row_layout import RowLayout
from espnx.errors import EspnxError
from espnx.storage import NativeEngine

from ..harness.registry import Say
from ..harness.result import Row

DISK, EMULATED = "this disk", "emulated"
#: Of medians, that emulation is to be within, unless calibrations themselves differ by more.
WITHIN = 0.15
_READS = {
    "4 KiB x 1": (4096, 1),
    "4 KiB x 64": (4096, 64),
    "64 KiB x 1": (65_536, 1),
    "64 KiB x 64": (65_536, 64),
}
_BEAMS = (1, 4)
_L, _K = 40, 10


@dataclass(frozen=True)
class Work:
    """Attributes: path: of the files. runs: calibrations. file_bytes, run_s: of what is read at
    random places, and for how long. vectors, walks: of the graph, of 64 dimensions. layers, heads,
    tokens: of the rows of a step, 128 values each, in fp16."""

    path: Path
    runs: int
    file_bytes: int = 256 << 20
    run_s: float = 0.5
    vectors: int = 20_000
    walks: int = 20
    layers: int = 4
    heads: int = 8
    tokens: int = 4096
    seed: int = 0

    @property
    def layout(self) -> RowLayout:
        return RowLayout("fp16", 128, 128, is_shared=False, least_rows=64)


def measure(work: Work, say: Say) -> list[Row]:
    """Two rows of each work: measured, emulated. Raises what building, reading and walking
    raise."""
    measured: dict[str, list[float]] = {}
    emulated: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="espnx-bench-validation-", dir=work.path) as folder,
        ExitStack() as opened,
    ):
        on_disk = opened.enter_context(_OnDisk(work, Path(folder)))
        for run in range(work.runs):
            found = measure_disk(folder, file_bytes=work.file_bytes, run_s=work.run_s)
            spec = disk_spec(
                "this-disk",
                "this machine's disk",
                found,
                measured=f"before run {run}, {datetime.date.today().isoformat()}",
            )
            for name, seconds in on_disk.seconds().items():
                measured.setdefault(name, []).append(seconds)
            for name, seconds in on_disk.emulated(spec).items():
                emulated.setdefault(name, []).append(seconds)
            say(
                f"run {run + 1} of {work.runs}: "
                + ", ".join(
                    f"{name} {emulated[name][-1] / measured[name][-1]:.2f}" for name in measured
                )
            )
        path, sizes = on_disk.path, on_disk.sizes
    return [
        row
        for name in measured
        for row in _rows(name, measured[name], emulated[name], sizes[name], path)
    ]


class _OnDisk:
    """The files, and what is asked of them. A context manager."""

    def __init__(self, work: Work, folder: Path):
        self._work, self._folder = work, folder
        rng = np.random.default_rng(work.seed)
        with ExitStack() as opened:
            self._engine = opened.enter_context(NativeEngine("auto"))
            with open(folder / "reads.bin", "wb") as file:
                for _ in range(-(-work.file_bytes >> 20)):
                    file.write(rng.bytes(1 << 20))
            self._file = self._engine.open(str(folder / "reads.bin"))
            self.path = self._file.effective
            base = rng.standard_normal((work.vectors, 64)).astype(np.float32)
            espnx.graph.build(base, folder / "graph", max_degree=32, list_size=50, threads=2)
            self._graph = espnx.graph.StoredGraph(folder / "graph")
            self._walked = opened.enter_context(SsdGraphDevice(self._graph, engine=self._engine))
            self._queries = [
                torch.from_numpy(each)
                for each in rng.standard_normal((work.walks, 64)).astype(np.float32)
            ]
            self._rounds = {beam: self._walk(beam) for beam in _BEAMS}
            rows = SsdDevice(folder).open_rows(engine=self._engine)
            opened.callback(rows.close)
            self._rows, self._views = rows, _put(work, rows)
            self._opened = opened.pop_all()
        self.sizes = {
            name: size_bytes * together for name, (size_bytes, together) in _READS.items()
        }
        for beam, walks in self._rounds.items():
            self.sizes[f"walk, W = {beam}"] = sum(
                moved for walk in walks for _, moved in walk
            ) // len(walks)
        self.sizes["decode"] = sum(
            view.segment.size_bytes for layer in self._views for view in layer
        )

    def _walk(self, beam: int) -> list[list[tuple[np.ndarray, int]]]:
        """The rounds of each walk: nodes, and bytes that were read for them."""
        found = []
        for query in self._queries:
            ticket = self._walked.search(query, _L, _K, beam_width=beam)
            ticket.finish()
            found.append([(each.nodes, each.bytes_moved) for each in ticket.rounds])
        return found

    def seconds(self) -> dict[str, float]:
        """Seconds of each work (a read or a batch, a walk, a step) on the disk, medians."""
        found = {}
        times = batches(self._engine, self._file, list(_READS.values()), self._work.run_s)
        for name, each in zip(_READS, times, strict=True):
            found[name] = statistics.median(each)
        for beam, walks in self._rounds.items():
            found[f"walk, W = {beam}"] = statistics.median(
                self._walk_seconds(walk) for walk in walks
            )
        found["decode"] = statistics.median(
            _visit(self._work, self._rows, self._views, time.perf_counter) for _ in range(5)
        )
        return found

    def _walk_seconds(self, rounds: Sequence[tuple[np.ndarray, int]]) -> float:
        taken_s = 0.0
        for nodes, _ in rounds:
            plan = self._graph.plan(nodes)
            begun = time.perf_counter()
            self._engine.read(plan).wait()
            taken_s += time.perf_counter() - begun
        return taken_s

    def emulated(self, spec: DeviceSpec) -> dict[str, float]:
        """Virtual seconds of the same on a disk of that spec."""
        found = {}
        for name, (size_bytes, together) in _READS.items():
            [device] = Emulation(spec).together([self._folder], stretch=0)
            begun_s = device.topology.now()
            ended_s = device.topology.wait(
                device.topology.transfer(
                    0, "flash_to_host", size_bytes * together, requests=together
                )
            )
            found[name] = ended_s - begun_s
            device.close()
        for beam in _BEAMS:
            found[f"walk, W = {beam}"] = self._emulated_walk(spec, beam)
        [device] = Emulation(spec).together([self._folder], stretch=0)
        rows = device.open_rows(engine=self._engine)
        found["decode"] = _visit(self._work, rows, _put(self._work, rows), device.topology.now)
        rows.close()
        device.close()
        return found

    def _emulated_walk(self, spec: DeviceSpec, beam: int) -> float:
        [device] = Emulation(spec).together([self._folder], stretch=0)
        taken_s = list[float]()
        walked = device.open_graph(espnx.graph.StoredGraph(self._folder / "graph"))
        try:
            for query, rounds in zip(self._queries, self._rounds[beam], strict=True):
                begun_s = device.topology.now()
                ticket = walked.search(query, _L, _K, beam_width=beam)
                ticket.finish()
                if [each.nodes.tolist() for each in ticket.rounds] != [
                    nodes.tolist() for nodes, _ in rounds
                ]:
                    raise EspnxError("an emulated walk has other rounds than the disk's own")
                taken_s.append(device.topology.now() - begun_s)
        finally:
            walked.close()
            device.close()
        return statistics.median(taken_s)

    def __enter__(self) -> _OnDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _put(work: Work, rows: RowDevice) -> list[list[SegmentView]]:
    """The rows of each layer, and what a step looks at."""
    generator, views = torch.Generator().manual_seed(work.seed), list[list[SegmentView]]()
    for _ in range(work.layers):
        k, v = (
            torch.randn(1, work.heads, work.tokens, 128, generator=generator).half()
            for _ in range(2)
        )
        segments = rows.put(work.layout, k, v, range(work.heads))
        views.append(
            [
                SegmentView(segment, sequence, work.tokens, 0)
                for sequence, segment in enumerate(segments)
            ]
        )
    rows.flush()
    return views


def _visit(
    work: Work, rows: RowDevice, views: Sequence[Sequence[SegmentView]], clock: Callable[[], float]
) -> float:
    """Seconds of a step's reads, all in line at once."""
    begun = clock()
    tickets = [rows.ahead(work.layout, each) for each in views]
    for ticket in tickets:
        rows.visit(ticket, lambda memory, pieces: None)
    return clock() - begun


def _rows(
    name: str, measured: Sequence[float], emulated: Sequence[float], size_bytes: int, path: str
) -> list[Row]:
    """The rows of one work. The emulated one says how it compares: by medians, and pair by pair."""
    of_measured = statistics.median(emulated) / statistics.median(measured)
    paired = statistics.median(each / other for each, other in zip(emulated, measured, strict=True))
    made = []
    for system, kind, times in ((DISK, "measured", measured), (EMULATED, "emulated", emulated)):
        ordered = sorted(times)
        middle, spread = (
            statistics.median(ordered),
            ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4],
        )
        metrics, ratio = dict[str, float](), dict[str, float]()
        if system == EMULATED:
            metrics, ratio = (
                {"of_measured": of_measured, "spread": spread / middle},
                {DISK: 1 / paired},
            )
        made.append(
            Row(
                "device",
                {"show": "validation", "work": name},
                system,
                kind,
                "auto",
                path,
                "cold",
                len(ordered),
                middle,
                ordered[-1],
                spread,
                size_bytes,
                size_bytes,
                True,
                metrics,
                ratio,
            )
        )
    return made


def is_within(emulated: Row) -> bool:
    """Whether medians differ by no more than `WITHIN`, or than emulated times do (IQR), by
    calibrations alone."""
    return abs(emulated.metrics["of_measured"] - 1) <= max(WITHIN, emulated.metrics["spread"])


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, a line for each work: what was measured and what was emulated, in columns
    of their own; of rows of one kind its columns alone."""
    kinds = [kind for kind in ("measured", "emulated") if any(row.kind == kind for row in rows)]
    headers = ["work", "KiB", *(word for kind in kinds for word in (f"{kind} us", "[IQR]")), "runs"]
    if "emulated" in kinds:
        headers += ["of the measured median", "paired", "within"]
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(row.params["work"], {})[row.kind] = row
    return headers, [
        _cells(work, [found[kind] for kind in kinds if kind in found])
        for work, found in lines.items()
    ]


def _cells(work: str, rows: Sequence[Row]) -> list[str]:
    cells = [work, f"{rows[0].bytes_asked / 1024:,.0f}"]
    for row in rows:
        cells += [f"{1e6 * (row.median_s or 0.0):,.0f}", f"[{1e6 * (row.iqr_s or 0.0):,.0f}]"]
    cells.append(str(rows[0].n))
    if "of_measured" in rows[-1].metrics:
        last = rows[-1]
        cells += [
            f"{last.metrics['of_measured']:.2f}",
            f"{1 / last.ratio[DISK]:.2f}",
            "yes" if is_within(last) else "NO",
        ]
    return cells
