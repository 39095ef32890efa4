"""A collection of postings that is split over several directories, each on a device that scans its
own lists."""

from __future__ import annotations

from .build import build_split
from .store import SplitFound, SplitPostings

__all__ = ["SplitFound", "SplitPostings", "build_split"]
