"""``espnx evaluate``: retrieval quality of an index against judged queries."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..tables import render_table
from .output import add_json_option, emit, json_document
from .progress import ProgressLine
from .queries import read_queries
from .search import add_index_options, add_search_options, check_store, open_index, search_options

if TYPE_CHECKING:
    from ..retrieval.search.index import Index
    from ..retrieval.store.texts import DocumentId


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("--queries", required=True, metavar="FILE", help="JSON lines with id (or _id) and text, or lines: id TAB text")
    parser.add_argument(
        "--qrels",
        required=True,
        metavar="FILE",
        help="lines: query, document, relevance (BEIR, with or without header, or TREC's four columns)",
    )
    parser.add_argument(
        "--metrics", default="nDCG@10,MRR@10,recall@100", metavar="M,...", help="nDCG@k, MRR@k and recall@k (default: %(default)s)"
    )
    add_search_options(parser)
    add_index_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    check_store(args.store)
    from ..retrieval.evaluate import read_qrels

    queries, qrels = read_queries(args.queries), read_qrels(args.qrels)
    metrics = [metric.strip() for metric in args.metrics.split(",")]
    with ProgressLine(is_terse=True) as progress, open_index(args, progress) as index:
        values = index.evaluate(queries, _ids_of(index, qrels), metrics, **search_options(args))
        path = index.store.effective_path
    judged = [query for query, relevant in qrels.items() if any(gain > 0 for gain in relevant.values())]
    missing = [query for query in judged if query not in queries]
    rows = [*((metric, f"{value:.4f}") for metric, value in values.items()), ("judged queries", f"{len(judged):,}")]
    if missing:
        rows.append(("of them not asked", f"{len(missing):,} (they count as having found nothing)"))
    document = json_document(
        "evaluate", store=args.store, metrics=values, judged_queries=len(judged), not_asked=len(missing), effective_path=path
    )
    emit(args, render_table(("", ""), rows), document)
    return 0


def _ids_of(index: Index, qrels: Mapping[str, Mapping[str, int]]) -> dict[str, dict[DocumentId, int]]:
    """Judgements by the store's own ids: a file cannot tell 7 from "7", so a number is meant where the store has that alone."""
    words = list({word for relevant in qrels.values() for word in relevant})
    held = index.store.texts.numbers(words)
    numbers = [
        word for word, number in zip(words, held.tolist(), strict=True)
        if number < 0 and re.fullmatch("-?[0-9]{1,18}", word)
    ]  # fmt: skip
    are_numbers = {
        word
        for word, number in zip(numbers, index.store.texts.numbers([int(word) for word in numbers]).tolist(), strict=True)
        if number >= 0
    }
    return {
        query: {int(word) if word in are_numbers else word: gain for word, gain in relevant.items()} for query, relevant in qrels.items()
    }
