"""``--show speculation``, ``gamma``, ``long`` and ``acceptance``: decoding with drafts beside
decoding one by one from the same kept cache, verified first; the number of drafts that is chosen
beside fixed ones; many long sequences in little memory; and what does not depend on the machine
alone: tokens a pass and bytes a token over given text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from espnx.errors import InvalidInputError

from ...harness.processes import Worker
from ...harness.registry import Say
from ...harness.result import Row, untimed
from ...machine.cgroup import MemoryGroup, memory_group
from ..options import Options
from ..systems.models import DTYPES, Task
from .timing import Variant, opened, task_of, timed
from .work import ONE_BY_ONE, SYSTEMS, TEXTS

#: The draft whose number of tokens is chosen or fixed, and the numbers.
_PACED, _GAMMAS = "pages-1/16", (0, 2, 4, 8, 16)
_CHOSEN = "chosen"
#: Of the time of the best fixed number, that the chosen ones may take more.
_ALLOWED = 0.15
#: What rows are stored as where memory is short, whatever the model computes in.
_LONG_ROWS = "bf16"


def show_speculation(options: Options, context: int, say: Say) -> list[Row]:
    """Rows of a context of so many tokens."""
    task = task_of(options, context)
    with opened(options, "speculation", task, say, throttle=options.throttle) as at:
        task, said = at.filled(task.batch, context, say)
        ours = [Variant(name, name) for name in SYSTEMS if name != ONE_BY_ONE]
        params = _params(options, "speculation", task, said["source"])
        one_by_one = Variant(ONE_BY_ONE, ONE_BY_ONE)
        return timed(options, params, at, task, said["effective_path"], ours, [one_by_one], say)


def show_gamma(
    options: Options, contexts: Sequence[int], batches: Sequence[int], say: Say
) -> list[Row]:
    """How many tokens are proposed: chosen, beside numbers that are fixed, in turns of one process
    for each rate of the disk: the one that it is throttled to, and its own.

    Args:
        contexts, batches: ascending; every context with every batch is measured.
    """
    found = list[Row]()
    rates = [options.throttle, None] if options.throttle else [None]
    longest = dataclasses.replace(task_of(options, contexts[-1]), batch=batches[-1])
    for rate in rates:
        at_rate = dataclasses.replace(options, throttle=rate)
        with opened(at_rate, "gamma", longest, say, throttle=rate) as at:
            for context in contexts:
                for batch in batches:
                    task, said = at.filled(batch, context, say)
                    rows = timed(
                        at_rate,
                        _params(at_rate, "gamma", task, said["source"]),
                        at,
                        task,
                        said["effective_path"],
                        [Variant(_CHOSEN, _PACED)],
                        [Variant(f"gamma-{n}", _PACED, n) for n in _GAMMAS],
                        say,
                        with_fio=False,
                        verifies=False,
                    )
                    found += _beside_the_best(rows, say)
    over = [row.metrics["over_best"] for row in found if "over_best" in row.metrics]
    say(
        f"    {sum(each <= 1 + _ALLOWED for each in over)} of {len(over)} within "
        f"{_ALLOWED:.0%} of the best fixed number"
    )
    return found


def _beside_the_best(rows: list[Row], say: Say) -> list[Row]:
    """The rows of a point, of which the chosen one says how it stands beside the best fixed."""
    chosen = next(row for row in rows if row.system == _CHOSEN)
    fixed = [row for row in rows if row.system != _CHOSEN and row.median_s]
    if not chosen.median_s or not fixed:
        return rows
    best = min(fixed, key=lambda row: row.median_s or 0.0)
    # of pairs, as all ratios are: the baseline's time over ours
    over = 1 / chosen.ratio[best.system]
    say(f"    chosen: {over:.2f} of the time of {best.system}, the best fixed number")
    more = {"over_best": over, "best_gamma": float(best.system.removeprefix("gamma-"))}
    return [
        dataclasses.replace(row, metrics={**row.metrics, **more}) if row is chosen else row
        for row in rows
    ]


def show_long(options: Options, context: int, say: Say) -> list[Row]:
    """Many long sequences in a process that may take `--memory`: pages of 1/16, beside fio.

    All begin with one text, which is computed once, and go on from different tokens; each has rows
    of its own, in bf16. Decoding one by one, which says what the tokens are, is timed once.
    """
    task = task_of(options, context)
    row_bytes = task.row_bytes // DTYPES[task.dtype].itemsize * torch.bfloat16.itemsize
    with (
        _group(options) as group,
        opened(
            options,
            "long",
            task,
            say,
            throttle=options.throttle,
            group=group,
            cache={"format": _LONG_ROWS},
            is_shared=True,
        ) as at,
    ):
        task, said = at.filled(task.batch, context, say)
        say(f"    one by one: {said['one_by_one_s']:.1f} s for {task.steps} tokens of each")
        params = {
            **_params(options, "long", task, said["source"]),
            "prefill": "of one sequence, written as that of each; they go on from different tokens",
            "rows": _LONG_ROWS,
        }
        ours, path = [Variant(_PACED, _PACED)], said["effective_path"]
        rows = timed(options, params, at, task, path, ours, [], say, row_bytes=row_bytes)
        more = {
            "one_by_one_s": said["one_by_one_s"] / task.steps,
            "kv_bytes": task.batch * task.context * row_bytes,
        }
        if group is not None and (peak_bytes := group.peak_bytes()) is not None:
            more["group_peak_bytes"] = peak_bytes
        return [
            dataclasses.replace(row, metrics={**row.metrics, **more})
            if row.system == _PACED and row.n
            else row
            for row in rows
        ]


def _group(options: Options) -> contextlib.AbstractContextManager[MemoryGroup | None]:
    """The group of the worker: of so many bytes, where `--memory` is a size. Raises
    InvalidInputError for `auto`, which would need a process to measure first."""
    if options.limit.size_bytes:
        return memory_group("long", options.limit.size_bytes)
    if options.limit.kind == "auto":
        raise InvalidInputError(
            "--memory of --show long", got="auto", expected="a size, or ample", fix="--memory 2GiB"
        )
    return contextlib.nullcontext()


def show_acceptance(options: Options, contexts: Sequence[int], say: Say) -> list[Row]:
    """`contexts`: tokens, ascending. No time is measured."""
    found = list[Row]()
    # of one sequence, and nothing is compared with tokens of a turn
    task = dataclasses.replace(task_of(options, contexts[-1]), batch=1, steps=1)
    with opened(options, "acceptance", task, say) as at:
        for context in contexts:
            own, said = at.filled(1, context, say)
            found += _rows_of_acceptance(
                at.worker,
                said["effective_path"],
                _params(options, "acceptance", own, said["source"]),
                say,
            )
    return found


def _rows_of_acceptance(
    worker: Worker, path: str, params: Mapping[str, Any], say: Say
) -> Iterator[Row]:
    for name in SYSTEMS:
        if name == ONE_BY_ONE:
            continue
        yield untimed(
            "kv",
            params,
            name,
            path=path,
            cache="warm" if "buffered" in path else "cold",
            metrics=_forced(worker, name, say),
        )


def _params(options: Options, show: str, task: Task, source: str) -> dict[str, Any]:
    params = options.params(show, task) | {"text": source, "prefill": "the model's own"}
    if options.draft_read_ahead is not None:
        params["draft_read_ahead_bytes"] = options.draft_read_ahead
    return params


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
