"""What is asked of walks, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...checks import check_finite, check_whole, plain
from ..format import GraphFacts
from ..options import SQUARES_MAX
from ..vectors import as_array
from .effort import list_size_for, probing_of, usual_point
from .probing import Probing

LIST_SIZE_MAX = 1 << 20
_ALONE_BEAM_WIDTH = 4


@dataclass(frozen=True, eq=False)
class WalkRequest:
    """Attributes:
    native, wide: queries as `checked_queries` gives them.
    k, beam_width, stop_beyond, deadline_s: of `GraphIndex.search`.
    list_size: of walks without a filter. is_named: the caller has said how long.
    recall: that the caller has named. probing: clusters to go through; None: all there are.
    """

    native: torch.Tensor
    wide: torch.Tensor
    k: int
    beam_width: int
    stop_beyond: float
    deadline_s: float
    list_size: int = 0
    is_named: bool = True
    recall: float | None = None
    probing: Probing | None = None

    @classmethod
    def of(
        cls,
        facts: GraphFacts,
        queries: Any,
        k: int,
        list_size: int | None,
        recall: float | None,
        nprobe: int | str | None,
        beam_width: int | None,
        stop_beyond: float | None,
        deadline_s: float,
    ) -> WalkRequest:
        """Arguments and errors: see `GraphIndex.search`."""
        native, wide = checked_queries(facts, queries)
        k, list_size, nprobe, beam_width = map(plain, (k, list_size, nprobe, beam_width))
        recall, stop_beyond, deadline_s = plain(recall), plain(stop_beyond), plain(deadline_s)
        check_whole("k, neighbours wanted", k, 1, LIST_SIZE_MAX)
        if list_size is not None and recall is not None:
            raise errors.InvalidInputError(
                "list_size and recall", got=f"{list_size} and {recall}", expected="one of them"
            )
        if list_size is not None:
            check_whole("list_size, candidates of a walk", list_size, k, LIST_SIZE_MAX)
        if beam_width is None:
            beam_width = beam_width_of(len(native))
        check_whole("beam_width", beam_width, 1, 64)
        check_finite("stop_beyond", 0.0 if stop_beyond is None else stop_beyond)
        check_finite("deadline_s", deadline_s)
        if (stop_beyond is not None and stop_beyond < 0) or deadline_s <= 0:
            raise errors.InvalidInputError(
                "stop_beyond and deadline_s",
                got=f"{stop_beyond} and {deadline_s}",
                expected="0 or more; above 0",
            )
        point = usual_point(facts) if recall is None else list_size_for(facts, recall)
        return cls(
            native,
            wide,
            k,
            beam_width,
            float("inf") if stop_beyond is None else float(stop_beyond),
            float(deadline_s),
            list_size or point.list_size,
            list_size is not None,
            recall,
            probing_of(facts, nprobe, point, list_size),
        )


def beam_width_of(n_queries: int) -> int:
    """Pages of each query that are under way at a time, unless a search says how many."""
    return 1 if n_queries >= 2 * _ALONE_BEAM_WIDTH else _ALONE_BEAM_WIDTH


def checked_queries(facts: GraphFacts, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries as the distance kernels take them, int8 as uint8, and as float32. Raises
    InvalidInputError."""
    return checked_values(given, facts.layout.dim, facts.layout.format, facts.metric)


def checked_values(
    given: Any,
    dim: int,
    format: str,  # noqa: A002
    metric: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the same for vectors of `dim` values that are stored in such a format."""
    values = as_array(given)
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or values.shape[1] != dim or values.dtype.kind not in "iuf":
        raise errors.InvalidInputError(
            "queries", got=f"{values.dtype} {list(values.shape)}", expected=f"numbers [q, {dim}]"
        )
    whole = {"uint8": np.uint8, "int8": np.int8}.get(format)
    if whole is not None:
        exact = values.astype(whole)
        if not np.array_equal(exact, values):
            raise errors.InvalidInputError(
                "queries",
                got=str(values.dtype),
                expected=f"values that {format} holds, as the vectors'",
            )
        wide = exact.astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(exact).view(np.uint8)), torch.from_numpy(wide)
    wide = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(wide).all():
        raise errors.InvalidInputError(
            "queries", got="values that are not finite", expected="numbers that float32 holds"
        )
    if metric == "cosine":
        length = np.linalg.norm(wide.astype(np.float64), axis=1, keepdims=True)
        if not length.all():
            raise errors.InvalidInputError(
                f"query {int(np.argmin(length))}",
                got="length 0",
                expected="a vector that has a direction",
            )
        wide = np.ascontiguousarray(wide / length, dtype=np.float32)
    squares = np.square(wide.astype(np.float64)).sum(axis=1)
    if squares.size and squares.max() > SQUARES_MAX:
        raise errors.InvalidInputError(
            f"query {int(np.argmax(squares))}",
            got=f"length {np.sqrt(squares.max()):.3g}",
            expected=f"at most {np.sqrt(SQUARES_MAX):.3g}",
            fix="scale it, as the vectors: distances overflow float32",
        )
    tensor = torch.from_numpy(wide)
    return tensor, tensor
