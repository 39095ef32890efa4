"""What diskannpy does for scripts/diskann_check.sh, in its own environment: ``build`` or
``search``."""

from __future__ import annotations

import sys

import diskannpy
import numpy as np


def build(vectors: str, directory: str, metric: str, gigabytes: str) -> None:
    """Builds the index ``ann`` in a directory. Gigabytes: of its codes in memory."""
    diskannpy.build_disk_index(
        data=np.load(vectors),
        distance_metric=metric,
        index_directory=directory,
        complexity=64,
        graph_degree=32,
        search_memory_maximum=float(gigabytes),
        build_memory_maximum=1,
        num_threads=2,
    )


def search(directory: str, prefix: str, queries: str, found: str, list_size: str) -> None:
    """Writes the ids of each query's ten nearest."""
    index = diskannpy.StaticDiskIndex(
        directory, num_threads=2, num_nodes_to_cache=0, cache_mechanism=0, index_prefix=prefix
    )
    np.save(
        found,
        index.batch_search(
            np.load(queries), 10, int(list_size), num_threads=2, beam_width=2
        ).identifiers,
    )


{"build": build, "search": search}[sys.argv[1]](*sys.argv[2:])
