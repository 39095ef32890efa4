"""The policy takes what is predicted and then what is measured to be fastest, and notices when that
changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from espnx.retrieval.search.prefetch import NO_PREFETCH, STRATEGIES, PrefetchPolicy, Steps

RATES = {0.05: 0.5, 0.1: 0.7, 0.3: 0.95, 0.5: 0.99}


def drive(
    policy: PrefetchPolicy, time_of: Callable[[Steps], float], first_stage_s: float, searches: int
) -> Counter[Steps]:
    chosen: Counter[Steps] = Counter()
    for _ in range(searches):
        steps, _ = policy.choose("kind")
        chosen[steps] += 1
        policy.learn("kind", steps, first_stage_s, time_of(steps))
    return chosen


def test_begins_without_a_prefetch() -> None:
    assert PrefetchPolicy(RATES).choose("kind") == (NO_PREFETCH, None)


@pytest.mark.parametrize("best", STRATEGIES)
def test_settles_on_the_fastest_of_those_that_are_close(best: Steps) -> None:
    chosen = drive(
        PrefetchPolicy(RATES), lambda steps: 10e-3 if steps == best else 11e-3, 8e-3, 400
    )
    assert chosen[best] > 330, chosen


def test_leaves_alone_what_cannot_win() -> None:
    """A first stage of no length hides nothing: the prefetch is predicted to be slower, and never
    tried."""
    chosen = drive(
        PrefetchPolicy({0.3: 0.2}), lambda steps: 2e-3 if not steps else 1e-9, 0.01e-3, 200
    )
    assert set(chosen) <= {NO_PREFETCH, (0.1,), (0.3,), (0.05, 0.1, 0.2, 0.4)}
    assert PrefetchPolicy({}).choose("k")[0] == NO_PREFETCH


def test_average_cost_of_choosing_is_below_five_percent() -> None:
    times = {NO_PREFETCH: 10e-3, (0.1,): 10.5e-3, (0.3,): 14e-3, (0.05, 0.1, 0.2, 0.4): 12e-3}
    chosen = drive(PrefetchPolicy(RATES), times.__getitem__, 3e-3, 300)
    assert sum(times[steps] * n for steps, n in chosen.items()) / 300 < 1.05 * min(times.values())


def test_changes_its_mind() -> None:
    policy = PrefetchPolicy(RATES)
    drive(policy, lambda steps: 10e-3 if not steps else 10.8e-3, 8e-3, 100)
    chosen = drive(policy, lambda steps: 20e-3 if not steps else 10.8e-3, 8e-3, 100)
    assert chosen[NO_PREFETCH] < 40, chosen


def test_kinds_are_apart_and_bounded() -> None:
    policy = PrefetchPolicy(RATES)
    for kind in range(1000):
        policy.learn(kind, NO_PREFETCH, 1e-3, 2e-3)
    assert policy.choose(0) == (NO_PREFETCH, None)  # forgotten long ago
    assert policy.choose(999)[1] is not None
    assert policy.budget_s(999, 0.25) == pytest.approx(0.75e-3)
    assert policy.budget_s("unknown", 0.3) is None
