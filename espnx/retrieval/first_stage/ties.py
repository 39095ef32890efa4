"""Lists of candidates, ordered, merged and cut. Which of those that score the same at the end of a
list it keeps is decided by their ids, never by where their records lie, so that a store ranks alike
before and after it was compacted, in parts, and on several devices.

A stage hands on the best by record number. Where the last of them scores as the next one does, it
is asked for more, until it has handed on all that do. A walk over a graph cannot do that: which of
several equal records it comes to is the graph's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .interface import Allowed, Candidates, LoadedStage, StageReads, StageSearch

#: From record numbers, int64 [m], and a count below m: those that come first, whatever the records'
#: numbers are.
FirstOf = Callable[[np.ndarray, int], np.ndarray]
_MORE = 32  # asked for beyond what is wanted: most ties end there
_TIMES = 16  # as many candidates, when a stage is asked again


def top(numbers: np.ndarray, scores: np.ndarray, count: int) -> Candidates:
    """The `count` best by (score, then lower number), so that ties never depend on scan order."""
    # FAISS's own answers come in order, but for equal scores
    if not (scores[1:] < scores[:-1]).all():
        # Stable: runs that are in order merge in linear time, and numbers decide only where scores
        # are equal.
        order = np.argsort(-scores, kind="stable")
        numbers, scores = numbers[order], scores[order]
        if (scores[1:] == scores[:-1]).any():
            order = np.lexsort((numbers, -scores))
            numbers, scores = numbers[order], scores[order]
    return numbers[:count], scores[:count]


def merged(each: Sequence[Candidates], count: int) -> Candidates:
    """The `count` best of several lists of candidates."""
    return top(
        np.concatenate([np.empty(0, np.int64), *(numbers for numbers, _ in each)]),
        np.concatenate([np.empty(0, np.float32), *(similarities for _, similarities in each)]),
        count,
    )


def settled(found: Candidates, count: int, first_of: FirstOf) -> Candidates:
    """The same candidates, best first, of which the first `count` are those that come first by
    (score, `first_of`)."""
    numbers, scores = found
    if not 0 < count < len(numbers) or scores[count] != scores[count - 1]:
        return found
    begin = int(np.searchsorted(-scores, -scores[count], side="left"))
    end = int(np.searchsorted(-scores, -scores[count], side="right"))
    tied = numbers[begin:end]
    chosen = first_of(tied, count - begin)
    return np.concatenate(
        [numbers[:begin], np.sort(chosen), np.setdiff1d(tied, chosen), numbers[end:]]
    ), scores


def cut(found: Candidates, count: int, first_of: FirstOf) -> Candidates:
    """The `count` best candidates, see `settled`."""
    numbers, scores = settled(found, count, first_of)
    return numbers[:count], scores[:count]


class StageInFront:
    """See `LoadedStage`: what another one says and does, but for what a class derived from it says
    itself. Closing it does nothing: the other one is closed by whoever loaded it.

    Attributes:
        stage: the other one.
    """

    def __init__(self, stage: LoadedStage):
        self.stage = stage

    @property
    def auto_effort(self) -> int:
        return self.stage.auto_effort

    @property
    def default_candidates(self) -> int:
        return self.stage.default_candidates

    @property
    def hit_rates(self) -> Mapping[float, float]:
        return self.stage.hit_rates

    @property
    def needs_vectors(self) -> bool:
        return self.stage.needs_vectors

    @property
    def finds_equals(self) -> bool:
        return self.stage.finds_equals

    def prepare(self, query: Any, text: str | None = None) -> Any:
        return self.stage.prepare(query, text)

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> StageSearch:
        return self.stage.start(queries, candidates, effort, allowed, at_least, deadline_s)

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        return self.stage.search_bytes(candidates, effort, allowed, at_least)

    def close(self) -> None: ...


def settled_stage(stage: LoadedStage, first_of: FirstOf) -> LoadedStage:
    """A stage whose lists end as the module says; the same one where it cannot find what scores
    alike."""
    return _SettledStage(stage, first_of) if stage.finds_equals else stage


class _SettledStage(StageInFront):
    def __init__(self, stage: LoadedStage, first_of: FirstOf):
        super().__init__(stage)
        self._first_of = first_of

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> StageSearch:
        if not candidates:
            return super().start(queries, candidates, effort, allowed, at_least, deadline_s)

        def begin(some: Sequence[Any], count: int) -> StageSearch:
            return self.stage.start(some, count, effort, allowed, at_least, deadline_s)

        return SettledSearch(begin, queries, candidates, self._first_of)

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        return super().search_bytes(candidates + _MORE, effort, allowed, at_least)


class SettledSearch:
    """See `StageSearch`. `begin`: starts a search of some queries for so many candidates of
    each."""

    def __init__(
        self,
        begin: Callable[[Sequence[Any], int], StageSearch],
        queries: Sequence[Any],
        candidates: int,
        first_of: FirstOf,
    ):
        self._begin, self._queries, self._candidates, self._first_of = (
            begin,
            queries,
            candidates,
            first_of,
        )
        self._search = begin(queries, candidates + _MORE)
        self._again: list[StageReads] = []

    def advance(self, share: float) -> list[Candidates]:
        return [
            (numbers[: self._candidates], scores[: self._candidates])
            for numbers, scores in self._search.advance(share)
        ]

    def complete(self) -> list[Candidates]:
        found = self._search.complete()
        return [
            cut(self._whole(query, each), self._candidates, self._first_of)
            for query, each in zip(self._queries, found, strict=True)
        ]

    def _whole(self, query: Any, found: Candidates) -> Candidates:
        """What was found, with all that score as the last one that is wanted."""
        asked = self._candidates + _MORE
        while len(found[0]) >= asked and found[1][-1] == found[1][self._candidates - 1]:
            asked *= _TIMES
            search = self._begin([query], asked)
            (found,) = search.complete()
            self._again.append(search.reads)
        return found

    @property
    def reads(self) -> StageReads:
        return sum(self._again, self._search.reads)
