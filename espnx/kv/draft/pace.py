"""How many tokens are proposed for a pass: as many as bring the most tokens a second, by what
drafts and passes took so far and how many of their tokens stood.

With S(j) the part of drafts whose first j tokens all stand, a draft of g tokens brings 1 + S(1) +
... + S(g) tokens, and takes g draft steps and a pass over g + 1 positions, whose time is a line in
their number: the rows are read once, whatever it is, and the rest of the work grows with it.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens that are proposed at most, and the first time.
_MOST, _FIRST = 16, 8
#: What a measurement counts after each further pass: texts and times change.
_KEPT = 0.95
#: How many tokens of a known mean count beside those that were tried at a place.
_PRIOR = 2.0
#: After so many passes another number is tried once, fewer or more: a time that is always measured
#: at one number says nothing of others.
_AGAIN = 32


class Pace:
    """How many tokens are proposed for the passes over a cache.

    Attributes:
        gamma: tokens that are proposed for the next pass at most.
        why: it is so many.
        predicted_s: seconds of a token of each sequence with so many; None: not known yet.
    """

    def __init__(self) -> None:
        self.gamma, self.why = 0, "the first pass shows what one over a single position takes"
        self.predicted_s: float | None = None
        # sums over passes: 1, positions, their squares, seconds, seconds x positions
        self._sums = [0.0] * 5
        self._draft_s = 0.0  # of a token, or 0 before the first
        # drafts whose tokens before a place stood, and of them those whose token there did
        self._reached, self._stood = [0.0] * _MOST, [0.0] * _MOST
        self._passes = 0

    def note(
        self, drafted: Sequence[int], kept: Sequence[int], draft_s: float, pass_s: float
    ) -> None:
        """A pass has ended.

        Args:
            drafted: tokens that were proposed for each sequence.
            kept: tokens that each sequence got.
            draft_s, pass_s: what both took.
        """
        longest = max(drafted)
        now = (1.0, longest + 1.0, (longest + 1.0) ** 2, pass_s, pass_s * (longest + 1.0))
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, now, strict=True)]
        self._passes += 1
        if longest:
            each_s = draft_s / longest
            self._draft_s += (each_s - self._draft_s) * (1 - _KEPT if self._draft_s else 1)
        right = [n - 1 for n in kept]
        for place in range(_MOST):
            reached = [most > place for n, most in zip(right, drafted, strict=True) if n >= place]
            stood = [n > place for n, most in zip(right, drafted, strict=True) if most > place]
            self._reached[place] = _KEPT * self._reached[place] + sum(reached)
            self._stood[place] = _KEPT * self._stood[place] + sum(stood)

    def choose(self) -> int:
        """Tokens that are to be proposed for the next pass, at most."""
        if not self._passes:
            return self.gamma
        if not self._reached[0]:
            self.gamma, self.why = _FIRST, "nothing was proposed yet"
            return self.gamma
        seconds = [self._predict(gamma) for gamma in range(_MOST + 1)]
        best = min(range(_MOST + 1), key=lambda gamma: seconds[gamma])
        self.gamma, self.predicted_s = best, seconds[best]
        self.why = (
            f"the least predicted seconds a token: {seconds[best]:.4g}; with none proposed "
            f"{seconds[0]:.4g}"
        )
        if self._passes % _AGAIN == 0:
            is_more = self._passes // _AGAIN % 2 == 1
            self.gamma = min(_MOST, max(2, 2 * best)) if is_more else best // 2
            self.why = f"{best} is best, and another number is tried now and then"
        return self.gamma

    def _predict(self, gamma: int) -> float:
        """Seconds of a token of each sequence with drafts of so many tokens."""
        weight, n, n_squared, s, ns = self._sums
        spread = n_squared - n * n / weight
        slope = max(0.0, (ns - n * s / weight) / spread) if spread > 1e-6 else 0.0
        pass_s = max(0.0, s / weight + slope * (gamma + 1 - n / weight))
        mean = (sum(self._stood) + 0.5) / (sum(self._reached) + 1.0)
        tokens = share = 1.0
        for reached, stood in zip(self._reached[:gamma], self._stood[:gamma], strict=True):
            share *= (stood + _PRIOR * mean) / (reached + _PRIOR)
            tokens += share
        return (pass_s + gamma * self._draft_s) / tokens
