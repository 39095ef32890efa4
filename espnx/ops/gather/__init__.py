"""Ragged records of an I/O buffer as one compact tensor."""

from __future__ import annotations

from .api import gather
from .reference import gather_reference

__all__ = ["gather", "gather_reference"]
