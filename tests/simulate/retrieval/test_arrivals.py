"""Queries that arrive at random, beside queueing theory."""

from __future__ import annotations

import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.retrieval.arrivals import arrive, highest_rate_per_s

SERIAL_S = 0.5


def test_the_highest_rate_is_one_over_a_query_s_time() -> None:
    assert highest_rate_per_s(SERIAL_S) == pytest.approx(1 / SERIAL_S, rel=0.03)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_waits_are_those_of_theory(load: float) -> None:
    """Pollaczek and Khinchine, of services that all take as long: half the load over what is left
    of it, on the average. The mean of so many that depend on one another is known to some
    percent."""
    waits = [arrive(SERIAL_S, load / SERIAL_S, seed=seed) for seed in range(3)]
    assert not any(each.grows for each in waits)
    assert min(each.median_s for each in waits) >= SERIAL_S * (1 - 1e-9)
    means = [each.mean_s for each in waits]
    expected_s = SERIAL_S * (1 + load / 2 / (1 - load))
    assert sum(means) / len(means) == pytest.approx(expected_s, rel=0.05)


def test_more_than_it_can_makes_a_queue() -> None:
    assert arrive(SERIAL_S, 1.1 / SERIAL_S).grows
    assert arrive(SERIAL_S, 0.9 / SERIAL_S) == arrive(SERIAL_S, 0.9 / SERIAL_S)


def test_no_such_rate() -> None:
    with pytest.raises(InvalidInputError, match="a rate of arrivals; got 0"):
        arrive(SERIAL_S, 0)
    with pytest.raises(InvalidInputError, match="the time of a query; got -1"):
        arrive(-1, 1)
