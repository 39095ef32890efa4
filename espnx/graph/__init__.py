"""Nearest neighbours from SSD: a graph of vectors whose every part lies on storage.

>>> import espnx.graph                                            # doctest: +SKIP
>>> espnx.graph.build("vectors.npy", "my.graph")
>>> with espnx.graph.open("my.graph") as graph:
...     found = graph.search(queries, k=10)
...     found.ids, found.distances, found.pages
"""

from __future__ import annotations

from .build import GraphReport, build
from .devices.stored import StoredGraph
from .diskann.conversion import ExportReport, ImportReport, export_diskann, import_diskann
from .format import METRICS, GraphShare, RecallPoint
from .global_index.places import remove
from .index import GraphIndex
from .merging.writer import GraphWriter
from .neighbours import Neighbours
from .private import PrivateGraphs, build_private
from .vectors import Vectors, read_vectors

open = GraphIndex  # noqa: A001 - espnx.graph.open reads as it should
open_writer = GraphWriter

__all__ = [
    "METRICS",
    "ExportReport",
    "GraphIndex",
    "GraphReport",
    "GraphShare",
    "GraphWriter",
    "ImportReport",
    "Neighbours",
    "PrivateGraphs",
    "RecallPoint",
    "StoredGraph",
    "Vectors",
    "build",
    "build_private",
    "export_diskann",
    "import_diskann",
    "open",
    "open_writer",
    "read_vectors",
    "remove",
]
