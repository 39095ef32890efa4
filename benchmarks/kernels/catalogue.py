"""All points, part by part, in the order in which they are measured."""

from __future__ import annotations

from . import attention, projections, ranges, scoring
from .point import Point


def points() -> list[Point]:
    return [*attention.points(), *scoring.points(), *ranges.points(), *projections.points()]
