"""What a search is asked for: checked once, and handed on as it is, from the face of the index to
the scoring."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

from ... import errors
from ...checks import check_callable, check_whole, plain
from ...storage.documents.ids import DocumentId
from ..first_stage.fusion import METHODS, WITH_MAXSIM
from .known import OnCandidates
from .prefetch import Steps


class SearchKeywords(TypedDict, total=False):
    """Keyword arguments of `Index.search`, for type checkers."""

    candidates: int | None
    first_stage: str | Sequence[str] | None
    fuse: str
    rerank: int | None
    cascade: int | None
    nprobe: int | str
    prefetch_step: float | Sequence[float] | str
    cls_weight: float | None
    include: Iterable[DocumentId] | None
    exclude: Iterable[DocumentId] | None
    explain: bool
    on_candidates: OnCandidates | None
    deadline_s: float


_NO_SCALARS = ("prefetch_step", "include", "exclude", "first_stage", "on_candidates")


@dataclass(frozen=True)
class SearchOptions:
    """See `Index.search`, whose arguments these are. `candidates` is at least k, or None; NumPy's
    and PyTorch's numbers are Python's own.

    Raises InvalidInputError.
    """

    k: int = 10
    candidates: int | None = None
    rerank: int | None = None
    cascade: int | None = None
    nprobe: int | str = "auto"
    prefetch_step: float | Sequence[float] | str = "auto"
    cls_weight: float | None = None
    include: Iterable[DocumentId] | None = None
    exclude: Iterable[DocumentId] | None = None
    explain: bool = False
    deadline_s: float = 30.0
    first_stage: str | Sequence[str] | None = None
    fuse: str = "rrf"
    on_candidates: OnCandidates | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in _NO_SCALARS:
                object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check_whole("k", self.k, 1)
        for name, wanted, least in (
            ("candidates", self.candidates, 1),
            ("rerank", self.rerank, 0),
            ("cascade", self.cascade, 1),
        ):
            if wanted is not None:
                check_whole(name, wanted, least)
        if self.rerank is not None and self.cascade is not None:
            raise errors.InvalidInputError(
                "rerank and cascade",
                got=f"rerank={self.rerank}, cascade={self.cascade}",
                expected="one of them",
                fix="rerank takes the first stage's best, cascade those of the coarse records",
            )
        nprobe, deadline_s = self.nprobe, self.deadline_s
        if nprobe != "auto" and (
            not isinstance(nprobe, int) or isinstance(nprobe, bool) or nprobe < 1
        ):
            raise errors.InvalidInputError(
                "nprobe", got=repr(nprobe), expected="at least 1, or 'auto'"
            )
        if (
            not isinstance(deadline_s, int | float)
            or isinstance(deadline_s, bool)
            or not math.isfinite(deadline_s)
            or deadline_s <= 0
        ):
            raise errors.InvalidInputError(
                "deadline_s", got=repr(deadline_s), expected="a positive number of seconds"
            )
        if self.on_candidates is not None:
            check_callable("on_candidates", self.on_candidates)
        if self.fuse not in (*METHODS, WITH_MAXSIM):
            raise errors.InvalidInputError(
                "fuse", got=repr(self.fuse), expected=" or ".join((*METHODS, WITH_MAXSIM))
            )
        if self.fuses_maxsim and not self.depth:
            raise errors.InvalidInputError(
                f"fuse={WITH_MAXSIM!r}",
                got="rerank=0",
                expected="documents that MaxSim ranks",
                fix="leave rerank out, or fuse='rrf'",
            )
        object.__setattr__(self, "first_stage", _checked_stages(self.first_stage))
        object.__setattr__(
            self, "candidates", None if self.candidates is None else max(self.k, self.candidates)
        )
        object.__setattr__(self, "prefetch_step", _checked_steps(self.prefetch_step))

    @property
    def stages(self) -> tuple[str, ...]:
        """Kinds of the first stages that were named; none: the store's own choice."""
        return self.first_stage if isinstance(self.first_stage, tuple) else ()

    @property
    def wanted(self) -> int:
        """Candidates, where their number is known."""
        return self.k if self.candidates is None else self.candidates

    @property
    def fuses_maxsim(self) -> bool:
        """Whether MaxSim's ranking is fused with those of the first stages, instead of coming
        before them."""
        return self.fuse == WITH_MAXSIM

    @property
    def is_cascade(self) -> bool:
        return self.cascade is not None

    @property
    def depth(self) -> int:
        """How many candidates are scored exactly."""
        wanted = self.rerank if self.cascade is None else self.cascade
        return self.wanted if wanted is None else min(wanted, self.wanted)

    @property
    def reads_records(self) -> bool:
        """Whether a query's own vectors are looked at, beside what the first stage makes of it."""
        return self.depth > 0 or self.explain

    @property
    def effort(self) -> int | None:
        """The effort of the first stage; None: its own choice."""
        return self.nprobe if isinstance(self.nprobe, int) else None

    @property
    def steps(self) -> Steps | None:
        """Shares of the first stage's work after which reads begin; None: the search chooses."""
        return self.prefetch_step if isinstance(self.prefetch_step, tuple) else None


def _checked_stages(named: str | Sequence[str] | None) -> tuple[str, ...]:
    if named is None or named == ():
        return ()
    kinds = (
        (named,) if isinstance(named, str) else tuple(named) if isinstance(named, Iterable) else ()
    )
    if (
        not kinds
        or not all(isinstance(kind, str) for kind in kinds)
        or len(set(kinds)) < len(kinds)
    ):
        raise errors.InvalidInputError(
            "first_stage",
            got=repr(named),
            expected="the name of one of the index's, or several, each once",
        )
    return kinds


def _checked_steps(prefetch_step: float | Sequence[float] | str) -> Steps | str:
    if isinstance(prefetch_step, str):
        if prefetch_step == "auto":
            return prefetch_step
        values: Sequence[float] = [math.nan]
    else:
        prefetch_step = plain(prefetch_step)
        values = (
            [plain(step) for step in prefetch_step]
            if isinstance(prefetch_step, Iterable)
            else [prefetch_step]
        )
    rising = all(a < b for a, b in itertools.pairwise(values))
    if not all(isinstance(step, int | float) and 0 <= step <= 1 for step in values) or not rising:
        raise errors.InvalidInputError(
            "prefetch_step",
            got=repr(prefetch_step),
            expected="a share of the lists, 0 to 1, or several, rising, or 'auto'",
        )
    return tuple(float(step) for step in values if step > 0)
