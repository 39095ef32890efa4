"""Scoring posting lists where the I/O engine put them."""

from __future__ import annotations

from .api import postings
from .checks import KINDS, VARIANTS, Rules
from .reference import postings_reference

__all__ = ["KINDS", "VARIANTS", "Rules", "postings", "postings_reference"]
