"""HNSW with its vectors on SSD (RAGX, section 2.3): links in memory, vectors in pages, read as a
walk comes to them."""

from __future__ import annotations

from .links import Links
from .stored import HnswGraph
from .write import build_hnsw, links_of, write_hnsw

__all__ = ["HnswGraph", "Links", "build_hnsw", "links_of", "write_hnsw"]
