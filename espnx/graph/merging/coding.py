"""Codes of a merged graph: those of the graph before, or, where they say little of what was added,
trained anew."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..codes.codebook import Codebook, train_codebook
from ..format import GraphFacts

_COMPARED_ROWS, _TRAINED_ROWS = 2048, 65_536
#: Squared error of the codes of additions over that of what the codes were trained for: of vectors
#: that are drawn alike 1.1 to 1.5, and up to 3 where there are hardly more than centroids, whose
#: codes gain by more vectors.
_WORSE = 2.0


def codebook_for(
    facts: GraphFacts,
    n_living: int,
    read_living: Callable[[np.ndarray], np.ndarray],
    added: np.ndarray,
    memory_bytes: int,
) -> Codebook:
    """The codebook of a graph that additions come into.

    A walk goes by codes, so that vectors which the codes cannot tell apart are found by a list as
    long as the graph only.

    Args:
        facts: of the graph before.
        n_living: nodes of it that stay.
        read_living: reads the vectors, float32 [m, dim], of some of these, by their number among
            them, int64 [m], growing.
        added: [a, dim], as they are stored.
        memory_bytes: of the sample of a training, at most, which takes as much again.
    """
    if not len(added):
        return facts.codebook
    random = np.random.default_rng(int(facts.options.get("seed", 0)))

    def some(most: int, of: int) -> np.ndarray:
        return np.sort(random.choice(of, min(most, of), replace=False))

    new = np.asarray(added[some(_COMPARED_ROWS, len(added))], np.float32)
    if n_living:
        error = _error(facts.codebook, read_living(some(_COMPARED_ROWS, n_living)))
        if _error(facts.codebook, new) <= _WORSE * error:
            return facts.codebook
    total, dim = n_living + len(added), facts.layout.dim
    rows = max(1, min(_TRAINED_ROWS, total, memory_bytes // (8 * dim)))
    n_old = min(n_living, round(rows * n_living / total))
    sample = np.asarray(added[some(rows - n_old, len(added))], np.float32)
    if n_old:
        sample = np.concatenate([read_living(some(n_old, n_living)), sample])
    return train_codebook(
        sample,
        facts.layout.code_bytes,
        n=total,
        use_opq=bool(facts.options.get("use_opq", True)),
        seed=int(facts.options.get("seed", 0)),
    )


def _error(book: Codebook, rows: np.ndarray) -> float:
    """Mean squared distance of vectors from what their codes say."""
    return float(np.square(book.decode(book.encode(rows)) - rows).sum(axis=1).mean())
