"""Which way to search vectors from SSD fits them, a graph or lists, as measured on samples."""

from __future__ import annotations

from .advising import Advice, advise

__all__ = ["Advice", "advise"]
