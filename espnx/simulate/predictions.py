"""What was measured elsewhere, predicted: a value, a range from draws of all figures, and how it
moves when a mechanism is missing or a figure is another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInputError, StateError

DRAWS, DRAWS_MIN, DRAWS_MAX, SEED = 20, 10, 1000, 7
RANGE = (5.0, 95.0)  # percentiles
#: How much a figure is raised to see what it moves.
RAISED = 1.1


@dataclass(frozen=True)
class Prediction:
    """Attributes:
    id: of what is predicted.
    value: with the middles of all ranges.
    low, high: 5th and 95th percentile of draws from them.
    mechanism: by which it comes about.
    basis: what it is computed from.
    moved: the value, by what was changed.
    """

    id: str
    value: float
    low: float
    high: float
    mechanism: str
    basis: str
    moved: Mapping[str, float]


@dataclass(frozen=True)
class NotPredicted:
    """Attributes:
    id: of what is not.
    not_predicted: why.
    """

    id: str
    not_predicted: str


def check_draws(n_draws: int) -> None:
    """Raises InvalidInputError: too few for a range, or so many that they take hours."""
    if not DRAWS_MIN <= n_draws <= DRAWS_MAX:
        raise InvalidInputError("draws", got=n_draws, expected=f"{DRAWS_MIN} to {DRAWS_MAX:,}")


def predictions(
    values: Mapping[str, float],
    drawn: Sequence[Mapping[str, float]],
    moved: Mapping[str, Mapping[str, float]],
    words: Callable[[str], tuple[str, str]],
) -> tuple[Prediction, ...]:
    """A row of each id.

    Args:
        values: of each, with the middles.
        drawn: the same, of each draw.
        moved: the same, by what was changed.
        words: mechanism and basis of an id.

    Raises:
        StateError: a value outside its own range.
    """
    rows = []
    for name, value in values.items():
        low, high = np.percentile([each[name] for each in drawn], RANGE)
        # what the draws do not move is the same in all of them, up to the last bits
        slack = 1e-9 * abs(value)
        if not low - slack <= value <= high + slack:
            raise StateError(
                f"{name} is outside its own range", got=value, expected=f"{low:g} to {high:g}"
            )
        by_what = {what: each[name] for what, each in moved.items()}
        rows.append(Prediction(name, value, float(low), float(high), *words(name), by_what))
    return tuple(rows)
