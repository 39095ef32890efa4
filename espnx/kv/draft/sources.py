"""Where proposed tokens came from, and whether lookup is asked before a model: it costs nothing,
but what it proposes may stand less often.

A file of its own: `pace` says how many tokens, whoever proposes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOKUP = "lookup"
#: What a measurement counts after each further turn: texts change.
_KEPT = 0.95
#: Turns of each before the two are compared.
_LEAST_TURNS = 8.0
#: After so many passes that asked a model alone, lookup is asked again: the text may quote now.
_AGAIN = 16


@dataclass
class _Source:
    """Turns of sequences whose tokens one source proposed; the first two count less with time."""

    turns: float = 0.0
    brought: float = 0.0
    proposed: int = 0
    accepted: int = 0

    def note(self, proposed: int, kept: int) -> None:
        self.turns, self.brought = _KEPT * self.turns + 1, _KEPT * self.brought + kept
        self.proposed, self.accepted = self.proposed + proposed, self.accepted + kept - 1


class Sources:
    """Which drafts brought how many tokens."""

    def __init__(self) -> None:
        self._of = dict[str, _Source]()
        self._pass_s = 0.0  # of the last passes, and of drafts of a model for one
        self._model_s = 0.0
        self._skipped = 0  # passes since lookup was asked

    def note(
        self,
        sources: Sequence[str],
        drafted: Sequence[int],
        kept: Sequence[int],
        draft_s: float,
        pass_s: float,
    ) -> None:
        """A pass has ended.

        Args:
            sources: of what was proposed for each sequence.
            drafted, kept: tokens that were proposed for each, and that it got.
            draft_s, pass_s: seconds of all drafts, and of the pass.
        """
        self._pass_s += (pass_s - self._pass_s) * (1 - _KEPT if self._pass_s else 1)
        models = False
        for source, n, got in zip(sources, drafted, kept, strict=True):
            if n:
                self._of.setdefault(source, _Source()).note(n, got)
                models |= source != LOOKUP
        if models:
            self._model_s += (draft_s - self._model_s) * (1 - _KEPT if self._model_s else 1)

    def asks_lookup(self) -> bool:
        """Whether lookup is asked first for the next pass: unless it brought fewer tokens a second
        lately than the model, its own seconds included."""
        lookup = self._of.get(LOOKUP, _Source())
        models = [each for name, each in self._of.items() if name != LOOKUP]
        turns, brought = sum(each.turns for each in models), sum(each.brought for each in models)
        if lookup.turns < _LEAST_TURNS or turns < _LEAST_TURNS or self._skipped >= _AGAIN:
            self._skipped = 0
            return True
        by_lookup = lookup.brought / lookup.turns * (self._pass_s + self._model_s)
        is_better = by_lookup >= brought / turns * self._pass_s
        self._skipped = 0 if is_better else self._skipped + 1
        return is_better

    def as_dict(self) -> dict[str, dict[str, int]]:
        """The tokens that each source proposed, and how many of them stood."""
        return {
            name: {"proposed": each.proposed, "accepted": each.accepted}
            for name, each in self._of.items()
        }
