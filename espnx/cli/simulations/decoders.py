"""``espnx simulate --system smartssd-16 --workload opt-66b``: tokens a second of machines whose
drives hold K and V, what bounds them, and where the time goes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..output import json_document
from .answers import say
from .numbers import flat, lines, numbers, ratios, systems, unwritten

if TYPE_CHECKING:
    from ...simulate.decoding.answer import Answer
    from ...simulate.decoding.machine import Specs


DEFAULTS = {"context": "32768", "output": "64", "batch": "16"}


def add_decoder_options(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("of machines that decode")
    add = options.add_argument
    for name, what in (
        ("context", "tokens of each before"),
        ("output", "tokens of each that are made"),
    ):
        add(
            f"--{name}",
            metavar="N[,N...]",
            help=f"{what}; several are a sweep (default: {DEFAULTS[name]})",
        )
    add(
        "--techniques",
        metavar="WORDS",
        help="of programs that attend in drives, such as writeback,x-cache, or none (default: what "
        "the system says)",
    )


def run_decoder(args: Namespace) -> int:
    from ...simulate.decoding.answer import answer
    from ...simulate.decoding.machine import load_system
    from ...simulate.decoding.shape import Shape
    from ...simulate.figures import middles
    from ...simulate.specs.kinds import ModelSpec
    from ...simulate.specs.load import load

    machines = [load_system(each) for each in systems(args)]
    workload = load(ModelSpec, args.workload)
    shape = Shape.of(workload)
    contexts, outputs, batches = (
        numbers(name, DEFAULTS[name] if getattr(args, name) is None else getattr(args, name))
        for name in ("context", "output", "batch")
    )
    techniques = _techniques(args.techniques, machines)
    answers = [
        answer(
            specs.machine(
                middles(specs.ranges),
                techniques=techniques if specs.program.attention == "drives" else None,
            ),
            workload.name,
            shape,
            batch=batch,
            context=context,
            output=output,
        )
        for context in contexts
        for batch in batches
        for output in outputs
        for specs in machines
    ]
    beside = ratios([each.tokens_per_s for each in answers], len(machines))
    document = json_document(
        "simulate",
        kind="modelled",
        inputs={
            "system": args.system,
            "vs": args.vs,
            "workload": workload.name,
            "title": workload.title,
            "batch": batches,
            "context": contexts,
            "output": outputs,
        },
        figures={
            name: asdict(each) | {"value": each.middle}
            for specs in machines
            for name, each in specs.ranges.items()
        },
        answers=[asdict(each) for each in answers],
        ratios=flat(beside),
    )
    say(args, _text(machines, workload.title, answers, beside), document)
    return 0


def _techniques(text: str | None, machines: Sequence[Specs]) -> tuple[str, ...] | None:
    from ...simulate.specs.kinds import TECHNIQUES

    if text is None:
        return None
    if all(specs.program.attention != "drives" for specs in machines):
        raise InvalidInputError(
            "--techniques", got=text, expected="a system whose program attends in drives"
        )
    words = () if text == "none" else tuple(text.split(","))
    for word in words:
        if word not in TECHNIQUES:
            raise InvalidInputError(
                "--techniques", got=word, expected=f"{', '.join(TECHNIQUES)}, or none"
            )
    return words


def _text(
    machines: Sequence[Specs],
    title: str,
    answers: Sequence[Answer],
    beside: Sequence[Sequence[float]],
) -> str:
    parts = [f"{title} (modelled)", _rates(answers)]
    if beside:
        names = [each.system for each in answers[: len(machines)]]
        parts.append("\n".join(lines(names, beside, "tokens/s")))
    if len(answers) == len(machines):
        parts += [_times(answers), _costs(answers)]
    return "\n\n".join(parts)


def _rates(answers: Sequence[Answer]) -> str:
    headers = ["system", "context", "batch", "output", "tokens/s", "with contexts", "bound by"]
    headers += ["busy", "X share", "s/step", "drift"]
    rows = [
        (
            each.system,
            f"{each.context:,}",
            each.batch,
            each.output,
            f"{each.tokens_per_s:.3g}",
            f"{each.run_tokens_per_s:.3g}",
            each.bound,
            f"{each.stage(each.bound).busy:.0%}",
            f"{each.x_share:g}",
            f"{each.step_s:.3g}",
            f"{each.residual:+.1%}",
        )
        for each in answers
    ]
    return render_table(headers, rows, right=[each for each in headers if each not in _WORDS])


_WORDS = ("system", "bound by")


def _times(answers: Sequence[Answer]) -> str:
    """The time of a token: seconds in which each part serves, and the rate it would allow."""
    names = dict.fromkeys(stage.name for each in answers for stage in each.stages)
    rows = []
    for name in names:
        cells: list[str | None] = []
        for each in answers:
            stage = next((stage for stage in each.stages if stage.name == name), None)
            cells += (
                [None, None]
                if stage is None
                else [f"{stage.busy_s:.3g}", f"{stage.bound_tokens_per_s:.3g}"]
            )
        rows.append((name, *cells))
    headers = ["in a step, of a part"]
    for number, each in enumerate(answers):
        # columns are told apart by their headers
        headers += [f"{each.system} s" + " " * number, "at most tokens/s" + " " * number]
    return render_table(headers, rows, right=headers[1:])


def _hourly(per_s: float | None) -> str | None:
    return None if per_s is None else f"{per_s * 3600:.3g}"


def _costs(answers: Sequence[Answer]) -> str:
    headers = [
        "system",
        "W",
        "J/token",
        "drives $",
        "tokens/h and $",
        "written/sequence",
        "sequences until worn",
    ]
    rows = [
        (
            each.system,
            None if each.watts is None else f"{each.watts:,.0f}",
            None if each.joules_per_token is None else f"{each.joules_per_token:,.0f}",
            None if each.drives_dollars is None else f"{each.drives_dollars:,.0f}",
            _hourly(each.tokens_per_s_per_drives_dollar),
            format_size(int(each.written_bytes)),
            None if each.sequences_until_worn is None else f"{each.sequences_until_worn:,.0f}",
        )
        for each in answers
    ]
    text = render_table(headers, rows, right=headers[1:])
    unknown = dict.fromkeys(word for each in answers for word in each.unknown)
    notes = [f"not known: {', '.join(unknown)}"] if unknown else []
    if idle := unwritten({each.system: each.written_bytes for each in answers}):
        notes.append(idle)
    return "\n".join([text, *notes])
