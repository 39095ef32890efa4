"""``espnx simulate --system cosmos``: commands a second of a board with processing elements."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import InvalidInputError
from ...tables import render_table
from ..output import json_document
from .answers import say
from .numbers import numbers

if TYPE_CHECKING:
    from ...simulate.closed_loop import Answer

US = 1e6
THREADS, SEED = "32", 1


def run_board(args: Namespace) -> int:
    from dataclasses import asdict

    from ...simulate.calibration import SYNCHRONOUS_OVER_CONVENTIONAL, calibrate_set_up_s
    from ...simulate.closed_loop import ask
    from ...simulate.cosmos import CHANNELS, ELEMENTS, Cosmos, ranges
    from ...simulate.figures import middles
    from ...simulate.workloads import load_workload

    if args.vs is not None:
        raise InvalidInputError("--vs", got=args.vs, expected=f"none beside {args.system}")
    workload = load_workload(args.workload)
    seed = SEED if args.seed is None else args.seed
    channels = CHANNELS if args.channels is None else args.channels
    known = ranges()
    figures = middles(known)
    set_up_s = calibrate_set_up_s(figures)
    threads = numbers("threads", THREADS if args.threads is None else args.threads)
    sweep = {
        number: {
            element: ask(Cosmos(element, figures, set_up_s, channels), workload, number, seed=seed)
            for element in ELEMENTS
        }
        for number in sorted(threads)
    }
    answers = sweep[max(threads)]
    fitted = {
        "set_up_s": set_up_s,
        "on": "synchronous over conventional, stress, 32 threads",
        "ratio": SYNCHRONOUS_OVER_CONVENTIONAL.middle,
    }
    document = json_document(
        "simulate",
        inputs={
            "system": args.system,
            "workload": workload.name,
            "title": workload.title,
            "threads": threads,
            "channels": channels,
            "seed": seed,
        },
        kind="modelled",
        clusters_per_query=workload.clusters_per_query,
        figures={name: asdict(each) | {"value": each.middle} for name, each in known.items()},
        fitted=fitted,
        elements={element: asdict(answer) for element, answer in answers.items()},
        sweep=[
            {
                "threads": number,
                "elements": {element: asdict(answer) for element, answer in each.items()},
            }
            for number, each in sweep.items()
        ],
    )
    head = f"{args.system}, {channels} channels: {workload.title}, {max(threads)} threads"
    parts = [f"{head} (modelled)", _rates(answers), _times(answers)]
    if len(threads) > 1:
        parts += [_breakdown(element, sweep) for element in ELEMENTS]
    say(args, "\n\n".join(parts), document)
    return 0


def _rates(answers: dict[str, Answer]) -> str:
    headers = ["element", "commands/s", "queries/s", "bound by", "bound/s", "command us", "drift"]
    rows = []
    for element, answer in answers.items():
        bound_per_s = (
            answer.loop_bound_per_s
            if answer.bound == "threads"
            else answer.stage(answer.bound).bound_per_s
        )
        rows.append(
            (
                element,
                f"{answer.commands_per_s:,.0f}",
                None if answer.queries_per_s is None else f"{answer.queries_per_s:,.1f}",
                answer.bound,
                None if bound_per_s is None else f"{bound_per_s:,.0f}",
                f"{answer.command_s * US:,.0f}",
                f"{answer.residual:+.1%}",
            )
        )
    return render_table(headers, rows, right=[each for each in headers if each[-1] in "sr"])


def _breakdown(element: str, sweep: Mapping[int, Mapping[str, Answer]]) -> str:
    """A command's time over the threads: microseconds before and in each part."""
    names = [stage.name for stage in next(iter(sweep.values()))[element].stages]
    rows = []
    for threads, each in sweep.items():
        found = each[element]
        cells = [f"{(one.waiting_s + one.service_s) * US:,.0f}" for one in found.stages]
        rows.append(
            (f"{threads}", f"{found.commands_per_s:,.0f}", f"{found.command_s * US:,.0f}", *cells)
        )
    headers = [f"{element}, threads", "commands/s", "command us", *names]
    return render_table(headers, rows, right=headers)


def _times(answers: dict[str, Answer]) -> str:
    """How much of a command's time goes where, in microseconds: waiting + service."""
    names = dict.fromkeys(stage.name for each in answers.values() for stage in each.stages)
    rows = []
    for name in names:
        cells = []
        for answer in answers.values():
            stage = next((each for each in answer.stages if each.name == name), None)
            cells.append(
                None
                if stage is None
                else f"{stage.waiting_s * US:,.0f} + {stage.service_s * US:,.0f}"
            )
        rows.append((name, *cells))
    headers = ["waits + is served, us", *answers]
    return render_table(headers, rows, right=headers[1:])
