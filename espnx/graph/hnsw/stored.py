"""An HNSW whose links lie in memory and whose vectors lie on SSD, as a device walks over it (RAGX,
sections 2.3 and 4.3).

A directory holds four files (the written specification is docs/graph-format.md)::

    vectors.bin     the vectors in the order of their numbers, as many as fit in each page of 4096
                    bytes; longer ones take whole pages
    pages.crc       the CRC32C of each page, or of each vector of several, uint32
    links.bin       uint8 layers of each node; int32 neighbours in the lowest layer [n, 2 m]; int32
                    neighbours in the layers above [., m]
    MANIFEST.json   format, dimension, metric, counts, entry point, the checksums of the other two;
                    written last
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ... import errors
from ...device.vectors.interface import PAGE_BYTES, Nodes
from ...ops.distances import DIM_MAX, METRICS, VECTOR_FORMATS, vector_bytes
from ...storage import Engine, FileHandle, NativeEngine, Plan
from ...storage.files import crc32c, read_file
from ...storage.manifest import read_manifest
from ...storage.parse import Fields, check_file_size
from ...storage.replacing import versioned
from .links import M_MAX, Links, links_bytes, parse_links

MAGIC, VERSION = "espnx-hnsw", 1
VECTORS_NAME, SUMS_NAME, LINKS_NAME = "vectors.bin", "pages.crc", "links.bin"
NODES_MAX = 2**31 - 1
_REBUILD = "restore the directory from a copy, or build it again"


@dataclass(frozen=True)
class Slots:
    """The places of vectors. A *unit* is what is read, and has a checksum: a page, or the pages of
    one long vector.

    Attributes:
        n: vectors.
        vector_bytes: of one.
    """

    n: int
    vector_bytes: int

    @property
    def unit_bytes(self) -> int:
        return -(-self.vector_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def per_unit(self) -> int:
        """Vectors of a unit."""
        return max(1, PAGE_BYTES // self.vector_bytes)

    @property
    def n_units(self) -> int:
        return -(-self.n // self.per_unit)


class HnswGraph:
    """See `espnx.device.vectors.interface.LayeredGraph`. For a device's ``open_graph``; results are
    numbers of vectors, from 0.

    In memory are the links, 8 m bytes a vector and a little more for the layers above, and 4 bytes
    for each page of vectors. A search with ``beam_width=1`` finds what FAISS finds with
    ``efSearch=list_size``, where no two distances are equal.

    Args:
        path: of a directory that `build_hnsw` or `write_hnsw` has made.

    Raises:
        StoreNotFoundError: nothing was written there.
        FormatError, ChecksumError, TruncatedFileError, FileMissingError: damaged, or of another
            kind or version.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.directory = os.fspath(path)
        with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
            fields = Fields(
                read_manifest(engine, path, MAGIC, VERSION),
                os.path.join(path, "MANIFEST.json"),
                fix=_REBUILD,
            )
            self.format: str = fields.choice("format", VECTOR_FORMATS)
            self.dim = fields.whole("dim", 1, DIM_MAX)
            self.metric: str = fields.choice("metric", METRICS)
            self._slots = Slots(
                fields.whole("n", 0, NODES_MAX), vector_bytes(self.format, self.dim)
            )
            generation = fields.whole("generation", 1)
            self.links = _read_links(
                engine, self._file_path(LINKS_NAME, generation), fields, self._slots.n
            )
            self._sums = _read_sums(
                engine, self._file_path(SUMS_NAME, generation), fields, self._slots
            )
        self._path = self._file_path(VECTORS_NAME, generation)
        check_file_size(
            self._path, self._slots.n_units * self._slots.unit_bytes, "file of vectors", _REBUILD
        )
        self._file: FileHandle | None = None

    def _file_path(self, name: str, generation: int) -> str:
        return os.path.join(self.directory, versioned(name, generation))

    @property
    def n_nodes(self) -> int:
        """See `Graph`."""
        return self._slots.n

    @property
    def n_upper_layers(self) -> int:
        """See `LayeredGraph`."""
        return self.links.n_upper_layers

    @property
    def memory_bytes(self) -> int:
        """Bytes that stay in host memory."""
        return self.links.memory_bytes + int(self._sums.nbytes)

    def open(self, engine: Engine) -> Sequence[FileHandle]:
        """See `Graph`."""
        self._file = engine.open(self._path)
        return [self._file]

    def entry_points(self, query: torch.Tensor) -> np.ndarray:
        """See `Graph`: one, in the highest layer."""
        return np.array([self.links.entry] if self.n_nodes else [], np.int64)

    def upper_neighbours(self, layer: int, node: int) -> np.ndarray:
        """See `LayeredGraph`."""
        return self.links.near_above(layer, node)

    def plan(self, nodes: np.ndarray) -> Plan:
        """The page of each vector, or its pages."""
        if self._file is None:
            raise errors.StateError(
                "plan of a graph",
                got="a graph that no device has opened",
                fix="device.open_graph(graph)",
            )
        unit, size_bytes = nodes // self._slots.per_unit, self._slots.unit_bytes
        return Plan.of(
            self._file,
            torch.from_numpy(unit * size_bytes),
            [size_bytes] * len(nodes),
            crc32c=torch.from_numpy(self._sums[unit]),
        )

    def parse(self, nodes: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray) -> Nodes:
        """The vectors that were asked for; their neighbours come from memory."""
        slots = self._slots
        near, first = self.links.near(nodes)
        return Nodes(
            nodes,
            np.asarray(position_bytes) + nodes % slots.per_unit * slots.vector_bytes,
            near,
            first,
        )

    def estimator(self, query: torch.Tensor) -> None:
        """See `Graph`: there are no codes."""

    def verify(self) -> int:
        """Reads and checks every vector's page: how many there are. Raises ChecksumError, ReadError
        for the first that is damaged."""
        slots = self._slots
        with NativeEngine() as engine:
            file = engine.open(self._path)
            for first in range(0, slots.n_units, 1024):
                part = np.arange(first, min(first + 1024, slots.n_units))
                offset = torch.from_numpy(part * slots.unit_bytes)
                plan = Plan.of(
                    file,
                    offset,
                    [slots.unit_bytes] * len(part),
                    crc32c=torch.from_numpy(self._sums[part]),
                )
                for _ in engine.read(plan):  # each is checked when it is handed out
                    pass
        return slots.n_units


