"""How many lists to scan, and how early the candidates are known: measured when an index is built.

Both belong to the data, not to the code: how clustered the vectors are decides how soon the nearest lists hold what the search will find
(ESPN, section 4.2 and figure 6).
"""

from __future__ import annotations

import numpy as np

from .first_stage import FirstStage

#: What a store's own nprobe is to find: that share of so many exhaustive candidates.
CANDIDATES, RECALL = 1000, 0.98
#: Shares of the lists at which the hit rate is measured.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
_QUERIES_AT_ONCE = 8  # bounds the memory of the answers


def measure(stage: FirstStage, vectors: np.ndarray, candidates: int, recall: float) -> tuple[int, dict[str, float]]:
    """The smallest number of lists that finds `recall` of the exhaustive candidates, and the hit rate of a prefetch at each of `STEPS`.

    Args:
        stage: filled.
        vectors: float32 [q, dim], queries or what resembles them.
        candidates: per query.
        recall: wanted, 0 to 1.

    Returns:
        (nprobe, {"0.05": share of the candidates of a search with that nprobe that are known after 5 % of its lists, ...})
    """
    if not stage.nlist or not len(vectors):
        return 0, {}
    blocks = [vectors[i : i + _QUERIES_AT_ONCE] for i in range(0, len(vectors), _QUERIES_AT_ONCE)]
    truth = [[set(numbers.tolist()) for numbers, _ in stage.start(block, candidates, stage.nlist).complete()] for block in blocks]
    wanted = recall * sum(len(found) for block in truth for found in block)

    def enough(nprobe: int) -> bool:
        hits = 0
        for block, known in zip(blocks, truth, strict=True):
            found = stage.start(block, candidates, nprobe).complete()
            hits += sum(len(want.intersection(numbers.tolist())) for want, (numbers, _) in zip(known, found, strict=True))
        return hits >= wanted

    high = 1
    while high < stage.nlist and not enough(high):
        high = min(2 * high, stage.nlist)
    low = high // 2
    # To the nearest sixteenth: closer than that, the sample of queries decides.
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, hit_rates(stage, vectors, candidates, high)


def hit_rates(stage: FirstStage, vectors: np.ndarray, candidates: int, nprobe: int) -> dict[str, float]:
    """For each of `STEPS`: the share of the final candidates that are among the candidates after that share of the lists."""
    hits = dict.fromkeys(STEPS, 0)
    total = 0
    for first in range(0, len(vectors), _QUERIES_AT_ONCE):
        search = stage.start(vectors[first : first + _QUERIES_AT_ONCE], candidates, nprobe)
        early = {step: [numbers for numbers, _ in search.advance(step)] for step in STEPS}
        final = [numbers for numbers, _ in search.complete()]
        total += sum(map(len, final))
        for step, known in early.items():
            hits[step] += sum(len(np.intersect1d(a, b, assume_unique=True)) for a, b in zip(known, final, strict=True))
    return {f"{step:g}": count / max(1, total) for step, count in hits.items()}
