"""``espnx simulate --system ragx-1 --workload gtr``: queries a second of services that find
passages for a model, where a query's time goes, and how long it waits."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..output import json_document
from .answers import say
from .numbers import flat, lines, numbers, ratios, systems

if TYPE_CHECKING:
    from ...simulate.retrieval.answer import Answer
    from ...simulate.retrieval.arrivals import Waits

#: Answers whose phases are shown, a column each.
PHASES_MAX = 8
PASSAGES, GENERATION = "5000000", "llama2-34b"


def add_service_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("of services that find passages").add_argument
    add(
        "--passages",
        metavar="N[,N...]",
        help=f"that are searched; several are a sweep (default: {PASSAGES})",
    )
    add(
        "--generation",
        metavar="NAME",
        help=f"the model that answers: a name, or a .yaml file (default: {GENERATION})",
    )
    add(
        "--rate",
        type=float,
        metavar="PER_S",
        help="queries that arrive a second, at random: how long they wait",
    )


def run_service(args: Namespace) -> int:
    from ...simulate.retrieval.answer import answer
    from ...simulate.retrieval.service import FITTED, load_service
    from ...simulate.retrieval.validation import middle_values

    generation = GENERATION if args.generation is None else args.generation
    specs = [load_service(each, args.workload, generation) for each in systems(args)]
    passages = numbers("passages", PASSAGES if args.passages is None else args.passages)
    values, _ = middle_values()
    own = {name: each.middle for spec in specs for name, each in spec.ranges.items()}
    given = {**own, **{name: values[name] for name in FITTED}}
    batches = [1] if args.batch is None else numbers("batch", args.batch)
    asked = [(each, batch) for each in passages for batch in batches]
    answers = [answer(spec.given(given), each, batch) for each, batch in asked for spec in specs]
    beside = ratios([each.queries_per_s for each in answers], len(specs))
    waits = [] if args.rate is None else [_waits(each, args.rate) for each in answers]
    document = json_document(
        "simulate",
        kind="modelled",
        inputs={
            "system": args.system,
            "vs": args.vs,
            "workload": specs[0].retriever.name,
            "title": specs[0].retriever.title,
            "generation": specs[0].generation.name,
            "passages": passages,
            "batch": batches,
            "rate": args.rate,
        },
        figures={
            name: asdict(each) | {"value": each.middle}
            for spec in specs
            for name, each in spec.ranges.items()
        },
        fitted={name: values[name] for name in FITTED},
        answers=[asdict(each) for each in answers],
        waits=[None if each is None else asdict(each) for each in waits],
        ratios=flat(beside),
    )
    parts = [f"{specs[0].retriever.title}, answers by {specs[0].generation.title} (modelled)"]
    parts.append(_rates(answers, waits))
    if len(answers) <= PHASES_MAX:
        parts.append(_phases(answers))
    if beside:
        names = [each.system for each in answers[: len(specs)]]
        parts.append("\n".join(lines(names, beside, "queries/s")))
    if assumed := {each.system: each for each in answers if each.kept == "memory"}:
        parts.append(
            "\n".join(
                f"{name}: its memory is taken to hold {format_size(int(each.kept_bytes))}, "
                "whether it does or not"
                for name, each in assumed.items()
            )
        )
    if any(each.is_extrapolated for each in answers):
        parts.append(
            "walks marked * are of graphs larger than any that was walked: by a fitted law"
        )
    say(args, "\n\n".join(parts), document)
    return 0


def _waits(found: Answer, rate: float) -> Waits | None:
    """None: a queue would grow without end."""
    from ...simulate.retrieval.arrivals import arrive

    if not rate > 0:
        raise InvalidInputError("--rate", got=rate, expected="above 0")
    if found.batch > 1:
        raise InvalidInputError("--rate", got=f"batches of {found.batch}", expected="batches of 1")
    if rate >= found.queries_per_s:
        return None
    return arrive(found.serial_s, rate)


def _rates(answers: Sequence[Answer], waits: Sequence[Waits | None]) -> str:
    headers = ["system", "passages", "batch", "queries/s", "bound by", "walk", "search J/query"]
    rows = []
    for each in answers:
        walk = None if each.distances is None else f"{each.distances:,.0f}"
        rows.append(
            [
                each.system,
                f"{each.passages:,}",
                str(each.batch),
                f"{each.queries_per_s:.3g}",
                each.bound,
                walk if walk is None or not each.is_extrapolated else f"{walk}*",
                f"{each.search_joules:.3g}",
            ]
        )
    if waits:
        headers += ["median s", "p99 s"]
        for row, wait in zip(rows, waits, strict=True):
            row += (
                ["the queue grows", None]
                if wait is None
                else [f"{wait.median_s:.3g}", f"{wait.p99_s:.3g}"]
            )
    return render_table(headers, rows, right=[each for each in headers if each not in _WORDS])


_WORDS = ("system", "bound by")


def _phases(answers: Sequence[Answer]) -> str:
    """Seconds of a batch in each."""
    phases: Mapping[str, float] = answers[0].phases_s
    rows = [(name, *(f"{each.phases_s[name]:.3g}" for each in answers)) for name in phases]
    headers = ["of a batch, s"]
    for number, each in enumerate(answers):
        # columns are told apart by their headers
        headers.append(f"{each.system} {each.passages:,}" + " " * number)
    return render_table(headers, rows, right=headers[1:])
