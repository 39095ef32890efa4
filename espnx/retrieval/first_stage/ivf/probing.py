"""How many lists to scan, and how early the candidates are known: measured when an index is built.

Both belong to the data, not to the code: how clustered the vectors are decides how soon the nearest
lists hold what the search will find (ESPN, section 4.2 and figure 6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ....storage.parse import Fields
from ..interface import Candidates
from .search import LoadedIvf

#: What a store's own nprobe is to find: that share of the exhaustive candidates.
RECALL = 0.98
#: Shares of the lists at which the hit rate is measured.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
_QUERIES_AT_ONCE = 8  # bounds the memory of the answers
_SAMPLE, _SEARCHED = 64, 4096  # documents taken as queries; looked at for so many that differ
_SEARCHED_BYTES = 16 << 20
# similarities that differ by less, of the largest, are those of duplicates: rounding is as much
_ALIKE = 1e-6


def parse_steps(fields: Fields) -> dict[float, float]:
    """What `describe_steps` has written as ``steps``. Raises FormatError."""
    listed = fields.inner("steps")
    shares: dict[float, float] = {}
    for name in listed:
        try:
            shares[float(name)] = listed.real(name)
        except ValueError:
            listed.refuse(name, "a share of the work as a name")
    return shares


def describe_steps(steps: Mapping[float, float]) -> dict[str, float]:
    """What manifests keep of the steps: share of a search's work -> share of its candidates that
    are known by then."""
    return {f"{step:g}": rate for step, rate in steps.items()}


def distinct_sample(
    count: int, dim: int, vectors: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """First-stage vectors of some of `count` documents, no two alike: duplicates would all ask the
    same. float32 [m, dim].

    Args:
        vectors: of documents by number (int64, ascending). Asked once more, for more of them, where
            the first ones are too much alike.
    """
    for size in (_SAMPLE, max(_SAMPLE, min(_SEARCHED, _SEARCHED_BYTES // (4 * dim)))):
        chosen = np.sort(
            np.random.default_rng(1).choice(count, size=min(size, count), replace=False)
        ).astype(np.int64)
        found = np.ascontiguousarray(vectors(chosen))
        _, first = np.unique(
            found.view(np.dtype((np.void, found.dtype.itemsize * dim))).reshape(-1),
            return_index=True,
        )
        if len(first) >= min(_SAMPLE, count):
            break
    first.sort()
    return found[
        first[np.linspace(0, len(first) - 1, min(_SAMPLE, len(first))).round().astype(np.int64)]
    ]


def measure(
    stage: LoadedIvf, vectors: np.ndarray, candidates: int, recall: float
) -> tuple[int, dict[float, float]]:
    """The smallest number of lists that finds `recall` of the exhaustive candidates, and the hit
    rate of a prefetch at each of `STEPS`.

    Candidates that are equally similar to a query count once: where most documents are alike,
    finding them says nothing about the others.

    Args:
        stage: filled.
        vectors: float32 [q, dim], queries or what resembles them.
        candidates: per query.
        recall: wanted, 0 to 1.

    Returns:
        (nprobe, {0.05: share of the candidates of a search with that nprobe that are known after 5
        % of its lists, ...})
    """
    if not stage.nlist or not len(vectors):
        return 0, {}
    blocks = [vectors[i : i + _QUERIES_AT_ONCE] for i in range(0, len(vectors), _QUERIES_AT_ONCE)]
    truth = [
        [known_of(scores) for _, scores in stage.start(block, candidates, stage.nlist).complete()]
        for block in blocks
    ]
    wanted = recall * sum(len(known) for block in truth for known in block)

    def enough(nprobe: int) -> bool:
        hits = 0
        for block, best in zip(blocks, truth, strict=True):
            found = stage.start(block, candidates, nprobe).complete()
            hits += hits_of(best, found)
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


def known_of(scores: np.ndarray) -> np.ndarray:
    """Similarities, descending; of those that are alike, the first."""
    return (
        scores[np.r_[True, -np.diff(scores) > _ALIKE * np.abs(scores).max()]]
        if len(scores)
        else scores
    )


def hits_of(truth: Sequence[np.ndarray], found: Sequence[Candidates]) -> int:
    """How many of what is to be found (of each query, see `known_of`) was found."""
    return sum(_matched(known, scores) for known, (_, scores) in zip(truth, found, strict=True))


def _matched(wanted: np.ndarray, scores: np.ndarray) -> int:
    """How many of `wanted` (see `known_of`) are among the scores, which descend."""
    if not len(wanted) or not len(scores):
        return 0
    rising = scores[::-1]
    after = np.searchsorted(rising, wanted)
    gaps = np.minimum(
        *(np.abs(rising[np.clip(at, 0, len(rising) - 1)] - wanted) for at in (after - 1, after))
    )
    return int((gaps <= _ALIKE * np.abs(wanted).max()).sum())


def hit_rates(
    stage: LoadedIvf, vectors: np.ndarray, candidates: int, nprobe: int
) -> dict[float, float]:
    """The share of the final candidates that are among the candidates after each of `STEPS`, a
    share of the lists."""
    hits = dict.fromkeys(STEPS, 0)
    total = 0
    for first in range(0, len(vectors), _QUERIES_AT_ONCE):
        search = stage.start(vectors[first : first + _QUERIES_AT_ONCE], candidates, nprobe)
        early = {step: [numbers for numbers, _ in search.advance(step)] for step in STEPS}
        final = [numbers for numbers, _ in search.complete()]
        total += sum(map(len, final))
        for step, known in early.items():
            hits[step] += sum(
                len(np.intersect1d(a, b, assume_unique=True))
                for a, b in zip(known, final, strict=True)
            )
    return {step: count / max(1, total) for step, count in hits.items()}
