"""The embedding store: opens what a build published, says where each record lies, reads records and checks them.

What stays in memory is 2.125 bytes a document (token counts, and one offset per 64 records); docs/store-format.md is the written format.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from .. import errors
from ..storage import Engine, NativeEngine
from ..storage.engine import FileHandle
from ..storage.manifest import read_manifest
from ..storage.stream import crc32c, file_sums, read_range, read_windows
from .first_stage import load_faiss
from .projection import Projection
from .record import RecordSchema
from .texts import TextReader
from .tier import Placement, Tier

MAGIC = "espnx-embedding-store"
VERSION = 1
GROUP_RECORDS = 64  # as in csrc/cpu/records.hpp
SEGMENT_HEADER_BYTES = 4096
META_NAME, FIRST_STAGE_NAME, TEXTS_NAME = "meta.safetensors", "first_stage.faiss", "texts.sqlite"
_SEGMENT = struct.Struct("<8sII16sQIQQQ")  # magic, version, byte-order mark, store id, generation, segment, first record, records, bytes
_SEGMENT_MAGIC, _BYTE_ORDER_MARK = b"ESPNXSEG", 0x01020304
_REBUILD = "restore the store from a copy, or build it again"


@dataclass(frozen=True)
class Segment:
    """One data file: `records` records from `first_record` on. `path` is relative to the store, or absolute on another device."""

    path: str
    first_record: int
    records: int
    size_bytes: int


def store_salt(store_id: str, generation: int) -> int:
    """What seeds the records' checksums: different for every store and every generation of one."""
    return crc32c(bytes.fromhex(store_id) + generation.to_bytes(8, "little"))


def segment_header(store_id: str, generation: int, number: int, segment: Segment) -> bytes:
    """The first 4 KiB of a data file: what it is and whose."""
    fields = _SEGMENT.pack(
        _SEGMENT_MAGIC,
        VERSION,
        _BYTE_ORDER_MARK,
        bytes.fromhex(store_id),
        generation,
        number,
        segment.first_record,
        segment.records,
        segment.size_bytes,
    )
    return (fields + struct.pack("<I", crc32c(fields))).ljust(SEGMENT_HEADER_BYTES, b"\0")


def check_segment_header(found: bytes, expected: bytes, path: str) -> None:
    """Raises FormatError or ForeignFileError where a data file is not the one the manifest means."""
    if found == expected:
        return
    size = _SEGMENT.size
    (crc,) = struct.unpack_from("<I", found, size)
    if found[:8] != _SEGMENT_MAGIC or crc != crc32c(found[:size]) or any(found[size + 4 :]):
        raise errors.FormatError("damaged header of a data file", path=path, offset_bytes=0, size_bytes=SEGMENT_HEADER_BYTES, fix=_REBUILD)
    got, want = _SEGMENT.unpack_from(found), _SEGMENT.unpack_from(expected)
    if got[3:5] != want[3:5]:
        raise errors.ForeignFileError(
            "data file of another store",
            path=path,
            got=f"store {got[3].hex()} generation {got[4]}",
            expected=f"store {want[3].hex()} generation {want[4]}",
        )
    raise errors.FormatError("data file does not fit the manifest", path=path, got=got, expected=want, fix=_REBUILD)


