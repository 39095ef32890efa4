"""Retrieval quality of rankings against judgements, as trec_eval computes it, and whether one
system's differs from another's."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..suggestions import suggests_keywords
from .named_measures import depth_of_named, measured, named_measure

#: query -> document -> how relevant (0: judged and not relevant).
Qrels = Mapping[Any, Mapping[Any, int]]
#: query -> documents, best first: ids, pairs (id, score), or hits.
Rankings = Mapping[Any, Sequence[Any]]

DEFAULT_METRICS = ("nDCG@10", "MRR@10", "recall@100")
_METRIC = re.compile(r"(ndcg|mrr|map|recall|p|success)@([1-9][0-9]{0,8})", re.IGNORECASE)
_METRICS = "nDCG@k, MRR@k, MAP@k, recall@k, P@k or success@k"
# Numbers that a bootstrap draws at a time.
_DRAWN_AT_ONCE = 1 << 20


@suggests_keywords
def evaluate(
    rankings: Rankings, qrels: Qrels, metrics: Sequence[str] = DEFAULT_METRICS
) -> dict[str, float]:
    """Means over the queries that have a relevant document; one that is missing from `rankings`
    counts as having found nothing, but they may not all be missing: their ids are then of another
    kind.

    Values are those of ``ir_measures`` (nDCG, RR, AP, R, P and Success at k), wherever every judged
    query has a relevant document; it takes one that has none into the mean, as a zero.

    Args:
        rankings: query -> documents, best first: ids, pairs of id and score (as `read_run` gives),
            or the hits of a search.
        qrels: query -> id -> relevance. Above 0 is relevant; nDCG takes it as the gain, discounted
            by log2(rank + 1).
        metrics: of ``nDCG@k``, ``MRR@k``, ``MAP@k``, ``recall@k``, ``P@k`` (precision) and
            ``success@k`` (whether there is any). Any other name is one of ir-measures, which
            computes it where it is installed (``pip install 'espnx[metrics]'``): ``RR@10``,
            ``ERR@20``, ``Bpref``, ``AP(rel=2)@100``. It sees rankings in their order, without
            scores.

    Raises:
        InvalidInputError: an unknown metric, no query with a relevant document, rankings of no
            query that is judged, or a ranking that names a document twice.
    """
    each = evaluate_each(rankings, qrels, metrics)
    return {metric: math.fsum(values.values()) / len(values) for metric, values in each.items()}


@suggests_keywords
def evaluate_each(
    rankings: Rankings, qrels: Qrels, metrics: Sequence[str] = DEFAULT_METRICS
) -> dict[str, dict[Any, float]]:
    """What `evaluate` takes the means of: metric -> query -> value."""
    own = {metric: parsed for metric in metrics if (parsed := _own(metric)) is not None}
    named = {metric: named_measure(metric, _METRICS) for metric in metrics if metric not in own}
    judged = {
        query: relevant
        for query, relevant in qrels.items()
        if any(gain > 0 for gain in relevant.values())
    }
    if not judged:
        raise errors.InvalidInputError(
            "evaluate",
            got="no query with a relevant document",
            expected="qrels: query -> id -> relevance",
        )
    check_judged(rankings, qrels)
    found: dict[str, dict[Any, float]] = {metric: {} for metric in metrics}
    ranked: dict[Any, list[Any]] = {}
    for query, relevant in judged.items():
        ranking = [document_of(item) for item in rankings.get(query, ())]
        if len(set(ranking)) != len(ranking):
            raise errors.InvalidInputError(
                f"ranking of query {query!r}",
                got="a document twice",
                expected="every document at most once",
            )
        gains = [max(0, relevant.get(document, 0)) for document in ranking]
        for metric, (kind, depth) in own.items():
            found[metric][query] = _KINDS[kind](gains[:depth], relevant, depth)
        ranked[query] = ranking
    for metric, measure in named.items():
        found[metric] = measured(measure, ranked, judged)
    return found


def document_of(item: Any) -> Any:
    """The id of what a ranking holds: itself, the first of a pair, or of a hit."""
    if isinstance(item, tuple):
        return item[0] if item else item
    return getattr(item, "id", item)


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same queries. `str()` says it in a line.

    Attributes:
        metric: what was compared.
        value, baseline: the means of both.
        difference: value - baseline.
        low, high: of the difference, the bounds of its interval.
        confidence: of the interval.
        queries: how many.
        better, worse: for how many of them the value is above, and below, the baseline's.
    """

    metric: str
    value: float
    baseline: float
    difference: float
    low: float
    high: float
    confidence: float
    queries: int
    better: int
    worse: int

    def __str__(self) -> str:
        return (
            f"{self.metric} {self.value:.4f} against {self.baseline:.4f}: {self.difference:+.4f}, "
            f"{self.confidence:.0%} interval {self.low:+.4f} to {self.high:+.4f} ({self.queries:,} "
            f"queries: {self.better:,} better, {self.worse:,} worse)"
        )


