"""Distances of queries to vectors that lie in place in an I/O buffer: squared L2 and inner product,
of whole numbers and of floats."""

from __future__ import annotations

from .api import distances
from .checks import DIM_MAX, METRICS, VECTOR_FORMATS, vector_bytes
from .reference import distances_reference

__all__ = [
    "DIM_MAX",
    "METRICS",
    "VECTOR_FORMATS",
    "distances",
    "distances_reference",
    "vector_bytes",
]
