"""Several first stages in one store: one decides the order of the records, the others follow it,
and a search takes one of them or fuses some.

To whoever builds and changes stores they are one stage. Names of sections and arrays have their
stage's kind and a dot in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from ... import errors
from ...device.kinds import PartKind
from ...storage.files import Region
from ...storage.parse import Fields
from ..encoder import Encoded
from ..sparse_encoder import SparseEncoder
from .devices import StageDevices, asked_of_devices
from .fused import FusedStage
from .interface import Documents, Entries, FirstStage, LoadedStage, StoredEntries
from .registry import described, parse_stage, with_sparse_encoder
from .ties import FirstOf, StageInFront, settled_stage

_STAGES_MAX = 8


@dataclass(frozen=True, eq=False)
class SeveralStages:
    """See `FirstStage`.

    Attributes:
        stages: in the order in which they were named; each of another kind.
    """

    kind: ClassVar[str] = "several"
    follows: ClassVar[bool] = False

    stages: tuple[FirstStage, ...]

    @classmethod
    def of(cls, stages: Sequence[FirstStage]) -> SeveralStages:
        """Raises InvalidInputError for stages that cannot be in one store."""
        kinds = [stage.kind for stage in stages]
        if len(set(kinds)) < len(kinds) or cls.kind in kinds:
            raise errors.InvalidInputError(
                "first stages", got=", ".join(kinds), expected="each kind once"
            )
        deciding = [stage.kind for stage in stages if not stage.follows]
        if len(deciding) > 1:
            raise errors.InvalidInputError(
                "first stages",
                got=" and ".join(deciding),
                expected="at most one of those that decide how records lie",
                fix="keep one of them",
            )
        if len({stage.vector_dim for stage in stages if stage.vector_dim}) > 1:
            raise errors.InvalidInputError(
                "first stages",
                got=", ".join(
                    f"{stage.kind}: {stage.vector_dim} dimensions"
                    for stage in stages
                    if stage.vector_dim
                ),
                expected="vectors of one kind",
                fix="give all of them the same pooling",
            )
        return cls(tuple(stages))

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> SeveralStages:
        """Raises FormatError."""
        stages = [
            parse_stage(each, d_cls, dim) for each in fields.each("stages", count=_STAGES_MAX)
        ]
        try:
            return cls.of(stages)
        except errors.InvalidInputError as error:
            fields.refuse("stages", error.expected, error.got)

    def describe(self) -> dict[str, Any]:
        return {"stages": [described(stage) for stage in self.stages]}

    @property
    def leader(self) -> FirstStage:
        """The stage that decides the order of the records: the one that cannot follow, else the
        first."""
        return next((stage for stage in self.stages if not stage.follows), self.stages[0])

    @property
    def _leader_first(self) -> tuple[FirstStage, ...]:
        return (self.leader, *(stage for stage in self.stages if stage is not self.leader))

    @cached_property
    def _with_vectors(self) -> FirstStage | None:
        return next((stage for stage in self.stages if stage.vector_dim), None)

    @property
    def vector_dim(self) -> int:
        return 0 if self._with_vectors is None else self._with_vectors.vector_dim

    @property
    def is_cls_similarity(self) -> bool:
        return self.stages[0].is_cls_similarity

    @property
    def in_place(self) -> frozenset[str]:
        return frozenset(f"{stage.kind}.{name}" for stage in self.stages for name in stage.in_place)

    def vector(self, document: Encoded) -> torch.Tensor:
        return torch.empty(0) if self._with_vectors is None else self._with_vectors.vector(document)

    def fresh(self) -> SeveralStages:
        return self._each(lambda stage: stage.fresh())

    def train(self, documents: Documents, memory_bytes: int) -> SeveralStages:
        return self._each(lambda stage: stage.train(documents, memory_bytes))

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            f"{stage.kind}.{name}": array
            for stage in self.stages
            for name, array in stage.arrays().items()
        }

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> SeveralStages:
        def own(stage: FirstStage) -> FirstStage:
            prefix = f"{stage.kind}."
            return stage.with_arrays(
                {
                    name.removeprefix(prefix): a
                    for name, a in arrays.items()
                    if name.startswith(prefix)
                },
                path,
            )

        return self._each(own)

    def add_bytes(self, count: int) -> int:
        return sum(stage.add_bytes(count) for stage in self.stages)

    def build_operations(self, count: int) -> int:
        return sum(stage.build_operations(count) for stage in self.stages)

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        leader, *others = self._leader_first
        made = leader.add(documents)
        return self._together(made, lambda found: [stage.add(documents, found) for stage in others])

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        leader, *others = self._leader_first
        made = leader.merge(_of(leader, parts), deleted)
        return self._together(
            made, lambda found: [stage.merge(_of(stage, parts), deleted, found) for stage in others]
        )

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[SeveralStages, Entries]:
        leader, *others = self._leader_first
        new_leader, made = leader.compact(_of(leader, parts), deleted)
        found = _whole(made.order)
        followed = [stage.compact(_of(stage, parts), deleted, found) for stage in others]
        by_kind = {stage.kind: stage for stage in (new_leader, *(stage for stage, _ in followed))}
        entries = self._together(
            Entries([found], made.sections), lambda _: [each for _, each in followed]
        )
        return replace(self, stages=tuple(by_kind[stage.kind] for stage in self.stages)), entries

    def _together(self, made: Entries, follow: Callable[[np.ndarray], list[Entries]]) -> Entries:
        found = _whole(made.order)
        sections: dict[str, Iterable[np.ndarray]] = {}
        for stage, entries in zip(self._leader_first, [made, *follow(found)], strict=True):
            sections |= {
                f"{stage.kind}.{name}": pieces for name, pieces in entries.sections.items()
            }
        return Entries([found], sections)

    def check(self, parts: Sequence[StoredEntries]) -> None:
        for stage in self.stages:
            stage.check(_of(stage, parts))

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: int | None = None,
        deleted: np.ndarray | None = None,
        device: StageDevices | None = None,
    ) -> LoadedSeveral:
        loaded: dict[str, LoadedStage] = {}
        try:
            for stage in self.stages:
                loaded[stage.kind] = stage.load(
                    _of(stage, parts), threads=threads, gpu=gpu, deleted=deleted, device=device
                )
        except BaseException:
            for each in loaded.values():
                each.close()
            raise
        return LoadedSeveral(loaded)

    def on_devices(self, parts: Sequence[StoredEntries]) -> dict[PartKind, list[Any]]:
        """See `asked_of_devices`."""
        found: dict[PartKind, list[Any]] = {}
        for stage in self.stages:
            for kind, what in asked_of_devices(stage, _of(stage, parts)).items():
                found.setdefault(kind, []).extend(what)
        return found

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> SeveralStages:
        if not isinstance(loaded, LoadedSeveral):
            raise errors.InvalidInputError(
                "tune", got=type(loaded).__name__, expected="what these stages have loaded"
            )
        return self._each(lambda stage: stage.tune(loaded.stages[stage.kind], documents))

    def resident_bytes(self, records: int) -> int:
        return sum(stage.resident_bytes(records) for stage in self.stages)

    def with_sparse_encoder(self, encoder: SparseEncoder) -> SeveralStages:
        """Those that encode texts themselves are given the model. Raises InvalidInputError where
        there is none, or for another model."""
        takers = [stage for stage in self.stages if hasattr(stage, "with_sparse_encoder")]
        if not takers:
            return with_sparse_encoder(self.stages[0], encoder)  # type: ignore[return-value]  # raises
        return self._each(
            lambda stage: with_sparse_encoder(stage, encoder) if stage in takers else stage
        )

    def _each(self, change: Callable[[FirstStage], FirstStage]) -> SeveralStages:
        return replace(self, stages=tuple(change(stage) for stage in self.stages))


def and_another(stage: FirstStage, other: FirstStage) -> SeveralStages:
    """A stage, or several, and one more, which follows. Raises as `SeveralStages.of`."""
    return SeveralStages.of(
        [*(stage.stages if isinstance(stage, SeveralStages) else (stage,)), other]
    )


def entries_of_another(
    stage: FirstStage, entries: Entries, other: FirstStage, made: Entries
) -> Entries:
    """Makes the entries of `and_another`, from what `stage` made and what `other` made in its
    order."""
    own = {
        name if isinstance(stage, SeveralStages) else f"{stage.kind}.{name}": pieces
        for name, pieces in entries.sections.items()
    }
    return Entries(
        entries.order,
        own | {f"{other.kind}.{name}": pieces for name, pieces in made.sections.items()},
    )


class LoadedSeveral(StageInFront):
    """See `LoadedStage`: searches by the stage that was named first, unless others are chosen.

    Attributes:
        stages: by kind.
    """

    def __init__(self, stages: Mapping[str, LoadedStage]):
        self.stages = dict(stages)
        super().__init__(next(iter(self.stages.values())))

    def chosen(self, kinds: Sequence[str], fuse: str, first_of: FirstOf) -> LoadedStage:
        """One stage, or several that are fused; `first_of`: see `ties`. Raises InvalidInputError
        for a kind that is not there."""
        for kind in kinds:
            if kind not in self.stages:
                raise errors.InvalidInputError(
                    "first_stage",
                    got=repr(kind),
                    expected=" or ".join(self.stages),
                    fix="build the index with it (first_stages=...)",
                )
        each = {kind: settled_stage(self.stages[kind], first_of) for kind in kinds}
        return each[kinds[0]] if len(kinds) == 1 else FusedStage(each, fuse, first_of)

    def close(self) -> None:
        for stage in self.stages.values():
            stage.close()


class _EntriesOfOne:
    """See `StoredEntries`: what one stage has of a part that holds several."""

    def __init__(self, part: StoredEntries, kind: str):
        self._part, self._kind = part, kind

    @property
    def path(self) -> str:
        return self._part.path

    @property
    def first_number(self) -> int:
        return self._part.first_number

    @property
    def count(self) -> int:
        return self._part.count

    def size_bytes(self, name: str) -> int:
        return self._part.size_bytes(f"{self._kind}.{name}")

    def read(self, name: str) -> np.ndarray:
        return self._part.read(f"{self._kind}.{name}")

    def windows(self, name: str) -> Any:
        return self._part.windows(f"{self._kind}.{name}")

    def place(self, name: str) -> Region:
        return self._part.place(f"{self._kind}.{name}")


def _of(stage: FirstStage, parts: Sequence[StoredEntries]) -> list[StoredEntries]:
    return [_EntriesOfOne(part, stage.kind) for part in parts]


def _whole(order: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *order])
