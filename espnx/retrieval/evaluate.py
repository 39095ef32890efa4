"""Retrieval quality: nDCG@k, MRR@k and recall@k of rankings against judgements, as trec_eval computes them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .. import errors

#: query -> document -> how relevant (0: judged and not relevant).
Qrels = Mapping[Any, Mapping[Any, int]]

DEFAULT_METRICS = ("nDCG@10", "MRR@10", "recall@100")
_METRIC = re.compile(r"(ndcg|mrr|recall)@([1-9][0-9]*)", re.IGNORECASE)


def evaluate(rankings: Mapping[Any, Sequence[Any]], qrels: Qrels, metrics: Sequence[str] = DEFAULT_METRICS) -> dict[str, float]:
    """Means over the queries that have a relevant document; one that is missing from `rankings` counts as having found nothing, but they
    may not all be missing: their ids are then of another kind.

    Args:
        rankings: query -> ids of documents, best first.
        qrels: query -> id -> relevance. Above 0 is relevant; nDCG takes it as the gain, discounted by log2(rank + 1).
        metrics: of ``nDCG@k``, ``MRR@k``, ``recall@k``.

    Raises:
        InvalidInputError: an unknown metric, no query with a relevant document, rankings of no query that is judged, or a ranking that
            names a document twice.
    """
    parsed = [_parse(metric) for metric in metrics]
    judged = {query: relevant for query, relevant in qrels.items() if any(gain > 0 for gain in relevant.values())}
    if not judged:
        raise errors.InvalidInputError("evaluate", got="no query with a relevant document", expected="qrels: query -> id -> relevance")
    check_judged(rankings, qrels)
    totals = dict.fromkeys(metrics, 0.0)
    for query, relevant in judged.items():
        ranking = list(rankings.get(query, ()))
        if len(set(ranking)) != len(ranking):
            raise errors.InvalidInputError(f"ranking of query {query!r}", got="a document twice", expected="every document at most once")
        gains = [max(0, relevant.get(document, 0)) for document in ranking]
        for metric, (kind, depth) in zip(metrics, parsed, strict=True):
            totals[metric] += _KINDS[kind](gains[:depth], relevant, depth)
    return {metric: total / len(judged) for metric, total in totals.items()}


def check_judged(queries: Collection[Any], qrels: Qrels) -> None:
    """Raises InvalidInputError unless one of the queries is judged."""
    if not any(query in qrels for query in queries):
        raise errors.InvalidInputError(
            "evaluate: no query is judged", got=_kind(queries), expected=_kind(qrels), fix="give both the same ids, of the same type"
        )


def _kind(ids: Collection[Any]) -> str:
    first = next(iter(ids), None)
    return "no query ids" if first is None else f"query ids such as {first!r} ({type(first).__name__})"


def _parse(metric: str) -> tuple[str, int]:
    match = _METRIC.fullmatch(metric)
    if match is None:
        raise errors.InvalidInputError("metric", got=repr(metric), expected="nDCG@k, MRR@k or recall@k")
    return match[1].lower(), int(match[2])


def _dcg(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))


def _ndcg(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return _dcg(gains) / _dcg(sorted((gain for gain in relevant.values() if gain > 0), reverse=True)[:depth])


def _mrr(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return next((1 / (rank + 1) for rank, gain in enumerate(gains) if gain > 0), 0.0)


def _recall(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return sum(gain > 0 for gain in gains) / sum(gain > 0 for gain in relevant.values())


_KINDS = {"ndcg": _ndcg, "mrr": _mrr, "recall": _recall}


def read_qrels(path: str) -> dict[str, dict[str, int]]:
    """Judgements of a TSV file: ``query document relevance`` (BEIR, with or without header) or TREC's four columns.

    Where a line has tabs, those alone separate its columns.

    Raises:
        InvalidInputError: the file cannot be read, a line is neither, or two lines contradict each other; says which.
    """
    qrels: dict[str, dict[str, int]] = {}
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                fields = [field.strip() for field in line.split("\t")] if "\t" in line.strip() else line.split()
                if not fields or (number == 1 and not _is_number(fields[-1])):
                    continue
                if len(fields) not in (3, 4) or not all(fields) or not re.fullmatch(r"-?[0-9]+", fields[-1]):
                    raise errors.InvalidInputError(
                        f"line {number} of {path}", got=line.strip()[:80],
                        expected="query, document, relevance, a whole number (or TREC's four columns)",
                    )  # fmt: skip
                query, document, relevance = fields[0], fields[-2], int(fields[-1])
                known = qrels.setdefault(query, {}).setdefault(document, relevance)
                if known != relevance:
                    raise errors.InvalidInputError(
                        f"line {number} of {path}", got=f"{relevance} for query {query!r}, document {document!r}",
                        expected=f"{known}, as in a line before", fix="leave one of the two out",
                    )  # fmt: skip
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidInputError(f"cannot read judgements {path}", got=str(error), expected="a readable TSV file") from error
    return qrels


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
