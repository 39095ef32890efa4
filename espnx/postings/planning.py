"""What posting lists will take before there are any: bytes on SSD and in memory, by the sizes of
the format and Zipf's law.

How often terms come is not known before the texts are: the i-th most frequent is taken to be in a
share of the records that falls as 1 / i, and the records of a list to lie at random. Sizes of the
dictionary and of lengths are the format's; those of lists are modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import errors
from ..checks import check_whole
from .stored.layout import GROUP_TERMS, HEADER_BYTES, LIST_ALIGN_BYTES, RECORDS_MAX, TERMS_MAX

_BLOCK_POSTINGS, _PIECE_HEAD_BYTES, _BLOCK_HEAD_BYTES, _NAME_BYTES = 128, 32, 2, 8
#: Of a value: counts less one, of which most are 0 and the widest of a block decides; impacts are
#: bytes.
_COUNT_BITS, _IMPACT_BITS = 2, 8
#: Heaps' law with the exponents of English news (Manning, Raghavan, Schuetze: Introduction to
#: Information Retrieval, 5.1.1).
_HEAPS_K, _HEAPS_B = 44, 0.49


@dataclass(frozen=True)
class PostingsPlan:
    """Sizes in bytes.

    Attributes:
        n_terms, n_postings: of the index.
        disk: by what it is, and `total_bytes`; without ids and texts.
        memory: that searches keep, in all as `total_bytes`.
    """

    n_terms: int
    n_postings: int
    disk: dict[str, int]
    memory: dict[str, int]


def plan_postings(
    n_records: int, terms: int, *, n_terms: int | None = None, is_weighted: bool = False
) -> PostingsPlan:
    """Computes a plan.

    Args:
        n_records: how many.
        terms: different ones in each.
        n_terms: of the whole vocabulary; None: as Heaps' law has it for so much text.
        is_weighted: sparse vectors with weights of a byte each, which have forward records; else
            BM25.

    Raises InvalidInputError for a number out of range.
    """
    check_whole("records of postings", n_records, 1, RECORDS_MAX)
    check_whole("terms of a record", terms, 1, TERMS_MAX)
    if n_terms is None:
        n_terms = max(terms, round(_HEAPS_K * (n_records * terms) ** _HEAPS_B))
    check_whole("terms of the vocabulary", n_terms, 1, TERMS_MAX)
    if terms > n_terms:
        raise errors.InvalidInputError(
            "terms of a record", got=terms, expected=f"at most the vocabulary's {n_terms:,}"
        )
    n_postings = n_records * terms
    counts = _frequencies(n_records, n_postings, n_terms)
    held = counts[counts >= 1]
    lists = int(_list_bytes(held, n_records, _IMPACT_BITS if is_weighted else _COUNT_BITS).sum())
    found = len(held)
    dictionary = (
        HEADER_BYTES
        + found * (8 + 4 + 4 + (7 if is_weighted else 0))
        + 8 * (found // GROUP_TERMS + 1)
    )
    disk = {
        "lists_bytes": lists,
        "dictionary_bytes": dictionary,
        "names_bytes": found * (_NAME_BYTES + 4),
    }
    if is_weighted:
        places = HEADER_BYTES + 2 * n_records + 8 * (n_records // GROUP_TERMS + 1)
        disk |= {
            "forward_bytes": n_records
            * -(-(16 + terms * ((2 if found <= 1 << 16 else 4) + 1)) // 16)
            * 16,
            "places_bytes": places,
        }
        memory = {"dictionary_bytes": dictionary, "places_bytes": places}
    else:
        disk["lengths_bytes"] = HEADER_BYTES + 2 * n_records
        memory = {"dictionary_bytes": dictionary, "lengths_bytes": disk["lengths_bytes"]}
    return PostingsPlan(found, n_postings, _with_total(disk), _with_total(memory))


def _with_total(sizes: dict[str, int]) -> dict[str, int]:
    return {"total_bytes": sum(sizes.values())} | sizes


def _frequencies(n_records: int, n_postings: int, n_terms: int) -> np.ndarray:
    """float64 [n_terms]: records with each term, at most all, as many postings in all."""
    shares = 1.0 / np.arange(1, n_terms + 1)
    low, high = 0.0, float(n_records) * n_terms
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if np.minimum(n_records, middle * shares).sum() < n_postings
            else (low, middle)
        )
    return np.minimum(n_records, high * shares)


def _list_bytes(counts: np.ndarray, n_records: int, value_bits: int) -> np.ndarray:
    """float64: of lists with so many postings. The widest of a block's gaps decides; of k gaps that
    are spread at random it is H(k) times their mean."""
    together = np.minimum(counts, _BLOCK_POSTINGS)
    widest = np.maximum(0.0, n_records / counts - 1) * (np.log(together) + 0.5772)
    bits = np.ceil(np.log2(1 + widest)) + value_bits
    used = (
        _PIECE_HEAD_BYTES
        + _NAME_BYTES
        + _BLOCK_HEAD_BYTES * np.ceil(counts / _BLOCK_POSTINGS)
        + counts * bits / 8
    )
    return np.ceil(used / LIST_ALIGN_BYTES) * LIST_ALIGN_BYTES
