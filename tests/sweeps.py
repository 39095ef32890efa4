"""Long tests, of which `make test` runs a part and `make sweep` the rest: products of parameters,
and faults at every moment."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

Row = tuple[tuple[Any, Any], ...]


def in_steps(of: int) -> pytest.MarkDecorator:
    """A test with a `step`: of the moments at which something goes wrong, it tries one in so many,
    and `make sweep` each."""
    return pytest.mark.parametrize(
        "step",
        [pytest.param(of, id=f"one in {of}"), pytest.param(1, id="each", marks=pytest.mark.sweep)],
    )


def at_length(name: str, part: Any, whole: Any) -> pytest.MarkDecorator:
    """A test with a parameter that says how much it does: `make test` gives it the first value, and
    `make sweep` the second."""
    return pytest.mark.parametrize(name, [part, pytest.param(whole, marks=pytest.mark.sweep)])


def some(values: Iterable[Any], of: int) -> list[Any]:
    """Values of a parameter, or tuples of several: `make test` takes one in so many, `make sweep`
    the others."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.sweep] if place % of else [],
        )
        for place, value in enumerate(values)
    ]


def mark_samples(items: Iterable[pytest.Item]) -> None:
    """Of a test with the mark ``sampled(n)``, all but a `covering` of its parameters are marked
    ``sweep``. What is a sweep already shows nothing."""
    tests: dict[str, dict[Row, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("sweep"):
            tests[item.nodeid.partition("[")[0]][parameters(item)].append(item)
    for rows in tests.values():
        (together,) = next(iter(rows.values()))[0].get_closest_marker("sampled").args
        kept = covering(list(rows), together)
        for item in (item for row in rows if row not in kept for item in rows[row]):
            item.add_marker(pytest.mark.sweep)


def parameters(item: pytest.Item) -> Row:
    """The names that are given values together, and which values these are, by the identity of the
    objects."""
    values: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [
        tuple(each.replace(" ", "").split(",")) if isinstance(each, str) else tuple(each)
        for each in names
    ]
    # of fixtures
    groups += [(name,) for name in values if not any(name in group for group in groups)]
    return tuple((group, tuple(id(values[name]) for name in group)) for group in sorted(groups))


def covering(rows: Sequence[Row], together: int) -> set[Row]:
    """Rows (name, value), ... in which every so many values that meet in any of them meet: 1 for
    each value, 2 for each pair. Each next one is the first of those that show the most that has not
    been seen."""
    shown = {row: set(itertools.combinations(row, min(together, len(row)))) for row in rows}
    missing = set().union(*shown.values())
    found = set()
    while missing:
        best = max(rows, key=lambda row: len(shown[row] & missing))
        found.add(best)
        missing -= shown[best]
    return found
