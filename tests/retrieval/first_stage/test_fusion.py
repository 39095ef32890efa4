"""Fusion against plain Python over dictionaries, on random lists; ties; and what is no list of
candidates."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from espnx.errors import InvalidInputError
from espnx.retrieval.first_stage.fusion import Fused, fuse


def oracle(stages, method, weights, rrf_k=60):
    """(number, score, ranks, scores of stages) of each candidate, best first."""
    parts, ranks, scores = {}, {}, {}
    for stage, (numbers, similarities) in enumerate(stages):
        values = [float(value) for value in similarities]
        for number, value in zip(numbers.tolist(), values, strict=True):
            rank = 1 + sum(other > value for other in values)
            if method == "rrf":
                part = weights[stage] * (1 / (rrf_k + rank))
            else:
                least, greatest = min(values), max(values)
                part = weights[stage] * (
                    (value - least) / (greatest - least) if greatest > least else 1.0
                )
            parts.setdefault(number, [0.0] * len(stages))[stage] = part
            ranks.setdefault(number, [-1] * len(stages))[stage] = rank
            scores.setdefault(number, [math.nan] * len(stages))[stage] = value
    made = [
        (number, sum(sorted(each)), ranks[number], scores[number]) for number, each in parts.items()
    ]
    return sorted(made, key=lambda item: (-item[1], item[0]))


def random_stage(rng, size, universe, levels):
    numbers = rng.choice(universe, size=size, replace=False).astype(np.int64)
    # few levels: scores tie
    scores = rng.integers(-levels, levels, size=size).astype(np.float32) / 4
    return numbers, -np.sort(-scores)


@pytest.mark.parametrize("method", ["rrf", "weighted"])
@pytest.mark.parametrize("seed", range(40))
def test_against_dictionaries(method, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    universe = np.unique(rng.integers(0, 40 if seed % 2 else 1 << 40, 40))
    stages = [
        random_stage(rng, int(rng.integers(0, len(universe) + 1)), universe, 6)
        for _ in range(count)
    ]
    weights = [1.0] * count if seed % 3 else rng.uniform(0, 2, count).tolist()
    fused = fuse(stages, method, weights=weights)
    wanted = oracle(stages, method, weights)
    assert fused.numbers.tolist() == [item[0] for item in wanted]
    assert fused.scores.tolist() == [item[1] for item in wanted]
    assert fused.ranks.tolist() == [item[2] for item in wanted]
    np.testing.assert_array_equal(
        fused.stage_scores, np.array([item[3] for item in wanted], np.float32).reshape(-1, count)
    )
    assert [
        array.dtype for array in (fused.numbers, fused.scores, fused.ranks, fused.stage_scores)
    ] == [np.int64, np.float64, np.int32, np.float32]


def test_reciprocal_ranks_by_hand():
    first = (np.array([7, 3, 9]), np.array([3.0, 2.0, 1.0], np.float32))
    second = (np.array([3, 4]), np.array([9.0, 8.0], np.float32))
    fused = fuse([first, second])
    assert fused.numbers.tolist() == [3, 7, 4, 9]
    exact = [Fraction(1, 62) + Fraction(1, 61), Fraction(1, 61), Fraction(1, 62), Fraction(1, 63)]
    assert fused.scores.tolist() == pytest.approx([float(each) for each in exact], rel=1e-15)
    assert fused.ranks.tolist() == [[2, 1], [1, -1], [-1, 2], [3, -1]]
    assert len(fused) == 4


def test_equal_sums_by_the_lower_number():
    # the same three ranks in every order: sums in the order of stages would differ
    ranks = np.array([[1, 2, 3], [3, 1, 2], [2, 3, 1]])
    numbers = np.array([30, 20, 10])
    stages = []
    for stage in range(3):
        order = np.argsort(ranks[:, stage])
        stages.append((numbers[order], np.arange(3, 0, -1).astype(np.float32)))
    fused = fuse(stages)
    assert fused.numbers.tolist() == [10, 20, 30]
    assert len(set(fused.scores.tolist())) == 1


def test_weights_and_depth():
    first, second = ((np.array([number]), np.ones(1, np.float32)) for number in (1, 2))
    assert fuse([first, second]).numbers.tolist() == [1, 2]
    assert fuse([first, second], weights=[1, 2]).numbers.tolist() == [2, 1]
    assert fuse([first, second], weights=[0, 1]).numbers.tolist() == [2, 1], (
        "a stage that does not count still brings its candidates"
    )
    assert fuse([first], rrf_k=0).scores.tolist() == [1.0]
    huge = np.array([3e38, -3e38], np.float32)  # whose difference float32 does not hold
    assert fuse([(np.array([1, 2]), huge)], "weighted").scores.tolist() == [1.0, 0.0]


def test_nothing_to_fuse():
    for stages in ([], [(np.empty(0, np.int64), np.empty(0, np.float32))] * 3, [([], [])]):
        for method in ("rrf", "weighted"):
            fused = fuse(stages, method)
            assert isinstance(fused, Fused)
            assert len(fused) == 0
            assert fused.ranks.shape == fused.stage_scores.shape == (0, len(stages))


ONE = (np.array([1, 2]), np.array([2.0, 1.0], np.float32))


@pytest.mark.parametrize(
    ("stages", "options", "said"),
    [
        ([ONE], {"method": "sum"}, "rrf"),
        ([ONE], {"weights": [1, 2]}, "1 numbers"),
        ([ONE], {"weights": [-1]}, "weights"),
        ([ONE], {"weights": [math.nan]}, "weights"),
        ([ONE], {"weights": 3}, "weights"),
        ([ONE], {"rrf_k": -1}, "rrf_k"),
        ([ONE], {"rrf_k": math.nan}, "rrf_k"),
        ([ONE, (np.array([5, 5]), ONE[1])], {}, "stage 1.*twice"),
        ([(ONE[0], np.array([1.0, np.nan]))], {}, "finite"),
        ([(ONE[0], np.array([1e300, 1.0]))], {}, "finite"),
        ([(ONE[0], np.array([1.0]))], {}, "stage 0"),
        ([(np.array([1.5, 2.5]), ONE[1])], {}, "int64"),
        ([(ONE[0][:, None], ONE[1][:, None])], {}, r"\[2, 1\]"),
        ([3], {}, "stage 0"),
    ],
)
def test_refused(stages, options, said):
    with pytest.raises(InvalidInputError, match=said):
        fuse(stages, **options)
