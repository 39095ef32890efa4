"""The embedding store: opens what a build published, says where each record lies, reads records and checks them.

What stays in memory is 2.125 bytes a document (token counts, and one offset per 64 records); docs/store-format.md is the written format.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from .. import errors
from ..storage import Engine, NativeEngine, Plan
from ..storage.engine import DEFAULT_DEADLINE_S, FileHandle, Future
from ..storage.manifest import read_manifest
from ..storage.native import load_native
from ..storage.stream import crc32c, file_sums, read_range, read_windows
from .projection import Projection
from .record import RecordSchema, damage
from .texts import TextReader

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
        except BaseException:
            self.close()
            raise

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
        self._counts = torch.from_numpy(self.n_tokens)
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

    def locate(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(segment, offset_bytes, size_bytes), int64 [m] each, of record numbers int64 [m]. Raises InvalidInputError outside the store."""
        wanted = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        return load_native().locate_records(
            wanted, self._counts, self._groups, self._segment_begin, self.schema.fixed_bytes, self.schema.row_bytes
        )

    def plan(self, numbers: np.ndarray) -> Plan:
        """A read of whole records."""
        segment, offset_bytes, size_bytes = self.locate(numbers)
        handles = torch.tensor([file.number for file in self._files], dtype=torch.int64)
        return Plan(file=handles[segment] if len(handles) else segment, offset_bytes=offset_bytes, size_bytes=size_bytes)

    def read(self, numbers: np.ndarray, *, gap_bytes: int, priority: int = 0, deadline_s: float = DEFAULT_DEADLINE_S) -> Future:
        """Starts reading records; item i of the future is record `numbers[i]`. What arrives must pass `check` before it is used."""
        return self.record_engine.read(self.plan(numbers), gap_bytes=gap_bytes, priority=priority, deadline_s=deadline_s)

    def check(self, memory: torch.Tensor, positions: torch.Tensor, numbers: np.ndarray) -> None:
        """Raises ChecksumError or StaleDataError, naming file, offset and length, unless every record is whole and the right one."""
        found = damage(memory, self.schema, positions, numbers, self.n_tokens[numbers], self.salt)
        if not found:
            return
        index, what = found[0]
        segment, offset_bytes, size_bytes = self.locate(numbers[index : index + 1])
        kind = errors.ChecksumError if what.startswith("CRC32C") else errors.StaleDataError
        raise kind(
            f"record {numbers[index]} is not what was written" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""),
            path=self._files[int(segment[0])].path,
            offset_bytes=int(offset_bytes[0]),
            size_bytes=int(size_bytes[0]),
            got=what,
            expected=f"record {numbers[index]} with {self.n_tokens[numbers[index]]} tokens",
            fix="run `espnx index verify`; " + _REBUILD,
        )

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
            future = self.read(numbers, gap_bytes=1 << 20)
            self.check(future.wait(), future.position_bytes, numbers)
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
