"""The first stage on disk: plain arrays, from which FAISS's objects are made, and into which they are taken apart.

What is trained (centroids, parameters of the code) belongs to a store's base. A part holds its lists alone: their numbers, how many
records each has, and the codes. Records lie in the order of their lists, so that their numbers need not be written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import errors
from .first_stage import CODES, load_faiss

CENTROIDS, PARAMETERS = "first_stage.centroids", "first_stage.parameters"
_VALUES = {"flat": 0, "sq8": 2, "sq6": 2, "sq4": 2}  # trained float32 values, per dimension


def code_bytes(code: str, dim: int) -> int:
    """Of one vector. Raises InvalidInputError for a code that there is not."""
    if code in CODES:
        return -(-dim * {"flat": 32, "sq8": 8, "sq6": 6, "sq4": 4}[code] // 8)
    if code.startswith("pq") and code[2:].isdecimal() and 0 < int(code[2:]) <= dim and dim % int(code[2:]) == 0:
        return int(code[2:])
    raise errors.InvalidInputError("first-stage code", got=repr(code), expected=f"{', '.join(CODES)} or pqM where M divides {dim}")


def trained_arrays(index: Any) -> dict[str, np.ndarray]:
    """What was trained, float32: centroids [nlist, dim], and the parameters of the code, flat."""
    faiss = load_faiss()
    parameters = np.empty(0, np.float32)
    if isinstance(index, faiss.IndexIVFScalarQuantizer):
        parameters = faiss.vector_to_array(index.sq.trained)
    elif isinstance(index, faiss.IndexIVFPQ):
        parameters = faiss.vector_to_array(index.pq.centroids)
    return {CENTROIDS: index.quantizer.reconstruct_n(0, index.nlist), PARAMETERS: parameters.astype(np.float32)}


def parameter_values(code: str, dim: int) -> int:
    """How many float32 the parameters of a code are."""
    return 256 * dim if code.startswith("pq") else _VALUES[code] * dim


def empty_index(trained: dict[str, np.ndarray], code: str, dim: int) -> Any:
    """A trained FAISS index without entries. The arrays must have the right shapes."""
    faiss = load_faiss()
    centroids, parameters = trained[CENTROIDS], trained[PARAMETERS]
    quantizer = faiss.IndexFlatIP(dim)
    nlist, metric = len(centroids), faiss.METRIC_INNER_PRODUCT
    if code == "flat":
        index = faiss.IndexIVFFlat(quantizer, dim, nlist, metric)
    elif code.startswith("pq"):
        index = faiss.IndexIVFPQ(quantizer, dim, nlist, int(code[2:]), 8, metric)
        faiss.copy_array_to_vector(np.ascontiguousarray(parameters), index.pq.centroids)
    else:
        kind = {"sq8": faiss.ScalarQuantizer.QT_8bit, "sq6": faiss.ScalarQuantizer.QT_6bit, "sq4": faiss.ScalarQuantizer.QT_4bit}[code]
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, nlist, kind, metric)
        faiss.copy_array_to_vector(np.ascontiguousarray(parameters), index.sq.trained)
    quantizer.add(np.ascontiguousarray(centroids))
    quantizer.this.disown()  # the index frees it
    index.own_fields = True
    index.is_trained = True
    return index


class Filling:
    """Fills an index part by part. Every list gets its memory at once, so that nothing is moved while it grows.

    Args:
        sizes: int64 [nlist], of the lists when all is in.
    """

    def __init__(self, index: Any, sizes: np.ndarray):
        self._index, self._used = index, np.zeros(len(sizes), dtype=np.int64)
        for number in np.flatnonzero(sizes).tolist():
            index.invlists.resize(number, int(sizes[number]))

    def add(self, numbers: np.ndarray, sizes: np.ndarray, codes: Iterable[np.ndarray], first_record: int) -> None:
        """The lists of one part; `codes`: uint8, in any pieces. Records are numbered from `first_record` on."""
        size, pointer, lists = self._index.code_size, load_faiss().swig_ptr, self._index.invlists
        ends = np.cumsum(sizes)
        rest, done = np.empty(0, np.uint8), 0
        for piece in codes:
            data = np.concatenate([rest, piece]) if len(rest) else piece
            count = len(data) // size
            rest = data[count * size :].copy()
            rows, end = np.ascontiguousarray(data[: count * size]), done + count
            while done < end:
                which = int(np.searchsorted(ends, done, side="right"))
                take = min(end, int(ends[which])) - done
                number, ids = int(numbers[which]), np.arange(first_record + done, first_record + done + take)
                part = rows[(done - end + count) * size : (done - end + count + take) * size]
                lists.update_entries(number, int(self._used[number]), take, pointer(ids), pointer(part))
                self._used[number] += take
                done += take
        self._index.ntotal += done


def encode_vectors(index: Any, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The list of each vector, int64 [m], and its code, uint8 [m, code size]. `vectors`: float32 [m, dim]."""
    pointer = load_faiss().swig_ptr
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    lists = np.ascontiguousarray(index.quantizer.search(vectors, 1)[1].reshape(-1))
    codes = np.zeros((len(vectors), index.code_size), dtype=np.uint8)
    index.encode_vectors(len(vectors), pointer(vectors), pointer(lists), pointer(codes))
    return lists, codes


def runs_of(lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers int32, sizes int64) of the lists of records that lie in list order. `lists`: ascending."""
    numbers, sizes = np.unique(lists, return_counts=True)
    return numbers.astype(np.int32), sizes.astype(np.int64)
