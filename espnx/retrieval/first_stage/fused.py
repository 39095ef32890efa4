"""Several loaded first stages searched as one: all of them look for candidates at once, and the
union is ranked by fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..encoder import Encoded
from . import fusion
from .interface import Allowed, Candidates, LoadedStage, StageReads, StageSearch
from .ties import FirstOf, cut


class FusedStage:
    """See `LoadedStage`. Each stage brings as many candidates as are wanted, and the best of the
    union are kept.

    Args:
        stages: by kind; an effort that a caller names is the first one's, the others take their
            own.
        fuse: how ranks become one, of `fusion.METHODS`.
        first_of: of equal ones, where the union is cut, see `ties`.
    """

    #: Where each stage measured its own, none is known of the union.
    hit_rates: Mapping[float, float] = {}

    def __init__(self, stages: Mapping[str, LoadedStage], fuse: str, first_of: FirstOf):
        self.stages, self._fuse, self._first_of = dict(stages), fuse, first_of

    @property
    def auto_effort(self) -> int:
        return next(iter(self.stages.values())).auto_effort

    @property
    def default_candidates(self) -> int:
        """Candidates that even the dearest of the stages finds cheaply."""
        return min(stage.default_candidates for stage in self.stages.values())

    @property
    def finds_equals(self) -> bool:
        return all(stage.finds_equals for stage in self.stages.values())

    @property
    def needs_vectors(self) -> bool:
        return any(stage.needs_vectors for stage in self.stages.values())

    def prepare(self, query: Encoded, text: str | None = None) -> tuple[Any, ...]:
        return tuple(stage.prepare(query, text) for stage in self.stages.values())

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> FusedSearch:
        searches: dict[str, StageSearch] = {}
        for place, (kind, stage) in enumerate(self.stages.items()):
            own = [query[place] for query in queries]
            searches[kind] = stage.start(
                own, candidates, effort if place == 0 else None, allowed, at_least, deadline_s
            )
        return FusedSearch(searches, candidates, self._fuse, self._first_of)

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        efforts = [effort, *[None] * (len(self.stages) - 1)]
        return sum(
            stage.search_bytes(candidates, own, allowed, at_least)
            for stage, own in zip(self.stages.values(), efforts, strict=True)
        )

    def close(self) -> None:
        """Does nothing: the stages are closed by whoever loaded them."""


class FusedSearch:
    """See `StageSearch`.

    Attributes:
        found: of each query what each stage found, by kind; empty before `complete`.
    """

    def __init__(
        self, searches: Mapping[str, StageSearch], candidates: int, fuse: str, first_of: FirstOf
    ):
        self._searches, self._candidates, self._fuse, self._first_of = (
            searches,
            candidates,
            fuse,
            first_of,
        )
        self.found: list[Mapping[str, Candidates]] = []

    def advance(self, share: float) -> list[Candidates]:
        return [
            (fused.numbers[: self._candidates], fused.scores[: self._candidates].astype(np.float32))
            for fused in self._fused([search.advance(share) for search in self._searches.values()])
        ]

    def complete(self) -> list[Candidates]:
        each = [search.complete() for search in self._searches.values()]
        self.found = [
            dict(zip(self._searches, of_query, strict=True)) for of_query in zip(*each, strict=True)
        ]
        best = [
            cut((fused.numbers, fused.scores), self._candidates, self._first_of)
            for fused in self._fused(each)
        ]
        return [(numbers, scores.astype(np.float32)) for numbers, scores in best]

    @property
    def reads(self) -> StageReads:
        return sum((search.reads for search in self._searches.values()), StageReads())

    def _fused(self, each: list[list[Candidates]]) -> list[fusion.Fused]:
        return [fusion.fuse(of_query, self._fuse) for of_query in zip(*each, strict=True)]
