"""As many tokens are proposed as a plain search over true times and shares would choose, or nearly
as good a number, from the first pass on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from espnx.kv.draft.pace import Pace, PassLine

#: Seconds of one over the positions, of a draft step, by sequences.
Seconds = Callable[[int, int], float]


@dataclass(frozen=True)
class Costs:
    """What a machine takes, and how often a token at a place of a draft stands whose draft stood so
    far."""

    pass_s: Seconds  # positions, sequences
    step_s: Callable[[int], float]  # sequences
    share: Callable[[int], float]
    waited: float = 0.0  # of a pass over one position, for reads


def decoded(
    costs: Costs, batch: int, tokens: int, seed: int, gamma: int | None = None
) -> tuple[float, list[int], Pace]:
    """(Seconds for so many tokens of each sequence behind a text that is in the cache, the numbers
    that were proposed, the chooser). `gamma`: fixed. What stands does not depend on it."""
    draw, pace, chosen = random.Random(seed), Pace(), list[int]()
    first_s = costs.pass_s(1, batch)
    pace.note_first(batch, first_s, costs.waited * first_s)
    left, spent = [tokens - 1] * batch, first_s
    luck = [[draw.random() for _ in range(4 * tokens)] for _ in range(batch)]
    while any(left):
        going = [row for row in range(batch) if left[row]]
        room, done = [left[row] - 1 for row in going], 0
        if gamma is None:
            pace.choose(len(going), max(room))
            while done < max(room) and pace.goes_on(done):
                step_s = costs.step_s(len(going)) * draw.uniform(0.9, 1.1)
                pace.note_step(step_s)
                spent, done = spent + step_s, done + 1
        else:
            done = min(gamma, max(room))
            spent += sum(costs.step_s(len(going)) * draw.uniform(0.9, 1.1) for _ in range(done))
        drafted = [min(done, n) for n in room]
        kept = []
        for row, n in zip(going, drafted, strict=True):
            right = 0
            while right < n and luck[row].pop() < costs.share(right):
                right += 1
            kept.append(right + 1)
            left[row] -= right + 1
        pass_s = costs.pass_s(done + 1, len(going)) * draw.uniform(0.9, 1.1)
        pace.note(drafted, kept, pass_s)
        spent += pass_s
        chosen.append(done)
    return spent, chosen, pace


#: K and V of a token of SmolLM2-135M in fp32, and speeds of two cores: bytes a second of attention
#: over rows in memory, of a disk that is not throttled; seconds of the rest of a pass over one
#: token, and of each further one.
_TOKEN_BYTES, _ATTENTION_BYTES_PER_S, _FREE_BYTES_PER_S = 46_080, 6e9, 2.2e9
_DENSE_S, _DENSE_MORE_S = 0.045, 0.004


def machine(context: int, rate: float | None, share: float) -> Costs:
    """Costs of SmolLM2 behind so many tokens, from a disk of `rate` bytes a second, with drafts
    over 1/16 of the pages."""
    row_bytes = context * _TOKEN_BYTES

    def computed(positions: int, sequences: int) -> float:
        attention = sequences * row_bytes / _ATTENTION_BYTES_PER_S * (1 + 0.12 * (positions - 1))
        return _DENSE_S + _DENSE_MORE_S * (positions * sequences - 1) + attention

    def pass_s(positions: int, sequences: int) -> float:
        read = sequences * row_bytes / (rate or _FREE_BYTES_PER_S)
        return max(read, computed(positions, sequences))

    def step_s(sequences: int) -> float:
        return (
            _DENSE_S
            + _DENSE_MORE_S * (sequences - 1)
            + sequences * row_bytes / 14 / _ATTENTION_BYTES_PER_S
        )

    one = pass_s(1, 1)
    return Costs(pass_s, step_s, lambda place: share, 1 - min(1.0, computed(1, 1) / one))


@pytest.mark.parametrize("share", [0.86, 0.7])
@pytest.mark.parametrize("rate", [400e6, None])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("context", [2048, 7680])
def test_as_good_as_the_best_fixed_number(
    context: int, batch: int, rate: float | None, share: float
) -> None:
    """Over 128 tokens, from the first on, against the best of five numbers that is known only
    afterwards."""
    costs, seeds = machine(context, rate, share), range(8)
    fixed = {
        gamma: sum(decoded(costs, batch, 128, seed, gamma)[0] for seed in seeds)
        for gamma in (0, 2, 4, 8, 16)
    }
    own = sum(decoded(costs, batch, 128, seed)[0] for seed in seeds)
    best = min(fixed, key=lambda gamma: fixed[gamma])
    assert own <= 1.15 * fixed[best], f"{own / fixed[best]:.3f} of gamma {best}"


def line(first_s: float, position_s: float, draft_s: float, share: float) -> Costs:
    """A pass takes `first_s + position_s x positions`."""
    return Costs(lambda n, _: first_s + position_s * n, lambda _: draft_s, lambda _: share, 0.9)


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
    costs = first_s, position_s, draft_s, share
    _, chosen, pace = decoded(line(*costs), 1, 1000, 0)
    best = min(seconds(*costs, gamma) for gamma in range(17))
    late = [seconds(*costs, gamma) for gamma in chosen[20:-3]]
    assert sum(late) / len(late) <= 1.15 * best
    pace.choose()
    predicted, foretold = pace.predicted_s, pace.foretold_s
    assert predicted is not None
    assert foretold is not None
    assert 0.6 * best <= predicted <= 1.6 * best
    assert 0.6 * best <= foretold <= 1.6 * best
    assert f"{predicted:.4g}" in pace.why


def test_the_first_draft_is_ended_by_what_its_steps_take() -> None:
    """Steps that take as long as the pass: it stops after those that show it. Steps that take
    nothing: it goes on."""
    slow, quick = (
        decoded(line(1.0, 0.0, draft_s, 0.86), 1, 40, 0)[1][0] for draft_s in (1.0, 0.001)
    )
    assert slow == 2
    assert quick >= 8


def test_where_drafts_lose_none_are_made_but_now_and_then() -> None:
    _, chosen, pace = decoded(line(0.0, 1.0, 1.0, 0.3), 1, 200, 0)
    assert chosen[0] == 2, "what a step takes has to be seen once"
    assert sum(gamma > 0 for gamma in chosen) < 8
    assert sum(gamma > 0 for gamma in chosen[20:]) >= 2
    assert len(pace.decisions) == 16, "of more than a hundred"
    assert all(set(each) == {"gamma", "why"} for each in pace.decisions)


def test_nothing_is_proposed_before_a_pass_was_seen() -> None:
    pace = Pace()
    assert (pace.choose(4), pace.predicted_s) == (0, None)
    assert "first pass" in pace.why
    pace.note([0] * 4, [1] * 4, 1.0)
    assert pace.choose(4) > 0
    assert "not known yet" in pace.why


def test_a_slow_first_pass_is_soon_forgotten() -> None:
    pace = Pace("4bit")
    pace.note_first(1, 30.0, 29.0, is_slow=True)
    assert pace.choose() > 8, "drafts are cheap beside such a pass"
    for _ in range(2):
        pace.note_step(0.8)
    pace.note([2], [3], 1.0)
    pace.choose()
    assert pace.predicted_s is not None
    assert pace.predicted_s < 3


def test_a_step_in_which_the_machine_slept_is_no_step() -> None:
    pace = Pace()
    pace.note_first(1, 1.0)
    pace.choose()
    for _ in range(8):
        pace.note_step(0.01)
    before = pace.choose()
    pace.note_step(100.0)
    assert pace.choose() >= before - 4


def test_fewer_sequences_take_less() -> None:
    """What passes over eight took says what one over two takes, before one was made."""
    pace = Pace()
    pace.note_first(8, 8.0)
    for _ in range(4):
        pace.choose(8)
        pace.note_step(0.1)
        pace.note([8] * 8, [6] * 8, 8.4)
    pace.choose(8)
    wide = pace.predicted_s
    pace.choose(2)
    assert wide is not None
    assert pace.predicted_s is not None
    assert pace.predicted_s < 0.5 * wide


def test_no_more_than_there_is_room_for() -> None:
    pace = Pace()
    pace.note_first(1, 1.0)
    pace.note_step(0.001)
    assert pace.choose(1, 3) == 3
    assert pace.choose(1, 0) == 0
    assert not pace.goes_on(0)


def test_texts_that_become_easier_are_seen() -> None:
    """Drafts that never stood come to stand: more are proposed again."""
    pace = Pace()
    for number in range(400):
        gamma, done = pace.choose(), 0
        while pace.goes_on(done):
            pace.note_step(0.001)
            done += 1
        gamma = done
        pace.note([gamma], [1 if number < 60 else gamma + 1], 1.0 + 0.1 * gamma)
    assert pace.gamma >= 8


def test_a_line_through_passes() -> None:
    known = PassLine()
    assert not known.is_known
    known.note(1, 1.0)
    assert known.predict(1, 0.0) == pytest.approx(1.0)
    assert 1.0 < known.predict(9, 0.0) < 2.0, "a little more, before it was seen"
    for _ in range(20):
        known.note(1, 1.0)
        known.note(9, 3.0)
    assert known.predict(5, 0.0) == pytest.approx(2.0, rel=0.05)
    for _ in range(100):
        known.note(9, 3.0)
    assert known.predict(1, 0.0) == pytest.approx(1.0, rel=0.2), "what was seen is not forgotten"
    known.scale(0.5)
    assert known.predict(9, 0.0) == pytest.approx(1.5, rel=0.05)
    # longer drafts may shorten the pass, by no more than they take
    falling = PassLine()
    for _ in range(20):
        falling.note(1, 2.0)
        falling.note(9, 1.0)
    assert falling.slope_s(0.05) == pytest.approx(-0.05)
    assert falling.slope_s(1.0) == pytest.approx(-0.125, rel=0.1)
