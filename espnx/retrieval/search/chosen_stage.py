"""Which first stage finds the candidates of a search: the store's own choice, one of several, or
some of them fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ... import errors
from ..first_stage.fused import FusedStage
from ..first_stage.interface import FirstStage, LoadedStage
from ..first_stage.several import LoadedSeveral, SeveralStages
from ..first_stage.ties import FirstOf, settled_stage
from .prefetch import PrefetchPolicy


@dataclass(frozen=True, eq=False)
class ChosenStage:
    """See the module.

    Attributes:
        kinds: of the stages whose candidates come to a search.
        is_cls_similarity: see `FirstStage`; never of fused ranks.
        prefetch: of searches with it.
    """

    kinds: tuple[str, ...]
    loaded: LoadedStage
    is_cls_similarity: bool
    prefetch: PrefetchPolicy

    @classmethod
    def of(
        cls,
        stage: FirstStage,
        loaded: LoadedStage,
        kinds: Sequence[str],
        fuse: str,
        first_of: FirstOf,
    ) -> ChosenStage:
        """`kinds`: as a search names them; none: the store's first. `first_of`: see `ties`. Raises
        InvalidInputError for one that the store does not have."""
        each = stage.stages if isinstance(stage, SeveralStages) else (stage,)
        named = tuple(kinds) or (each[0].kind,)
        if isinstance(loaded, LoadedSeveral):
            chosen = loaded.chosen(named, fuse, first_of)
        elif named == (stage.kind,):
            chosen = settled_stage(loaded, first_of)
        else:
            raise errors.InvalidInputError(
                "first_stage",
                got=" and ".join(named),
                expected=stage.kind,
                fix="build the index with it (first_stages=...)",
            )
        is_cls = not isinstance(chosen, FusedStage) and next(
            each.is_cls_similarity for each in each if each.kind == named[0]
        )
        return cls(named, chosen, is_cls, PrefetchPolicy(chosen.hit_rates))
