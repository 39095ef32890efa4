"""Nearest neighbours from SSD by lists (SPANN): small clusters of vectors on storage, whose heads
say which of them a query reads, all at once.

>>> import espnx.clusters                                         # doctest: +SKIP
>>> espnx.clusters.build("vectors.npy", "my.clusters")
>>> with espnx.clusters.open("my.clusters") as index:
...     found = index.search(queries, k=10, n_lists=16)
...     found.ids, found.distances, found.pages
"""

from __future__ import annotations

from .advice import Advice, advise
from .build import ClusterReport, build
from .facts import ClusterFacts, info
from .found import ListNeighbours
from .index import ClusterIndex
from .options import PACKINGS
from .planning import ClusterPlan, plan

open = ClusterIndex  # noqa: A001 - espnx.clusters.open reads as it should

__all__ = [
    "PACKINGS",
    "Advice",
    "ClusterFacts",
    "ClusterIndex",
    "ClusterPlan",
    "ClusterReport",
    "ListNeighbours",
    "advise",
    "build",
    "info",
    "open",
    "plan",
]
