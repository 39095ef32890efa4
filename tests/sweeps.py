"""Long tests, of which `make test` runs a part and `make sweep` the rest: products of parameters, of which those combinations are run
that show every pair of values once, and faults at every moment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def crossed(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parameters of a test, each with all its values, in every combination; all but `pairwise` of them are marked ``sweep``."""
    kept = pairwise({name: range(len(each)) for name, each in values.items()})
    cases = []
    for places in itertools.product(*(range(len(each)) for each in values.values())):
        marks = () if places in kept else (pytest.mark.sweep,)
        cases.append(pytest.param(*(each[place] for each, place in zip(values.values(), places, strict=True)), marks=marks))
    return pytest.mark.parametrize(tuple(values), cases)


def pairwise(values: Mapping[str, Sequence[Any]]) -> set[tuple[Any, ...]]:
    """Combinations in which every value of every parameter meets every value of every other at least once: each next one is the first of
    those that show the most pairs not seen before."""
    rows = list(itertools.product(*values.values()))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) or {(0, row[0])} for row in rows}
    missing = set().union(*pairs.values())
    found = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        found.add(best)
        missing -= pairs[best]
    return found


def in_steps(of: int) -> pytest.MarkDecorator:
    """A test with a `step`: of the moments at which something goes wrong, it tries one in so many, and `make sweep` each."""
    return pytest.mark.parametrize("step", [pytest.param(of, id=f"one in {of}"), pytest.param(1, id="each", marks=pytest.mark.sweep)])
