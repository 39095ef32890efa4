"""``espnx plan --vectors``: what a graph of vectors needs on SSD and in memory, by where its codes
lie, and what these media cost."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...checks import check_finite
from ...errors import InvalidInputError
from ...sizes import format_size, parse_size
from ...tables import render_table
from ..output import emit, json_document

if TYPE_CHECKING:
    from ...graph.planning import GraphPlan

#: Below what any build takes: PyTorch and NumPy alone hold 220 MiB and more, and 48 MiB are
#: buffers. What one needs is told by `build`.
LEAST_MEMORY_BYTES = 256 << 20
_TB_BYTES, _GB_BYTES = 10**12, 2**30  # as SSDs and as memory are sold
_WHERE = {
    "inline": "codes beside each node",
    "paged": "codes in pages of their own",
    "memory": "codes in memory",
}


def check_build_memory(memory: str | None) -> None:
    """Checks ``--memory`` before seconds of imports. Raises InvalidInputError."""
    if memory is not None and parse_size(memory) < LEAST_MEMORY_BYTES:
        raise InvalidInputError(
            "--memory of a graph's build",
            got=format_size(parse_size(memory)),
            expected=(
                f"more than {format_size(LEAST_MEMORY_BYTES)}: the whole process counts, and "
                "PyTorch alone takes nearly as much"
            ),
            fix=(
                "about 300MiB for small inputs; `espnx plan --vectors N --dim D` says it for others"
            ),
        )


def configure_graph(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "a graph of vectors", "with --dim; options as of `espnx graph build`"
    ).add_argument
    add("--vectors", type=int, metavar="N", help="how many")
    add(
        "--vector-dtype",
        default="float16",
        metavar="T",
        help="float32, float16, bfloat16, uint8, int8 or pq (default: %(default)s)",
    )
    add("--disk-pq-bytes", type=int, metavar="B", help="of codes in place of vectors")
    add("--codes", choices=tuple(_WHERE), help="default: all are shown")
    add("--max-degree", type=int, default=64, metavar="R", help="default: %(default)s")
    add("--pq-bytes", type=int, metavar="B", help="of a code (default: as many as fill a page)")
    add("--no-opq", dest="use_opq", action="store_false", help="codes of the vectors as they are")
    add("--clusters", type=int, metavar="N", help="a graph for each (default: one graph)")
    add("--replicas", type=float, metavar="SHARE", help="of vectors in two clusters (default: 0)")
    add(
        "--directories",
        type=int,
        default=0,
        metavar="N",
        help="in which the clusters' pages lie (default: beside the rest)",
    )
    add(
        "--price-per-tb-ssd",
        type=float,
        metavar="P",
        help="of 10^12 bytes: the media cost is shown",
    )
    add("--price-per-gb-ram", type=float, metavar="P", help="of 2^30 bytes, in the same currency")


def run_graph(args: Namespace) -> int:
    if args.dim is None:
        raise InvalidInputError(
            "plan --vectors",
            got="no --dim",
            expected="the dimensions of a vector",
            fix="--dim 384, say",
        )
    check_build_memory(args.memory)
    prices = {"ssd": args.price_per_tb_ssd, "ram": args.price_per_gb_ram}
    for name, price in prices.items():
        check_finite(f"price of {name}", price or 0.0)
        if (price or 0) < 0:
            raise InvalidInputError(f"price of {name}", got=price, expected="0 or more")
    from ...graph.planning import plan_graph

    options = {
        "vector_dtype": args.vector_dtype,
        "max_degree": args.max_degree,
        "pq_bytes": args.pq_bytes,
        "disk_pq_bytes": args.disk_pq_bytes,
        "use_opq": args.use_opq,
        "clusters": args.clusters,
        "replicas": args.replicas or 0.0,
        "directories": args.directories,
    }
    if args.clusters is None and args.replicas is not None:
        raise InvalidInputError(
            "plan --replicas", got="no --clusters", expected="how many clusters", fix="--clusters N"
        )
    shown = [args.codes] if args.codes else list(_WHERE) if args.clusters is None else ["inline"]
    plans = {codes: plan_graph(args.vectors, args.dim, codes=codes, **options) for codes in shown}
    costs = {codes: _cost(plan, prices) for codes, plan in plans.items()}
    modes = {
        codes: asdict(plan) | ({"cost": costs[codes]} if costs[codes] else {})
        for codes, plan in plans.items()
    }
    inputs = {
        "vectors": args.vectors,
        "dim": args.dim,
        **options,
        "price_per_tb_ssd": prices["ssd"],
        "price_per_gb_ram": prices["ram"],
    }
    held = (
        args.vector_dtype if args.disk_pq_bytes is None else f"codes of {args.disk_pq_bytes} bytes"
    )
    rows = [
        (
            "vectors",
            f"{args.vectors:,}",
            f"x {args.dim} dimensions as {held}, {args.max_degree} neighbours each",
        )
    ]
    if args.clusters is not None:
        more = f", {args.replicas:.0%} of the vectors in two" if args.replicas else ""
        rows.append(("clusters", f"{args.clusters:,}", f"a graph each, of equal size{more}"))
    for codes, plan in plans.items():
        rows += _shown(codes, plan, costs[codes])
    emit(
        args,
        render_table(("", "", ""), rows),
        json_document("plan", inputs=inputs, kinds={"modes": "computed"}, modes=modes),
    )
    return 0


def _cost(plan: GraphPlan, prices: dict[str, Any]) -> dict[str, float]:
    """Prices of a plan's disk and memory, where they are known."""
    cost = {}
    if prices["ssd"] is not None:
        cost["ssd"] = plan.disk["total_bytes"] / _TB_BYTES * prices["ssd"]
    if prices["ram"] is not None:
        cost["ram"] = plan.memory["total_bytes"] / _GB_BYTES * prices["ram"]
    return cost


def _shown(codes: str, plan: GraphPlan, cost: dict[str, float]) -> list[tuple[str, str, str]]:
    disk, memory, build = plan.disk, plan.memory, plan.build
    nodes = (
        f"{plan.nodes_per_page} to a page of {format_size(plan.page_bytes)}, codes of "
        f"{plan.pq_bytes} bytes"
    )
    rows = [
        (f"{_WHERE[codes]}", "", f"--codes {codes}"),
        ("  on SSD", format_size(disk["total_bytes"]), nodes),
        *(
            [("  in the fullest directory", format_size(disk["directory_bytes"]), "of pages")]
            if "directory_bytes" in disk
            else []
        ),
        (
            "  in memory",
            format_size(memory["total_bytes"]),
            "when it is open; buffers of searches beside it",
        ),
        (
            "  while it is built",
            format_size(build["whole_bytes"]),
            f"with --memory at least {format_size(build['least_bytes'])}; libraries beside it",
        ),
    ]
    if plan.hint is not None:
        rows.append(("  hint", "", plan.hint))
    names = {"ssd": "SSD", "ram": "memory"}
    if cost:
        parts = " + ".join(f"{value:,.2f} {names[name]}" for name, value in cost.items())
        rows.append(("  media cost", f"{sum(cost.values()):,.2f}", parts))
    return rows