def _read_links(engine: NativeEngine, path: str, fields: Fields, n: int) -> Links:
    m, n_upper = fields.whole("m", 1, M_MAX), fields.whole("n_upper", 0, NODES_MAX)
    entry = fields.whole("entry", -1, NODES_MAX)
    data = _read_checked(
        engine, path, links_bytes(n, m, n_upper), fields.whole("links_crc32c", 0, 2**32 - 1)
    )
    links = parse_links(data, n, m, n_upper, entry)
    links.check(path)
    return links


def _read_sums(engine: NativeEngine, path: str, fields: Fields, slots: Slots) -> np.ndarray:
    """int64 [units]."""
    data = _read_checked(engine, path, 4 * slots.n_units, fields.whole("sums_crc32c", 0, 2**32 - 1))
    return np.frombuffer(data, "<u4").astype(np.int64)


def _read_checked(engine: NativeEngine, path: str, size_bytes: int, expected_crc: int) -> bytes:
    check_file_size(path, size_bytes, "file of an HNSW", _REBUILD)
    data = read_file(engine, path)
    if crc32c(data) != expected_crc:
        raise errors.ChecksumError(
            "file of an HNSW",
            path=path,
            got=f"CRC32C {crc32c(data):08x}",
            expected=f"{expected_crc:08x}",
            fix=_REBUILD,
        )
    return data
