"""Which passage an answer's words come from, told by the words alone: what attention is held
against where an answer is wrong, too. A file of its own: it knows nothing of attention."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


def copied_from(text: str, question: str, passages: Sequence[str]) -> int | None:
    """The number of the passage that has the longest run of the answer's words, whatever their
    case; None where none has any, or several have as long a run. Runs of the question's words alone
    do not count: what the question says comes from there.
    """
    answer, asked = _words(text), set(_words(question))
    found = [_longest(answer, asked, _words(each)) for each in passages]
    most = max(found, default=0)
    return found.index(most) if most and found.count(most) == 1 else None


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _longest(answer: Sequence[str], asked: set[str], passage: Sequence[str]) -> int:
    """Words of the longest run that both have, with one in it that is not asked."""
    best, before = 0, list[tuple[int, bool]]()  # of runs that end at each word of the passage
    for word in answer:
        now = list[tuple[int, bool]]()
        for at, other in enumerate(passage):
            length, is_news = before[at - 1] if at and before else (0, False)
            now.append((length + 1, is_news or word not in asked) if word == other else (0, False))
        best = max(best, *(length for length, is_news in now if is_news), 0)
        before = now
    return best
