"""``espnx simulate --system dell-r760xa --workload falcon-4.8b``: how long searches of graphs on
drives take, how many a second a server answers, and what bounds them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...sizes import format_size
from ...tables import render_table
from ..output import json_document
from .answers import say
from .numbers import flat, lines, numbers, ratios, systems

if TYPE_CHECKING:
    from ...simulate.graphs.answer import Answer

MS = 1e3
LIST_SIZES = "10,50,100,150,200,250"


def add_server_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("of servers that search graphs on drives").add_argument
    add(
        "--list-size",
        metavar="N[,N...]",
        help=f"of a search; several are a sweep (default: {LIST_SIZES})",
    )
    add(
        "--streams",
        metavar="N[,N...]",
        help="of queries, each of which waits for its answer (default: what the workload says)",
    )


def run_server(args: Namespace) -> int:
    from ...simulate.figures import middles
    from ...simulate.graphs.answer import answer
    from ...simulate.graphs.server import load_server

    specs = [load_server(each, args.workload) for each in systems(args)]
    collection = specs[0].collection
    list_sizes = numbers("list-size", LIST_SIZES if args.list_size is None else args.list_size)
    streams = (
        [int(collection.streams.value)]
        if args.streams is None
        else numbers("streams", args.streams)
    )
    answers = [
        answer(each.given(middles(each.ranges)), list_size, n)
        for list_size in list_sizes
        for n in streams
        for each in specs
    ]
    beside = ratios([each.queries_per_s for each in answers], len(specs))
    document = json_document(
        "simulate",
        kind="modelled",
        inputs={
            "system": args.system,
            "vs": args.vs,
            "workload": collection.name,
            "title": collection.title,
            "list_size": list_sizes,
            "streams": streams,
        },
        figures={
            name: asdict(each) | {"value": each.middle}
            for spec in specs
            for name, each in spec.ranges.items()
        },
        answers=[asdict(each) for each in answers],
        ratios=flat(beside),
    )
    parts = [f"{collection.title} (modelled)", _rates(answers), _bounds(answers)]
    if beside:
        names = [each.server.name for each in specs]
        parts.append("\n".join(lines(names, beside, "queries/s")))
    stored = format_size(int(answers[0].stored_bytes))
    parts.append(f"index: {stored}; which recall a list leads to is not modelled")
    if any(each.is_extrapolated for each in answers):
        parts.append("walks are of graphs larger than any that was walked: by a fitted law")
    say(args, "\n\n".join(parts), document)
    return 0


def _rates(answers: Sequence[Answer]) -> str:
    headers = ["system", "list", "streams", "queries/s", "mean ms", "P95 ms", "bound by", "drift"]
    rows = [
        (
            each.system,
            f"{each.list_size}",
            f"{each.streams}",
            f"{each.queries_per_s:,.1f}",
            f"{each.mean_s * MS:.3g}",
            f"{each.p95_s * MS:.3g}",
            each.bound,
            f"{each.residual:+.1%}",
        )
        for each in answers
    ]
    return render_table(headers, rows, right=[each for each in headers if each not in _WORDS])


_WORDS = ("system", "bound by")


def _bounds(answers: Sequence[Answer]) -> str:
    """What a query asks, and what each part would allow without any waiting."""
    names = list(answers[0].bounds_per_s)
    headers = ["system", "list", "vertices", "reads", "core ms", "cores busy", "drives busy"]
    headers += [f"{name}: at most/s" for name in names]
    rows = [
        (
            each.system,
            f"{each.list_size}",
            f"{each.vertices:,.0f}",
            f"{each.reads:,.0f}",
            f"{each.core_s * MS:.3g}",
            *(f"{each.busy[name]:.0%}" for name in ("cores", "drives")),
            *(f"{each.bounds_per_s[name]:,.0f}" for name in names),
        )
        for each in answers
    ]
    return render_table(headers, rows, right=headers[1:])
