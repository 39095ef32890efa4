"""The arguments of a search, checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from .. import errors
from ..checks import check_whole, plain
from .advice import Steps
from .texts import DocumentId


class SearchOptions(TypedDict, total=False):
    """Keyword arguments of `Index.search`, for type checkers."""

    candidates: int
    rerank: int | None
    cascade: int | None
    nprobe: int | str
    prefetch_step: float | Sequence[float] | str
    cls_weight: float | None
    include: Iterable[DocumentId] | None
    exclude: Iterable[DocumentId] | None
    explain: bool
    deadline_s: float


@dataclass(frozen=True)
class Arguments:
    """What the caller asked for. `steps` is None where the searcher chooses, `nprobe` where the index knows; `candidates` is at least k."""

    k: int
    candidates: int
    depth: int
    is_cascade: bool
    nprobe: int | None
    steps: Steps | None
    deadline_s: float


def check_arguments(
    k: int,
    candidates: int,
    rerank: int | None,
    cascade: int | None,
    nprobe: int | str,
    prefetch_step: float | Sequence[float] | str,
    deadline_s: float,
) -> Arguments:
    """Raises InvalidInputError."""
    k, candidates, rerank, cascade, nprobe, deadline_s = map(plain, (k, candidates, rerank, cascade, nprobe, deadline_s))
    for name, value, least in (("k", k, 1), ("candidates", candidates, 1), ("rerank", rerank, 0), ("cascade", cascade, 1)):
        if value is not None:
            check_whole(name, value, least)
    if rerank is not None and cascade is not None:
        raise errors.InvalidInputError(
            "rerank and cascade", got=f"rerank={rerank}, cascade={cascade}", expected="one of them",
            fix="rerank takes the first stage's best, cascade those of the compact records",
        )  # fmt: skip
    if nprobe != "auto" and (not isinstance(nprobe, int) or isinstance(nprobe, bool) or nprobe < 1):
        raise errors.InvalidInputError("nprobe", got=repr(nprobe), expected="at least 1, or 'auto'")
    if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or not math.isfinite(deadline_s) or deadline_s <= 0:
        raise errors.InvalidInputError("deadline_s", got=repr(deadline_s), expected="a positive number of seconds")
    candidates = max(k, candidates)
    wanted = cascade if cascade is not None else rerank
    return Arguments(
        k=k,
        candidates=candidates,
        depth=candidates if wanted is None else min(wanted, candidates),
        is_cascade=cascade is not None,
        nprobe=nprobe if isinstance(nprobe, int) else None,
        steps=_steps(prefetch_step),
        deadline_s=deadline_s,
    )


def _steps(prefetch_step: float | Sequence[float] | str) -> Steps | None:
    if isinstance(prefetch_step, str):
        if prefetch_step == "auto":
            return None
        values: Sequence[float] = [math.nan]
    else:
        prefetch_step = plain(prefetch_step)
        values = [plain(step) for step in prefetch_step] if isinstance(prefetch_step, Iterable) else [prefetch_step]
    rising = all(a < b for a, b in itertools.pairwise(values))
    if not all(isinstance(step, int | float) and 0 <= step <= 1 for step in values) or not rising:
        raise errors.InvalidInputError(
            "prefetch_step", got=repr(prefetch_step), expected="a share of the lists, 0 to 1, or several, rising, or 'auto'"
        )
    return tuple(float(step) for step in values if step > 0)
