"""Programs that run here, in turns with the disk free and under a throttle: what `espnx simulate`
says of a free turn on the same disk under a throttle, and what the turns beside it take under it.

The disk is measured free, as `espnx device calibrate` does; the throttle is what Linux's is
(`espnx.simulate.programs.throttle.Throttle`). A turn begins after a pause, so that a whole slice of
the throttle is there; it is predicted as a whole, with what its steps have in common. All turns are
one process's, since two differ by more than turns do.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from espnx.device.model.disk import disk_spec, measure_disk
from espnx.device.model.spec import DeviceSpec
from espnx.device.trace.reader import read_trace
from espnx.simulate.programs.answer import step_times
from espnx.simulate.programs.throttle import Throttle

from ..corpora.mixtures import MIXTURES, Mixture
from ..corpora.stores import Prepared, ensure_store
from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.traces import read_steps
from ..kv import fleet as kv
from ..kv.measure import judge_step
from ..kv.systems.models import Task, logit_tolerance
from ..machine.throttle import throttled
from ..retrieval import fleet as retrieval
from .compared import predicted_row, row
from .machines import machine_of

#: A throttle grants in slices of 0.1 s: a turn that follows another at once inherits part of one.
_SETTLE_S = 0.5
_WARM_UP, _CHECKED, _K = 2, 3, 10
#: How far a prediction may be off.
DECODE, SEARCH = 0.05, 0.15
_PREFETCH = [0.3]  # what the chooser chooses depends on the disk


@dataclass(frozen=True)
class Work:
    """Attributes: path: on the disk. rates: bytes/s of the throttles. turns: of each program, under
    each. config, batch, context, steps: of what decodes, and tokens of a turn. documents, searches,
    candidates: of what is searched, and of a turn. file_bytes, run_s: of the disk's measurement."""

    path: Path
    rates: Sequence[int]
    turns: int
    name: str
    config: dict[str, Any]
    batch: int
    context: int
    steps: int
    documents: int
    searches: int
    candidates: int
    seed: int
    file_bytes: int = 256 << 20
    run_s: float = 1.0


#: What ran, and the throttle in bytes/s (None: none).
_Turn = tuple[str, int | None]


@dataclass(frozen=True)
class _Run:
    """Attributes: turns: in their order, of each what it was and its seconds; results: what the
    program can be judged by; path: of the bytes; asked_bytes: by a turn, by what ran."""

    turns: list[tuple[_Turn, float]]
    results: Any
    path: str
    asked_bytes: dict[str, int]

    def times(self, what: str, rate: int | None) -> list[float]:
        return [seconds for turn, seconds in self.turns if turn == (what, rate)]


def measure(work: Work, say: Say) -> list[Row]:
    """Rows of both programs: free, and under each throttle with the prediction behind. Raises
    PathUnavailableError (no throttle here), and what decoding and searching raise."""
    with throttled(work.path, work.rates[0]):  # told before the long way
        pass
    with tempfile.TemporaryDirectory(prefix="espnx-bench-simulate-", dir=work.path) as folder:
        say("measuring the disk")
        found = measure_disk(folder, file_bytes=work.file_bytes, run_s=work.run_s)
        when = f"before the runs, {datetime.date.today().isoformat()}"
        disk = disk_spec("this-disk", "this machine's disk", found, measured=when)
        rows = _compared(_Decoding(work, Path(folder), say), work, disk, DECODE, say)
        return rows + _compared(_Searching(work, Path(folder), say), work, disk, SEARCH, say)


def _compared(
    program: _Decoding | _Searching, work: Work, disk: DeviceSpec, allowed: float, say: Say
) -> list[Row]:
    say(f"{program.name}, free and throttled in turns, recorded")
    run = program.run(work.rates, record=True)
    say(f"{program.name}, free")
    problem = program.problem(program.run((), record=False).results, run.results)
    if problem:
        say(f"    its results are not those of the free disk: {problem}")
    trace, steps = read_trace(program.trace), read_steps(program.trace)
    machine, rows = machine_of(disk, 1, computes_inside=False), []
    for what, asked in run.asked_bytes.items():
        rows.append(
            row(
                _params(what, None), "free", "measured", run.times(what, None), path=run.path,
                size_bytes=asked, correct=problem is None,
            )
        )  # fmt: skip
    for rate in work.rates:
        predicted = step_times(machine, trace, steps, throttle=Throttle(rate))
        for what, asked in run.asked_bytes.items():
            # of free turns: what the host did in a slow one is not known
            own = [
                each
                for each, (turn, _) in zip(predicted, run.turns, strict=True)
                if turn == (what, None)
            ]
            times = run.times(what, rate)
            rows.append(
                row(
                    _params(what, rate), "throttled", "measured", times, path=run.path,
                    size_bytes=asked, correct=problem is None,
                )
            )  # fmt: skip
            rows.append(predicted_row(_params(what, rate), own, rows[-1], allowed))
            say(
                f"    {what}, {rate / 1e6:g} MB/s: {1e3 * statistics.median(times):.1f} ms a turn, "
                f"predicted {1e3 * statistics.median(own):.1f}"
            )
    return rows


