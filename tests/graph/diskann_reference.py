"""DiskANN's files node by node, by its own description and by nothing of espnx: what imports and
exports are compared with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SECTOR = 4096


def packed(values: np.ndarray) -> bytes:
    """Two int32, rows and columns, and then the values."""
    return struct.pack("<ii", *values.shape) + values.tobytes()


def write_index(
    prefix: Path,
    vectors: np.ndarray,
    neighbours: Sequence[Sequence[int]],
    *,
    degree: int,
    medoid: int = 0,
) -> None:
    node_bytes = vectors[0].nbytes + 4 + 4 * degree
    per_sector = SECTOR // node_bytes
    body = b""
    for vector, near in zip(vectors, neighbours, strict=True):
        node = vector.tobytes() + struct.pack(f"<I{len(near)}I", len(near), *near)
        # what lies behind the last neighbour is nobody's number
        node = node.ljust(node_bytes, b"\xff")
        if per_sector == 0:
            body += node.ljust(-(-node_bytes // SECTOR) * SECTOR, b"\0")
            continue
        if len(body) % SECTOR + node_bytes > SECTOR:
            body = body.ljust(-(-len(body) // SECTOR) * SECTOR, b"\0")
        body += node
    body = body.ljust(-(-len(body) // SECTOR) * SECTOR, b"\0")
    values = [
        len(vectors),
        vectors.shape[1],
        medoid,
        node_bytes,
        per_sector,
        0,
        0,
        0,
        SECTOR + len(body),
    ]
    Path(f"{prefix}_disk.index").write_bytes(
        struct.pack("<ii9Q", 9, 1, *values).ljust(SECTOR, b"\0") + body
    )


def read_index(prefix: Path, dtype: np.dtype) -> tuple[np.ndarray, list[list[int]], int]:
    """(vectors, neighbours, medoid)"""
    data = Path(f"{prefix}_disk.index").read_bytes()
    rows, columns, n, dim, medoid, node_bytes, per_sector, *zeros, size = struct.unpack_from(
        "<ii9Q", data
    )
    assert (rows, columns, zeros, size) == (9, 1, [0, 0, 0], len(data))
    vectors, neighbours = [], []
    for i in range(n):
        if per_sector == 0:
            at = SECTOR + i * -(-node_bytes // SECTOR) * SECTOR
        else:
            at = SECTOR + i // per_sector * SECTOR + i % per_sector * node_bytes
        vectors.append(np.frombuffer(data, dtype, dim, at))
        at += dim * dtype.itemsize
        (count,) = struct.unpack_from("<I", data, at)
        neighbours.append(list(struct.unpack_from(f"<{count}I", data, at + 4)))
    return np.array(vectors), neighbours, medoid


def write_codes(
    prefix: Path, codes: np.ndarray, table: np.ndarray, centre: np.ndarray, begin: np.ndarray
) -> None:
    Path(f"{prefix}_pq_compressed.bin").write_bytes(packed(codes))
    parts = [
        packed(table.astype("<f4")),
        packed(centre.astype("<f4")[:, None]),
        packed(begin.astype("<u4")[:, None]),
    ]
    starts = np.cumsum([SECTOR, *(len(each) for each in parts)]).astype("<u8")
    Path(f"{prefix}_pq_pivots.bin").write_bytes(
        packed(starts[:, None]).ljust(SECTOR, b"\0") + b"".join(parts)
    )


def write_metadata(prefix: Path, dtype: int, metric: int, n: int, dim: int) -> None:
    Path(f"{prefix}_metadata.bin").write_bytes(struct.pack("<4Q", dtype, metric, n, dim))


def make(
    prefix: Path,
    vectors: np.ndarray,
    *,
    degree: int = 8,
    chunks: int = 3,
    metric: int = 0,
    seed: int = 0,
    is_rotated: bool = False,
) -> list[list[int]]:
    """An index of some vectors, whose edges lead to the nearest and to a few others; codes of
    rotated vectors, if that is wanted. Returns the edges."""
    random = np.random.default_rng(seed)
    n, dim = vectors.shape
    wide = vectors.astype(np.float64)
    near = np.argsort(np.square(wide[:, None] - wide[None]).sum(-1), axis=1)[:, 1 : degree - 1]
    # A ring beside the nearest, so that from each all can be reached; of different lengths.
    edges = [
        [(i + 1) % n, *near[i, : random.integers(degree // 2, degree - 1)].tolist()]
        for i in range(n)
    ]
    write_index(prefix, vectors, edges, degree=degree, medoid=n // 2)
    begin = np.linspace(0, dim, chunks + 1).round().astype(int)
    centre = wide.mean(axis=0)
    around = wide - centre
    if is_rotated:
        rotation = np.linalg.qr(random.standard_normal((dim, dim)))[0].astype("<f4")
        Path(f"{prefix}_pq_pivots.bin_rotation_matrix.bin").write_bytes(packed(rotation))
        around = around @ rotation
    table = (around[random.integers(0, n, 256)]).astype(np.float32)
    codes = np.empty((n, chunks), np.uint8)
    for chunk in range(chunks):
        own = slice(begin[chunk], begin[chunk + 1])
        codes[:, chunk] = (
            np.square(around[:, None, own] - table[None, :, own]).sum(-1).argmin(axis=1)
        )
    write_codes(prefix, codes, table, centre, begin)
    write_metadata(
        prefix, {"float32": 0, "int8": 1, "uint8": 2}[vectors.dtype.name], metric, n, dim
    )
    return edges
