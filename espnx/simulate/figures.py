"""Figures that the time model takes beside those of device specs, each with a range and where it is
from. A file of its own: whatever is simulated has such figures, and draws from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Range:
    """A figure that is known within bounds.

    Attributes:
        low, high: the bounds; the middle of them is what a point is computed with.
        source: where they are from.
        confidence: one of `espnx.device.model.spec.CONFIDENCES`.
    """

    low: float
    high: float
    source: str
    confidence: str

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


def middles(ranges: Mapping[str, Range]) -> dict[str, float]:
    return {name: each.middle for name, each in ranges.items()}


def draw(ranges: Mapping[str, Range], rng: np.random.Generator) -> dict[str, float]:
    """One value of each, anywhere within its bounds alike."""
    return {name: float(rng.uniform(each.low, each.high)) for name, each in ranges.items()}


def rounded(value: float, step: float, source: str, confidence: str) -> Range:
    """A printed figure: whatever is rounded to it."""
    return Range(value - step / 2, value + step / 2, source, confidence)
