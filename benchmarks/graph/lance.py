"""LanceDB's IVF_PQ with refinement in a process of ours: inverted lists of product-quantisation
codes, and the vectors themselves for the candidates that these bring. A file of its own: a package
that need not be there."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .service import Found, Opened, Setting

_TABLE = "vectors"


def load_lance(threads: int) -> Any:
    """The package. Its threads are chosen as it is imported, so the first caller chooses. Raises
    ImportError."""
    os.environ.setdefault("LANCE_CPU_THREADS", str(threads))
    import lancedb

    return lancedb


def build_lance(base: str, folder: str, pq_bytes: int, threads: int) -> None:
    """A table of the vectors in a file and its index: sqrt(n) lists, codes of `pq_bytes`. Raises
    ImportError."""
    lancedb = load_lance(threads)
    import pyarrow as arrow
    from lancedb.index import IvfPq

    vectors = np.load(base).astype(np.float32)
    n, dim = vectors.shape
    lists = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), dim)
    table = lancedb.connect(folder).create_table(
        _TABLE, arrow.table({"id": np.arange(n), "vector": lists})
    )
    config = IvfPq(distance_type="l2", num_partitions=max(1, int(n**0.5)), num_sub_vectors=pq_bytes)
    table.create_index("vector", config=config)


class LanceTable(Opened):
    """A table of LanceDB. A list size L probes L lists and measures the vectors of L candidates, in
    whole multiples of k."""

    def __init__(self, folder: str, threads: int):
        self._table: Any = load_lance(threads).connect(folder).open_table(_TABLE)

    def search(self, queries: np.ndarray, k: int, setting: Setting) -> Found:
        query = self._table.search(
            queries.astype(np.float32), vector_column_name="vector"
        ).distance_type("l2")
        refined = query.nprobes(setting.list_size).refine_factor(-(-setting.list_size // k))
        found = refined.select(["id", "_distance"]).limit(k).to_arrow()
        # Rows of one query may come in any order, and there are fewer than k where its lists hold
        # fewer.
        ids, far = (
            np.full((len(queries), k), -1, np.int64),
            np.full((len(queries), k), np.inf, np.float32),
        )
        which = (
            found["query_index"].to_numpy()
            if "query_index" in found.column_names
            else np.zeros(len(found), np.int64)
        )
        order = np.lexsort((found["_distance"].to_numpy(), which))
        place = np.arange(len(order)) - np.searchsorted(which[order], which[order])
        ids[which[order], place] = found["id"].to_numpy()[order]
        far[which[order], place] = found["_distance"].to_numpy()[order]
        return Found(ids, far)

    def close(self) -> None:
        self._table = None
