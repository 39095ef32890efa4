"""``espnx plan --postings``: what BM25, or an index of sparse vectors, needs on SSD and in memory.
A file of its own as the plan of each other kind of store is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from ...sizes import format_size
from ...tables import render_table
from ..output import emit, json_document

#: Different terms of a passage of 80 words, and of a SPLADE vector of one.
_TERMS, _TERMS_OF_VECTORS, _WORD_PIECES = 50, 120, 30_522


def configure_postings(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "posting lists", "how often terms come is modelled by Zipf's law"
    ).add_argument
    add("--postings", type=int, metavar="N", help="how many records")
    add(
        "--terms",
        type=int,
        metavar="T",
        help="different ones in each (default: 50, with --weights 120)",
    )
    add(
        "--vocabulary",
        type=int,
        metavar="V",
        help="different ones in all (default: by Heaps' law, with --weights 30,522)",
    )
    add(
        "--weights",
        action="store_true",
        help="sparse vectors such as SPLADE's, a byte a weight (default: BM25)",
    )


def run_postings(args: Namespace) -> int:
    from ...postings.planning import plan_postings

    terms = args.terms or (_TERMS_OF_VECTORS if args.weights else _TERMS)
    vocabulary = _WORD_PIECES if args.vocabulary is None and args.weights else args.vocabulary
    plan = plan_postings(args.postings, terms, n_terms=vocabulary, is_weighted=args.weights)
    what = "sparse vectors, weights in one byte" if args.weights else "BM25"
    rows = [
        ("records", f"{args.postings:,}", f"{what}, {terms:,} terms each, {plan.n_terms:,} in all")
    ]
    assumed = [
        name
        for name, value in (("terms", args.terms), ("vocabulary", args.vocabulary))
        if value is None
    ]
    rows += [("  assumed", name, f"say yours with --{name}") for name in assumed]
    rows.append(
        (
            "on SSD",
            format_size(plan.disk["total_bytes"]),
            f"{plan.disk['total_bytes'] / plan.n_postings:.2f} bytes a posting (modelled)",
        )
    )
    rows += _parts(plan.disk)
    rows.append(
        (
            "in memory",
            format_size(plan.memory["total_bytes"]),
            f"{plan.memory['total_bytes'] / args.postings:.2f} bytes a record",
        )
    )
    rows += _parts(plan.memory)
    inputs = {
        "postings": args.postings,
        "terms": terms,
        "vocabulary": vocabulary,
        "weights": args.weights,
    }
    document = json_document(
        "plan",
        inputs=inputs,
        assumed=assumed,
        kinds={"disk": "modelled", "memory": "computed"},
        **asdict(plan),
    )
    emit(args, render_table(("", "", ""), rows), document)
    return 0


def _parts(sizes: dict[str, int]) -> list[tuple[str, str, str]]:
    words = {
        "lists_bytes": "lists of records and values",
        "dictionary_bytes": "where each list is",
        "names_bytes": "terms",
        "forward_bytes": "terms of each record, for exact scores",
        "places_bytes": "where each of those is",
        "lengths_bytes": "of records",
    }
    return [
        (f"  {name.removesuffix('_bytes')}", format_size(sizes[name]), what)
        for name, what in words.items()
        if name in sizes
    ]
