"""Samples of vectors, each with queries that it does not hold, drawn in one pass over a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...graph.neighbours import measure, nearest_of
from ...graph.vectors import Vectors, read_vectors

#: Vectors of a sample, and bytes, at most; a smaller one beside it has a quarter of it.
SAMPLE_MAX, SAMPLE_BYTES = 16_384, 64 << 20
SMALLER = 4
#: Queries of a sample, and of vectors that give these themselves the share.
QUERIES, QUERIES_SHARE = 256, 0.2
_BLOCK_ROWS, _CONTRAST = 8192, 4
#: By which distances of one vector may differ, for they are summed in another order.
_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Sample:
    """Some of the vectors, and queries like them.

    Attributes:
        base: [m, dim], uint8, int8 or float32. queries: [q, dim], likewise.
        farthest: float32 [q]: how far the k-th nearest of each query is. metric: of these.
        contrast: float32 [q]: that distance over the one of the 4 k-th nearest, by Euclid: little
            where a query's neighbours lie apart from all else.
    """

    base: np.ndarray
    queries: np.ndarray
    farthest: np.ndarray
    contrast: np.ndarray
    metric: str

    @classmethod
    def of(cls, base: np.ndarray, queries: np.ndarray, k: int, metric: str) -> Sample:
        """Measures all vectors, which says what is right."""
        wide, more = _wide(metric, queries), min(_CONTRAST * k, len(base))
        far, _ = nearest_of(metric, wide, more, _blocks(metric, base))
        near = far if metric != "ip" else nearest_of("l2", wide, more, _blocks("l2", base))[0]
        contrast = np.ones(len(near), np.float32)
        np.divide(near[:, k - 1], near[:, -1], out=contrast, where=near[:, -1] > 0)
        return cls(base, queries, far[:, k - 1].copy(), np.sqrt(contrast), metric)

    def hits(self, ids: np.ndarray) -> np.ndarray:
        """int64 [q]: how many of the rows found for each query, [q, k] with -1 for none, are as
        near as its k-th nearest. Of equally near ones any will do."""
        queries = _wide(self.metric, self.queries)
        found = np.empty(len(ids), np.int64)
        for query, rows in enumerate(ids):
            known = _as_measured(self.metric, self.base[rows[rows >= 0]])
            far = measure(queries[query : query + 1], known, self.metric)[0]
            limit = self.farthest[query]
            found[query] = (far <= limit + _TOLERANCE * abs(limit)).sum()
        return found


def draw_samples(
    source: Any,
    queries: Any,
    *,
    k: int,
    metric: str,
    folds: int,
    sample: int | None,
    seed: int,
    column: str | None = None,
) -> tuple[Vectors, list[tuple[Sample, Sample]]]:
    """Draws for each fold a sample and, of the same queries, a smaller one that is a part of it.

    Args:
        source, column: of `espnx.graph.read_vectors`, read once, block by block.
        queries: likewise; None: vectors that are in no sample of the fold.
        sample: vectors of the larger sample; None: at most 16,384 and 64 MiB.

    Raises what `read_vectors` raises, and InvalidInputError for vectors that are too few, or not
    finite, and queries that do not fit.
    """
    vectors = read_vectors(source, column=column)
    asked = None if queries is None else _read_queries(queries, vectors)
    n_queries = (
        min(QUERIES, len(asked))
        if asked is not None
        else min(QUERIES, int(vectors.n * QUERIES_SHARE))
    )
    held_out = 0 if asked is not None else n_queries
    row_bytes = vectors.dim * 4
    size = min(sample or max(SAMPLE_MAX // 8, min(SAMPLE_MAX, SAMPLE_BYTES // row_bytes)),
               vectors.n - held_out)  # fmt: skip
    least = SMALLER * (k + 1)
    if size < least or n_queries < 1:
        raise errors.InvalidInputError(
            f"vectors, of which samples and their {k} nearest are looked at",
            got=f"{vectors.n}" if sample is None else f"{vectors.n}, samples of {sample}",
            expected=f"{least} and {held_out or 1} for queries, or more",
            fix="a smaller k" if k > 1 else "",
        )
    random = np.random.default_rng(seed)
    chosen = [
        random.choice(vectors.n, size + held_out, replace=False, shuffle=True) for _ in range(folds)
    ]
    rows, kept = _gather(vectors, np.unique(np.concatenate(chosen)))
    found = []
    for each in chosen:
        picked = kept[np.searchsorted(rows, each)]
        own = picked[size:] if asked is None else asked[random.permutation(len(asked))[:n_queries]]
        base, own = _as_built(picked[:size], own)
        parts = [
            Sample.of(np.ascontiguousarray(part), own, k, metric)
            for part in (base, base[: size // SMALLER])
        ]
        found.append((parts[0], parts[1]))
    return vectors, found


def _read_queries(given: Any, vectors: Vectors) -> np.ndarray:
    known = read_vectors(given)
    if known.dim != vectors.dim or not known.n:
        raise errors.InvalidInputError(
            "queries", got=[known.n, known.dim], expected=f"[q, {vectors.dim}], 1 or more"
        )
    if vectors.dtype.kind in "iu" and known.dtype != vectors.dtype:
        raise errors.InvalidInputError(
            "dtype of queries", got=str(known.dtype), expected=f"{vectors.dtype}, as the vectors'"
        )
    every, first = list[np.ndarray](), 0
    for block in known.blocks():
        _check_finite(block, "query", first)
        every.append(np.array(block))
        first += len(block)
    return np.concatenate(every)


def _gather(vectors: Vectors, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some rows, ascending, and their vectors; every value of the source is looked at."""
    kept = np.empty((len(wanted), vectors.dim), vectors.dtype)
    first = 0
    for block in vectors.blocks():
        _check_finite(block, "vector", first)
        begin, end = np.searchsorted(wanted, [first, first + len(block)])
        kept[begin:end] = block[wanted[begin:end] - first]
        first += len(block)
    return wanted, kept


def _check_finite(block: np.ndarray, what: str, first: int) -> None:
    if block.dtype.kind != "f":
        return
    finite = np.isfinite(block).all(axis=1)
    if not finite.all():
        raise errors.InvalidInputError(
            f"{what} {first + int(np.argmin(finite))}",
            got="values that are not finite",
            expected="numbers that float32 holds",
        )


def _as_built(base: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers as they are; others as float32, scaled by a power of two to about 1, so that
    float16 holds them as well whatever they are measured in."""
    if base.dtype.kind in "iu":
        return base, np.ascontiguousarray(queries)
    wide = base.astype(np.float64)
    size = float(np.sqrt(np.mean(np.square(wide))))
    scale = 2.0 ** -round(np.log2(size)) if size > 0 else 1.0
    return (wide * scale).astype(np.float32), (queries.astype(np.float64) * scale).astype(
        np.float32
    )


def _as_measured(metric: str, rows: np.ndarray) -> np.ndarray:
    if metric != "cosine":
        return np.ascontiguousarray(rows)
    wide = rows.astype(np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)


def _wide(metric: str, queries: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(_as_measured(metric, queries.astype(np.float32)))


def _blocks(metric: str, base: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, len(base), _BLOCK_ROWS):
        part = base[first : first + _BLOCK_ROWS]
        yield np.arange(first, first + len(part)), _as_measured(metric, part)


def sizes_of(samples: Sequence[tuple[Sample, Sample]]) -> tuple[int, int]:
    """Vectors of the smaller and of the larger samples."""
    return len(samples[0][1].base), len(samples[0][0].base)
