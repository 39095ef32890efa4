"""A draft that costs no pass of the model: what followed the last tokens where they stood before
(prompt lookup; LLMA, arXiv 2304.04487).

A file of its own: a way to draft, beside others.
"""

from __future__ import annotations

import numpy as np

#: Of the last tokens so many are looked for, the longest first: one alone is found everywhere, and
#: four rarely.
_LONGEST, _SHORTEST = 3, 2


def continuation(tokens: np.ndarray, n: int) -> list[int]:
    """What may come next.

    Args:
        tokens: int64 [m], the text so far.
        n: at most so many.

    Returns:
        The tokens behind the last place where the text had its last three before, or else its last
        two; none where it had not, or `n` is 0.
    """
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        ends = len(tokens) - length  # of places that begin before the text's last tokens do
        if ends <= 0 or not n:
            continue
        same = np.ones(ends, dtype=bool)
        for i in range(length):
            same &= tokens[i : i + ends] == tokens[ends + i]
        places = np.flatnonzero(same)
        if len(places):
            begin = int(places[-1]) + length
            return [int(token) for token in tokens[begin : begin + n]]
    return []
