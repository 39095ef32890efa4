"""``espnx evaluate``: retrieval quality of an index against judged queries."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError
from ...importers.queries import read_queries
from ...tables import render_table
from ..output import add_json_option, emit, json_document
from ..progress import ProgressLine
from .search import add_index_options, add_search_options, check_store, open_index, search_options

if TYPE_CHECKING:
    from ...retrieval.search.index import Index
    from ...storage.documents.ids import DocumentId


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", help="directory of the store, or a run file of TREC's six columns, of any system"
    )
    parser.add_argument(
        "--queries",
        metavar="FILE",
        help="for a store: JSON lines with id (or _id) and text, or lines: id TAB text",
    )
    parser.add_argument(
        "--qrels",
        required=True,
        metavar="FILE",
        help=(
            "lines: query, document, relevance (BEIR, with or without header, or TREC's four "
            "columns)"
        ),
    )
    parser.add_argument(
        "--metrics",
        default="nDCG@10,MRR@10,recall@100",
        metavar="M,...",
        help=(
            "nDCG@k, MRR@k, MAP@k, recall@k, P@k and success@k; others by ir-measures where it is "
            "installed (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--save-run",
        metavar="FILE",
        help="write what was found as a run file, as deep as the metrics go",
    )
    parser.add_argument(
        "--against",
        metavar="RUN",
        help="a run file to compare with: the difference, and how sure it is (paired bootstrap)",
    )
    add_search_options(parser)
    add_index_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from ...importers.trec import read_run, write_run
    from ...retrieval.evaluate import compare_rankings, depth_of, evaluate, read_qrels

    is_run = os.path.isfile(args.store)
    if not is_run:
        check_store(args.store)
        if args.queries is None:
            raise InvalidInputError(
                "evaluate a store",
                got="no queries",
                expected="a file of queries",
                fix="--queries FILE",
            )
    elif args.queries is not None or args.save_run is not None:
        raise InvalidInputError(
            f"evaluate the run {args.store}",
            got="--queries or --save-run",
            expected="neither: what it found is known",
            fix="name a store",
        )
    qrels = read_qrels(args.qrels)
    baseline = None if args.against is None else read_run(args.against)
    # AP(rel=2,judged_only=True)@10 is one
    metrics = [metric.strip() for metric in re.split(r",(?![^(]*\))", args.metrics)]
    depth_of(metrics)  # one that is not known is told before an encoder is loaded
    asked: Collection[str]
    if is_run:
        rankings, path = read_run(args.store), ""
        asked, values = rankings, evaluate(rankings, qrels, metrics)
    else:
        queries = read_queries(str(args.queries))
        asked = queries
        rankings, values, path = _searched(
            args,
            queries,
            qrels,
            metrics,
            wants_rankings=bool(args.save_run) or baseline is not None,
        )
    if args.save_run is not None:
        write_run(args.save_run, rankings)
    judged = [
        query for query, relevant in qrels.items() if any(gain > 0 for gain in relevant.values())
    ]
    missing = [query for query in judged if query not in asked]
    rows = [
        *((metric, f"{value:.4f}") for metric, value in values.items()),
        ("judged queries", f"{len(judged):,}"),
    ]
    if missing:
        rows.append(("of them not asked", f"{len(missing):,} (they count as having found nothing)"))
    document: dict[str, Any] = {
        "store": args.store,
        "metrics": values,
        "judged_queries": len(judged),
        "not_asked": len(missing),
        "effective_path": path,
    }
    text = render_table(("", ""), rows)
    if baseline is not None:
        compared = compare_rankings(rankings, baseline, qrels, metrics)
        document["against"] = {
            "run": args.against,
            "comparisons": [asdict(each) for each in compared],
        }
        text += f"\n\nagainst {args.against}:\n" + "\n".join(map(str, compared))
    emit(args, text, json_document("evaluate", **document))
    return 0


def _searched(
    args: argparse.Namespace,
    queries: Mapping[str, str],
    qrels: dict[str, dict[str, int]],
    metrics: list[str],
    *,
    wants_rankings: bool,
) -> tuple[dict[str, list[tuple[str, float]]], dict[str, float], str]:
    """What a store finds for the judged queries where that is wanted, by ids as text; the metrics;
    the path of the reads."""
    from ...retrieval.evaluate import check_judged, depth_of, evaluate

    with ProgressLine(is_terse=True) as progress, open_index(args, progress) as index:
        options = search_options(args)
        if not wants_rankings:
            return (
                {},
                index.evaluate(queries, _ids_of(index, qrels), metrics, **options),
                index.store.effective_path,
            )
        check_judged(queries, qrels)
        judged = {query: text for query, text in queries.items() if query in qrels}
        results = index.search(judged, depth_of(metrics), **options)
        rankings = {
            query: [(str(hit.id), hit.score) for hit in result] for query, result in results.items()
        }
        return rankings, evaluate(rankings, qrels, metrics), index.store.effective_path


def _ids_of(
    index: Index, qrels: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[DocumentId, int]]:
    """Judgements by the store's own ids: a file cannot tell 7 from "7", so a number is meant where
    the store has that alone."""
    words = list({word for relevant in qrels.values() for word in relevant})
    held = index.store.texts.numbers(words)
    numbers = [
        word
        for word, number in zip(words, held.tolist(), strict=True)
        if number < 0 and re.fullmatch("-?[0-9]{1,18}", word)
    ]
    are_numbers = {
        word
        for word, number in zip(
            numbers,
            index.store.texts.numbers([int(word) for word in numbers]).tolist(),
            strict=True,
        )
        if number >= 0
    }
    return {
        query: {int(word) if word in are_numbers else word: gain for word, gain in relevant.items()}
        for query, relevant in qrels.items()
    }
