"""Proposed tokens leave the distribution as it is: chi-square over 20,000 draws, which a wrong rule
fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from espnx.kv.draft.acceptance import next_token

_VOCABULARY, _DRAWS = 50, 20_000


def probability(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Of counts as far from `p` as these, or farther (Pearson's chi-square): its upper tail, by the
    incomplete gamma function."""
    expected = p.double() * counts.sum()
    own = expected > 0
    assert not bool(counts[~own].any())
    distance = ((counts[own] - expected[own]) ** 2 / expected[own]).sum()
    freedom = int(own.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), distance / 2))


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a pass, a part of them cut off as top-k does; the probabilities of a draft."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(_VOCABULARY, generator=draw) * 1.5
    scores[torch.randperm(_VOCABULARY, generator=draw)[:10]] = -torch.inf
    q = (scores.nan_to_num(neginf=-1.0) + torch.randn(_VOCABULARY, generator=draw)).softmax(-1)
    return scores, q


def leviathan(scores: torch.Tensor, drafted: int, q: torch.Tensor) -> int:
    return next_token(scores, drafted, q, is_sampled=True)[0]


def certain(scores: torch.Tensor, drafted: int, q: torch.Tensor) -> int:
    """The draft is one token, whatever it was drawn by."""
    return next_token(scores, drafted, is_sampled=True)[0]


def too_willing(scores: torch.Tensor, drafted: int, q: torch.Tensor) -> int:
    """A wrong rule: what is drawn in place of a rejected token is drawn by all of p."""
    p = scores.softmax(-1)
    if float(torch.rand(())) * float(q[drafted]) < float(p[drafted]):
        return drafted
    return int(torch.multinomial(p, 1))


@pytest.mark.parametrize(
    ("rule", "is_right"), [(leviathan, True), (certain, True), (too_willing, False)]
)
def test_sampled_tokens(
    rule: Callable[[torch.Tensor, int, torch.Tensor], int], is_right: bool
) -> None:
    torch.manual_seed(11)
    scores, q = distributions(5)
    drafts = torch.multinomial(q, _DRAWS, replacement=True).tolist()
    got = torch.tensor([rule(scores, drafted, q) for drafted in drafts])
    counts = got.bincount(minlength=_VOCABULARY)
    assert (probability(counts, scores.softmax(-1)) > 1e-3) is is_right


def test_how_often_a_draft_is_accepted() -> None:
    """By min(p, q) summed, which is the most that any rule reaches, to 5 standard deviations."""
    torch.manual_seed(12)
    scores, q = distributions(6)
    most = float(torch.minimum(scores.softmax(-1), q).sum())
    drafts = torch.multinomial(q, 5_000, replacement=True).tolist()
    stood = [next_token(scores, drafted, q, is_sampled=True)[1] for drafted in drafts]
    apart = 5 * (most * (1 - most) / len(stood)) ** 0.5
    assert abs(sum(stood) / len(stood) - most) < apart


def test_greedy_tokens_and_certain_drafts() -> None:
    scores = torch.tensor([0.0, 3.0, 1.0])
    assert next_token(scores, 1, is_sampled=False) == (1, True)
    assert next_token(scores, 2, is_sampled=False) == (1, False)
    assert next_token(scores, None, is_sampled=False) == (1, False)
    alone = torch.tensor([-torch.inf, 0.0, -torch.inf])
    for q in (None, alone.softmax(-1), torch.tensor([0.5, 0.5, 0.0])):
        assert next_token(alone, 1, q, is_sampled=True) == (1, True)
    assert next_token(alone, 0, torch.tensor([0.5, 0.5, 0.0]), is_sampled=True) == (1, False)
