"""Files of a DiskANN index on SSD: version 0 of the layout, as its C++ library and diskannpy 0.7
write it. Parsed and never believed.

An index of n vectors lies in files of one prefix, all little-endian; "bin" is two int32, rows and
columns, and then the values::

    PREFIX_disk.index         sector 0: bin uint64 [9, 1]: n, dim, medoid, bytes of a node, nodes of
                              a sector (0: a node takes several), three that are 0 here (frozen
                              points, reordered vectors), bytes of the file; then nodes by number,
                              a sector of 4096 bytes never cut by one: vector, uint32 count,
                              uint32 [R] neighbours
    PREFIX_pq_pivots.bin      bin uint64 [4, 1]: where the others begin; float32 [256, dim]
                              centroids less their centre, float32 [dim, 1] centre,
                              uint32 [chunks + 1, 1] first dimension of each chunk
    PREFIX_pq_compressed.bin  bin uint8 [n, chunks]: codes
    PREFIX_pq_pivots.bin_rotation_matrix.bin
                              where codes are of rotated vectors (OPQ): bin float32 [dim, dim]; a
                              vector, less the centre, times it is what the chunks are of
    PREFIX_metadata.bin       uint64 [4]: dtype, metric, n, dim; diskannpy's alone
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ... import errors
from ...ops.distances import DIM_MAX
from ...storage import NativeEngine
from ...storage.files import StreamWriter, read_file, read_range, read_windows, regroup, write_file
from ...storage.parse import check_plain_file
from ..codes.codebook import Codebook
from ..format import N_MAX
from ..layout import MAX_DEGREE_MAX

INDEX, PIVOTS, CODES, METADATA = (
    "_disk.index",
    "_pq_pivots.bin",
    "_pq_compressed.bin",
    "_metadata.bin",
)
#: Behind the name of the centroids' file.
ROTATION = "_rotation_matrix.bin"
#: Beside an index by inner product: by what its vectors were divided.
NORM = "_disk.index_max_base_norm.bin"
#: Where nodes have codes in place of vectors, the centroids of these.
DISK_PIVOTS = "_disk.index_pq_pivots.bin"
#: What DiskANN reads at most.
DEGREE_MAX, CHUNKS_MAX = 512, 512
#: By their numbers in PREFIX_metadata.bin.
DTYPES, METRICS = ("float32", "int8", "uint8"), ("l2", "ip", "cosine")
SECTOR_BYTES = 4096
_HEADER_VALUES = 9
_CENTROIDS = 256
_BLOCK_BYTES = 4 << 20
# By what the square of a length may change that float32 and whoever trained it have rounded.
_NOT_ORTHOGONAL = 0.01
_REBUILD = "restore the index from a copy, or build it again"
# Of other kinds of index, which would be read wrongly: what each file says.
_FOREIGN = {"_disk.index_dummy_map.txt": "points that stand for others, of an index with labels"}


@dataclass(frozen=True)
class DiskannHeader:
    """What sector 0 of ``PREFIX_disk.index`` says.

    Attributes:
        n: vectors.
        width: values that a node has of its vector: the dimensions, or bytes of a code.
        medoid: where searches begin.
        node_bytes: of a node.
    """

    n: int
    width: int
    medoid: int
    node_bytes: int

    @property
    def nodes_per_sector(self) -> int:
        """0: a node takes several sectors."""
        return SECTOR_BYTES // self.node_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of the sectors that hold one node, or of the one that holds several."""
        return -(-self.node_bytes // SECTOR_BYTES) * SECTOR_BYTES

    @property
    def nodes_per_unit(self) -> int:
        return max(1, self.nodes_per_sector)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return SECTOR_BYTES + -(-self.n // self.nodes_per_unit) * self.unit_bytes

    def node_dtype(self, dtype: np.dtype) -> np.dtype:
        """The layout of a node, without holes: ``vector``, ``count``, ``neighbours``."""
        degree = (self.node_bytes - self.width * dtype.itemsize) // 4 - 1
        return np.dtype(
            [
                ("vector", dtype.newbyteorder("<"), (self.width,)),
                ("count", "<u4"),
                ("neighbours", "<u4", (degree,)),
            ]
        )


@dataclass(frozen=True, eq=False)
class DiskannNodes:
    """All nodes of an index.

    Attributes:
        vectors: [n, width].
        neighbours: uint32 [n, R], whatever was in the file behind the last of each.
        counts: int64 [n].
    """

    vectors: np.ndarray
    neighbours: np.ndarray
    counts: np.ndarray


def refuse_other_kinds(prefix: str) -> None:
    """Raises FormatError where files beside the index say that it is of a kind that is not read
    here."""
    for name, what in _FOREIGN.items():
        if os.path.lexists(prefix + name):
            raise errors.FormatError(
                "not an index that can be read here",
                path=prefix + name,
                got=what,
                expected="vectors as they are",
            )


def read_header(engine: NativeEngine, path: str) -> DiskannHeader:
    """Sector 0 of ``PREFIX_disk.index``, checked against the file's size.

    Raises FileMissingError, TruncatedFileError, FormatError, ReadError.
    """
    size_bytes = _size(path, SECTOR_BYTES)
    file = engine.open(path)
    try:
        sector = read_range(engine, file, 0, SECTOR_BYTES)
    finally:
        engine.close_file(file)
    shape = sector[:8].view("<i4").tolist()
    if shape != [_HEADER_VALUES, 1]:
        raise errors.FormatError(
            "header of a DiskANN index",
            path=path,
            got=f"{shape} values",
            expected=f"[{_HEADER_VALUES}, 1], of version 0",
            fix=(
                "indexes with reordered vectors, AiSAQ's and those of DiskANN in Rust are of other "
                "layouts"
            ),
        )
    n, width, medoid, node_bytes, per_sector, frozen, _, reorder, stated = (
        sector[8 : 8 + 8 * _HEADER_VALUES].view("<u8").tolist()
    )
    for name, got, least, most in (
        ("n", n, 1, N_MAX),
        ("dim", width, 1, DIM_MAX),
        ("medoid", medoid, 0, max(n, 1) - 1),
        ("frozen points", frozen, 0, 0),
        ("reordered vectors", reorder, 0, 0),
        ("bytes of a node", node_bytes, 9, 4 * DIM_MAX + 4 * (1 + MAX_DEGREE_MAX)),
        (
            "nodes of a sector",
            per_sector,
            SECTOR_BYTES // max(node_bytes, 1),
            SECTOR_BYTES // max(node_bytes, 1),
        ),
        ("bytes of the file", stated, size_bytes, size_bytes),
    ):
        if not least <= got <= most:
            expected = least if least == most else f"{least} to {most}"
            raise errors.FormatError(
                f"{name} of a DiskANN index", path=path, got=got, expected=expected, fix=_REBUILD
            )
    header = DiskannHeader(n, width, medoid, node_bytes)
    if size_bytes != header.size_bytes:
        kind = errors.TruncatedFileError if size_bytes < header.size_bytes else errors.FormatError
        raise kind(
            "DiskANN index",
            path=path,
            got=f"{size_bytes} bytes",
            expected=f"{header.size_bytes}, of {n} nodes",
            fix=_REBUILD,
        )
    return header


def read_nodes(
    engine: NativeEngine, path: str, header: DiskannHeader, dtype: np.dtype
) -> DiskannNodes:
    """Every node, checked. `header` has been checked against the file's size, so that no more
    memory is taken than it has bytes.

    Raises:
        FormatError: the dtype does not fit the bytes of a node, more neighbours than there is room
            for, a number that is nobody's, a value that is not finite.
        TruncatedFileError, ReadError: the file has changed, or cannot be read.
    """
    rest = header.node_bytes - header.width * dtype.itemsize - 4
    if rest < 4 or rest % 4 or rest // 4 > MAX_DEGREE_MAX:
        raise errors.FormatError(
            "a node of a DiskANN index",
            path=path,
            got=f"{header.node_bytes} bytes",
            expected=(
                f"{header.width} values of {dtype}, a count and 1 to {MAX_DEGREE_MAX} neighbours"
            ),
            fix="is the dtype right?",
        )
    node = header.node_dtype(dtype)
    degree = rest // 4
    found = DiskannNodes(
        np.empty((header.n, header.width), dtype),
        np.empty((header.n, degree), np.uint32),
        np.empty(header.n, np.int64),
    )
    done = 0
    at_once = max(1, _BLOCK_BYTES // header.unit_bytes) * header.unit_bytes
    for block in regroup(_behind_header(engine, path), at_once):
        units = block[: len(block) - len(block) % header.unit_bytes].reshape(-1, header.unit_bytes)
        nodes = (
            np.ascontiguousarray(units[:, : header.nodes_per_unit * header.node_bytes])
            .reshape(-1)
            .view(node)[: header.n - done]
        )
        _check_nodes(path, header, nodes, done)
        part = slice(done, done + len(nodes))
        found.vectors[part], found.neighbours[part], found.counts[part] = (
            nodes["vector"],
            nodes["neighbours"],
            nodes["count"],
        )
        done += len(nodes)
    if done != header.n:
        raise errors.TruncatedFileError(
            "DiskANN index", path=path, got=f"{done} nodes", expected=header.n, fix=_REBUILD
        )
    return found


def _behind_header(engine: NativeEngine, path: str) -> Iterator[np.ndarray]:
    for number, window in enumerate(read_windows(engine, path)):
        yield window[SECTOR_BYTES:] if number == 0 else window


def _check_nodes(path: str, header: DiskannHeader, nodes: np.ndarray, first: int) -> None:
    """Raises FormatError for the first node that cannot be."""

    def refuse(wrong: np.ndarray, what: str, values: np.ndarray, expected: str) -> None:
        for i in np.flatnonzero(wrong)[:1].tolist():
            number = first + i
            at = (
                SECTOR_BYTES
                + number // header.nodes_per_unit * header.unit_bytes
                + number % header.nodes_per_unit * header.node_bytes
            )
            raise errors.FormatError(
                f"{what} of node {number}",
                path=path,
                offset_bytes=at,
                got=values[i].item(),
                expected=expected,
                fix=_REBUILD,
            )

    degree = nodes["neighbours"].shape[1]
    refuse(nodes["count"] > degree, "neighbours", nodes["count"], f"at most {degree}")
    last = np.where(np.arange(degree) < nodes["count"][:, None], nodes["neighbours"], 0).max(axis=1)
    refuse(last >= header.n, "a neighbour", last, f"below {header.n}")
    if nodes["vector"].dtype.kind == "f":
        # of finite float32 values it is finite
        sums = nodes["vector"].astype(np.float64).sum(axis=1)
        refuse(~np.isfinite(sums), "the vector's sum", sums, "finite values")


def read_codebook(engine: NativeEngine, path: str, chunks: int, dim: int) -> Codebook:
    """Centroids of ``PREFIX_pq_pivots.bin``, their centre added, and the rotation, where a file
    beside it has one.

    Raises FileMissingError, TruncatedFileError, FormatError, ReadError.
    """
    size_bytes = _size(path, 8 + 8 * 4)
    most = 2 * SECTOR_BYTES + 8 * 3 + 4 * (_CENTROIDS * dim + dim + chunks + 1)
    if size_bytes > most:  # before memory is taken for it
        raise errors.FormatError(
            "DiskANN's centroids",
            path=path,
            got=f"{size_bytes} bytes",
            expected=f"at most {most}",
            fix=_REBUILD,
        )
    data = read_file(engine, path)
    starts = _bin(data, 0, "<u8", (4, 1), path, "sections").ravel().tolist()
    table = _bin(data, starts[0], "<f4", (_CENTROIDS, dim), path, "centroids")
    centre = _bin(data, starts[1], "<f4", (dim, 1), path, "the centre").ravel()
    begin = _bin(data, starts[2], "<u4", (chunks + 1, 1), path, "chunks").ravel().astype(np.int64)
    if begin[0] != 0 or begin[-1] != dim or (np.diff(begin) < 1).any():
        raise errors.FormatError(
            "first dimensions of DiskANN's chunks",
            path=path,
            got=begin.tolist()[:8],
            expected=f"growing from 0 to {dim}",
            fix=_REBUILD,
        )
    rotation = _read_rotation(engine, path + ROTATION, dim)
    centroids = table + (
        centre if rotation is None else centre.astype(np.float64) @ rotation
    ).astype(np.float32)
    if not np.isfinite(centroids).all():
        where = np.argwhere(~np.isfinite(centroids))[0].tolist()
        raise errors.FormatError(
            f"centroid {where[0]}, dimension {where[1]}",
            path=path,
            got=float(centroids[*where]),
            expected="a finite number",
            fix=_REBUILD,
        )
    return Codebook(begin, centroids, rotation)


def _read_rotation(engine: NativeEngine, path: str, dim: int) -> np.ndarray | None:
    """Raises as `read_codebook`."""
    if not os.path.lexists(path):
        return None
    if (size_bytes := _size(path, 8)) > 8 + 4 * dim * dim:
        raise errors.FormatError(
            "DiskANN's rotation",
            path=path,
            got=f"{size_bytes} bytes",
            expected=8 + 4 * dim * dim,
            fix=_REBUILD,
        )
    rotation = _bin(read_file(engine, path), 0, "<f4", (dim, dim), path, "the rotation").copy()
    if not np.isfinite(rotation).all():
        raise errors.FormatError(
            "DiskANN's rotation",
            path=path,
            got="values that are not finite",
            expected="a rotation",
            fix=_REBUILD,
        )
    far = np.abs(rotation.T.astype(np.float64) @ rotation - np.eye(dim)).max()
    if not far < _NOT_ORTHOGONAL:
        raise errors.FormatError(
            "DiskANN's rotation",
            path=path,
            got=f"lengths change by {far:g}",
            expected="a rotation",
            fix=_REBUILD,
        )
    return rotation


def read_dim(engine: NativeEngine, path: str) -> int:
    """Dimensions of the vectors that the centroids of a file are of. Raises as `read_codebook`."""
    size_bytes = _size(path, 8 + 8 * 4)
    file = engine.open(path)
    try:
        begin = int(
            _bin(
                read_range(engine, file, 0, 8 + 8 * 4).tobytes(), 0, "<u8", (4, 1), path, "sections"
            )[0, 0]
        )
        if begin > size_bytes - 8:
            raise errors.TruncatedFileError(
                "centroids of DiskANN",
                path=path,
                got=f"{size_bytes} bytes",
                expected=f"{begin + 8} or more",
                fix=_REBUILD,
            )
        rows, dim = read_range(engine, file, begin, 8).view("<i4").tolist()
    finally:
        engine.close_file(file)
    if rows != _CENTROIDS or not 1 <= dim <= DIM_MAX:
        raise errors.FormatError(
            "centroids of DiskANN",
            path=path,
            offset_bytes=begin,
            got=[rows, dim],
            expected=f"[{_CENTROIDS}, 1 to {DIM_MAX}]",
            fix=_REBUILD,
        )
    return dim


def read_codes(engine: NativeEngine, path: str, n: int) -> np.ndarray:
    """uint8 [n, chunks] of ``PREFIX_pq_compressed.bin``. Raises as `read_codebook`."""
    size_bytes = _size(path, 8)
    file = engine.open(path)
    try:
        rows, chunks = read_range(engine, file, 0, 8).view("<i4").tolist()
    finally:
        engine.close_file(file)
    if rows != n or not 1 <= chunks <= DIM_MAX:
        raise errors.FormatError(
            "DiskANN's codes",
            path=path,
            got=f"[{rows}, {chunks}]",
            expected=f"[{n}, 1 or more]",
            fix=_REBUILD,
        )
    if size_bytes != 8 + n * chunks:
        kind = errors.TruncatedFileError if size_bytes < 8 + n * chunks else errors.FormatError
        raise kind(
            "DiskANN's codes",
            path=path,
            got=f"{size_bytes} bytes",
            expected=f"{8 + n * chunks}",
            fix=_REBUILD,
        )
    return np.frombuffer(read_file(engine, path), np.uint8, offset=8).reshape(n, chunks)


def read_metadata(engine: NativeEngine, path: str) -> tuple[str, str] | None:
    """(dtype, metric) that diskannpy noted, or None: DiskANN's tools note nothing. Raises
    TruncatedFileError, FormatError, ReadError."""
    if not os.path.lexists(path):
        return None
    if (size_bytes := _size(path, 32)) != 32:
        raise errors.FormatError(
            "diskannpy's metadata", path=path, got=f"{size_bytes} bytes", expected=32, fix=_REBUILD
        )
    dtype, metric, _, _ = np.frombuffer(read_file(engine, path), "<u8").tolist()
    if dtype >= len(DTYPES) or metric >= len(METRICS):
        raise errors.FormatError(
            "diskannpy's metadata",
            path=path,
            got=f"dtype {dtype}, metric {metric}",
            expected="0, 1 or 2 each",
            fix=_REBUILD,
        )
    return DTYPES[dtype], METRICS[metric]


def read_norm(engine: NativeEngine, path: str) -> float:
    """The number by which the vectors of an index by inner product were divided. Raises as
    `read_codebook`."""
    _size(path, 12)
    norm = float(_bin(read_file(engine, path), 0, "<f4", (1, 1), path, "the largest length")[0, 0])
    if not 0 < norm < np.inf:
        raise errors.FormatError(
            "the largest length of vectors",
            path=path,
            got=norm,
            expected="a finite number above 0",
            fix=_REBUILD,
        )
    return norm


def _size(path: str, least: int) -> int:
    """Bytes of a plain file of at least so many. Raises FileMissingError, TruncatedFileError,
    FormatError, ReadError."""
    try:
        size_bytes = check_plain_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise errors.FileMissingError(
            "a file of a DiskANN index is missing", path=path, fix="is the prefix right?"
        ) from None
    except PermissionError as error:
        raise errors.ReadError(
            "cannot read a file of a DiskANN index", path=path, errno=error.errno
        ) from error
    if size_bytes < least:
        raise errors.TruncatedFileError(
            "file of a DiskANN index",
            path=path,
            got=f"{size_bytes} bytes",
            expected=f"{least} or more",
            fix=_REBUILD,
        )
    return size_bytes


def _bin(
    data: bytes, at: int, dtype: str, shape: tuple[int, int], path: str, what: str
) -> np.ndarray:
    """A "bin" that begins there. Raises TruncatedFileError, FormatError for one of another
    shape."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    if at + 8 > len(data):
        raise errors.TruncatedFileError(
            f"{what} of DiskANN",
            path=path,
            got=f"{len(data)} bytes",
            expected=f"{at + 8} or more",
            fix=_REBUILD,
        )
    found = np.frombuffer(data, "<i4", 2, at).tolist()
    if found != list(shape):
        raise errors.FormatError(
            f"{what} of DiskANN",
            path=path,
            offset_bytes=at,
            got=found,
            expected=list(shape),
            fix=_REBUILD,
        )
    if at + 8 + size > len(data):
        raise errors.TruncatedFileError(
            f"{what} of DiskANN",
            path=path,
            got=f"{len(data)} bytes",
            expected=f"{at + 8 + size} or more",
            fix=_REBUILD,
        )
    return np.frombuffer(data, dtype, shape[0] * shape[1], at + 8).reshape(shape)


def write_nodes(
    engine: NativeEngine, path: str, header: DiskannHeader, nodes: DiskannNodes
) -> None:
    """``PREFIX_disk.index``. Raises WriteError, DiskFullError."""
    node = header.node_dtype(nodes.vectors.dtype)
    sector = np.zeros(SECTOR_BYTES, np.uint8)
    values = [
        header.n,
        header.width,
        header.medoid,
        header.node_bytes,
        header.nodes_per_sector,
        0,
        0,
        0,
        header.size_bytes,
    ]
    sector[: 8 + 8 * _HEADER_VALUES] = np.frombuffer(
        _packed(np.array(values, "<u8")[:, None]), np.uint8
    )
    at_once = max(1, _BLOCK_BYTES // header.unit_bytes)
    with StreamWriter(engine, path) as writer:
        writer.write(sector)
        for first in range(0, header.n, at_once * header.nodes_per_unit):
            part = slice(first, first + at_once * header.nodes_per_unit)
            count = len(nodes.counts[part])
            units = -(-count // header.nodes_per_unit)
            made = np.zeros(units * header.nodes_per_unit, node)
            made["vector"][:count], made["count"][:count] = nodes.vectors[part], nodes.counts[part]
            there = np.arange(nodes.neighbours.shape[1]) < nodes.counts[part, None]
            made["neighbours"][:count] = np.where(there, nodes.neighbours[part], 0)
            block = np.zeros((units, header.unit_bytes), np.uint8)
            block[:, : header.nodes_per_unit * header.node_bytes] = made.view(np.uint8).reshape(
                units, -1
            )
            writer.write(block.reshape(-1))
        writer.sync()


def write_codebook(engine: NativeEngine, path: str, book: Codebook) -> None:
    """``PREFIX_pq_pivots.bin``, with a centre of zeros: the centroids are themselves then, to the
    bit. Not the rotation.

    Raises WriteError, DiskFullError.
    """
    dim = book.centroids.shape[1]
    sections = [
        book.centroids.astype("<f4"),
        np.zeros((dim, 1), "<f4"),
        book.begin.astype("<u4")[:, None],
    ]
    packed = [_packed(each) for each in sections]
    starts = np.cumsum([SECTOR_BYTES, *(len(each) for each in packed)])
    write_file(
        engine,
        path,
        b"".join([_packed(starts.astype("<u8")[:, None]).ljust(SECTOR_BYTES, b"\0"), *packed]),
    )


def write_rotation(engine: NativeEngine, path: str, rotation: np.ndarray) -> None:
    """What lies beside the centroids where these are of rotated vectors. Raises WriteError,
    DiskFullError."""
    write_file(engine, path, _packed(rotation.astype("<f4")))


def write_codes(engine: NativeEngine, path: str, codes: np.ndarray) -> None:
    """``PREFIX_pq_compressed.bin``. Raises WriteError, DiskFullError."""
    write_file(engine, path, _packed(codes))


def write_metadata(engine: NativeEngine, path: str, dtype: str, n: int, dim: int) -> None:
    """``PREFIX_metadata.bin``, of the metric l2. Raises WriteError, DiskFullError."""
    write_file(
        engine, path, np.array([DTYPES.index(dtype), METRICS.index("l2"), n, dim], "<u8").tobytes()
    )


def _packed(values: np.ndarray) -> bytes:
    """A "bin" of values [rows, columns]."""
    return np.array(values.shape, "<i4").tobytes() + np.ascontiguousarray(values).tobytes()
