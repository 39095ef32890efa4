"""Posting lists on SSD: BM25 whose index need not fit in memory.

>>> import espnx                                                            # doctest: +SKIP
>>> espnx.Postings.build("my.bm25", texts)
>>> with espnx.Postings.open("my.bm25") as postings:
...     found = postings.search(["who writes to the log?"], k=10)
"""

from __future__ import annotations

from .analyzer import Analyzer
from .bm25 import BM25, VARIANTS
from .plan import Collection, QueryTerms
from .records import CsrArrays
from .search import Found, PostingsSearch, PostingsState
from .store import Postings, PostingsReport

__all__ = [
    "BM25",
    "VARIANTS",
    "Analyzer",
    "Collection",
    "CsrArrays",
    "Found",
    "Postings",
    "PostingsReport",
    "PostingsSearch",
    "PostingsState",
    "QueryTerms",
]
