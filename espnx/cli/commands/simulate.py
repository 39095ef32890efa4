"""``espnx simulate``: what a machine that is not here would bring, and how far to believe it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError
from ...suggestions import nearest
from ...tables import render_table
from ..output import add_json_option, check_json, emit, json_document

if TYPE_CHECKING:
    from ...simulate.closed_loop import Answer
    from ...simulate.validation import Validation

DESCRIPTION = """Commands pass a machine's parts in simulated time: nothing is measured, nothing is
waited for, and the same words give the same numbers. Rates are modelled, from figures of papers and
from ranges that are shown; one figure is fitted (--validation says on what).

Systems: cosmos, an SSD with processing elements on its flash channels, set up asynchronously or
synchronously, or without any. Workloads: sift, spacev (clusters of several sizes, anywhere),
stress (clusters of 16 KiB, one after another)."""
SYSTEMS = ("cosmos",)
US = 1e6


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--system", metavar="NAME", help="what is simulated")
    add("--workload", metavar="NAME", help="what it is asked for")
    add(
        "--threads",
        type=int,
        default=32,
        metavar="N",
        help="that ask, each with one command under way (default: %(default)s)",
    )
    add("--channels", type=int, metavar="N", help="of flash, with the same bandwidth (default: 8)")
    add("--seed", type=int, default=1, metavar="N", help="of places (default: %(default)s)")
    add(
        "--validation",
        action="store_true",
        help="in place of an answer: what papers have measured, predicted, with ranges",
    )
    add("--draws", type=int, default=20, metavar="N", help="for a range (default: %(default)s)")
    add_json_option(parser)


def run(args: Namespace) -> int:
    if args.json:
        check_json(args.json)
    if args.validation:
        return run_validation(args)
    for name in ("system", "workload"):
        if getattr(args, name) is None:
            raise InvalidInputError(
                "simulate", got=f"no --{name}", expected="--system and --workload, or --validation"
            )
    if args.system not in SYSTEMS:
        near = nearest(args.system, SYSTEMS)
        raise InvalidInputError(
            "a system",
            got=args.system,
            expected=", ".join(SYSTEMS),
            fix=near and f"did you mean {near}?",
        )
    return run_cosmos(args)


def run_cosmos(args: Namespace) -> int:
    from dataclasses import asdict

    from ...simulate.calibration import SYNCHRONOUS_OVER_CONVENTIONAL, calibrate_set_up_s
    from ...simulate.closed_loop import ask
    from ...simulate.cosmos import CHANNELS, ELEMENTS, Cosmos, ranges
    from ...simulate.figures import middles
    from ...simulate.workloads import load_workload

    workload = load_workload(args.workload)
    channels = CHANNELS if args.channels is None else args.channels
    known = ranges()
    figures = middles(known)
    set_up_s = calibrate_set_up_s(figures)
    answers = {
        element: ask(
            Cosmos(element, figures, set_up_s, channels), workload, args.threads, seed=args.seed
        )
        for element in ELEMENTS
    }
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
            "threads": args.threads,
            "channels": channels,
            "seed": args.seed,
        },
        kind="modelled",
        clusters_per_query=workload.clusters_per_query,
        figures={name: asdict(each) | {"value": each.middle} for name, each in known.items()},
        fitted=fitted,
        elements={element: asdict(answer) for element, answer in answers.items()},
    )
    head = (
        f"{args.system}, {channels} channels: {workload.title}, {args.threads} threads (modelled)"
    )
    emit(args, f"{head}\n\n{_rates(answers)}\n\n{_times(answers)}", document)
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


def run_validation(args: Namespace) -> int:
    from ...simulate.validation import validate

    found = validate(args.draws)
    document = json_document(
        "simulate",
        kind="modelled",
        validation=[_row(row) for row in found.rows],
        fitted=dict(found.fitted),
        fitted_on=dict(found.fitted_on),
        check=dict(found.check),
    )
    emit(args, _validation_text(found), document)
    return 0


def _row(row: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(row)


def _validation_text(found: Validation) -> str:
    rows = [
        (row["id"], *(f"{row[name]:.2f}" for name in ("value", "low", "high")))
        if "value" in row
        else (row["id"], row["not_predicted"], None, None)
        for row in map(_row, found.rows)
    ]
    table = render_table(["id", "value", "low", "high"], rows, right=["value", "low", "high"])
    fitted = ", ".join(f"{name} {value * US:.1f} us" for name, value in found.fitted.items())
    on = ", ".join(f"{name} = {value:g}" for name, value in found.fitted_on.items())
    check = found.check
    return (
        f"{table}\n\nfitted: {fitted}, on {on}\n"
        f"not fitted, beside it: {check['id']}: measured {check['measured']}, "
        f"predicted {check['predicted']:.1f}"
    )
