"""Ways to decode behind one kept context, timed side by side in one process: what the shows of
drafts have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...harness.processes import Worker
from ...harness.registry import Say
from ...harness.result import Row, found_wrong
from ...harness.runner import Sample, compare
from ...io.content import ensure_file
from ...io.fio import FioSystem, variants
from ...io.work import SEQUENTIAL_STEP_BYTES, Point, Work
from ...machine.cgroup import MemoryGroup
from ...machine.throttle import throttled
from ..fleet import folder_in, scratch_parent
from ..measure import FIO_FILE
from ..options import Options
from ..systems.models import Task, write_weights
from .work import ONE_BY_ONE

_NEW, _QUICK_NEW = 64, 16
_POSITIONS, _QUICK_POSITIONS = 192, 24
_SETTLE_S = 0.5  # a throttle grants in slices of 0.1 s
#: Of 1,000 tokens so many may differ, where logits lie closer than rounding.
_PLACES_OF_1000 = 2


@dataclass(frozen=True)
class Variant:
    """A way to decode.

    Attributes:
        name: in the rows.
        system: one of `SYSTEMS`.
        gamma: tokens that are proposed for each pass; None: chosen.
    """

    name: str
    system: str
    gamma: int | None = None


@dataclass(frozen=True)
class Opened:
    """A process with a model, which keeps contexts.

    Attributes:
        worker: the process.
        task: what it does; its context is the longest.
        storage: the directory of its caches.
        throttle: of its disk, bytes a second; None: none.
    """

    worker: Worker
    task: Task
    storage: Path
    throttle: int | None

    def filled(self, batch: int, context: int, say: Say) -> tuple[Task, dict[str, Any]]:
        """The task with so many sequences of so many tokens, which are in kept caches then; and
        what the worker says of them."""
        say(f"    {self.task.name}, {batch} x {context} tokens are read")
        task = dataclasses.replace(self.task, batch=batch, context=context)
        return task, self.worker.ask("speculation_fill", context=context, batch=batch)


@contextlib.contextmanager
def opened(
    options: Options,
    show: str,
    task: Task,
    say: Say,
    *,
    throttle: int | None = None,
    group: MemoryGroup | None = None,
    cache: Mapping[str, Any] | None = None,
    is_shared: bool = False,
) -> Iterator[Opened]:
    """A worker with the model's weights.

    Args:
        show: what is shown.
        task: `context` is the longest of its contexts.
        throttle: of the disk, while the worker lives.
        group: that the worker joins.
        cache: options of its caches.
        is_shared: all sequences begin with one text.
    """
    positions = _QUICK_POSITIONS if options.quick else _POSITIONS
    with contextlib.ExitStack() as stack:
        scratch, storage = (
            Path(stack.enter_context(folder_in(where)))
            for where in (scratch_parent(options.path), options.path)
        )
        say(f"{show}: the weights of {task.name}")
        end = task.context + max(task.steps, positions) + 16
        write_weights(dataclasses.replace(task, context=end), scratch / "weights")
        if throttle:  # before the worker, which inherits it
            stack.enter_context(throttled(options.path, throttle))
        worker = stack.enter_context(Worker("kv", show, group))
        worker.ask(
            "speculation_open",
            task=task.words(),
            positions=positions,
            weights=str(scratch / "weights"),
            storage=str(storage),
            options={**options.cache, **(cache or {}), "x_rows": 0},
            is_shared=is_shared,
            draft_read_ahead=options.draft_read_ahead,
        )
        yield Opened(worker, task, storage, throttle)


def task_of(options: Options, context: int) -> Task:
    """What is decoded behind so many tokens."""
    new = options.new or (_QUICK_NEW if options.quick else _NEW)
    return dataclasses.replace(options.task(options.plan()), steps=new, context=context)


class SpeculationSystem:
    """A way to decode, for the runner.

    Args:
        row_bytes: of K and V of a token of a sequence, as they are stored.
        verifies: its tokens are looked at before it is measured; otherwise afterwards alone.
    """

    def __init__(
        self,
        variant: Variant,
        worker: Worker,
        task: Task,
        effective_path: str,
        say: Say,
        *,
        row_bytes: int,
        verifies: bool,
    ):
        self.name = self.group = variant.name
        self.requested_path = self.effective_path = effective_path
        self._worker, self._task, self._say, self._variant = worker, task, say, variant
        self._row_bytes, self._verifies = row_bytes, verifies

    def verify(self) -> str | None:
        if not self._verifies or self._variant.system == ONE_BY_ONE:
            return None  # the latter is what the others are compared with
        self._ask()
        return self.problem()

    def _ask(self) -> dict[str, Any]:
        variant = self._variant
        return self._worker.ask(
            "speculation_run", system=variant.system, gamma=variant.gamma, name=variant.name
        )

    def problem(self) -> str | None:
        """What is wrong with the tokens of the last turn."""
        if self._variant.system == ONE_BY_ONE:
            return None
        found = self._worker.ask("speculation_verdict", name=self.name)["verdict"]
        for place in found["places"]:
            self._say(
                f"    {self.name}: sequence {place['sequence']} parts at its token "
                f"{place['token']}: logits {place['best']:.6g} and {place['other']:.6g}"
            )
        problem: str | None = found["problem"]
        most = max(1, _PLACES_OF_1000 * self._task.batch * self._task.steps // 1000)
        if problem is None and len(found["places"]) > most:
            return f"{len(found['places'])} sequences part from one by one, allowed are {most}"
        return problem

    def prepare(self, turn: int) -> str:
        return "warm" if "buffered" in self.effective_path else "cold"

    def run(self) -> Sample:
        answer, n = self._ask(), self._task.steps
        first = self._task.context + 1
        # of all K and V for each token: what decoding one by one asks for
        whole = sum(self._task.batch * (first + i) * self._row_bytes for i in range(n))
        moved = answer["bytes_moved"] if answer["read_bytes"] is None else answer["read_bytes"]
        metrics = {
            "step_s": answer["seconds"] / n,
            "tokens_per_s": n * self._task.batch / answer["seconds"],
            "asked_share": answer["bytes_asked"] / whole,
            "tokens_a_pass": answer["tokens_a_pass"],
            "draft_bytes": answer["draft_bytes"],
            "draft_memory_bytes": answer["draft_memory_bytes"],
            "draft_s_per_step": answer["draft_s"] / n,
            "read_ahead_per_step": answer["read_ahead_bytes"] / n,
            "read_ahead_limit_bytes": answer["read_ahead_limit_bytes"],
            "gamma": answer["gamma"],
        }
        return Sample(answer["seconds"], whole, int(moved), metrics)

    def close(self) -> None:
        pass


def timed(
    options: Options,
    params: Mapping[str, Any],
    at: Opened,
    task: Task,
    path: str,
    ours: Sequence[Variant],
    baselines: Sequence[Variant],
    say: Say,
    *,
    row_bytes: int | None = None,
    with_fio: bool = True,
    verifies: bool = True,
) -> list[Row]:
    """Rows of ways to decode, each compared with every baseline, and with fio, which reads as many
    bytes as all K and V.

    Args:
        path: of the bytes.
        row_bytes: of K and V of a token of a sequence, as stored; None: as the model makes them.
        verifies: tokens are looked at before anything is measured, too.
    """
    each_bytes = task.row_bytes if row_bytes is None else row_bytes
    systems = {
        variant.name: SpeculationSystem(
            variant, at.worker, task, path, say, row_bytes=each_bytes, verifies=verifies
        )
        for variant in (*ours, *baselines)
    }
    fio = []
    if with_fio:
        fio = _fio_systems(options, task.batch * task.context * each_bytes, at.storage, say)
    rows = compare(
        "kv",
        params,
        [systems[variant.name] for variant in ours],
        [*(systems[variant.name] for variant in baselines), *fio],
        pairs=options.pairs,
        seed=options.seed,
        say=say,
        settle_s=_SETTLE_S if at.throttle else 0,
    )
    fio_row = next((row for row in rows if row.system == "fio" and row.median_s), None)
    found = []
    for row in rows:
        if row.system in systems and row.n:
            if fio_row is not None and fio_row.median_s:
                step_s = fio_row.median_s / fio_row.bytes_asked * row.bytes_asked / task.steps
                more = {"fio_s": step_s, "over_fio": row.metrics["step_s"] / step_s}
                row = dataclasses.replace(row, metrics={**row.metrics, **more})
            if problem := systems[row.system].problem():
                say(f"WRONG RESULT of {row.system}: {problem}. Its times are dropped.")
                row = found_wrong(row)
        found.append(row)
    return found


def _fio_systems(options: Options, size_bytes: int, storage: Path, say: Say) -> list[FioSystem]:
    """fio on about as many bytes; none, and said, where it is not installed."""
    if shutil.which("fio") is None:
        say("    the disk's own line is left out: fio is not installed")
        return []
    steps = max(1, round(size_bytes / SEQUENTIAL_STEP_BYTES))
    data = ensure_file(storage / FIO_FILE, steps * SEQUENTIAL_STEP_BYTES, options.seed, say)
    point = Point("read", "sequential", 960 << 10, 8)
    work = Work(point, data, steps * SEQUENTIAL_STEP_BYTES // point.block_bytes, options.seed)
    return [FioSystem(work, variant) for variant in variants(point)]
