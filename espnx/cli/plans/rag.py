"""``espnx plan rag``: what keeping the K and V of passages takes and brings. A file of its own as
the plan of each kind of store is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ...errors import InvalidInputError
from ...sizes import format_size, parse_size
from ...tables import render_table
from ..output import emit, json_document

#: Tokens of a passage, where nothing else is said, and the parts of all passages whose hit rate is
#: shown.
_TOKENS, _PARTS = 512, (0.001, 0.01, 0.1)


def configure_rag(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "K and V of passages (plan rag, beside --model)", "bytes are whole rows, without blocks"
    ).add_argument
    add("--passages", type=int, metavar="N", help="how many there are")
    add("--passage-tokens", type=int, metavar="T", help=f"tokens of each (default: {_TOKENS})")
    add(
        "--popularity",
        metavar="zipf:S",
        help="the passage of rank r is asked for as 1 / r^S; zipf:0: all alike (default: zipf:1.0)",
    )
    add("--library", metavar="SIZE", help="what is kept at most (default: several sizes)")
    add(
        "--flops",
        type=float,
        metavar="F",
        help="operations a second of what computes, such as 400e12 (default: measured, beside "
        "--storage)",
    )


def run_rag(args: Namespace) -> int:
    from ...integrations.streamed.plan import plan_model
    from ...rag.planning import break_even_bytes_per_s, hit_rate

    _check(args)
    s = _exponent(args.popularity)
    tokens = args.passage_tokens or _TOKENS
    plan = plan_model(args.model, batch=1, context=tokens, storage=args.storage)
    if not plan.resume:
        raise InvalidInputError(
            f"plan rag --model {args.model}",
            got="layers that are not full attention",
            expected="K and V that can be kept",
        )
    each_bytes, operations = plan.resume["kv_bytes"], plan.resume["operations"]
    all_bytes = each_bytes * args.passages
    if args.library is None:
        kept = [max(1, round(part * args.passages)) for part in _PARTS]
    else:
        kept = [min(args.passages, parse_size(args.library) // each_bytes)]
    rates = [
        {
            "passages": count,
            "bytes": count * each_bytes,
            "hit_rate": hit_rate(count, args.passages, s),
        }
        for count in dict.fromkeys([*kept, *([] if args.library else [args.passages])])
    ]
    measured = plan.speeds.get("gemm_operations_per_s")
    even = {
        name: None if rate is None else break_even_bytes_per_s(each_bytes, operations, rate)
        for name, rate in (("given", args.flops), ("here", measured))
    }
    sizes = {
        "bytes_per_token": plan.kv["bytes_per_token"],
        "bytes_per_passage": each_bytes,
        "bytes_of_all": all_bytes,
    }
    assumed = [
        name
        for name, value in (
            ("passage-tokens", args.passage_tokens),
            ("popularity", args.popularity),
        )
        if value is None
    ]
    inputs = {
        "path": args.model,
        "passages": args.passages,
        "passage_tokens": tokens,
        "popularity": f"zipf:{s:g}",
        "library": args.library,
        "flops": args.flops,
        "storage": args.storage,
    }
    document = json_document(
        "plan",
        inputs=inputs,
        assumed=assumed,
        kinds={"sizes": "computed", "hit_rate": "modelled", "break_even": "modelled"},
        model=plan.model,
        sizes=sizes,
        operations_per_passage=operations,
        hit_rate=rates,
        break_even={**even, "storage": plan.speeds.get("storage_bytes_per_s")},
    )
    rows = [
        ("model", plan.model["class"], f"{plan.model['parameters']:,} parameters"),
        *(("  assumed", name, f"say yours with --{name}") for name in assumed),
        ("K and V", format_size(sizes["bytes_per_token"]), "a token"),
        ("  a passage", format_size(each_bytes), f"{tokens:,} tokens"),
        ("  all passages", format_size(all_bytes), f"{args.passages:,}"),
    ]
    rows += [
        (
            "hit rate",
            f"{each['hit_rate']:.1%}",
            (
                f"{each['passages']:,} kept, the most popular by zipf:{s:g}: "
                f"{format_size(int(each['bytes']))} (modelled)"
            ),
        )
        for each in rates
    ]
    emit(args, render_table(("", "", ""), rows + _break_even(document, operations)), document)
    return 0


def _check(args: Namespace) -> None:
    """Raises InvalidInputError."""
    if args.passages is None:
        raise InvalidInputError(
            "plan rag", got="no --passages", expected="how many there are", fix="--passages 1000000"
        )
    for name, value in (("--passages", args.passages), ("--passage-tokens", args.passage_tokens)):
        if value is not None and value < 1:
            raise InvalidInputError(name, got=value, expected="at least 1")
    if args.flops is not None and not 0 < args.flops < float("inf"):
        raise InvalidInputError("--flops", got=args.flops, expected="operations a second, above 0")


def _break_even(document: dict[str, object], operations: float) -> list[tuple[str, str, str]]:
    even = document["break_even"]
    if not isinstance(even, dict) or (even["given"] is None and even["here"] is None):
        return [
            (
                "break-even",
                "n/a",
                f"needs --flops or --storage DIR: bytes x rate / {operations:.4g} operations",
            )
        ]
    rows = []
    for name, what in (("given", "with --flops"), ("here", "with what computes here (measured)")):
        if even[name] is not None:
            rows.append(
                (
                    "break-even",
                    f"{format_size(int(even[name]))}/s",
                    f"from there on {what} reading is sooner",
                )
            )
    if even["storage"] is not None:
        rows.append(("  the disk", f"{format_size(int(even['storage']))}/s", "measured"))
    return rows


def _exponent(popularity: str | None) -> float:
    """S of ``zipf:S``."""
    if popularity is None:
        return 1.0
    kind, _, number = popularity.partition(":")
    try:
        s = float(number)
    except ValueError:
        s = -1.0
    if kind != "zipf" or not 0 <= s <= 10:
        raise InvalidInputError("--popularity", got=popularity, expected="zipf:S, S from 0 to 10")
    return s