def _under(rate: int | None, path: Path, worker: Worker) -> AbstractContextManager[None]:
    """A throttle of a process, after a pause; None: none."""
    time.sleep(_SETTLE_S)
    return nullcontext() if rate is None else throttled(path, rate, worker.number)


def _params(what: str, rate: int | None) -> dict[str, Any]:
    under = "nothing" if rate is None else f"{rate / 1e6:g} MB/s"
    return {"show": "throttle", "what": what, "under": under, "throttle_bytes_per_s": rate}


class _Decoding:
    """A model decodes with K and V on the disk."""

    def __init__(self, work: Work, folder: Path, say: Say):
        self._work, self._say = work, say
        self.name, self.trace = "decode", folder / "decode.trace"
        steps = _WARM_UP + work.turns * (1 + len(work.rates)) * work.steps
        self._task = Task(
            work.name, work.config, work.batch, work.context, steps, "fp16", work.seed
        )

    def run(self, rates: Sequence[int], *, record: bool) -> _Run:
        work, task = self._work, self._task
        spec = kv.Spec("espnx", "espnx", {"record": str(self.trace)} if record else {})
        what = f"{work.steps} steps of {work.name}, {work.batch} x {work.context:,}"
        turns, every = list[tuple[_Turn, float]](), list(range(task.steps))
        with kv.Fleet(
            task, [spec], work.path, kv.Limit("ample"), _WARM_UP, every, self._say
        ) as fleet:
            for _ in range(work.turns):
                for rate in (None, *work.rates):
                    with _under(rate if rate in rates else None, work.path, fleet.worker(spec)):
                        seconds = fleet.steps(spec.name, work.steps)["seconds"]
                    turns.append(((what, rate), seconds))
            ids, path = fleet.ids[spec.name], str(fleet.facts[spec.name]["effective_path"])
            logits = [np.load(fleet.logits / spec.name / f"{step}.npy") for step in every]
        asked = task.kv_bytes(task.context + task.steps // 2) * work.steps
        return _Run(turns, list(zip(ids, logits, strict=True)), path, {what: asked})

    def problem(self, expected: Any, got: Any) -> str | None:
        """What differs in two runs' tokens and logits. A model of random weights has ties, and sums
        of many threads come in any order: either token of two that lie so near is right."""
        tolerance = logit_tolerance(self._task, None)
        for step, ((_, right), (ids, logits)) in enumerate(zip(expected, got, strict=True)):
            verdict = judge_step(right, np.array(ids), logits, tolerance)
            if verdict.problem:
                return f"step {step}: {verdict.problem}"
        return None


class _Searching:
    """A corpus is searched: all candidates scored, and the best 64."""

    def __init__(self, work: Work, folder: Path, say: Say):
        self._work = work
        self.name, self.trace = "search", folder / "search.trace"
        corpus = Mixture("B", work.documents, MIXTURES["B"])
        nlist = max(16, work.documents * 4096 // 1_000_000)
        self._prepared: Prepared = ensure_store(work.path, "B", corpus, {"nlist": nlist}, say)

    def run(self, rates: Sequence[int], *, record: bool) -> _Run:
        work = self._work
        opening = {"record": str(self.trace)} if record else {}
        system = retrieval.System("espnx", opening=opening)
        turns, asked = list[tuple[_Turn, float]](), dict[str, int]()
        hits = []
        with retrieval.Fleet(self._prepared, [system], None, None) as fleet:
            worker, facts = fleet.worker_of(system), fleet.facts(system)
            for rerank in (None, 64):
                depth = "exact" if rerank is None else f"re-rank {rerank}"
                what = f"{work.searches} searches, {depth}, {work.documents:,} documents"
                options = {
                    "k": _K,
                    "candidates": work.candidates,
                    "rerank": rerank,
                    "nprobe": facts["default_nprobe"],
                    "prefetch_step": _PREFETCH,
                }
                queries = list(range(work.searches))
                for rate in (None, *work.rates):
                    with _under(rate if rate in rates else None, work.path, worker):
                        some = [
                            worker.ask("search", queries=[each], options=options)
                            for each in queries[:_CHECKED]
                        ]
                    hits += [each["hits"] for each in some]
                    of_one = statistics.fmean(each["bytes_asked"] for each in some)
                    asked[what] = round(of_one * len(queries))
                for _ in range(work.turns if rates else 0):
                    for rate in (None, *rates):
                        with _under(rate, work.path, worker):
                            answer = worker.ask(
                                "callers", queries=queries, options=options, callers=1
                            )
                        turns.append(((what, rate), answer["seconds"]))
        return _Run(turns, hits, str(facts["effective_path"]), asked)

    def problem(self, expected: Any, got: Any) -> str | None:
        """What differs in two runs' hits, which are the same to the bit."""
        if expected == got:
            return None
        first = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        return f"search {first} of those that were checked has other hits"
