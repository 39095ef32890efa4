"""Closure: in which lists a vector is (SPANN, section 3.2.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..ops.quantise import load_faiss
from .heads import flat_index

#: Above so many heads the nearest are looked for in an HNSW, else measured all.
FLAT_HEADS_MAX = 16_384
_CANDIDATES = 32
_AT_ONCE = 512
#: Of the HNSW of heads.
HNSW_M, EF_CONSTRUCTION = 32, 100


def hnsw_index(heads: np.ndarray) -> Any:
    """FAISS's HNSW of float32 [heads, dim]."""
    index = load_faiss().IndexHNSWFlat(heads.shape[1], HNSW_M)
    index.hnsw.efConstruction = EF_CONSTRUCTION
    index.add(heads)
    return index


class Closure:
    """Finds the lists of vectors: those of near heads, but not a head that is nearer to a head
    which the vector has already than to the vector itself (the RNG rule): what lies behind it is
    found through that one.

    Args:
        heads: float32 [heads, dim], one or more.
        replicas: lists of a vector, at most.
    """

    def __init__(self, heads: np.ndarray, replicas: int):
        self._heads, self._replicas = torch.from_numpy(heads), replicas
        self._squares = (self._heads * self._heads).sum(dim=1)
        self._candidates = min(len(heads), _CANDIDATES if replicas > 1 else 1)
        if len(heads) <= FLAT_HEADS_MAX:
            self._index, self._options = flat_index(heads), {}
        else:
            faiss = load_faiss()
            self._index = hnsw_index(heads)
            self._options = {"params": faiss.SearchParametersHNSW(efSearch=4 * _CANDIDATES)}

    def lists_of(self, vectors: np.ndarray) -> np.ndarray:
        """int32 [m, replicas]: the lists of float32 [m, dim], the nearest head's first; -1 behind
        the last."""
        found = np.full((len(vectors), self._replicas), -1, np.int32)
        for first in range(0, len(vectors), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            found[part] = self._lists_of(np.ascontiguousarray(vectors[part], np.float32))
        return found

    def _lists_of(self, vectors: np.ndarray) -> np.ndarray:
        far, near = self._index.search(vectors, self._candidates, **self._options)
        lists = np.full((len(vectors), self._replicas), -1, np.int32)
        between = self._between(np.maximum(near, 0))
        taken = np.zeros(near.shape, bool)
        counts = np.zeros(len(vectors), np.int64)
        for place in range(near.shape[1]):
            to_taken = np.where(taken, between[:, :, place], np.inf).min(axis=1)
            fits = (to_taken > far[:, place]) & (counts < self._replicas) & (near[:, place] >= 0)
            rows = np.flatnonzero(fits)
            lists[rows, counts[rows]] = near[rows, place]
            taken[:, place] = fits
            counts += fits
        return lists

    def _between(self, near: np.ndarray) -> np.ndarray:
        """float32 [m, c, c]: squared distances between the heads of each row."""
        numbers = torch.from_numpy(near)
        heads, squares = self._heads[numbers], self._squares[numbers]
        products = torch.bmm(heads, heads.transpose(1, 2))
        found: np.ndarray = (squares[:, :, None] + squares[:, None, :] - 2 * products).numpy()
        return found
