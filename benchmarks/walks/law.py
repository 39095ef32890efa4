"""A law of how many vectors a walk compares: a power of the vectors that there are, times one of
efSearch. It is fitted where a walk sees a small part of the graph; more of it is a limit of its own
that larger graphs do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espnx.errors import InvalidInputError

#: Where the law begins.
VECTORS, EF = 100_000, 1000
#: Of a graph, at most, that a walk sees.
SEEN_MOST = 0.25


@dataclass(frozen=True)
class Law:
    """Attributes, of each kind of vectors by its name:
    distances: at `VECTORS` and `EF`.
    more_vectors, more_ef: powers with which they grow.
    off: the most that a walk's distances differ from it, as a share of them.
    descent: hops beyond efSearch, the mean of all.
    """

    distances: Mapping[str, float]
    more_vectors: Mapping[str, float]
    more_ef: Mapping[str, float]
    off: Mapping[str, float]
    descent: float


def fit_law(rows: Sequence[Mapping[str, Any]]) -> Law:
    """Least squares on logarithms, of each kind of vectors. Raises InvalidInputError: too few
    walks."""
    found: dict[str, dict[str, float]] = {name: {} for name in _FIELDS}
    walks = [row for row in rows if row["metrics"]["distances"] <= SEEN_MOST * row["params"]["n"]]
    for data in dict.fromkeys(row["params"]["data"] for row in walks):
        own = [row for row in walks if row["params"]["data"] == data]
        n = np.log([row["params"]["n"] / VECTORS for row in own])
        ef = np.log([row["params"]["ef"] / EF for row in own])
        if len(set(n)) < 2 or len(set(ef)) < 2:
            raise InvalidInputError(
                "a law of walks", got=f"{len(own)} of {data}", expected="two sizes, two efSearch"
            )
        far = np.log([row["metrics"]["distances"] for row in own])
        terms = np.column_stack([np.ones(len(own)), n, ef])
        solved, *_ = np.linalg.lstsq(terms, far, rcond=None)
        values = (*np.exp(solved[:1]), *solved[1:], np.abs(np.expm1(terms @ solved - far)).max())
        for name, value in zip(_FIELDS, values, strict=True):
            found[name][data] = float(value)
    if not walks:
        raise InvalidInputError("a law of walks", got="no walk of a small part of a graph")
    beyond = [row["metrics"]["hops"] - row["params"]["ef"] for row in walks]
    return Law(**found, descent=float(np.mean(beyond)))


_FIELDS = ("distances", "more_vectors", "more_ef", "off")


def shown(law: Law) -> str:
    """A line for each field: of each kind of vectors, and the middle of them."""
    lines = []
    for name in _FIELDS:
        own: Mapping[str, float] = getattr(law, name)
        each = ", ".join(f"{data} {value:.4g}" for data, value in own.items())
        middle = (min(own.values()) + max(own.values())) / 2
        lines.append(f"{name:13}{middle:.4g} ({each})")
    return "\n".join([*lines, f"{'descent':13}{law.descent:.3g}"])
