"""All points, part by part, in the order in which they are measured."""

from __future__ import annotations

from . import attention, projections, ranges, scoring
from .point import Point


def points() -> list[Point]:
    decode = attention.points()
    both = [point for point in decode if point.part == "x"]
    rest = [*scoring.points(), *ranges.points(), *both, *projections.points()]
    return [*(point for point in decode if point.part != "x"), *rest]
