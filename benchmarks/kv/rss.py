"""Memory that a cache takes while a model decodes and while it takes in a long prompt in chunks,
beside what is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from espnx.sizes import format_size

from ..harness.registry import Say
from ..harness.result import Row
from ..machine.memory import status_bytes
from .fleet import Fleet, Limit, Spec
from .measure import judge
from .options import Options

CHUNK_TOKENS, GROWTH_CHUNK_TOKENS = 256, 128
_STEPS = 3
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def resident_bytes() -> tuple[int, int]:
    """(now, at most since `reset_peak`) of this process, shared weights included."""
    sizes = status_bytes()
    return sizes.get("VmRSS", 0), sizes.get("VmHWM", 0)


def reset_peak() -> None:
    _CLEAR.write_text(_RESET_PEAK)


def show_rss(options: Options, say: Say) -> list[Row]:
    """Peak memory above that of the model with its weights in memory."""
    plan = options.plan(new=_STEPS)
    task = options.task(plan)
    specs = [*options.ours(), Spec("dynamic", "dynamic")]
    found: list[Row] = []
    for phase in ("decode", "prefill"):
        say(f"rss: {phase}, {task.name}, {task.batch} x {task.context} tokens")
        with Fleet(
            task, specs, plan.path, Limit("ample"), 0, list(range(_STEPS)), say, is_seeded=False
        ) as fleet:
            found += [_row(options, fleet, spec, phase, say) for spec in specs]
            found[-len(specs) :] = _judged(fleet, specs, found[-len(specs) :], say)
    return found


def show_growth(options: Options, say: Say) -> list[Row]:
    """Memory after each chunk of a prompt, above that of the model before it: at 1, 4, 16, ...
    chunks, of one prefill."""
    plan = options.plan(new=_STEPS)
    task = options.task(plan)
    found = list[Row]()
    for spec in options.ours():
        say(f"growth: {spec.name}, {task.name}, {task.batch} x {task.context} tokens")
        with Fleet(task, [spec], plan.path, Limit("ample"), 0, [], say, is_seeded=False) as fleet:
            base = fleet.ask(spec.name, "touch")["now"]
            answer = fleet.ask(spec.name, "prefill", chunk=GROWTH_CHUNK_TOKENS)
            path = str(fleet.facts[spec.name]["effective_path"])
        chunks, is_whole = (
            answer["chunks"],
            int(answer["stored_bytes"]) == task.kv_bytes(task.context),
        )
        for count in sorted({*(4**i for i in range(16) if 4**i < len(chunks)), len(chunks)}):
            reached = dataclasses.replace(
                task, context=min(count * GROWTH_CHUNK_TOKENS, task.context)
            )
            then, stored = chunks[count - 1], reached.kv_bytes(reached.context)
            more = max(0, then["resident_bytes"] - base)
            say(f"    {format_size(stored)} stored: {format_size(more)} more")
            found.append(
                Row(
                    case="kv",
                    params={
                        **options.params("growth", reached),
                        "chunk_tokens": GROWTH_CHUNK_TOKENS,
                    },
                    system=spec.name,
                    kind="measured",
                    requested_path=path,
                    effective_path=path,
                    cache="cold",
                    n=1,
                    median_s=then["seconds"],
                    p99_s=then["seconds"],
                    iqr_s=0.0,
                    bytes_asked=stored,
                    bytes_moved=int(then["read_bytes"] or 0),
                    correct=is_whole,
                    metrics={"more_bytes": more, "base_bytes": base, "stored_bytes": stored},
                )
            )
    return found


def _row(options: Options, fleet: Fleet, spec: Spec, phase: str, say: Say) -> Row:
    task = fleet.task
    base = fleet.ask(spec.name, "touch")["now"]
    if phase == "decode":
        fleet.ask(spec.name, "seed")
        fleet.ask(spec.name, "reset_peak")
        answer = fleet.steps(spec.name, _STEPS)
        peak = fleet.ask(spec.name, "peak")["peak"]
    else:
        fleet.ask(spec.name, "reset_peak")
        answer = fleet.ask(spec.name, "prefill", chunk=CHUNK_TOKENS)
        peak = fleet.ask(spec.name, "peak")["peak"]
        fleet.steps(spec.name, _STEPS)
    stored = int(answer["stored_bytes"]) or task.kv_bytes(task.context)
    more = max(0, peak - base)
    say(f"    {spec.name}: {format_size(more)} at most, {format_size(stored)} stored")
    return Row(
        case="kv",
        params={**options.params("rss", task), "phase": phase, "chunk_tokens": CHUNK_TOKENS},
        system=f"{spec.name}-{phase}",
        kind="measured",
        requested_path=str(fleet.facts[spec.name]["effective_path"]),
        effective_path=str(fleet.facts[spec.name]["effective_path"]),
        cache="warm" if spec.in_memory else "cold",
        n=1,
        median_s=answer["seconds"],
        p99_s=answer["seconds"],
        iqr_s=0.0,
        bytes_asked=task.kv_bytes(task.context),
        bytes_moved=int(answer["read_bytes"] or 0),
        correct=True,
        metrics={
            "peak_bytes": more,
            "base_bytes": base,
            "stored_bytes": stored,
            "memory_over_stored": more / stored,
        },
    )


def _judged(fleet: Fleet, specs: Sequence[Spec], rows: Sequence[Row], say: Say) -> list[Row]:
    found = []
    for spec, row in zip(specs, rows, strict=True):
        verdict = judge(fleet, spec, "dynamic")
        if verdict.problem:
            say(f"WRONG RESULT of {row.system}: {verdict.problem}")
        found.append(dataclasses.replace(row, correct=verdict.problem is None))
    return found