@suggests_keywords
def compare_rankings(
    rankings: Rankings,
    baseline: Rankings,
    qrels: Qrels,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    confidence: float = 0.95,
    samples: int = 10_000,
    seed: int = 0,
) -> list[Comparison]:
    """How much better one system is than another, and how sure that is: the interval of a paired
    bootstrap over queries (Sakai, SIGIR 2006; percentiles). Where it holds 0, as many other queries
    might as well have said the opposite.

    Args:
        rankings, baseline, qrels, metrics: as of `evaluate`; both are judged on all queries that
            have a relevant document.
        confidence: of the interval, above 0 and below 1.
        samples: how many times as many queries are drawn, with repetition.
        seed: of the draws; the same numbers everywhere.

    Raises:
        InvalidInputError: what `evaluate` refuses, or an argument out of range.
    """
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise errors.InvalidInputError(
            "confidence", got=repr(confidence), expected="a number between 0 and 1"
        )
    for name, number, most in (("samples", samples, 10_000_000), ("seed", seed, 2**63 - 1)):
        if (
            not isinstance(number, int)
            or isinstance(number, bool)
            or not (name == "samples") <= number <= most
        ):
            raise errors.InvalidInputError(
                name, got=repr(number), expected=f"a whole number up to {most}"
            )
    ours, theirs = evaluate_each(rankings, qrels, metrics), evaluate_each(baseline, qrels, metrics)
    made = []
    for metric in metrics:
        values, others = (np.array(list(each[metric].values())) for each in (ours, theirs))
        means = _resampled_means(values - others, samples, seed)
        low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
        value, other = (math.fsum(each) / len(each) for each in (values, others))
        made.append(
            Comparison(
                metric,
                value,
                other,
                value - other,
                float(low),
                float(high),
                confidence,
                len(values),
                int((values > others).sum()),
                int((values < others).sum()),
            )
        )
    return made


def _resampled_means(differences: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """float64 [samples]: means of as many values as there are, drawn with repetition. The raw
    stream of PCG64 is the same everywhere."""
    random, count = np.random.PCG64(seed), len(differences)
    at_once = max(1, _DRAWN_AT_ONCE // count)
    means = []
    for begin in range(0, samples, at_once):
        rows = min(at_once, samples - begin)
        drawn = random.random_raw(rows * count) % np.uint64(count)
        means.append(differences[drawn.astype(np.int64)].reshape(rows, count).mean(1))
    return np.concatenate(means)


def check_judged(queries: Collection[Any], qrels: Qrels) -> None:
    """Raises InvalidInputError unless one of the queries is judged."""
    if not any(query in qrels for query in queries):
        raise errors.InvalidInputError(
            "evaluate: no query is judged",
            got=_kind(queries),
            expected=_kind(qrels),
            fix="give both the same ids, of the same type",
        )


def _kind(ids: Collection[Any]) -> str:
    first = next(iter(ids), None)
    return (
        "no query ids" if first is None else f"query ids such as {first!r} ({type(first).__name__})"
    )


def _own(metric: str) -> tuple[str, int] | None:
    """(kind, depth) of a metric that is computed here; None: it is another one."""
    match = _METRIC.fullmatch(metric)
    return None if match is None else (match[1].lower(), int(match[2]))


def depth_of(metrics: Sequence[str]) -> int:
    """How deep rankings must be for all of them. Raises InvalidInputError for an unknown one."""
    depths = (
        own[1] if (own := _own(metric)) else depth_of_named(named_measure(metric, _METRICS))
        for metric in metrics
    )
    return max(depths, default=10)


def _dcg(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))


def _ndcg(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return _dcg(gains) / _dcg(
        sorted((gain for gain in relevant.values() if gain > 0), reverse=True)[:depth]
    )


def _mrr(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return next((1 / (rank + 1) for rank, gain in enumerate(gains) if gain > 0), 0.0)


def _recall(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return sum(gain > 0 for gain in gains) / sum(gain > 0 for gain in relevant.values())


def _map(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    found, total = 0, 0.0
    for rank, gain in enumerate(gains, start=1):
        if gain > 0:
            found += 1
            total += found / rank
    return total / sum(gain > 0 for gain in relevant.values())


def _precision(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return sum(gain > 0 for gain in gains) / depth


def _success(gains: Sequence[int], relevant: Mapping[Any, int], depth: int) -> float:
    return float(any(gain > 0 for gain in gains))


_KINDS = {
    "ndcg": _ndcg,
    "mrr": _mrr,
    "map": _map,
    "recall": _recall,
    "p": _precision,
    "success": _success,
}


def read_qrels(path: str) -> dict[str, dict[str, int]]:
    """Judgements of a TSV file: ``query document relevance`` (BEIR, with or without header) or
    TREC's four columns.

    Where a line has tabs, those alone separate its columns.

    Raises:
        InvalidInputError: the file cannot be read, a line is neither, or two lines contradict each
            other; says which.
    """
    qrels: dict[str, dict[str, int]] = {}
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                fields = (
                    [field.strip() for field in line.split("\t")]
                    if "\t" in line.strip()
                    else line.split()
                )
                if not fields or (number == 1 and not _is_number(fields[-1])):
                    continue
                if (
                    len(fields) not in (3, 4)
                    or not all(fields)
                    or not re.fullmatch(r"-?[0-9]+", fields[-1])
                ):
                    raise errors.InvalidInputError(
                        f"line {number} of {path}",
                        got=line.strip()[:80],
                        expected=(
                            "query, document, relevance, a whole number (or TREC's four columns)"
                        ),
                    )
                query, document, relevance = fields[0], fields[-2], int(fields[-1])
                known = qrels.setdefault(query, {}).setdefault(document, relevance)
                if known != relevance:
                    raise errors.InvalidInputError(
                        f"line {number} of {path}",
                        got=f"{relevance} for query {query!r}, document {document!r}",
                        expected=f"{known}, as in a line before",
                        fix="leave one of the two out",
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidInputError(
            f"cannot read judgements {path}", got=str(error), expected="a readable TSV file"
        ) from error
    return qrels


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
