"""Fusion of ranked lists: reciprocal ranks (RRF) or weighted scores, and what each list said of
each candidate.

Pure functions of arrays: nothing is read, and equal input gives equal output, whatever order a
sum's parts come in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InvalidInputError
from .interface import Candidates

METHODS = ("rrf", "weighted")
#: Of searches: as ``rrf``, MaxSim's own ranking of what it has scored being one more list.
WITH_MAXSIM = "rrf+maxsim"
#: Of Cormack, Clarke and Buettcher (SIGIR 2009): how little the first ranks are above the next
#: ones.
RRF_K = 60


@dataclass(frozen=True, eq=False)
class Fused:
    """The union of the candidates of some stages, best first.

    Attributes:
        numbers: int64 [m], each once.
        scores: float64 [m], falling; of equal ones the lower number comes first.
        ranks: int32 [m, stages], from 1, see `ranks_of`; -1 where a stage did not have the
            candidate.
        stage_scores: float32 [m, stages]; NaN there.
    """

    numbers: np.ndarray
    scores: np.ndarray
    ranks: np.ndarray
    stage_scores: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)


def fuse(
    stages: Sequence[Candidates],
    method: str = "rrf",
    *,
    weights: Sequence[float] | None = None,
    rrf_k: float = RRF_K,
) -> Fused:
    """One ranking of several, of one query.

    Args:
        stages: of each its candidates: numbers int64 [m], each once, best first, and scores float32
            [m]. A stage may have none.
        method: ``"rrf"``: the sum of ``weight / (rrf_k + rank)``, ranks from 1, the same for those
            that score the same (`ranks_of`). ``"weighted"``: the sum of ``weight * (score - least)
            / (greatest - least)``, of each stage's own candidates; where all of them score the
            same, that is 1. What a stage did not find has 0 of it. Order does not count.
        weights: of each stage; None: 1 each.
        rrf_k: see `method`.

    A list that is cut short takes from its stage's say: a candidate just beyond its end counts as
    not found. Where that matters, fuse lists that are several times as deep as what is wanted of
    the result.

    Raises:
        InvalidInputError: another method, weights that are not finite, negative or of another
            number, a stage that names a candidate twice, arrays of other shapes or kinds, or scores
            that are not finite.
    """
    if method not in METHODS:
        raise InvalidInputError("fuse", got=repr(method), expected=" or ".join(map(repr, METHODS)))
    chosen = _checked_weights(weights, len(stages))
    if not isinstance(rrf_k, (int, float)) or not 0 <= rrf_k < math.inf:
        raise InvalidInputError("fuse: rrf_k", got=repr(rrf_k), expected="a number of at least 0")
    lists = [_checked(stage, candidates) for stage, candidates in enumerate(stages)]
    numbers = (
        np.unique(np.concatenate([each for each, _ in lists])) if lists else np.empty(0, np.int64)
    )
    ranks = np.full((len(numbers), len(lists)), -1, np.int32)
    scores = np.full((len(numbers), len(lists)), np.nan, np.float32)
    parts = np.zeros((len(numbers), len(lists)))
    for stage, (found, similarities) in enumerate(lists):
        rows = np.searchsorted(numbers, found)
        ranks[rows, stage] = ranks_of(similarities)
        scores[rows, stage] = similarities
        say = (
            _least_to_greatest(similarities)
            if method == "weighted"
            else 1.0 / (rrf_k + ranks[rows, stage])
        )
        parts[rows, stage] = chosen[stage] * say
    sums = _sums(parts)
    order = np.lexsort((numbers, -sums))
    return Fused(numbers[order], sums[order], ranks[order], scores[order])


def ranks_of(scores: np.ndarray) -> np.ndarray:
    """int64 [m], from 1, of scores that fall: candidates that score the same share a rank, and as
    many ranks after it are nobody's (1, 2, 2, 4)."""
    begins = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]])[: len(scores)]
    return np.repeat(begins + 1, np.diff(np.append(begins, len(scores))))


def _least_to_greatest(scores: np.ndarray) -> np.ndarray:
    wide = scores.astype(np.float64)
    if not len(wide):
        return wide
    least, greatest = wide.min(), wide.max()
    return (wide - least) / (greatest - least) if greatest > least else np.ones_like(wide)


def _sums(parts: np.ndarray) -> np.ndarray:
    """Sums each row, the smallest first: rows of the same values have the same sum, whichever stage
    each came from."""
    parts = np.sort(parts, axis=1)
    sums = np.zeros(len(parts))
    for column in parts.T:
        sums += column
    return sums


def _checked_weights(weights: Sequence[float] | None, stages: int) -> list[float]:
    if weights is None:
        return [1.0] * stages
    try:
        chosen = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        chosen = []
    if len(chosen) != stages or not all(0 <= weight < math.inf for weight in chosen):
        raise InvalidInputError(
            "fuse: weights",
            got=repr(weights),
            expected=f"{stages} numbers of at least 0, one for each stage",
        )
    return chosen


def _checked(stage: int, candidates: Any) -> Candidates:
    try:
        numbers, scores = (np.asarray(each) for each in candidates)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"fuse: stage {stage}", got=type(candidates).__name__, expected="numbers and scores"
        ) from None
    shapes = f"{numbers.dtype} {list(numbers.shape)} and {scores.dtype} {list(scores.shape)}"
    is_whole = numbers.dtype.kind in "iu" or numbers.size == 0  # an empty list comes as float64
    if (
        numbers.ndim != 1
        or scores.shape != numbers.shape
        or not is_whole
        or scores.dtype.kind not in "fiu"
    ):
        raise InvalidInputError(
            f"fuse: stage {stage}", got=shapes, expected="numbers int64 [m] and scores float32 [m]"
        )
    if len(np.unique(numbers)) != len(numbers):
        raise InvalidInputError(
            f"fuse: stage {stage}", got="a candidate twice", expected="each at most once"
        )
    with np.errstate(over="ignore"):  # becomes infinity, which is refused
        narrow = scores.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise InvalidInputError(
            f"fuse: stage {stage}",
            got="a score that is not finite",
            expected="finite scores, float32",
        )
    return numbers.astype(np.int64), narrow
