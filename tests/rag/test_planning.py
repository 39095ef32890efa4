"""The plan of kept passages: sums of Zipf's law against adding up, and the break-even bandwidth."""

from __future__ import annotations

import math

import pytest

from espnx import errors
from espnx.rag import planning
from espnx.rag.planning import _SUMMED, break_even_bytes_per_s, hit_rate, zipf_sum


@pytest.mark.parametrize("s", [0.0, 0.5, 0.99, 1.0, 1.2, 3.0])
@pytest.mark.parametrize("n", [0, 1, 7, _SUMMED, _SUMMED + 1, 300_001])
def test_sums_of_zipf(n: int, s: float) -> None:
    assert zipf_sum(n, s) == pytest.approx(
        math.fsum(rank**-s for rank in range(1, n + 1)), rel=1e-11
    )


@pytest.mark.parametrize("s", [0.0, 0.7, 1.0, 1.5])
def test_sums_beyond_what_is_added_up(s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few ranks added up, the end of the formula is far above rounding."""
    monkeypatch.setattr(planning, "_SUMMED", 64)
    assert zipf_sum(50_000, s) == pytest.approx(
        math.fsum(rank**-s for rank in range(1, 50_001)), rel=1e-8
    )


def test_hit_rates() -> None:
    assert hit_rate(0, 10, 1.0) == 0
    assert hit_rate(10, 10, 1.0) == hit_rate(99, 10, 1.0) == 1
    assert hit_rate(1, 2, 1.0) == pytest.approx(2 / 3)
    assert hit_rate(10**8, 10**9, 0.0) == pytest.approx(0.1)
    rates = [hit_rate(10**n, 10**9, 1.0) for n in range(10)]
    assert rates == sorted(rates)
    for wrong in ((-1, 10, 1.0), (1, 0, 1.0), (1, 10, -1.0), (1, 10, math.nan)):
        with pytest.raises(errors.InvalidInputError):
            hit_rate(*wrong)


def test_break_even() -> None:
    """Llama-3.1-8B, bf16: 128 KiB a token, 2 x 8.03e9 operations, at 400e12 a second."""
    assert break_even_bytes_per_s(2**17, 2 * 8.03e9, 400e12) == pytest.approx(3.26e9, rel=0.01)
