"""What keeping the K and V of passages takes and brings, before anything runs: bytes, the share of
requests that find their passage kept, and the bandwidth from which on reading is sooner than
computing. A file of its own: it needs neither an index nor a model."""

from __future__ import annotations

import numpy as np

from .. import errors
from ..checks import check_finite, check_whole

#: Ranks that are summed one by one; of more, the rest by Euler and Maclaurin, whose next term is
#: below one in 10^12 there.
_SUMMED = 1 << 16


def zipf_sum(n: int, s: float) -> float:
    """The sum of 1 / rank^s over ranks 1 to n.

    Args:
        n: at least 0. s: at least 0.
    """
    head = min(n, _SUMMED)
    total = float((1 / np.arange(1, head + 1, dtype=np.float64) ** s).sum())
    if n <= head:
        return total
    a, b = float(head), float(n)
    whole = np.log(b / a) if s == 1 else (b ** (1 - s) - a ** (1 - s)) / (1 - s)
    ends = (b**-s - a**-s) / 2
    slopes = s * (a ** (-s - 1) - b ** (-s - 1)) / 12
    return total + float(whole + ends + slopes)


def hit_rate(kept: int, passages: int, s: float) -> float:
    """The share of requests for passages that are kept, where the `kept` most popular of them are,
    and the one of rank r is asked for in proportion to 1 / r^s (Zipf; 0: all alike). No way to
    evict does better; those that learn what is popular come near it.

    Raises InvalidInputError: numbers out of range.
    """
    check_whole("passages", passages, 1)
    check_whole("kept", kept, 0)
    check_finite("s", s)
    if s < 0:
        raise errors.InvalidInputError("s", got=s, expected="0 or more")
    if kept >= passages:
        return 1.0
    return zipf_sum(kept, s) / zipf_sum(passages, s)


def break_even_bytes_per_s(
    bytes_per_token: float, operations_per_token: float, operations_per_s: float
) -> float:
    """The bandwidth from which on reading a token's K and V is sooner than computing them: both
    take as long where bytes / bandwidth = operations / rate."""
    return bytes_per_token * operations_per_s / operations_per_token
