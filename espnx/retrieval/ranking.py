"""From scores to the k best."""

from __future__ import annotations

import numpy as np

from .wave import Outcome


def rank(outcome: Outcome, k: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(record numbers, scores, how many of them are exact) of the k best: those scored exactly first, then the others as they came.

    Equal scores are in the order of record numbers.
    """
    depth = len(outcome.exact)
    head = outcome.numbers[:depth]
    best = np.lexsort((head, -outcome.exact))[:k]
    rest = slice(depth, depth + k - len(best))
    numbers = np.concatenate([head[best], outcome.numbers[rest]])
    return numbers, np.concatenate([outcome.exact[best], outcome.similarities[rest]]), len(best)
