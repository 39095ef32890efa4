"""What ``espnx bench kv`` can show, one after the other. Each returns rows whose params name it
(``show``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from espnx.sizes import format_size

from ..harness.doubts import without_doubtful
from ..harness.registry import Say
from ..harness.result import Row
from ..machine.memory import available_bytes
from .attend import show_attend
from .fleet import Spec
from .measure import measure
from .names import ALONE
from .options import Options
from .resume import show_resume
from .rss import show_growth, show_rss
from .speculation.show import show_acceptance, show_gamma, show_long, show_speculation
from .x_rows import show_x

_LEAST_CONTEXT, _LEAST_RESUMED, _LEAST_SPECULATED = 512, 1024, 2048
_PROCESS_BYTES = 1 << 30  # Python, PyTorch, weights and activations of a small model
_SPILL_TOKENS, _QUICK_SPILL_TOKENS, _SPILL_TURNS = 512, 32, 4


def measure_shows(options: Options, say: Say) -> list[Row]:
    """The rows of every show."""
    shows: dict[str, Callable[[Options, Say], list[Row]]] = {
        "decode": show_decode,
        "spill": show_spill,
        "context": show_context,
        "batch": show_batch,
        "attend": show_attend,
        "x": show_x,
        "x-sweep": show_x_sweep,
        "rss": show_rss,
        "growth": show_growth,
        "resume": show_resumed,
        "speculation": show_speculated,
        "gamma": show_paced,
        "long": show_crowded,
        "acceptance": show_accepted,
    }
    if set(options.shows) - set(ALONE):
        say(
            "No prefill: every system starts from the same seeded random K and V; all are fed the "
            "same tokens."
        )
    rows: list[Row] = []
    for show in options.shows:
        rows += shows[show](options, say)
    return rows


def show_decode(options: Options, say: Say) -> list[Row]:
    return _point(options, "decode", options.batch, options.context, say)


def show_context(options: Options, say: Say) -> list[Row]:
    """Contexts that double, up to `--context`."""
    contexts = sweep(min(_LEAST_CONTEXT, options.context), options.context)
    return [
        row
        for context in contexts
        for row in _point(
            _with_what_fits(options, options.batch, context, say),
            "context",
            options.batch,
            context,
            say,
        )
    ]


def show_batch(options: Options, say: Say) -> list[Row]:
    """Batches that double, up to `--batch`."""
    return [
        row
        for batch in sweep(1, options.batch)
        for row in _point(
            _with_what_fits(options, batch, options.context, say),
            "batch",
            batch,
            options.context,
            say,
        )
    ]


def _with_what_fits(options: Options, batch: int, context: int, say: Say) -> Options:
    """The options without the caches in memory that would need more of it than `--memory` allows,
    or than there is: K and V, an eighth for what is copied when they grow, and the process itself.
    """
    room = options.limit.size_bytes or available_bytes()
    need = (
        options.task(options.plan(), batch=batch, context=context).kv_bytes(context) * 9 // 8
        + _PROCESS_BYTES
    )
    left_out = [spec.name for spec in options.baselines if spec.in_memory] if need > room else []
    if left_out:
        say(
            f"{', '.join(left_out)} left out at {batch} x {context} tokens: {format_size(need)} of "
            f"memory, there are {format_size(room)}"
        )
    return dataclasses.replace(
        options, baselines=[spec for spec in options.baselines if spec.name not in left_out]
    )


def show_x_sweep(options: Options, say: Say) -> list[Row]:
    """Every number of sequences that keep X, and what the scheduler takes."""
    every = dataclasses.replace(options, x_rows=[*range(options.batch + 1), None])
    return _point(every, "x-sweep", options.batch, options.context, say)


def show_resumed(options: Options, say: Say) -> list[Row]:
    """Contexts that double, up to `--context`."""
    return show_resume(options, sweep(min(_LEAST_RESUMED, options.context), options.context), say)


def show_speculated(options: Options, say: Say) -> list[Row]:
    """Rows of `--context` alone: turns that read all K and V for each token take long."""
    return show_speculation(options, options.context, say)


def show_paced(options: Options, say: Say) -> list[Row]:
    """A short context and `--context`, of one sequence and of `--batch`."""
    contexts = sorted({min(_LEAST_SPECULATED, options.context), options.context})
    return show_gamma(options, contexts, sorted({1, options.batch}), say)


def show_crowded(options: Options, say: Say) -> list[Row]:
    """`--batch` sequences of `--context` tokens."""
    return show_long(options, options.context, say)


def show_accepted(options: Options, say: Say) -> list[Row]:
    """Contexts that double, up to `--context`."""
    least = min(_LEAST_SPECULATED, options.context)
    return show_acceptance(options, sweep(least, options.context), say)


def sweep(least: int, most: int) -> list[int]:
    """least, twice least, ... and most."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]


def _point(options: Options, show: str, batch: int, context: int, say: Say) -> list[Row]:
    plan = options.plan()
    task = options.task(plan, batch=batch, context=context)
    say(f"{show}: {task.name}, {batch} x {context} tokens")
    rows = measure(task, options.ours(), options.baselines, plan, options.params(show, task), say)
    for row in without_doubtful(rows):
        if row.ratio:
            shown = {
                name: value for name, value in row.ratio.items() if not name.startswith("fio-")
            }
            say(
                "    "
                + row.system
                + ": "
                + ", ".join(f"{value:.2f}x {name}" for name, value in shown.items())
            )
    return rows


def show_spill(options: Options, say: Say) -> list[Row]:
    """How many tokens wait in memory for their turn to be written: what that costs in requests,
    bytes and time."""
    plan = options.plan(
        new=_QUICK_SPILL_TOKENS if options.quick else _SPILL_TOKENS,
        turns=2 if options.quick else _SPILL_TURNS,
    )
    task = options.task(plan)
    say(
        f"spill: {task.name}, {task.batch} x {task.context} tokens, {plan.runs * plan.steps} new "
        "ones"
    )
    ours = [
        dataclasses.replace(spec, name=f"{spec.name}-spill-{interval}")
        for interval in options.spill
        for spec in options.ours(spill_interval=interval)
    ]
    reference = [spec for spec in options.baselines if spec.in_memory][:1] or [
        Spec("dynamic", "dynamic")
    ]
    rows = measure(
        task,
        ours,
        reference,
        dataclasses.replace(plan, with_fio=False),
        options.params("spill", task),
        say,
    )
    return [_with_writes(row, task.kv_bytes(1), plan.runs * plan.steps, plan.runs) for row in rows]


def _with_writes(row: Row, bytes_per_token: int, tokens: int, runs: int) -> Row:
    """Requests and bytes of the whole run, and how many times each new row was written."""
    totals = row.metrics
    if "write_requests" not in totals:
        return row
    written = totals["bytes_written_per_step"] * tokens
    more = {
        "requests_written": totals["write_requests"] * runs,
        "bytes_written": written,
        "write_amplification": written / (bytes_per_token * tokens),
    }
    return dataclasses.replace(row, metrics={**totals, **more})
