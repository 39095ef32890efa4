"""Names that the command line, the rows and the systems share."""

from __future__ import annotations

#: What BM25 is compared with.
BASELINES = ("mmap-willneed", "bm25s-mmap", "bm25s-memory", "bm25s-numba", "tantivy", "fts5")
NOT_INSTALLED = "not installed"
#: Of sparse vectors: exact search, what is in memory beside it, and what is built.
WHOLE = "whole lists"
PEERS = ("sindi", "seismic")
LEARNED = ("splade", *PEERS)
