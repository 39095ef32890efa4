"""As many tokens are proposed as a plain search over true times and shares would choose, or nearly
as good a number."""

from __future__ import annotations

import random

import pytest

from espnx.kv.draft.pace import Pace


def run(
    first_s: float, position_s: float, draft_s: float, share: float, passes: int, seed: int = 0
) -> tuple[list[int], Pace]:
    """Passes that take `first_s + position_s x positions`, drafts whose tokens each stand with that
    probability; times vary by a tenth. The numbers that were chosen."""
    draw, pace, chosen = random.Random(seed), Pace(), list[int]()
    for _ in range(passes):
        gamma = pace.choose()
        chosen.append(gamma)
        kept = 1
        while kept <= gamma and draw.random() < share:
            kept += 1
        noise = 1 + draw.uniform(-0.1, 0.1)
        pass_s = (first_s + position_s * (gamma + 1)) * noise
        pace.note([gamma], [kept], gamma * draft_s, pass_s)
    return chosen, pace


def seconds(first_s: float, position_s: float, draft_s: float, share: float, gamma: int) -> float:
    """Of a token, by the formula for independent tokens (Leviathan et al., section 3.3)."""
    tokens = sum(share**place for place in range(gamma + 1))
    return (first_s + position_s * (gamma + 1) + gamma * draft_s) / tokens


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
@pytest.mark.parametrize(
    ("first_s", "position_s", "draft_s"),
    [(1.0, 0.0, 0.0), (1.0, 0.02, 0.1), (0.2, 0.1, 0.2), (0.0, 1.0, 1.0), (1.0, 0.1, 0.0)],
)
def test_the_best_number(first_s: float, position_s: float, draft_s: float, share: float) -> None:
    chosen, pace = run(first_s, position_s, draft_s, share, 300)
    costs = first_s, position_s, draft_s, share
    best = min(seconds(*costs, gamma) for gamma in range(17))
    late = [seconds(*costs, gamma) for gamma in chosen[100:]]
    assert sum(late) / len(late) <= 1.15 * best
    assert pace.predicted_s is not None
    assert 0.6 * best <= pace.predicted_s <= 1.6 * best
    assert str(pace.predicted_s)[:3] in pace.why


def test_where_drafts_lose_none_are_made_but_now_and_then() -> None:
    chosen, _ = run(0.0, 1.0, 1.0, 0.3, 200)
    assert 2 < sum(gamma > 0 for gamma in chosen) < 20
    assert chosen[:2] == [0, 8]


def test_texts_that_become_easier_are_seen() -> None:
    """Drafts that never stood come to stand: more are proposed again."""
    pace = Pace()
    for number in range(300):
        gamma = pace.choose()
        pace.note([gamma], [1 if number < 100 else gamma + 1], 0.0, 1.0 + 0.1 * gamma)
    assert pace.gamma >= 8
