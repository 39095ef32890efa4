"""How many tokens are proposed for a pass: as many as promise the least seconds a token, by what
drafts and passes took so far and by how many of their tokens stood.

With S(j) the part of drafts whose first j tokens all stand, a draft of g tokens brings 1 + S(1) +
... + S(g) tokens (Leviathan et al., arXiv 2211.17192, section 3.3), and takes g draft steps and a
pass over g + 1 positions, whose time is a line in their number: the rows are read once, whatever it
is, and the rest of the work grows with it.

Nothing has to be tried at length: what is not known yet is taken as such drafts mostly are, a pass
over one position that was made anyway says what the rows take to read, and a draft is asked after
each of its steps whether one more is worth it, by what the steps before it took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .sources import LOOKUP

#: Tokens that are proposed at most.
_MOST = 16
#: What a measurement counts after each further pass: texts and times change.
_KEPT_STOOD, _KEPT_SECONDS, _KEPT_SLOPE = 0.95, 0.9, 0.95
#: How often a token stands whose draft stood so far, before anything is known: of passes over given
#: text (docs/measured/kv.md).
_STANDS = {LOOKUP: 0.3, "pages": 0.86, "4bit": 0.93, "assistant": 0.7}
#: As many tokens that were tried does that count for, over all places; and what is known over all
#: places beside those that were tried at one.
_PRIOR, _PRIOR_OF_PLACE = 8.0, 2.0
#: Of what a pass computes at one position, it computes so much more for each further one: the rows
#: are read from memory once, and products over several positions are cheaper.
_MORE_OF_POSITION = 0.15
#: And of the time of a pass of which nothing else is known.
_MORE_OF_PASS = 0.04
#: A pass that does more than those after it counts so much.
_OF_SLOW = 0.05
#: The prior of that slope counts as passes that lie so far apart (positions, squared); what passes
#: said from twice as much on is the prior of what comes.
_SPREAD = 2.0
#: The last so many draft steps count evenly. One that takes many times as long says that the
#: processor did something else.
_STEPS, _SLOWEST = 8, 4.0
#: So many steps the first draft takes whatever is expected: they show what a step takes.
_FIRST_STEPS = 2
#: After so many passes another number is tried once: a time that is always measured at one number
#: says nothing of others. Only one that may cost so much more, unless nothing is proposed at all:
#: then less and less often.
_AGAIN, _MORE_IN_TRIAL = 32, 1.3
#: Decisions that are remembered.
_REMEMBERED = 16


class PassLine:
    """Seconds of a pass over its positions: a line, which recent passes count most for. What it
    takes changes sooner than what one more position takes."""

    def __init__(self) -> None:
        # sums over passes: 1, positions, seconds
        self._level = [0.0] * 3
        # and 1, positions, their squares, seconds, seconds x positions
        self._sums = [0.0] * 5
        self._prior_s: float | None = None  # of a further position, where passes do not say

    @property
    def is_known(self) -> bool:
        return self._level[0] > 0

    def note(
        self,
        positions: int,
        seconds: float,
        waited_s: float | None = None,
        *,
        is_slow: bool = False,
    ) -> None:
        """A pass over so many positions has ended.

        Args:
            waited_s: for reads; None: not known.
            is_slow: it did more than those after it: it says something only where nothing else is
                known.
        """
        if self._prior_s is None:
            self._prior_s = (
                _MORE_OF_PASS * seconds
                if waited_s is None
                else _MORE_OF_POSITION * max(0.0, seconds - waited_s)
            )
        weight = _OF_SLOW if is_slow else 1.0
        level = (weight, weight * positions, weight * seconds)
        new = (*level[:2], weight * positions**2, weight * seconds, weight * seconds * positions)
        self._level = [_KEPT_SECONDS * old + x for old, x in zip(self._level, level, strict=True)]
        self._sums = [_KEPT_SLOPE * old + x for old, x in zip(self._sums, new, strict=True)]
        slope_s, spread = self._slope()
        if spread > 2 * _SPREAD:
            self._prior_s = slope_s

    def scale(self, by: float) -> None:
        """Passes may take `by` of what they took, from here on: what is known counts half."""
        weight, n, s = (0.5 * each for each in self._level)
        self._level = [weight, n, by * s]
        weight, n, n_squared, s, ns = (0.5 * each for each in self._sums)
        self._sums = [weight, n, n_squared, by * s, by * ns]
        if self._prior_s is not None:
            self._prior_s *= by

    def _slope(self) -> tuple[float, float]:
        """(seconds of a further position, how far apart passes lie: positions, squared)."""
        weight, n, n_squared, s, ns = self._sums
        spread = max(0.0, n_squared - n * n / weight)
        return (
            (ns - n * s / weight + _SPREAD * (self._prior_s or 0.0)) / (spread + _SPREAD),
            spread,
        )

    def slope_s(self, draft_step_s: float) -> float:
        """Seconds of a further position. Longer drafts let the disk read further ahead, so it may
        be below 0; by more than what they take it cannot be."""
        return max(-draft_step_s, self._slope()[0])

    def predict(self, positions: int, draft_step_s: float) -> float:
        """Seconds of a pass."""
        weight, n, s = self._level
        return max(0.0, s / weight + self.slope_s(draft_step_s) * (positions - n / weight))


class Pace:
    """How many tokens are proposed for the passes over a cache.

    Args:
        kind: of draft.

    Attributes:
        gamma: tokens that are proposed for the next pass at most.
        why: it is so many.
        predicted_s: seconds of a token of each sequence with so many; None: not known yet.
        decisions: the last ones: how many tokens were proposed, and why.
    """

    def __init__(self, kind: str = "pages") -> None:
        self.gamma, self.why = 0, "the first pass shows what one over a single position takes"
        self.predicted_s: float | None = None
        self._stands = _STANDS[kind]
        self._line = PassLine()
        # seconds of a draft step; None: not known yet. Lookup takes none
        self._step_s: float | None = 0.0 if kind == LOOKUP else None
        self._steps = 0
        self._waited_s: float | None = None  # of a pass over one position
        # drafts whose tokens before a place stood, and of them those whose token there did
        self._reached, self._stood = [0.0] * _MOST, [0.0] * _MOST
        self._tokens = [1.0] * (_MOST + 1)  # that a pass brings, by gamma
        self._sequences, self._passes, self._idle = 0, 0, 0
        self._most = _MOST
        self._is_trial = False
        self.decisions: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._foretold_s = self._foretold_tokens = 0.0  # of all passes, when they were chosen

    @property
    def foretold_s(self) -> float | None:
        """Seconds of a token of each sequence, as they were predicted for all passes so far; None:
        for none."""
        return self._foretold_s / self._foretold_tokens if self._foretold_tokens else None

    @property
    def draft_s(self) -> float:
        """Seconds that the next draft is expected to take; 0 while nothing is known."""
        if self._step_s is None and not self._line.is_known:
            return 0.0
        return self.gamma * self._assumed_step_s()

    # --- what happened ---

    def note_first(
        self, sequences: int, pass_s: float, waited_s: float | None = None, *, is_slow: bool = False
    ) -> None:
        """A pass over one position of so many sequences has ended, before anything was proposed:
        the one that a continued text begins with.

        Args:
            pass_s: what it took.
            waited_s: of it, for reads; None: not known.
            is_slow: it did more than the passes after it.
        """
        self._waited_s = waited_s
        self._at(sequences)
        self._line.note(1, pass_s, waited_s, is_slow=is_slow)

    def note_step(self, seconds: float) -> None:
        """A draft step has ended: one more token of each sequence."""
        if self._step_s is None or not self._steps:
            self._step_s, self._steps = seconds, 1
            return
        self._steps = min(self._steps + 1, _STEPS)
        self._step_s += (min(seconds, _SLOWEST * self._step_s) - self._step_s) / self._steps

    def note(
        self, drafted: Sequence[int], kept: Sequence[int], pass_s: float, *, is_slow: bool = False
    ) -> None:
        """A pass has ended.

        Args:
            drafted: tokens that were proposed for each sequence.
            kept: tokens that each sequence got.
            pass_s: what it took.
            is_slow: it did more than the passes after it.
        """
        self._at(len(drafted))
        longest = max(drafted)
        self.decisions.append({"gamma": longest, "why": self.why})
        if self.predicted_s is not None:
            tokens = self._tokens[min(longest, _MOST)]
            self._foretold_s += self._seconds(longest) * tokens
            self._foretold_tokens += tokens
        self._line.note(longest + 1, pass_s, is_slow=is_slow)
        self._passes += 1
        self._idle = 0 if longest else self._idle + 1
        right = [n - 1 for n in kept]
        for place in range(_MOST):
            reached = [most > place for n, most in zip(right, drafted, strict=True) if n >= place]
            stood = [n > place for n, most in zip(right, drafted, strict=True) if most > place]
            self._reached[place] = _KEPT_STOOD * self._reached[place] + sum(reached)
            self._stood[place] = _KEPT_STOOD * self._stood[place] + sum(stood)

    def _at(self, sequences: int) -> None:
        """A pass of so many sequences: each has rows of its own to read."""
        if self._sequences and sequences != self._sequences and self._line.is_known:
            self._line.scale(sequences / self._sequences)
            self._steps = min(self._steps, 1)
        self._sequences = sequences

    # --- what is to happen ---

    def choose(self, sequences: int = 1, most: int = _MOST) -> int:
        """Tokens that are to be proposed for the next pass of so many sequences, at most; no text
        has room for more than `most`. A model that proposes asks `goes_on` after each."""
        self._most, self._is_trial = min(most, _MOST), False
        if not self._line.is_known:
            return self.gamma
        self._at(sequences)
        self._tokens = self._expected()
        best = self._best(0)
        self.predicted_s = self._seconds(best)
        self.gamma = best
        if best < self._most and self._step_s is None:
            self.gamma = max(best, min(_FIRST_STEPS, self._most))
        self._explain(best)
        self._try_another(best)
        return self.gamma

    def goes_on(self, done: int) -> bool:
        """Whether a draft of so many tokens goes on, for one more."""
        if done >= self.gamma and (self._is_trial or not self._line.is_known):
            return False
        if self._is_trial or done < min(_FIRST_STEPS, self.gamma) or not self._line.is_known:
            return done < self._most
        best = self._best(done)
        if best <= done:
            if done < self.gamma:
                self._explain(best)
                self.why += f"; not {self.gamma}, now that steps are known"
            self.gamma, self.predicted_s = done, self._seconds(done)
            return False
        self.gamma = max(self.gamma, best)
        return True

    def _try_another(self, best: int) -> None:
        """Now and then another number."""
        number = self._passes
        if not number or not self._most:
            return
        if best == 0:  # after 32 passes that proposed nothing, then 64, 128, ...
            if self._idle >= _AGAIN and self._idle & (self._idle - 1) == 0:
                self.gamma, self._is_trial = min(_FIRST_STEPS, self._most), True
        elif number % _AGAIN == 0:
            is_more = number // _AGAIN % 2 == 1
            other = min(self._most, 2 * best) if is_more else best // 2
            if other != best and self._seconds(other) <= _MORE_IN_TRIAL * self._seconds(best):
                self.gamma, self._is_trial = other, True
        if self._is_trial:
            self.why += f"; {self.gamma} is tried once, which may have changed"

    def _best(self, least: int) -> int:
        """The number from `least` on with the least seconds a token."""
        return min(range(least, max(least, self._most) + 1), key=self._seconds)

    def _seconds(self, gamma: int) -> float:
        """What a token of each sequence takes, with drafts of so many tokens."""
        step_s = self._assumed_step_s()
        tokens = self._tokens[min(gamma, _MOST)]
        return (self._line.predict(gamma + 1, step_s) + gamma * step_s) / tokens

    def _assumed_step_s(self) -> float:
        """Seconds of a draft step. One that is not known yet takes half of what a pass computes."""
        if self._step_s is not None:
            return self._step_s
        pass_s = self._line.predict(1, 0.0)
        return (pass_s - min(self._waited_s or 0.0, pass_s)) / 2

    def _expected(self) -> list[float]:
        """Tokens that a pass brings, by how many are proposed: 0, 1, ..., `_MOST`."""
        mean = (sum(self._stood) + _PRIOR * self._stands) / (sum(self._reached) + _PRIOR)
        tokens, share = [1.0], 1.0
        for reached, stood in zip(self._reached, self._stood, strict=True):
            share *= (stood + _PRIOR_OF_PLACE * mean) / (reached + _PRIOR_OF_PLACE)
            tokens.append(tokens[-1] + share)
        return tokens

    def _explain(self, best: int) -> None:
        step_s = self._assumed_step_s()
        known = "" if self._step_s is not None else " (not known yet)"
        self.why = (
            f"{best} of at most {self._most} promise the least seconds a token: "
            f"{self._seconds(best):.4g}, with none proposed {self._seconds(0):.4g}; a pass over "
            f"one position {self._line.predict(1, step_s):.4g} s, over each further one "
            f"{self._line.slope_s(step_s):+.2g} s, a draft step {step_s:.3g} s{known}; "
            f"{self._tokens[best]:.3g} tokens a pass"
        )
