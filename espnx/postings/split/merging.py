"""Merges what devices gave back for a query: their best records, or every posting's part of a
score. A file of its own: this is what makes the result of several devices that of one index, bit
for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...device.postings import SCAN_REPLY, ScanLists
from ...device.several import top


def best_of(replies: Mapping[int, np.ndarray], n_parts: int, k: int) -> np.ndarray:
    """`SCAN_REPLY` [at most k] of the collection, of the best of each part: record i of part p is
    number i n + p of the whole."""
    every = [np.empty(0, SCAN_REPLY)]
    for part, reply in replies.items():
        numbered = reply.copy()
        numbered["number"] = reply["number"] * n_parts + part
        every.append(numbered)
    return _first(np.concatenate(every), k)


def best_of_partial(
    parts: Mapping[int, tuple[np.ndarray, ScanLists, np.ndarray]],
    constant: np.float32,
    k: int,
    allowed: np.ndarray | None,
) -> np.ndarray:
    """`SCAN_REPLY` [at most k] of the collection: sums in float32 in the order of the query's
    terms, as the scan of one index makes them.

    Args:
        parts: of each, where its lists come among the query's terms, the lists, and `PARTIAL` of
            their postings.
        constant: added to every sum.
        allowed: bool [records]: who may be found; None: all may.
    """
    pieces = list[tuple[int, np.ndarray]]()
    for order, lists, reply in parts.values():
        ends = np.cumsum(lists.places["postings"], dtype=np.int64)
        pieces += zip(order.tolist(), np.split(reply, ends[:-1]), strict=True)
    pieces.sort(key=lambda piece: piece[0])
    numbers, place = np.unique(
        np.concatenate([np.empty(0, np.uint32), *(piece["number"] for _, piece in pieces)]),
        return_inverse=True,
    )
    sums, at = np.zeros(len(numbers), np.float32), 0
    for _, piece in pieces:
        sums[place[at : at + len(piece)]] += piece["score"]  # a list has a record once
        at += len(piece)
    found = np.empty(len(numbers), SCAN_REPLY)
    found["number"], found["score"] = numbers, sums + constant
    return _first(found if allowed is None else found[allowed[numbers]], k)


def _first(found: np.ndarray, k: int) -> np.ndarray:
    best: np.ndarray = found[top(-found["score"], found["number"], k)]
    return best
