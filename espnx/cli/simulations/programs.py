"""``espnx simulate --trace run.trace --system smartssd-4``: a recorded program on other drives."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..output import emit, json_document
from .numbers import systems, unwritten

if TYPE_CHECKING:
    from ...simulate.programs.answer import Answer


def run_program(args: Namespace) -> int:
    from ...device.trace.reader import read_trace
    from ...simulate.decoding.machine import load_system
    from ...simulate.figures import middles
    from ...simulate.programs.answer import answer

    if args.system is None or args.workload is not None:
        raise InvalidInputError(
            "simulate --trace",
            got="no --system" if args.system is None else "--workload",
            expected="--system, whose drives are asked, and no --workload",
        )
    trace = read_trace(args.trace)
    machines = [load_system(each) for each in systems(args)]
    answers = [answer(specs.machine(middles(specs.ranges)), trace) for specs in machines]
    document = json_document(
        "simulate",
        kind="modelled",
        inputs={"system": args.system, "vs": args.vs, "trace": args.trace},
        is_whole=trace.is_whole,
        has_all_host_s=trace.has_all_host_s,
        figures={
            name: asdict(each) | {"value": each.middle}
            for specs in machines
            for name, each in specs.ranges.items()
        },
        programs=[asdict(each) for each in answers],
    )
    parts = [f"{trace.program} (modelled)", _totals(answers)]
    parts += [_verbs(each) for each in answers]
    if unknown := dict.fromkeys(word for each in answers for word in each.unknown):
        parts.append(f"not known: {', '.join(unknown)}")
    if idle := unwritten({each.system: each.written_bytes for each in answers}):
        parts.append(idle)
    if not trace.has_all_host_s:
        parts.append("a trace before version 3, without the host's work beside other commands")
    emit(args, "\n\n".join(parts), document)
    return 0


def _totals(answers: Sequence[Answer]) -> str:
    headers = ["system", "s", "recorded s", "of the host", "bound by", "written", "until worn"]
    rows = [
        (
            each.system,
            f"{each.predicted_s:.4g}",
            f"{each.recorded_s:.4g}",
            f"{each.host_s:.4g}",
            each.bound,
            format_size(each.written_bytes),
            None if each.runs_until_worn is None else f"{each.runs_until_worn:,.0f} runs",
        )
        for each in answers
    ]
    return render_table(
        headers, rows, right=[each for each in headers if each not in ("system", "bound by")]
    )


def _verbs(found: Answer) -> str:
    rows = [
        (
            verb,
            f"{times.count:,}",
            format_size(times.read_bytes),
            format_size(times.write_bytes),
            f"{times.recorded_s:.4g}",
            f"{times.predicted_s:.4g}",
        )
        for verb, times in found.verbs.items()
    ]
    headers = [f"on {found.system}", "count", "read", "written", "recorded s", "s"]
    return render_table(headers, rows, right=headers[1:])
