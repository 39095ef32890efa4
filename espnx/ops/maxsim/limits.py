"""Limits of dimensions and records. ``csrc/cpu/maxsim/maxsim.hpp`` has the same ones."""

from __future__ import annotations

from ...errors import InvalidInputError

DIM_MULTIPLE = 8
DIM_MAX = 65536
TOKENS_MAX = 65535


def check_dim(d: int) -> None:
    """Raises InvalidInputError unless ``d`` is a multiple of 8 from 8 to 65536."""
    if d % DIM_MULTIPLE or not DIM_MULTIPLE <= d <= DIM_MAX:
        raise InvalidInputError(
            "token dimension",
            got=d,
            expected=f"a multiple of {DIM_MULTIPLE} from {DIM_MULTIPLE} to {DIM_MAX}",
        )
