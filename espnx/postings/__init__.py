"""Posting lists on SSD: BM25 and sparse vectors, whose indexes need not fit in memory.

>>> import espnx                                                            # doctest: +SKIP
>>> espnx.Postings.build("my.bm25", texts)
>>> with espnx.Postings.open("my.bm25") as postings:
...     found = postings.search(["who writes to the log?"], k=10)
"""

from __future__ import annotations

from .analyzer import Analyzer
from .bm25 import BM25, VARIANTS
from .build.estimate import SpoolEstimate, estimate_spool
from .build.records import CsrArrays
from .files import PostingsReport
from .imports import read_bm25s, read_vector_lines
from .inspection import Explanation, TermScore, VerifyReport
from .search.search import Found
from .split import SplitFound, SplitPostings, build_split
from .store import Postings
from .versions import add, compact, delete

__all__ = [
    "BM25",
    "VARIANTS",
    "Analyzer",
    "CsrArrays",
    "Explanation",
    "Found",
    "Postings",
    "PostingsReport",
    "SplitFound",
    "SplitPostings",
    "SpoolEstimate",
    "TermScore",
    "VerifyReport",
    "add",
    "build_split",
    "compact",
    "delete",
    "estimate_spool",
    "read_bm25s",
    "read_vector_lines",
]
