"""HILOS's attention accelerator (section 4.4) as an op: algorithm 1 in the accelerator's own
roundings, equal to the bit everywhere."""

from __future__ import annotations

from .api import accelerator, accelerator_scores
from .bound import accelerator_bound
from .checks import DIM, GROUP, LSE_LEAST, PIECE_FIELDS, Buffered
from .reference import accelerator_reference, accelerator_scores_reference

__all__ = [
    "DIM", "GROUP", "LSE_LEAST", "PIECE_FIELDS", "Buffered", "accelerator", "accelerator_bound",
    "accelerator_reference", "accelerator_scores", "accelerator_scores_reference",
]  # fmt: skip
