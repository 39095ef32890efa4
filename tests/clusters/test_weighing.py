"""What `espnx graph advise` makes of measurements: costs at a recall, growth, parts of queries, the
verdict; of made-up figures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from espnx.clusters.advice.disk import DiskTimes, middle_of, times_of
from espnx.clusters.advice.trials import GRAPH, LISTS, Searched, Trial, efforts
from espnx.clusters.advice.weighing import (
    N_LEAST,
    Cost,
    cost_at,
    extrapolated,
    growth,
    lie_apart,
    linear,
    weigh,
)

DISK = DiskTimes(100e-6, 4e-6, 1e9)
MANY = 1 << 20
REACH = {GRAPH: True, LISTS: True}


def searched(effort: int, hits: list[int], pages: int, ratio: float | None = None) -> Searched:
    of_each = np.full(len(hits), pages)
    return Searched(
        effort, ratio, np.array(hits), of_each, of_each, of_each * 4096, of_each, 1.0, 1.0
    )


def trial(*every: Searched) -> Trial:
    return Trial(GRAPH, 100, 10, list(every), 1, 1, 1.0, "")


# --- the disk ---


def test_a_read_takes_a_request_and_its_bytes() -> None:
    request_s, byte_s, alone_s = 5e-6, 1e-9, 90e-6
    times = [
        alone_s,
        alone_s + 63 * (request_s + 4096 * byte_s),
        alone_s + 63 * (request_s + 32768 * byte_s),
    ]
    found = times_of(times, [1, 64, 64], "uring")
    assert (found.read_s, found.request_s, 1 / found.bytes_per_s) == pytest.approx(
        (alone_s, request_s, byte_s)
    )
    assert found.page_s == pytest.approx(request_s + 4096 * byte_s)
    assert found.merged_s(3, 40960) == pytest.approx(3 * request_s + 40960 * byte_s)
    # each round waits for the one before
    assert found.alone_s(10, 40960) == pytest.approx(10 * alone_s)
    assert found.alone_s(1, 40960) == pytest.approx(alone_s + 9 * found.page_s)
    assert found.query_s(10, 40960, 1) == found.alone_s(10, 40960)
    assert found.query_s(10, 40960, MANY) == pytest.approx(10 * found.page_s)
    assert found.query_s(10, 40960, 64) == pytest.approx(10 * found.page_s)
    # all at once, so that fewer queries keep as many reads under way
    assert found.query_s(1, 40960, 7) == pytest.approx(10 * found.page_s)
    waiting_s = alone_s - found.page_s
    assert found.query_s(10, 40960, 4) == pytest.approx(10 * found.page_s + 10 * waiting_s / 4)


@pytest.mark.parametrize(
    ("times", "counts"),
    [
        ([1e-4], [1]),
        ([1e-4, 2e-4], [1, 7]),
        ([1e-4, 1e-4, 1e-4], [1, 64, 64]),  # no slower than one alone
        ([1e-4, 9e-4, 8e-4], [1, 64, 64]),  # large reads quicker than small ones
        ([1e-4, 2e-4, 9e-1], [1, 64, 64]),  # and far too slow
    ],
)
def test_times_that_cannot_be_leave_a_disk(times: list[float], counts: list[int]) -> None:
    found = times_of(times, counts, "posix")
    assert all(0 <= each < math.inf for each in (found.read_s, found.request_s, found.bytes_per_s))
    assert found.bytes_per_s > 0
    assert 1 < found.merged_s(1, 32768) / found.page_s <= 8 + 1e-9


def test_the_middle_of_several_disks() -> None:
    found = middle_of([DiskTimes(float(a), float(10 - a), 5.0 * a, "x") for a in (1, 9, 2)])
    assert found == DiskTimes(2.0, 8.0, 10.0, "x")


# --- costs at a recall ---


def test_efforts_go_from_end_to_end() -> None:
    assert list(efforts(1, 6)) == [1, 2, 3, 4, 5, 6]
    assert list(efforts(3, 3)) == [3]
    many = list(efforts(10, 1000))
    assert (many[0], many[-1]) == (10, 1000)
    assert all(1 < after / before <= 1.2 for before, after in itertools.pairwise(many))


def test_between_two_efforts_by_a_straight_line() -> None:
    found = trial(searched(10, [9, 9], 10), searched(20, [10, 10], 20))
    cost = cost_at(found, 0.95, DISK, MANY)
    assert cost is not None
    assert (cost.recall, cost.effort, cost.pages) == pytest.approx((0.95, 15, 15))
    least = cost_at(found, 0.5, DISK, MANY)
    assert least is not None
    assert least.pages == 10
    assert cost_at(trial(searched(10, [9, 9], 10)), 0.95, DISK, MANY) is None


def test_an_effort_counts_that_nothing_quicker_finds_as_much_as() -> None:
    slow = searched(15, [9, 10], 40)
    pruned = searched(30, [10, 10], 12, ratio=1.5)
    found = trial(searched(10, [9, 9], 10), slow, searched(20, [10, 10], 20), pruned)
    cost = cost_at(found, 0.95, DISK, MANY)
    assert cost is not None
    assert cost.pages == pytest.approx(11)


def test_a_part_of_the_queries() -> None:
    found = trial(searched(10, [10, 0], 10), searched(20, [10, 10], 20))
    for part, pages in (([True, False], 10), ([False, True], 20 * 0.95 + 10 * 0.05)):
        cost = cost_at(found, 0.95, DISK, MANY, np.array(part))
        assert cost is not None
        assert cost.pages == pytest.approx(pages)


def test_reads_grow_by_a_power_and_never_fall() -> None:
    small, large = Cost(0.95, 10, 8, 8, 4096, 1), Cost(0.95, 12, 16, 4, 8192, 1)
    cost, power = extrapolated(small, large, (100, 400), 1600)
    assert (power, cost.pages, cost.requests) == pytest.approx((0.5, 32, 4))
    assert (cost.rounds, cost.recall) == (1, 0.95)
    assert growth(1, 1000, (100, 400)) == 1  # no faster than the vectors
    assert growth(0, 3, (100, 400)) == growth(2, 3, (100, 100)) == 0
    assert extrapolated(small, large, (100, 400), 400)[0] == large
    assert linear(10.0, 40.0, (100, 400), 1000) == pytest.approx(100)
    assert linear(40.0, 10.0, (100, 400), 1000) == 10


# --- parts of the queries ---


@pytest.mark.parametrize("n", [2, 5, 11, 64])
def test_the_parts_differ_most(n: int) -> None:
    """Against every split of the sorted values."""
    values = np.random.default_rng(n).random(n)
    found = lie_apart(values)
    order, least = np.sort(values), max(1, math.ceil(n / 5))
    splits = {
        place: order[:place].var() * place + order[place:].var() * (n - place)
        for place in range(least, n - least + 1)
    }
    best = min(splits, key=lambda place: splits[place])
    assert sorted(values[found]) == pytest.approx(order[:best].tolist())


def test_two_kinds_of_queries_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    is_near = rng.random(200) < 0.4
    values = np.where(is_near, 0.6, 0.93) + 0.02 * rng.standard_normal(200)
    assert np.array_equal(lie_apart(values), is_near)


@pytest.mark.parametrize("values", [[], [0.5], [0.5] * 9])
def test_parts_of_nearly_nothing(values: list[float]) -> None:
    assert lie_apart(np.array(values)).sum() <= max(0, len(values) - 1)


# --- the verdict ---


@pytest.mark.parametrize(
    ("over", "parts", "choice", "why"),
    [
        ([3.0, 3.3, 2.8], [(1.5, 5.0)] * 3, GRAPH, "samples differ by a factor of 1.18"),
        ([0.3, 0.33, 0.28], [(0.2, 0.5)] * 3, LISTS, "clusters take 0.30 times"),
        # a sample may say anything
        ([1.2, 0.9, 1.3], [(1.1, 1.2)] * 3, None, "samples differ as much"),
        ([1.2, 2.6], [(1.5, 3.0)] * 2, None, "samples differ as much"),
        ([1.1, 1.3], [(1.1, 1.2)] * 2, GRAPH, ""),
        ([1.05, 1.3], [(1.1, 1.2)] * 2, None, "samples differ as much"),
        # half of this, half of that
        ([2.0, 2.1], [(0.5, 4.0)] * 2, None, "fits a part"),
        ([0.6, 0.61], [(0.3, 1.8)] * 2, None, "fits a part"),
        ([2.0], [(2.0, 2.0)], None, "samples differ as much"),  # one has no spread
        ([2.0, 2.1], [(None, 2.0)] * 2, None, "a part of the queries"),
    ],
)
def test_the_verdict(
    over: list[float | None],
    parts: list[tuple[float | None, float | None]],
    choice: str | None,
    why: str,
) -> None:
    found = weigh(50_000, over, parts, REACH, 0.95)
    assert found.choice == choice
    assert why in found.reasons[0]


def test_the_verdict_is_the_same_the_other_way_round() -> None:
    """The graph for one is clusters for the other."""
    rng = np.random.default_rng(1)
    opposite = {GRAPH: LISTS, LISTS: GRAPH, None: None}
    for _ in range(50):
        over = np.exp(rng.normal(rng.normal(), 0.2, 3)).tolist()
        parts = [tuple(np.exp(rng.normal(0.5, 1, 2)).tolist())] * 3
        there = weigh(50_000, over, parts, REACH, 0.95)
        back = weigh(
            50_000,
            [1 / each for each in over],
            [(1 / low, 1 / high) for low, high in parts],
            REACH,
            0.95,
        )
        assert back.choice == opposite[there.choice]


def test_of_few_vectors_it_cannot_tell() -> None:
    over, parts = [5.0, 5.0], [(5.0, 5.0)] * 2
    assert weigh(N_LEAST - 1, over, parts, REACH, 0.95).choice is None
    assert weigh(N_LEAST, over, parts, REACH, 0.95).choice == GRAPH


def test_a_way_that_does_not_find_so_much_is_not_named() -> None:
    for reach, choice in (
        ({GRAPH: True, LISTS: False}, GRAPH),
        ({GRAPH: False, LISTS: True}, LISTS),
        ({GRAPH: False, LISTS: False}, None),
    ):
        found = weigh(50_000, [None, None], [(None, None)] * 2, reach, 0.99)
        assert found.choice == choice
        assert "did not find 0.99" in found.reasons[0]
        assert found.difference is None
