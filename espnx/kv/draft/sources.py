"""Where proposed tokens came from, and whether lookup is asked before a model: it costs nothing,
but what it proposes may stand less often.

Lookup need not be used to be judged: what it finds is compared with the tokens that a pass brings
by another's draft.

A file of its own: `pace` says how many tokens, whoever proposes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOKUP = "lookup"
#: What a measurement counts after each further turn: texts change.
_KEPT = 0.95
#: Tokens that a pass brings by a draft of each, before anything is known; and as many turns as that
#: counts for.
_PRIOR_LOOKUP, _PRIOR_MODEL, _PRIOR_TURNS = 1.4, 4.0, 4.0


@dataclass
class _Mean:
    """Tokens that a turn brings; turns count less with time."""

    prior: float
    turns: float = 0.0
    brought: float = 0.0

    def note(self, kept: int) -> None:
        self.turns, self.brought = _KEPT * self.turns + 1, _KEPT * self.brought + kept

    @property
    def tokens(self) -> float:
        return (self.brought + _PRIOR_TURNS * self.prior) / (self.turns + _PRIOR_TURNS)


class Sources:
    """Which drafts brought how many tokens."""

    def __init__(self) -> None:
        self._counts = dict[str, list[int]]()  # by source: tokens proposed, accepted
        self._lookup, self._model = _Mean(_PRIOR_LOOKUP), _Mean(_PRIOR_MODEL)
        self._pass_s: float | None = None  # of the last passes
        self._model_s = 0.0  # and of a model's drafts for one

    def note(
        self,
        sources: Sequence[str],
        drafted: Sequence[int],
        kept: Sequence[int],
        draft_s: float,
        pass_s: float,
        looked: Sequence[int | None] | None = None,
    ) -> None:
        """A pass has ended.

        Args:
            sources: of what was proposed for each sequence.
            drafted, kept: tokens that were proposed for each, and that it got.
            draft_s, pass_s: seconds of all drafts, and of the pass.
            looked: tokens that each would have got by lookup, where another proposed
                (`would_bring`); None: lookup found nothing.
        """
        pass_was, model_was = self._pass_s or pass_s, self._model_s or draft_s
        self._pass_s = _KEPT * pass_was + (1 - _KEPT) * pass_s
        if any(n and source != LOOKUP for source, n in zip(sources, drafted, strict=True)):
            self._model_s = _KEPT * model_was + (1 - _KEPT) * draft_s
        for row, (source, n, got) in enumerate(zip(sources, drafted, kept, strict=True)):
            if n:
                (self._lookup if source == LOOKUP else self._model).note(got)
                counts = self._counts.setdefault(source, [0, 0])
                counts[0], counts[1] = counts[0] + n, counts[1] + got - 1
            if (source != LOOKUP or not n) and looked and (would := looked[row]) is not None:
                self._lookup.note(would)

    def asks_lookup(self, *, by_clock: bool = True) -> bool:
        """Whether lookup is asked first for the next pass: where it brings as many tokens a second
        as the model, the model's seconds included. `by_clock` False: where it brings as many a
        pass, which is the same whenever the same text is drawn."""
        pass_s, model_s = (self._pass_s or 1.0, self._model_s) if by_clock else (1.0, 0.0)
        return self._lookup.tokens * (pass_s + model_s) >= self._model.tokens * pass_s

    def as_dict(self) -> dict[str, dict[str, int]]:
        """The tokens that each source proposed, and how many of them stood."""
        return {
            name: {"proposed": proposed, "accepted": accepted}
            for name, (proposed, accepted) in self._counts.items()
        }


def would_bring(proposed: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Tokens that a pass would have brought where these had been proposed, of which it says
    `tokens`: those that it brought with others. At least; what comes behind them is not known.
    None: none were proposed."""
    right = 0
    while right < min(len(proposed), len(tokens)) and proposed[right] == tokens[right]:
        right += 1
    return right + 1 if proposed else None
