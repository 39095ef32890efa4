"""``--show speculation`` and ``--show acceptance``: decoding with drafts beside decoding one by one
from the same kept cache, verified first; and what does not depend on the machine alone: tokens a
pass and bytes a token over given text."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...harness.processes import Worker
from ...harness.registry import Say
from ...harness.result import Row
from ...harness.runner import Sample, compare
from ...io.content import ensure_file
from ...io.fio import FioSystem, variants
from ...io.work import SEQUENTIAL_STEP_BYTES, Point, Work
from ...machine.throttle import throttled
from ..fleet import folder_in, scratch_parent
from ..measure import FIO_FILE
from ..options import Options
from ..systems.models import Task, write_weights
from .work import ONE_BY_ONE, SYSTEMS, TEXTS

_NEW, _QUICK_NEW = 64, 16
_POSITIONS, _QUICK_POSITIONS = 192, 24
_SETTLE_S = 0.5  # a throttle grants in slices of 0.1 s
#: Of 1,000 tokens so many may differ, where logits lie closer than rounding.
_PLACES_OF_1000 = 2


class SpeculationSystem:
    """A way to decode, for the runner."""

    def __init__(self, name: str, worker: Worker, task: Task, effective_path: str, say: Say):
        self.name = self.group = name
        self.requested_path = self.effective_path = effective_path
        self._worker, self._task, self._say = worker, task, say

    def verify(self) -> str | None:
        if self.name == ONE_BY_ONE:
            return None  # what the others are compared with
        self._worker.ask("speculation_run", name=self.name)
        return self.problem()

    def problem(self) -> str | None:
        """What is wrong with the tokens of the last turn."""
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
        answer, n = self._worker.ask("speculation_run", name=self.name), self._task.steps
        first = self._task.context + 1
        # of all K and V for each token: what decoding one by one asks for
        whole = sum(self._task.kv_bytes(first + i) for i in range(n))
        moved = answer["bytes_moved"] if answer["read_bytes"] is None else answer["read_bytes"]
        metrics = {
            "step_s": answer["seconds"] / n,
            "tokens_per_s": n * self._task.batch / answer["seconds"],
            "asked_share": answer["bytes_asked"] / whole,
            "tokens_a_pass": answer["tokens_a_pass"],
            "draft_bytes": answer["draft_bytes"],
            "draft_memory_bytes": answer["draft_memory_bytes"],
            "draft_s_per_step": answer["draft_s"] / n,
            "gamma": answer["gamma"],
        }
        return Sample(answer["seconds"], whole, int(moved), metrics)

    def close(self) -> None:
        pass


def show_speculation(options: Options, context: int, say: Say) -> list[Row]:
    """Rows of a context of so many tokens."""
    with _opened(options, "speculation", context, say) as (worker, task, storage):
        return _timed(options, _at(task, context), worker, storage, say)


def show_acceptance(options: Options, contexts: Sequence[int], say: Say) -> list[Row]:
    """`contexts`: tokens, ascending. No time is measured."""
    found = list[Row]()
    with _opened(options, "acceptance", contexts[-1], say) as (worker, task, _):
        for context in contexts:
            at = _at(task, context)
            path, source = _filled(at, worker, say)
            params = _params(options, "acceptance", at, source)
            for name in SYSTEMS:
                if name == ONE_BY_ONE:
                    continue
                metrics = _forced(worker, name, say)
                row = Row(
                    case="kv",
                    params=params,
                    system=name,
                    kind="measured",
                    requested_path=path,
                    effective_path=path,
                    cache="warm" if "buffered" in path else "cold",
                    n=0,
                    median_s=None,
                    p99_s=None,
                    iqr_s=None,
                    bytes_asked=0,
                    bytes_moved=0,
                    correct=True,
                    metrics=metrics,
                )
                found.append(row)
    return found


@contextlib.contextmanager
def _opened(options: Options, show: str, longest: int, say: Say) -> Any:
    """(worker with the model's weights, the task, the directory of its caches). `longest`: of the
    contexts."""
    new = options.new or (_QUICK_NEW if options.quick else _NEW)
    task = dataclasses.replace(options.task(options.plan()), steps=new, context=longest)
    if show == "acceptance":  # of one sequence, and nothing is compared with tokens of a turn
        task = dataclasses.replace(task, batch=1, steps=1)
    positions = _QUICK_POSITIONS if options.quick else _POSITIONS
    with contextlib.ExitStack() as stack:
        scratch, storage = (
            Path(stack.enter_context(folder_in(where)))
            for where in (scratch_parent(options.path), options.path)
        )
        say(f"{show}: the weights of {task.name}")
        end = longest + max(new, positions) + 16
        write_weights(dataclasses.replace(task, context=end), scratch / "weights")
        if show == "speculation" and options.throttle:  # before the worker, which inherits it
            stack.enter_context(throttled(options.path, options.throttle))
        worker = stack.enter_context(Worker("kv", "speculation"))
        worker.ask(
            "speculation_open",
            task=task.words(),
            positions=positions,
            weights=str(scratch / "weights"),
            storage=str(storage),
            options={**options.cache, "x_rows": 0},
        )
        yield worker, task, storage


def _at(task: Task, context: int) -> Task:
    return dataclasses.replace(task, context=context)


def _filled(task: Task, worker: Worker, say: Say) -> tuple[str, str]:
    """(the path of the bytes, what the text is)."""
    say(f"    {task.name}, {task.batch} x {task.context} tokens are read")
    answer = worker.ask("speculation_fill", context=task.context)
    return answer["effective_path"], answer["source"]


def _params(options: Options, show: str, task: Task, source: str) -> Mapping[str, Any]:
    return options.params(show, task) | {"text": source, "prefill": "the model's own"}


def _forced(worker: Worker, name: str, say: Say) -> dict[str, float]:
    """Metrics of passes over given tokens, of both texts."""
    metrics = dict[str, float]()
    for text in TEXTS:
        found = worker.ask("speculation_forced", name=name, text=text)
        suffix = "" if text == TEXTS[0] else f"_{text}"
        metrics |= {
            f"forced_tokens_a_pass{suffix}": found["tokens_a_pass"],
            f"forced_asked_share{suffix}": found["asked_share"],
            f"forced_passes{suffix}": found["passes"],
        }
        if text == TEXTS[0]:
            metrics |= {
                "draft_bytes": found["draft_bytes"],
                "draft_memory_bytes": found["draft_memory_bytes"],
            }
            metrics |= {f"accepted_{i + 1}": share for i, share in enumerate(found["accepted"])}
    say(
        f"    {name}: {metrics['forced_tokens_a_pass']:.2f} tokens a pass, "
        f"{metrics['forced_asked_share']:.3f} of K and V a token; of a text that quotes "
        f"{metrics['forced_tokens_a_pass_quoted']:.2f}"
    )
    return metrics


def _timed(options: Options, task: Task, worker: Worker, storage: Path, say: Say) -> list[Row]:
    path, source = _filled(task, worker, say)
    systems = {name: SpeculationSystem(name, worker, task, path, say) for name in SYSTEMS}
    fio = _fio_systems(options, task, storage, say)
    rows = compare(
        "kv",
        _params(options, "speculation", task, source),
        [systems[name] for name in SYSTEMS if name != ONE_BY_ONE],
        [systems[ONE_BY_ONE], *fio],
        pairs=options.pairs,
        seed=options.seed,
        say=say,
        settle_s=_SETTLE_S if options.throttle else 0,
    )
    fio_row = next((row for row in rows if row.system == "fio" and row.median_s), None)
    found = []
    for row in rows:
        if row.system in SYSTEMS and row.n:
            if fio_row is not None and fio_row.median_s:
                step_s = fio_row.median_s / fio_row.bytes_asked * row.bytes_asked / task.steps
                more = {"fio_s": step_s, "over_fio": row.metrics["step_s"] / step_s}
                row = dataclasses.replace(row, metrics={**row.metrics, **more})
            if row.system != ONE_BY_ONE:
                problem = systems[row.system].problem()
                if problem:
                    say(f"WRONG RESULT of {row.system}: {problem}. Its times are dropped.")
                    row = _without_times(row)
        found.append(row)
    return found


def _without_times(row: Row) -> Row:
    return dataclasses.replace(
        row,
        n=0,
        median_s=None,
        p99_s=None,
        iqr_s=None,
        bytes_asked=0,
        bytes_moved=0,
        correct=False,
        metrics={},
        ratio={},
    )


def _fio_systems(options: Options, task: Task, storage: Path, say: Say) -> list[FioSystem]:
    """fio on about as many bytes as all K and V; none, and said, where it is not installed."""
    if shutil.which("fio") is None:
        say("    the disk's own line is left out: fio is not installed")
        return []
    steps = max(1, round(task.kv_bytes(task.context) / SEQUENTIAL_STEP_BYTES))
    data = ensure_file(storage / FIO_FILE, steps * SEQUENTIAL_STEP_BYTES, options.seed, say)
    point = Point("read", "sequential", 960 << 10, 8)
    work = Work(point, data, steps * SEQUENTIAL_STEP_BYTES // point.block_bytes, options.seed)
    return [FioSystem(work, variant) for variant in variants(point)]
