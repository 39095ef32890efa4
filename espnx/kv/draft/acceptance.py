"""Which proposed tokens stand: greedy ones that are the largest logit's, sampled ones by rejection
sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), which keeps the distribution.

A file of its own: whether tokens and distribution are the model's depends on nothing else.
"""

from __future__ import annotations

import torch


def drawn(scores: torch.Tensor, *, is_sampled: bool) -> tuple[int, torch.Tensor | None]:
    """A token that is proposed, and the probabilities by which it was drawn (None: it was not).

    Args:
        scores: float32 [vocabulary], the draft's logits as processors left them; a NaN counts as a
            token that cannot be.
        is_sampled: drawn; otherwise the largest is taken.
    """
    scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    if not is_sampled or not bool(scores.isfinite().any()):
        return int(scores.argmax()), None
    q = scores.softmax(dim=-1)
    return int(torch.multinomial(q, 1)), q


def next_token(
    scores: torch.Tensor,
    drafted: int | None,
    drafted_by: torch.Tensor | None = None,
    *,
    is_sampled: bool,
) -> tuple[int, bool]:
    """The next token of a text, by the pass.

    Args:
        scores: float32 [vocabulary], the pass's logits as processors left them.
        drafted: the token that was proposed; None: none was.
        drafted_by: float32 [vocabulary], the probabilities by which it was drawn; None: it was
            certain. Then the rule is to draw by the pass's own probabilities and to compare: the
            token is accepted with its probability, and what comes in its place is drawn from the
            rest.
        is_sampled: drawn, by PyTorch's generator; otherwise the largest is taken.

    Returns:
        (the token, whether it is the drafted one, so that what was drafted behind it counts).
    """
    if not is_sampled:
        token = int(scores.argmax())
        return token, token == drafted
    p = scores.softmax(dim=-1)
    if drafted is not None and drafted_by is not None:
        # a number of [0, 1): a probability of 0 is never taken, one of 1 always
        if float(torch.rand(())) * float(drafted_by[drafted]) < float(p[drafted]):
            return drafted, True
        rest = (p - drafted_by).clamp_min(0)
        # all of it may be gone where both are alike to rounding
        return int(torch.multinomial(rest if bool(rest.any()) else p, 1)), False
    token = int(torch.multinomial(p, 1))
    return token, token == drafted
