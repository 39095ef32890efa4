"""What the text said after its last tokens before: against loops."""

from __future__ import annotations

import random

import numpy as np

from espnx.kv.draft.lookup import continuation


def plain(tokens: list[int], n: int) -> list[int]:
    for length in (3, 2):
        last = tokens[-length:]
        for begin in range(len(tokens) - length - 1, -1, -1):
            if len(last) == length and tokens[begin : begin + length] == last:
                return tokens[begin + length : begin + length + n]
    return []


def test_continuations() -> None:
    draw, found = random.Random(3), 0
    for _ in range(400):
        tokens = [draw.randrange(draw.choice([1, 3, 9])) for _ in range(draw.randrange(30))]
        n = draw.randrange(6)
        got = continuation(np.array(tokens, dtype=np.int64), n)
        assert got == plain(tokens, n)
        found += bool(got)
    assert found > 100


def test_the_longer_and_the_later_place() -> None:
    assert continuation(np.array([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]), 2) == [7, 2]
    assert continuation(np.array([2, 3, 7, 2, 3, 8, 1, 2, 3]), 2) == [8, 1]
    assert continuation(np.array([1, 2, 3]), 2) == []
