"""What flash reads for places in files: whole pages, each once."""

from __future__ import annotations

import numpy as np

PAGE_BYTES = 4096


def page_reads(
    file: np.ndarray, offset_bytes: np.ndarray, size_bytes: np.ndarray, gap_bytes: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What flash reads for some places in files: bool [m], which of them begin a read of their own;
    int64 [m], the bytes that each adds.

    Flash reads whole pages, each once, and a request counts once, whatever its size: places in the
    pages of one before them in their file, or right behind (or less than the gap), come with it.
    Nothing is read for places of no bytes.
    """
    begin = offset_bytes // PAGE_BYTES * PAGE_BYTES
    end = np.where(
        size_bytes > 0, -(-(offset_bytes + size_bytes) // PAGE_BYTES) * PAGE_BYTES, begin
    )
    order = np.lexsort((begin, file))
    order = order[end[order] > begin[order]]
    begin, end, file = begin[order], end[order], file[order]
    starts, added = np.ones(len(order), dtype=bool), end - begin
    for same in np.unique(file):
        (rows,) = np.nonzero(file == same)
        reached, rows = np.maximum.accumulate(end[rows])[:-1], rows[1:]
        starts[rows] = begin[rows] > reached + gap_bytes
        added[rows] = np.where(starts[rows], added[rows], np.maximum(end[rows] - reached, 0))
    begins, moved_bytes = (
        np.zeros(len(size_bytes), dtype=bool),
        np.zeros(len(size_bytes), dtype=np.int64),
    )
    begins[order], moved_bytes[order] = starts, added
    return begins, moved_bytes
