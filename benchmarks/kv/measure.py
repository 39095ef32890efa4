"""One point of the KV benchmark: systems decode in turns, their tokens and logits are compared, and
only then there are ratios."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..harness.registry import Say
from ..harness.result import Row, found_wrong
from ..harness.runner import Sample, System, compare
from ..io.content import DataFile, content_of, ensure_file
from ..io.fio import FioSystem, variants
from ..io.work import SEQUENTIAL_STEP_BYTES, Point, Work
from ..machine.throttle import throttled
from .fleet import Fleet, Limit, Spec
from .systems.models import Task, logit_tolerance

FIO_FILE = "espnx-bench-kv.data"
# A throttle grants in slices of 0.1 s: a run that follows another at once inherits part of a slice.
_SETTLE_S = 0.5
_KEPT_STEPS = 32
_REFERENCES = ("dynamic", "static", "memmap", "host")
#: The slowest of all, unless rows are on another path than the page cache.
REFERENCE = Spec("memmap", "memmap")


@dataclass(frozen=True)
class Plan:
    """How a point is measured.

    Attributes:
        runs: of each system; a run decodes `steps` tokens of each sequence.
        warm_up: steps before.
        path: a directory on the disk.
        throttle: bytes per second, or None.
    """

    runs: int
    steps: int
    warm_up: int
    path: Path
    limit: Limit
    throttle: int | None
    seed: int
    with_fio: bool

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.runs * self.steps

    def kept(self) -> list[int]:
        """Steps whose logits are compared."""
        return list(range(0, self.all_steps, -(-self.all_steps // _KEPT_STEPS)))


@dataclass(frozen=True)
class Verdict:
    """What is said of a system, beside the reference.

    Attributes:
        problem: None when all is right.
        error: the largest difference of a logit, in the reference's standard deviations; None where
            the system shows no logits.
        same: the part of the tokens that are the reference's.
    """

    problem: str | None
    error: float | None
    same: float


def judge(fleet: Fleet, spec: Spec, reference: str) -> Verdict:
    """Compares what a system has decoded so far with what the reference has."""
    verdict = Verdict(None, None, 0.0)
    judged_steps = list[float]()
    for step in fleet.keep:
        expected_at, found_at = (
            fleet.logits / name / f"{step}.npy" for name in (reference, spec.name)
        )
        if step >= len(fleet.ids[spec.name]) or not expected_at.exists():
            continue
        found = np.load(found_at) if found_at.exists() else None
        one = judge_step(
            np.load(expected_at),
            np.array(fleet.ids[spec.name][step]),
            found,
            logit_tolerance(fleet.task, spec.lossy),
        )
        judged_steps.append(one.same)
        error = max(
            (known for known in (verdict.error, one.error) if known is not None), default=None
        )
        verdict = Verdict(
            None if one.problem is None else f"step {step}: {one.problem}",
            error,
            float(np.mean(judged_steps)),
        )
        if verdict.problem:
            break
    return verdict


def judge_step(
    expected: np.ndarray, ids: np.ndarray, found: np.ndarray | None, tolerance: float
) -> Verdict:
    """One step of a system beside the reference's.

    Args:
        expected: the reference's logits, [sequences, vocabulary].
        ids: the tokens that the system chose, int64 [sequences].
        found: its logits; None: it shows none.
        tolerance: how far a logit may be off, in standard deviations of the reference's. Where the
            best two are closer than twice that, either token is right.
    """
    deviation, rows = float(expected.std()), np.arange(len(ids))
    same = float(np.mean(expected.argmax(-1) == ids))
    error = None if found is None else float(np.abs(found - expected).max()) / deviation
    below = float((expected.max(-1) - expected[rows, ids]).max()) / deviation
    # Its own logit may be too high and the best one's too low, each by the tolerance.
    if not below <= 2 * tolerance:
        return Verdict(
            f"a token {below:.3g} deviations below the best, allowed are {2 * tolerance:.3g}",
            error,
            same,
        )
    if error is not None and not error <= tolerance:
        return Verdict(
            f"a logit is off by {error:.3g} deviations, allowed are {tolerance:.3g}", error, same
        )
    return Verdict(None, error, same)


class KVSystem:
    """A process that decodes, for the runner."""

    def __init__(self, fleet: Fleet, spec: Spec, reference: str, steps: int):
        self.name = self.group = spec.name
        self.spec = spec
        self.requested_path = self.effective_path = str(fleet.facts[spec.name]["effective_path"])
        self._fleet, self._reference, self._steps = fleet, reference, steps
        self._resident = 0.0

    def verify(self) -> str | None:
        return judge(self._fleet, self.spec, self._reference).problem

    def prepare(self, turn: int) -> str:
        self._resident = self._fleet.ask(self.name, "residency")["fraction"]
        return "warm" if self.spec.in_memory or self._resident >= 0.01 else "cold"

    def run(self) -> Sample:
        task, first = self._fleet.task, len(self._fleet.ids[self.name])
        answer = self._fleet.steps(self.name, self._steps)
        seconds, n = answer["seconds"], self._steps
        # Of step i, counted from 0: the context and i + 1 tokens.
        asked = sum(task.kv_bytes(task.context + first + i + 1) for i in range(n))
        own: Mapping[str, float] = answer["own"]
        read = answer["read_bytes"]
        metrics = {
            "step_s": seconds / n,
            "tokens_per_s": n * task.batch / seconds,
            "asked_per_step": asked / n,
            "cpu_s": answer["cpu_s"] / n,
            "resident_fraction": self._resident,
            **{
                f"{name}_per_step": own[name] / n
                for name in ("waiting_s", "computing_s", "bytes_moved", "bytes_written")
                if name in own
            },
            **(
                {"write_requests": own["write_requests"], "x_rows": answer["x_rows"]} if own else {}
            ),
        }
        if read is None:
            read = own.get("bytes_moved", 0)
        return Sample(seconds, asked, int(read), metrics)

    def close(self) -> None:
        pass


def measure(
    task: Task,
    ours: Sequence[Spec],
    baselines: Sequence[Spec],
    plan: Plan,
    params: Mapping[str, Any],
    say: Say,
) -> list[Row]:
    """The rows of one point."""
    specs = [*ours, *baselines]
    reference = next(
        (spec.name for kind in _REFERENCES for spec in specs if spec.kind == kind), None
    )
    if reference is None:
        say("    memmap is added: the others' tokens are compared with its")
        specs, baselines, reference = [*specs, REFERENCE], [*baselines, REFERENCE], REFERENCE.name
    with contextlib.ExitStack() as stack:
        if plan.throttle:
            stack.enter_context(throttled(plan.path, plan.throttle))
        fleet = stack.enter_context(
            Fleet(task, specs, plan.path, plan.limit, plan.warm_up, plan.kept(), say)
        )
        fio = _fio_systems(fleet, ours, plan, say) if plan.with_fio else []
        systems: dict[str, System] = {
            spec.name: KVSystem(fleet, spec, reference, plan.steps) for spec in specs
        }
        rows = compare(
            "kv",
            params,
            [systems[spec.name] for spec in ours],
            [*(systems[spec.name] for spec in baselines), *fio],
            pairs=plan.runs,
            seed=plan.seed,
            say=say,
            settle_s=_SETTLE_S if plan.throttle else 0,
        )
        verdicts = {spec.name: judge(fleet, spec, reference) for spec in specs}
        rows = judged(rows, verdicts, say)
        predicted = next(
            (times for spec in ours if (times := fleet.facts[spec.name]["predicted_s"])), ()
        )
        names = {spec.name for spec in ours}
        return [_beside_prediction(row, predicted) if row.system in names else row for row in rows]


def _beside_prediction(row: Row, predicted: Sequence[float]) -> Row:
    """A row with the step time that a system which decides for itself foretold for that number of X
    rows, if one took part."""
    if not predicted or "x_rows" not in row.metrics:
        return row
    x_rows = int(row.metrics["x_rows"])
    is_choice = predicted[x_rows] == min(predicted)
    return dataclasses.replace(
        row,
        metrics={**row.metrics, "predicted_s": predicted[x_rows], "is_scheduled": float(is_choice)},
    )


def _fio_systems(fleet: Fleet, ours: Sequence[Spec], plan: Plan, say: Say) -> list[System]:
    """fio on the file in which the first of our systems keeps its rows, about as many bytes as a
    step in the middle of the run asks for: the rate of a drive can differ by half from one file to
    another. On a file of its own where too few rows were written."""
    task = fleet.task
    wanted = task.kv_bytes(task.context + plan.all_steps // 2)
    rows: dict[str, Any] = (
        fleet.ask(ours[0].name, "rows_file") if ours else {"path": None, "written_bytes": 0}
    )
    steps = min(
        max(1, round(wanted / SEQUENTIAL_STEP_BYTES)),
        rows["written_bytes"] // SEQUENTIAL_STEP_BYTES,
    )
    if steps:
        data = DataFile(Path(rows["path"]), rows["written_bytes"], content_of(plan.seed))
    else:
        steps = max(1, round(wanted / SEQUENTIAL_STEP_BYTES))
        data = ensure_file(plan.path / FIO_FILE, steps * SEQUENTIAL_STEP_BYTES, plan.seed, say)
        say(f"    fio reads {data.path}: too few rows are in a file of theirs")
    point = Point("read", "sequential", 960 << 10, 8)
    work = Work(point, data, steps * SEQUENTIAL_STEP_BYTES // point.block_bytes, plan.seed)
    return [FioSystem(work, variant) for variant in variants(point)]


def judged(rows: Sequence[Row], verdicts: Mapping[str, Verdict], say: Say) -> list[Row]:
    """Rows with what the comparison of tokens and logits said; a wrong system loses its times and
    every ratio to it."""
    wrong = {name for name, verdict in verdicts.items() if verdict.problem}
    for name in sorted(wrong):
        say(f"WRONG RESULT of {name}: {verdicts[name].problem}. Its times are dropped.")
    fio = next((row for row in rows if row.system == "fio" and row.median_s), None)
    found = []
    for row in rows:
        verdict = verdicts.get(row.system)
        if row.system in wrong:
            row = found_wrong(row)
        elif verdict is not None:
            error = {} if verdict.error is None else {"logit_error": verdict.error}
            metrics = {**row.metrics, "same_tokens": verdict.same, **error, **_bound(row, fio)}
            row = dataclasses.replace(
                row,
                metrics=metrics,
                ratio={name: value for name, value in row.ratio.items() if name not in wrong},
            )
        found.append(row)
    return found


def _bound(row: Row, fio: Row | None) -> dict[str, float]:
    """What sets the time of a step: the disk, where fio alone needs longer for the bytes than
    everything but waiting takes."""
    if fio is None or not fio.median_s or "step_s" not in row.metrics:
        return {}
    fio_s = fio.median_s / fio.bytes_asked * row.metrics["asked_per_step"]
    found = {"fio_s": fio_s}
    if "fio" in row.ratio:
        found["over_fio"] = 1 / row.ratio["fio"]
    if "waiting_s_per_step" in row.metrics:
        busy = row.metrics["step_s"] - row.metrics["waiting_s_per_step"]
        found["is_disk_bound"] = float(fio_s >= busy)
    return found
