"""An IVF index as plain arrays: FAISS's objects are made from them, filled, and taken apart into
them.

What is trained (centroids, parameters of the code) is the whole store's. A part holds its lists
alone: their numbers, how many records each has, and the codes. Records lie in the order of their
lists, so that their numbers need not be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .... import errors
from ....ops.centroids import PRODUCT_CENTROIDS, fit_product_quantizer
from ....ops.quantise import fit_clusters, load_faiss
from .cells import CELL_RECORDS, cell_order

CENTROIDS, PARAMETERS = "centroids", "parameters"
#: FAISS factory strings of the codes a list can hold. ``flat`` is exact; ``sq8`` loses a few tenths
#: of a point of recall for a quarter of the memory.
CODES = {"flat": "Flat", "sq8": "SQ8", "sq6": "SQ6", "sq4": "SQ4"}
_BITS = {"flat": 32, "sq8": 8, "sq6": 6, "sq4": 4}  # of a dimension
_VALUES = {"flat": 0, "sq8": 2, "sq6": 2, "sq4": 2}  # trained float32 values, per dimension


def code_bytes(code: str, dim: int) -> int:
    """Bytes of one vector. Raises InvalidInputError for an unknown code."""
    if code in CODES:
        return -(-dim * _BITS[code] // 8)
    if (
        code.startswith("pq")
        and code[2:].isdecimal()
        and 0 < int(code[2:]) <= dim
        and dim % int(code[2:]) == 0
    ):
        return int(code[2:])
    raise errors.InvalidInputError(
        "first-stage code",
        got=repr(code),
        expected=f"{', '.join(CODES)} or pqM where M divides the dimension of its vectors ({dim})",
    )


def parameter_values(code: str, dim: int) -> int:
    """How many float32 the parameters of a code are."""
    return PRODUCT_CENTROIDS * dim if code.startswith("pq") else _VALUES[code] * dim


def train_arrays(sample: np.ndarray, nlist: int, code: str) -> dict[str, np.ndarray]:
    """Centroids [nlist, dim] and the parameters of the code, flat; float32. The same sample gives
    the same arrays.

    Args:
        sample: float32 [m, dim], m >= nlist.

    Raises:
        InvalidInputError: unknown code, or too few documents for it.
    """
    dim = sample.shape[1]
    code_bytes(code, dim)
    if code.startswith("pq") and len(sample) < PRODUCT_CENTROIDS:
        raise errors.InvalidInputError(
            f"product quantisation needs at least {PRODUCT_CENTROIDS} documents",
            got=len(sample),
            fix="use sq8 or flat for a corpus this small",
        )
    sample = np.ascontiguousarray(sample, dtype=np.float32)
    arrays = {
        CENTROIDS: fit_clusters(sample, nlist, is_spherical=True),
        PARAMETERS: np.zeros(parameter_values(code, dim), np.float32),
    }
    index = empty_index(arrays, code, dim)
    if code.startswith("pq"):  # codes are of what the centroid leaves of a vector
        lists = index.quantizer.search(sample, 1)[1].reshape(-1)
        begin = np.arange(0, dim + 1, dim // int(code[2:]))
        centroids = fit_product_quantizer(sample - arrays[CENTROIDS][lists], begin)
        # FAISS's order
        arrays[PARAMETERS] = (
            centroids.reshape(PRODUCT_CENTROIDS, len(begin) - 1, -1).transpose(1, 0, 2).reshape(-1)
        )
    elif _VALUES[code]:
        index.is_trained = False
        index.train(sample)  # of the code alone: the lists have their centroids
        arrays[PARAMETERS] = load_faiss().vector_to_array(index.sq.trained)
    return arrays


def empty_index(trained: Mapping[str, np.ndarray], code: str, dim: int) -> Any:
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
        kind = {
            "sq8": faiss.ScalarQuantizer.QT_8bit,
            "sq6": faiss.ScalarQuantizer.QT_6bit,
            "sq4": faiss.ScalarQuantizer.QT_4bit,
        }[code]
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, nlist, kind, metric)
        faiss.copy_array_to_vector(np.ascontiguousarray(parameters), index.sq.trained)
    quantizer.add(np.ascontiguousarray(centroids))
    quantizer.this.disown()  # the index frees it
    index.own_fields = True
    index.is_trained = True
    return index


def enter(index: Any, windows: Iterable[np.ndarray]) -> None:
    """Puts vectors (float32 [m, dim] at a time) into an index, under the numbers 0, 1, ..."""
    pointer = load_faiss().swig_ptr
    for vectors in windows:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        numbers = np.arange(index.ntotal, index.ntotal + len(vectors), dtype=np.int64)
        lists = np.ascontiguousarray(index.quantizer.search(vectors, 1)[1].reshape(-1))
        index.add_core(len(vectors), pointer(vectors), pointer(numbers), pointer(lists))


def list_sizes(index: Any) -> np.ndarray:
    """int64 [nlist]."""
    return np.array(
        [index.invlists.list_size(number) for number in range(index.nlist)], dtype=np.int64
    )


def list_numbers(index: Any) -> Iterator[np.ndarray]:
    """The numbers of each list that holds any, in the order of its entries."""
    lists, pointer = index.invlists, load_faiss().rev_swig_ptr
    for number in np.flatnonzero(list_sizes(index)).tolist():
        # its memory is the index's, which may go first
        yield pointer(lists.get_ids(number), lists.list_size(number)).copy()


def list_codes(index: Any) -> Iterator[np.ndarray]:
    """The codes of each list that holds any, uint8."""
    lists, pointer = index.invlists, load_faiss().rev_swig_ptr
    for number in np.flatnonzero(list_sizes(index)).tolist():
        yield pointer(lists.get_codes(number), lists.list_size(number) * index.code_size).copy()


def decoded(index: Any, codes: np.ndarray) -> np.ndarray:
    """What codes (uint8 [m, code_size]) say of vectors, float32 [m, dim]: those of one list differ
    as the vectors do."""
    if hasattr(index, "sq"):
        return index.sq.decode(codes)
    return index.pq.decode(codes) if hasattr(index, "pq") else codes.view(np.float32)


def order_of_lists(index: Any, sizes: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The order of cells inside each of some lists, int64 [sum of sizes]: places among `codes`,
    uint8 [sum of sizes, code_size]."""
    ends = np.cumsum(sizes)
    found = [
        begin + cell_order(decoded(index, codes[begin:end]))
        for begin, end in zip(ends - sizes, ends, strict=True)
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


def sort_lists(index: Any) -> None:
    """Puts the entries of every list into the order of its cells. A list is copied, one at a
    time."""
    faiss, lists = load_faiss(), index.invlists
    for number in np.flatnonzero(list_sizes(index) > CELL_RECORDS).tolist():
        size = lists.list_size(number)
        codes = faiss.rev_swig_ptr(lists.get_codes(number), size * index.code_size).reshape(
            size, -1
        )
        order = cell_order(decoded(index, codes))
        codes, ids = codes[order], faiss.rev_swig_ptr(lists.get_ids(number), size)[order]
        lists.update_entries(number, 0, size, faiss.swig_ptr(ids), faiss.swig_ptr(codes))


class Filling:
    """Fills an index part by part. Every list gets its memory at once, so that nothing is moved
    while it grows.

    Args:
        sizes: int64 [nlist], of the lists when all is in.
    """

    def __init__(self, index: Any, sizes: np.ndarray):
        self._index, self._used = index, np.zeros(len(sizes), dtype=np.int64)
        for number in np.flatnonzero(sizes).tolist():
            index.invlists.resize(number, int(sizes[number]))

    def add(
        self, numbers: np.ndarray, sizes: np.ndarray, codes: Iterable[np.ndarray], first_record: int
    ) -> None:
        """The lists of one part; `codes`: uint8, in any pieces. Records are numbered from
        `first_record` on."""
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
                number, ids = (
                    int(numbers[which]),
                    np.arange(first_record + done, first_record + done + take),
                )
                part = rows[(done - end + count) * size : (done - end + count + take) * size]
                lists.update_entries(
                    number, int(self._used[number]), take, pointer(ids), pointer(part)
                )
                self._used[number] += take
                done += take
        self._index.ntotal += done


def reconstructed(index: Any, chosen: np.ndarray) -> np.ndarray:
    """Vectors as the codes have them, float32 [m, dim]. `chosen`: int64, places in the order of the
    lists."""
    ends = np.cumsum(list_sizes(index))
    vectors = np.empty((len(chosen), index.d), dtype=np.float32)
    for row, place in zip(vectors, chosen.tolist(), strict=True):
        in_list = int(np.searchsorted(ends, place, side="right"))
        offset = place - int(ends[in_list - 1] if in_list else 0)
        index.reconstruct_from_offset(in_list, offset, load_faiss().swig_ptr(row))
    return vectors


def runs_of(lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers int32, sizes int64) of the lists of records that lie in list order. `lists`:
    ascending."""
    numbers, sizes = np.unique(lists, return_counts=True)
    return numbers.astype(np.int32), sizes.astype(np.int64)