class EmbeddingStore:
    """A published store, open for reading. One consistent version, whatever is published meanwhile. A context manager.

    Args:
        path: the store's directory.
        engine: a native engine, for everything but records; stays the caller's.
        record_engine: the engine of the record reads, where it is another (into GPU memory); stays the caller's too.

    Attributes:
        manifest: the fields of MANIFEST.json.
        schema: of the records.
        n_tokens: uint16 [n], tokens of each document.
        count: documents. end_number: record numbers lie below it.
        full: the records. compact: smaller ones of the same documents, or None.
        deleted: bitmap of deleted records, or None.
        pooling: makes the first-stage vector of a query from its tokens; None: it is the CLS vector.

    Raises:
        StoreNotFoundError, FormatError, ForeignFileError, TruncatedFileError, ChecksumError: nothing damaged is opened.
    """

    def __init__(self, path: str | os.PathLike[str], engine: NativeEngine, record_engine: Engine | None = None):
        self.path, self.engine = os.fspath(path), engine
        self.record_engine: Engine = engine if record_engine is None else record_engine
        self.manifest = read_manifest(engine, path, MAGIC, VERSION)
        records = self.manifest["records"]
        self.schema = RecordSchema(records["format"], records["d_cls"], records["dim"])
        self.count: int = records["count"]
        self.salt = store_salt(self.manifest["store_id"], self.manifest["generation"])
        self.segments = [Segment(**segment) for segment in self.manifest["segments"]]
        self._load_meta()
        self.texts = TextReader(self._checked_path(TEXTS_NAME), self.salt)
        self._files: list[FileHandle] = []
        try:
            for number, segment in enumerate(self.segments):
                self._files.append(self._open_segment(number, segment))
            placement = Placement(self._groups, self._segment_begin, self._files)
            self.full = Tier(self.record_engine, self.schema, self.n_tokens, placement, self.salt)
        except BaseException:
            self.close()
            raise

    compact: Tier | None = None
    deleted: np.ndarray | None = None
    pooling: Any = None

    @property
    def end_number(self) -> int:
        return self.count

    @property
    def directory(self) -> str:
        """Where this generation's files lie."""
        return os.path.join(self.path, self.manifest["directory"])

    @property
    def effective_path(self) -> str:
        """The path that record reads take."""
        return self._files[0].effective if self._files else self.record_engine.effective

    @property
    def resident_bytes(self) -> int:
        """Memory that the store itself holds (the first stage's index is not part of it)."""
        fixed = 0 if self.projection is None else self.projection.components.nbytes
        return self.n_tokens.nbytes + self._groups.nbytes + self._segment_begin.nbytes + fixed

    def _checked_path(self, name: str) -> str:
        """Path of a file of this generation whose size is what the manifest says."""
        path = os.path.join(self.directory, name)
        if name not in self.manifest["files"]:
            raise errors.FormatError(f"manifest does not name {name}", path=self.path, fix=_REBUILD)
        want = self.manifest["files"][name]["size_bytes"]
        if not os.path.exists(path):
            raise errors.FormatError("file of the store missing", path=path, expected=f"{want} bytes", fix=_REBUILD)
        if os.path.getsize(path) != want:
            raise errors.TruncatedFileError(
                "file of the store has another size", path=path, got=os.path.getsize(path), expected=want, fix=_REBUILD
            )
        return path

    def check_file(self, name: str) -> list[int]:
        """Compares size and CRC32C of a metadata file with the manifest's. Returns the CRC32C of each of its windows."""
        path = self._checked_path(name)
        (found, sums), want = file_sums(self.engine, path), self.manifest["files"][name]["crc32c"]
        if found != want:
            raise errors.ChecksumError(
                "damaged file of the store", path=path, got=f"CRC32C {found:08x}", expected=f"{want:08x}", fix=_REBUILD
            )
        return sums

    def checked_windows(self, name: str) -> Iterator[np.ndarray]:
        """A metadata file in windows. It is read twice, so that not one byte is handed out before the whole was found right."""
        sums = self.check_file(name)
        return read_windows(self.engine, os.path.join(self.directory, name), sums=sums)

    def _load_meta(self) -> None:
        path = os.path.join(self.directory, META_NAME)
        try:
            meta = load_safetensors(b"".join(window.tobytes() for window in self.checked_windows(META_NAME)))
        except SafetensorError as error:
            raise errors.FormatError("damaged metadata", path=path, got=str(error), fix=_REBUILD) from error
        groups = -(-self.count // GROUP_RECORDS)
        shapes = {
            "n_tokens": (np.uint16, self.count),
            "group_offset_bytes": (np.int64, groups),
            "segment_begin": (np.int64, len(self.segments)),
        }
        for name, (dtype, length) in shapes.items():
            if name not in meta or meta[name].dtype != dtype or meta[name].shape != (length,):
                raise errors.FormatError(
                    f"metadata {name} does not fit the manifest", path=path, expected=f"{np.dtype(dtype)} [{length}]", fix=_REBUILD
                )
        self.n_tokens: np.ndarray = meta["n_tokens"]
        self._groups = torch.from_numpy(meta["group_offset_bytes"])
        self._segment_begin = torch.from_numpy(meta["segment_begin"])
        self.projection = Projection(torch.from_numpy(meta["projection"])) if "projection" in meta else None

    def _open_segment(self, number: int, segment: Segment) -> FileHandle:
        path = os.path.join(self.path, segment.path)
        try:
            file = self.engine.open(path)
        except errors.StoreNotFoundError as error:
            raise errors.FormatError("data file of the store missing", path=path, fix=_REBUILD) from error
        try:
            if file.size_bytes != segment.size_bytes:
                raise errors.TruncatedFileError(
                    "data file has another size", path=path, got=file.size_bytes, expected=segment.size_bytes, fix=_REBUILD
                )
            expected = segment_header(self.manifest["store_id"], self.manifest["generation"], number, segment)
            check_segment_header(read_range(self.engine, file, 0, SEGMENT_HEADER_BYTES).tobytes(), expected, path)
        except BaseException:
            self.engine.close_file(file)
            raise
        if self.record_engine is self.engine:
            return file
        self.engine.close_file(file)
        return self.record_engine.open(path)

    def load_index(self) -> Any:
        """The IVF index over first-stage vectors, checked before FAISS sees a byte of it; None for an empty store."""
        return load_index(self) if self.count else None

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Reads and checks every byte that means anything. Returns the number of records. Raises what it finds."""
        for name in self.manifest["files"]:
            self.check_file(name)
        if self.texts.count() != self.count:
            raise errors.FormatError(
                "texts and records differ in number", path=self.texts.path, got=self.texts.count(), expected=self.count, fix=_REBUILD
            )
        step = 1024
        for first in range(0, self.count, step):
            numbers = np.arange(first, min(first + step, self.count))
            future = self.full.read(numbers, gap_bytes=1 << 20)
            self.full.check(future.wait(), future.position_bytes, numbers)
            for _ in self.texts.scan(first, len(numbers)):
                pass
            progress(first + len(numbers), self.count)
        return self.count

    def close(self) -> None:
        """Closes the data files and the text database. Reads under way finish."""
        for file in self._files:
            self.record_engine.close_file(file)
        self._files = []
        self.texts.close()

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def load_index(store: EmbeddingStore) -> Any:
    """See `EmbeddingStore.load_index`. Raises FormatError where the index does not fit the store."""
    faiss = load_faiss()
    path = os.path.join(store.directory, FIRST_STAGE_NAME)
    source = _Bytes(store.checked_windows(FIRST_STAGE_NAME))
    index = faiss.read_index(faiss.PyCallbackIOReader(source.read))
    if index.ntotal != store.count or index.d != store.schema.d_cls:
        raise errors.FormatError(
            "first stage does not fit the store",
            path=path,
            got=f"{index.ntotal} x {index.d}",
            expected=f"{store.count} x {store.schema.d_cls}",
        )
    return index


class _Bytes:
    """A stream of arrays as a read(n)."""

    def __init__(self, windows: Any):
        self._windows, self._rest = windows, memoryview(b"")

    def read(self, count: int) -> bytes:
        parts, have = [], 0
        while have < count:
            if not self._rest:
                window = next(self._windows, None)
                if window is None:
                    break
                self._rest = memoryview(window.tobytes())
            part = self._rest[: count - have]
            self._rest = self._rest[len(part) :]
            parts.append(bytes(part))
            have += len(part)
        return b"".join(parts)
