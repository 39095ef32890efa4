"""Measures by ir-measures, under its own names (https://ir-measur.es): those that `evaluate` does
not compute itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import errors

#: How deep rankings are for a measure without a cut-off, as of TREC's runs.
WHOLE_DEPTH = 1000
_INSTALL = (
    "pip install 'espnx[metrics]', for the names of ir-measures such as RR@10, ERR@20, Bpref or "
    "AP(rel=2)@100"
)


def named_measure(name: str, own: str) -> Any:
    """A measure of ir-measures. Raises InvalidInputError: there is no such measure, or nothing here
    that computes it. `own`: the names that need no ir-measures."""
    try:
        import ir_measures
    except ImportError:
        raise errors.InvalidInputError(
            "metric", got=repr(name), expected=own, fix=_INSTALL
        ) from None
    expected = f"{own}, or a measure of ir-measures such as RR@10, ERR@20, Bpref or AP(rel=2)@100"
    try:
        found = ir_measures.parse_measure(name)
        is_supported = ir_measures.DefaultPipeline.supports(found)
    except (NameError, ValueError, AssertionError, SyntaxError) as error:
        raise errors.InvalidInputError(
            "metric", got=f"{name!r} ({error})", expected=expected
        ) from None
    if depth_of_named(found) < 1:
        raise errors.InvalidInputError("metric", got=repr(name), expected=expected)
    if not is_supported:
        raise errors.InvalidInputError(
            "metric",
            got=f"{name!r}, for which no provider of ir-measures is installed",
            expected=expected,
            fix="https://ir-measur.es says which package provides it",
        )
    return found


def depth_of_named(measure: Any) -> int:
    """How deep rankings must be for it."""
    return int(measure.params.get("cutoff", WHOLE_DEPTH))


def measured(
    measure: Any, rankings: Mapping[Any, Sequence[Any]], qrels: Mapping[Any, Mapping[Any, int]]
) -> dict[Any, float]:
    """query -> value, for every query of the judgements.

    Args:
        rankings: query -> ids of documents, best first: their order counts, no score does. One that
            is missing has found nothing.
    """
    import ir_measures

    def word(document: Any) -> str:
        """The numbers 7 and the text "7" are two documents."""
        return f"{type(document).__name__[0]}{document}"

    queries = list(qrels)
    judged = [
        ir_measures.Qrel(str(number), word(document), gain)
        for number, query in enumerate(queries)
        for document, gain in qrels[query].items()
    ]
    run = [
        ir_measures.ScoredDoc(str(number), word(document), float(-rank))
        for number, query in enumerate(queries)
        for rank, document in enumerate(rankings.get(query, ()))
    ]
    found = {
        each.query_id: float(each.value) for each in ir_measures.iter_calc([measure], judged, run)
    }
    return {
        query: found.get(str(number), float(measure.DEFAULT))
        for number, query in enumerate(queries)
    }
