"""The build's second pass: train the first stage, give every document its list, and say in which order records go to disk.

Records are stored in the order of their inverted list, so that what a query fetches together lies together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..storage import NativeEngine
from ..storage.stream import StreamWriter, regroup
from .budget import MemoryBudget
from .first_stage import IvfFirstStage, choose_nlist, load_faiss, train_index
from .probing import CANDIDATES, RECALL, distinct_sample, measure
from .spool import CODES, LISTS, Spool, spool_windows

_ROWS = 8192  # per window: small beside any budget, large enough for BLAS


def train(spool: Spool, code: str, nlist: int | None, work_bytes: int) -> Any:
    """A trained, empty FAISS index for the documents of a spool, or None for an empty one."""
    count = len(spool)
    if count == 0:
        return None
    lists = min(nlist or choose_nlist(count), count)
    row_bytes = 4 * spool.vector_dim
    wanted = min(count, max(64 * lists, 256), max(256, work_bytes // 4 // row_bytes))
    chosen = np.sort(np.random.default_rng(0).choice(count, size=wanted, replace=False)).astype(np.int64)
    return train_index(spool.vector_sample(chosen), lists, code)


def assign(engine: NativeEngine, directory: str, spool: Spool, index: Any, budget: MemoryBudget) -> list[int]:
    """Fills the index; ids are record numbers. Writes every document's list, in arrival order, to `directory`/lists.i32.

    Returns the checksums of that file's windows, which `record_order` needs.
    Raises InvalidInputError where the filled index cannot fit the memory budget.
    """
    need_bytes = len(spool) * (index.code_size + 8) * 3 // 2  # FAISS grows its lists by doubling
    budget.require(
        need_bytes, "the first stage does not fit the memory budget", "give more --memory, or a smaller code (--first-stage sq8 or pq16)"
    )
    counts = np.zeros(index.nlist, dtype=np.int64)
    path = os.path.join(directory, LISTS)
    with StreamWriter(engine, path, sums=()) as writer:
        for _, vectors in spool.vector_windows(_ROWS):
            lists = index.quantizer.search(vectors, 1)[1].reshape(-1)
            counts += np.bincount(lists, minlength=index.nlist)
            writer.write(lists.astype("<i4").view(np.uint8))
        writer.sync()
    sums = writer.sums or []
    pointer = load_faiss().swig_ptr
    free = np.concatenate([[0], np.cumsum(counts)[:-1]])
    for (_, vectors), lists in zip(spool.vector_windows(_ROWS), _list_windows(engine, path, _ROWS, sums), strict=True):
        order = np.argsort(lists, kind="stable")
        sorted_lists = lists[order]
        starts = np.flatnonzero(np.r_[True, sorted_lists[1:] != sorted_lists[:-1]])
        rank = np.arange(len(lists)) - np.repeat(starts, np.diff(np.r_[starts, len(lists)]))
        numbers = np.empty(len(lists), dtype=np.int64)
        numbers[order] = free[sorted_lists] + rank
        free += np.bincount(lists, minlength=index.nlist)
        listed = lists.astype(np.int64)
        index.add_core(len(lists), pointer(np.ascontiguousarray(vectors)), pointer(numbers), pointer(listed))
    return sums


def save_codes(engine: NativeEngine, directory: str, index: Any) -> list[int]:
    """Writes the codes of a filled index, in record order, to `directory`/codes.bin. Returns the checksums of that file's windows."""
    lists, pointer = index.invlists, load_faiss().rev_swig_ptr
    with StreamWriter(engine, os.path.join(directory, CODES), sums=()) as writer:
        for number in range(index.nlist):
            size = lists.list_size(number)
            if size:
                order = np.argsort(pointer(lists.get_ids(number), size), kind="stable")
                writer.write(pointer(lists.get_codes(number), size * index.code_size).reshape(size, -1)[order].reshape(-1))
        writer.sync()
    return writer.sums or []


def _list_windows(engine: NativeEngine, path: str, rows: int, sums: Sequence[int]) -> Iterator[np.ndarray]:
    """int32 arrays of `rows` entries (the last shorter)."""
    for block in regroup(spool_windows(engine, path, sums), 4 * rows):
        yield block.view("<i4")


def record_order(
    engine: NativeEngine, directory: str, sums: Sequence[int], list_sizes: np.ndarray, budget_documents: int
) -> Iterator[np.ndarray]:
    """Arrival numbers in record order, in pieces. Holds about `budget_documents` of them at a time, however many there are.

    Each piece covers whole lists: the file of list numbers is scanned once for as many lists as fit the budget.
    """
    path = os.path.join(directory, LISTS)
    first = 0
    while first < len(list_sizes):
        inside = np.cumsum(list_sizes[first:])
        last = first + max(1, int(np.searchsorted(inside, budget_documents, side="right")))
        arrivals, lists, seen = [], [], 0
        for window in _list_windows(engine, path, 1 << 20, sums):
            hit = np.flatnonzero((window >= first) & (window < last))
            arrivals.append(hit + seen)
            lists.append(window[hit])
            seen += len(window)
        order = np.argsort(np.concatenate(lists), kind="stable")
        piece = np.concatenate(arrivals)[order]
        if len(piece):
            yield piece
        first = last


def measure_probing(index: Any, spool: Spool) -> tuple[int, dict[str, float]]:
    """See `probing.measure`. Queries: a sample of the documents."""
    sample = distinct_sample(len(spool), spool.vector_dim, spool.vector_sample)
    return measure(IvfFirstStage(index), sample, min(CANDIDATES, len(spool)), RECALL)
