"""Posting lists on SSD: BM25 and sparse vectors, whose indexes need not fit in memory.

>>> import espnx                                                            # doctest: +SKIP
>>> espnx.Postings.build("my.bm25", texts)
>>> with espnx.Postings.open("my.bm25") as postings:
...     found = postings.search(["who writes to the log?"], k=10)

A store that holds postings beside other things hands `Segment` the regions of its files, and takes
sections from `SegmentBuilder`.
"""

from __future__ import annotations

from ..storage.files import Region
from .analyzer import Analyzer
from .bm25 import BM25, VARIANTS
from .build.builder import SegmentBuilder
from .build.estimate import SpoolEstimate, estimate_spool
from .build.records import CsrArrays
from .files import PostingsReport
from .imports import read_bm25s, read_vector_lines
from .inspection import Explanation, TermScore, VerifyReport
from .search.plan import Collection, QueryTerms
from .search.search import Found, PostingsSearch, PostingsState
from .search.two_step import search_two_step
from .split import SplitFound, SplitPostings, build_split
from .store import Postings
from .stored.layout import COUNT, FLOAT, IMPACT, RESIDENT
from .stored.segment import Segment
from .versions import add, compact, delete

__all__ = [
    "BM25",
    "COUNT",
    "FLOAT",
    "IMPACT",
    "RESIDENT",
    "VARIANTS",
    "Analyzer",
    "Collection",
    "CsrArrays",
    "Explanation",
    "Found",
    "Postings",
    "PostingsReport",
    "PostingsSearch",
    "PostingsState",
    "QueryTerms",
    "Region",
    "Segment",
    "SegmentBuilder",
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
    "search_two_step",
]
