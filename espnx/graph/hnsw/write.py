"""Builds an HNSW by FAISS, and writes one with its vectors beside it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ... import errors
from ...checks import check_whole
from ...ops.distances import VECTOR_FORMATS, vector_bytes
from ...ops.distances.checks import check_dim, check_metric
from ...ops.quantise import load_faiss
from ...storage import NativeEngine
from ...storage.files import StreamWriter, crc32c, names_in, write_file
from ...storage.manifest import NAME, write_manifest
from ...storage.native import given_engine
from ...storage.replacing import StoreKind, VersionedFiles, versioned, writing_to
from .links import M_MAX, Links
from .stored import LINKS_NAME, MAGIC, SUMS_NAME, VECTORS_NAME, VERSION, Slots

_NAMES = (VECTORS_NAME, SUMS_NAME, LINKS_NAME)
_FILES = VersionedFiles(_NAMES)
KIND = StoreKind(
    MAGIC,
    VERSION,
    "an HNSW",
    lambda path: [
        name for name in names_in(path) if not _FILES.is_unfinished(name) and name != f"{NAME}.new"
    ],
)
_FORMATS = {str(dtype).removeprefix("torch."): name for name, dtype in VECTOR_FORMATS.items()}


def build_hnsw(
    vectors: np.ndarray,
    directory: str | os.PathLike[str],
    *,
    m: int = 32,
    ef_construction: int = 100,
    metric: str = "l2",
    threads: int = 1,
    replace: bool = False,
    engine: NativeEngine | None = None,
) -> None:
    """Builds an HNSW in a directory, as RAGX has it: FAISS's, with the vectors on SSD (section 5.1:
    M 32, efConstruction 100).

    FAISS holds all vectors in memory as float32 while it builds.

    Args:
        vectors: [n, dim] of uint8, int8, float16 or float32, finite; stored as they are.
        directory: a new one, or an empty one.
        m: neighbours of a node in each layer; in the lowest twice as many.
        ef_construction: candidates that are kept for each new node.
        metric: ``l2`` or ``ip``.
        threads: of the build. With one, the same vectors give the same graph.
        replace: an HNSW that is there, which stays as it is until the new one is whole.
        engine: of the writes; None: one of its own.

    Raises:
        MissingDependencyError: FAISS is not installed.
        InvalidInputError: an argument out of range; a directory with something in it.
        WriteError, DiskFullError, StoreBusyError: the directory cannot be written, is full, or
            somebody else writes there.
    """
    faiss = load_faiss()
    rows = _checked(vectors)
    check_metric(metric)
    check_whole("m, neighbours of a node", m, 2, M_MAX)
    check_whole("ef_construction", ef_construction, 1, 1 << 20)
    check_whole("threads of a build", threads, 1, 256)
    index = faiss.IndexHNSWFlat(
        rows.shape[1], m, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    )
    index.hnsw.efConstruction = ef_construction
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        index.add(np.ascontiguousarray(rows, dtype=np.float32))
    finally:
        faiss.omp_set_num_threads(before)
    write_hnsw(directory, rows, links_of(index), metric=metric, replace=replace, engine=engine)


def links_of(index: Any) -> Links:
    """The links of a ``faiss.IndexHNSW``. Raises MissingDependencyError, InvalidInputError for
    another index."""
    faiss = load_faiss()
    if not isinstance(index, faiss.IndexHNSW):
        raise errors.InvalidInputError(
            "links of an index", got=type(index).__name__, expected="a faiss.IndexHNSW"
        )
    hnsw = index.hnsw
    layers, first = (faiss.vector_to_array(each) for each in (hnsw.levels, hnsw.offsets))
    neighbours = faiss.vector_to_array(hnsw.neighbors)
    wide, m = (hnsw.nb_neighbors(0), hnsw.nb_neighbors(1))
    if wide != 2 * m or layers.max(initial=0) > 255:
        raise errors.InvalidInputError(
            "links of an index",
            got=f"{wide} neighbours below and {m} above",
            expected="twice as many below, as FAISS makes them",
        )
    begin = first[:-1].astype(np.int64)
    above = layers.astype(np.int64) - 1
    owner = np.repeat(np.arange(len(layers)), above)
    height = np.arange(len(owner)) - np.repeat(np.cumsum(above) - above, above)
    lowest = neighbours[begin[:, None] + np.arange(wide)]
    upper = neighbours[(begin[owner] + wide + height * m)[:, None] + np.arange(m)]
    return Links(
        layers.astype(np.uint8), lowest.astype("<i4"), upper.astype("<i4"), int(hnsw.entry_point)
    )


def write_hnsw(
    directory: str | os.PathLike[str],
    vectors: np.ndarray,
    links: Links,
    *,
    metric: str = "l2",
    replace: bool = False,
    engine: NativeEngine | None = None,
) -> None:
    """Writes an HNSW; the directory holds it whole when this returns, or none.

    Args:
        directory: a new one, or an empty one.
        vectors: [n, dim] of uint8, int8, float16 or float32; a `numpy.memmap` is read page by page.
        links: of those vectors.
        metric: by which they were built: ``l2`` or ``ip``.
        replace: as of `build_hnsw`.
        engine: of the writes; None: one of its own.

    Raises as `build_hnsw`; FormatError for links that lead nowhere.
    """
    rows = _checked(vectors)
    check_metric(metric)
    if links.n != len(rows):
        raise errors.InvalidInputError(
            "links of an HNSW", got=f"{links.n} nodes", expected=f"{len(rows)}, one for each vector"
        )
    links.check()
    format = _FORMATS[rows.dtype.name]  # noqa: A001
    slots = Slots(len(rows), vector_bytes(format, rows.shape[1]))
    with (
        given_engine(engine) as own,
        writing_to(directory, KIND, replace=replace) as is_replacement,
    ):
        generation = _FILES.begin(own, directory, KIND, is_replacement=is_replacement)
        final = {name: os.path.join(directory, versioned(name, generation)) for name in _NAMES}
        sums = _write_vectors(own, f"{final[VECTORS_NAME]}.new", rows, slots)
        _, sums_crc32c = write_file(own, f"{final[SUMS_NAME]}.new", sums.tobytes())
        _, links_crc32c = write_file(own, f"{final[LINKS_NAME]}.new", links.to_bytes())
        for path in final.values():
            own.rename(f"{path}.new", path)
        facts = {
            "generation": generation,
            "format": format,
            "dim": rows.shape[1],
            "metric": metric,
            "n": len(rows),
            "m": links.m,
            "n_upper": len(links.upper),
            "entry": links.entry,
            "sums_crc32c": sums_crc32c,
            "links_crc32c": links_crc32c,
        }
        write_manifest(own, directory, MAGIC, VERSION, facts)
        _FILES.keep(directory, generation)


def _write_vectors(engine: NativeEngine, path: str, rows: np.ndarray, slots: Slots) -> np.ndarray:
    """uint32 [units]: their checksums, zeros behind the vectors included."""
    sums = np.zeros(slots.n_units, "<u4")
    with StreamWriter(engine, path) as writer:
        for unit in range(slots.n_units):
            data = (
                np.ascontiguousarray(rows[unit * slots.per_unit : (unit + 1) * slots.per_unit])
                .view(np.uint8)
                .reshape(-1)
            )
            whole = np.zeros(slots.unit_bytes, np.uint8)
            whole[: data.size] = data
            sums[unit] = crc32c(whole)
            writer.write(whole)
        writer.sync()
    return sums


def _checked(vectors: np.ndarray) -> np.ndarray:
    """Raises InvalidInputError."""
    rows = np.asanyarray(vectors)
    if rows.ndim != 2 or rows.dtype.name not in _FORMATS:
        raise errors.InvalidInputError(
            "vectors of an HNSW",
            got=f"{rows.dtype} {list(rows.shape)}",
            expected=f"[n, dim] of {', '.join(_FORMATS)}",
        )
    check_dim(rows.shape[1])
    if rows.dtype.kind == "f" and not np.isfinite(rows).all():
        raise errors.InvalidInputError(
            "vectors of an HNSW", got="values that are not finite", expected="numbers"
        )
    return rows
