"""The embedding store: opens what a build published, says where each record lies, reads records and checks them.

What stays in memory is 2.125 bytes a document (token counts, and one offset per 64 records); docs/store-format.md is the written format.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from .. import errors
from ..ops.maxsim import Codebook, token_format
from ..storage import Engine, NativeEngine
from ..storage.engine import FileHandle, paths_of, reasons_of
from ..storage.manifest import NAME as MANIFEST_NAME
from ..storage.manifest import read_manifest
from ..storage.stream import crc32c, file_sums, read_file, read_range, read_windows
from .first_stage import load_faiss
from .places import check_paths, shared_homes
from .pooling import make_pooling
from .projection import Projection
from .record import RecordSchema
from .texts import TextReader, TextReaders
from .tier import Placement, Tier

MAGIC = "espnx-embedding-store"
VERSION = 2
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


class Part:
    """What one build or one `add` published: a directory with records, metadata, lists and texts. The first part is the base: projection
    and codebooks are its.

    Attributes:
        first_number: of its records, a multiple of 64. count: of them, deleted ones too.
        files: name -> size_bytes and crc32c. meta: tensors of meta.safetensors.
    """

    def __init__(self, path: str, entry: dict[str, Any]):
        self.directory = os.path.join(path, entry["directory"])
        self.generation, self.first_number, self.count = entry["generation"], entry["first_number"], entry["count"]
        self.files: dict[str, dict[str, int]] = entry["files"]
        self._segments = {name: [Segment(**segment) for segment in entry["segments"][name]] for name in entry["segments"]}
        self.meta: dict[str, np.ndarray] = {}

    def segments(self, tier: str) -> list[Segment]:
        return self._segments.get(tier, [])


def store_salt(store_id: str, generation: int) -> int:
    """What seeds the records' checksums: different for every store and every base generation of one."""
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
        effective_path, fallback_reason: of the record reads, of all data files (`paths_of`), and why it is not what was tried first.
        shared_homes: directories that hold its data and are another store's: it can be read then, and not changed.
        pooling: makes the first-stage vector of a query from its tokens; None: it is the CLS vector.

    Raises:
        StoreNotFoundError, FormatError, ForeignFileError, TruncatedFileError, ChecksumError: nothing damaged is opened.
    """

    def __init__(self, path: str | os.PathLike[str], engine: NativeEngine, record_engine: Engine | None = None):
        self.path, self.engine = os.fspath(path), engine
        self.record_engine: Engine = engine if record_engine is None else record_engine
        self.manifest = read_manifest(engine, path, MAGIC, VERSION)
        check_paths(self.manifest, self.path)
        self.shared_homes = shared_homes(self.path, self.manifest)
        self.parts = [Part(self.path, entry) for entry in self.manifest["parts"]]
        self.count: int = self.manifest["records"]["count"]
        self.salt = store_salt(self.manifest["store_id"], self.manifest["base_generation"])
        self._files: list[FileHandle] = []
        self.texts = TextReaders([])
        try:
            self._load_meta()
            self.deleted = self._load_deleted()
            readers = [(part.first_number, TextReader(self._checked_path(part, TEXTS_NAME), self.salt)) for part in self.parts]
            self.texts = TextReaders(readers, self.deleted)
            self.full = self._open_tier("full")
            self.compact = self._open_tier("compact") if self.manifest["compact"] else None
            self.effective_path, self.fallback_reason = self._paths()
        except BaseException:
            self.close()
            raise

    @property
    def schema(self) -> RecordSchema:
        """Of the full records."""
        return self.full.schema

    @property
    def segments(self) -> list[Segment]:
        """The data files of the full records."""
        return [segment for part in self.parts for segment in part.segments("full")]

    @property
    def end_number(self) -> int:
        """Record numbers lie below it. Each part begins at a multiple of 64; numbers left out between parts are nobody's."""
        return len(self.n_tokens)

    @property
    def resident_bytes(self) -> int:
        """Memory that the store itself holds (the first stage's index is not part of it)."""
        fixed = 0 if self.projection is None else self.projection.components.nbytes
        fixed += 0 if self.deleted is None else self.deleted.nbytes
        books = [tier.codebook for tier in (self.full, self.compact) if tier is not None and tier.codebook is not None]
        fixed += sum(book.centroids.nbytes for book in books)
        return self.n_tokens.nbytes + sum(tier.resident_bytes for tier in (self.full, self.compact) if tier is not None) + fixed

    def _load_meta(self) -> None:
        counts: list[np.ndarray] = []
        at = 0
        for part in self.parts:
            part.meta = self._part_meta(part)
            counts += [np.zeros(part.first_number - at, dtype=np.uint16), part.meta["n_tokens"]]
            at = part.first_number + part.count
        self.n_tokens: np.ndarray = np.concatenate(counts) if counts else np.empty(0, np.uint16)
        meta = self.parts[0].meta if self.parts else {}
        self.projection = Projection(torch.from_numpy(meta["projection"])) if "projection" in meta else None
        stage = self.manifest["first_stage"]
        vector, dim = stage["vector"], self.manifest["encoder"]["dim"]
        self.pooling = None if vector == "cls" else make_pooling(vector, dim, **stage["parameters"])

    def _part_meta(self, part: Part) -> dict[str, np.ndarray]:
        path = os.path.join(part.directory, META_NAME)
        try:
            meta = load_safetensors(b"".join(window.tobytes() for window in self.checked_windows(part, META_NAME)))
        except SafetensorError as error:
            raise errors.FormatError("damaged metadata", path=path, got=str(error), fix=_REBUILD) from error
        groups = -(-part.count // GROUP_RECORDS)
        shapes = {
            "n_tokens": (np.uint16, part.count),
            "group_offset_bytes": (np.int64, groups),
            "segment_begin": (np.int64, len(part.segments("full"))),
        }
        if self.manifest["compact"]:
            shapes["compact_group_offset_bytes"] = (np.int64, groups)
        for name, (dtype, length) in shapes.items():
            if name not in meta or meta[name].dtype != dtype or meta[name].shape != (length,):
                raise errors.FormatError(
                    f"metadata {name} does not fit the manifest", path=path, expected=f"{np.dtype(dtype)} [{length}]", fix=_REBUILD
                )
        return meta

    def _load_deleted(self) -> np.ndarray | None:
        entry = self.manifest["deleted"]
        if entry is None:
            return None
        path = os.path.join(self.path, entry["path"])
        try:
            data = read_file(self.engine, path)
        except errors.FileMissingError as error:
            raise errors.FormatError("file of the store missing", path=path, fix=_REBUILD) from error
        if crc32c(data) != entry["crc32c"] or len(data) != entry["size_bytes"]:
            raise errors.ChecksumError("damaged file of the store", path=path, expected=f"CRC32C {entry['crc32c']:08x}", fix=_REBUILD)
        bitmap = np.zeros(-(-self.end_number // 8), dtype=np.uint8)  # what was added since is alive
        bitmap[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return bitmap

    def _open_tier(self, name: str) -> Tier:
        schema = self._schema(name)
        files: list[FileHandle] = []
        for part in self.parts:
            for number, segment in enumerate(part.segments(name)):
                files.append(self._open_segment(part, number, segment))
                self._files.append(files[-1])
        key = "group_offset_bytes" if name == "full" else "compact_group_offset_bytes"
        groups = [part.meta[key] for part in self.parts]
        begins = [segment.first_record for part in self.parts for segment in part.segments(name)]
        placement = Placement(
            torch.from_numpy(np.concatenate(groups) if groups else np.empty(0, np.int64)), torch.tensor(begins, dtype=torch.int64), files
        )
        book = None
        if self.parts:
            book = codebook_of(self.parts[0].meta, name, schema, os.path.join(self.parts[0].directory, META_NAME))
        return Tier(self.record_engine, schema, self.n_tokens, placement, self.salt, book)

    def _paths(self) -> tuple[str, str]:
        """(the path that record reads take, why it is not what was tried first), of all data files and tiers."""
        buffered = sorted({os.path.dirname(file.path) for file in self._files if file.effective.endswith("(buffered)")})
        reasons = [self.record_engine.fallback_reason, *(f"no direct I/O in {directory}" for directory in buffered)]
        return paths_of(file.effective for file in self._files) or self.record_engine.effective, reasons_of(reasons)

    def _schema(self, tier: str) -> RecordSchema:
        described = self.manifest["records" if tier == "full" else "compact"]
        try:
            return RecordSchema(described["format"], described.get("d_cls", 0), described["dim"])
        except errors.InvalidInputError as error:
            path = os.path.join(self.path, MANIFEST_NAME)
            raise errors.FormatError(
                f"{tier} records: {error.what}",
                path=path,
                got=error.got,
                expected=error.expected,
                fix="open it with the espnx that wrote it",
            ) from error

    def _checked_path(self, part: Part, name: str) -> str:
        """Path of a file of a part whose size is what the manifest says."""
        path = os.path.join(part.directory, name)
        if name not in part.files:
            raise errors.FormatError(f"manifest does not name {name}", path=self.path, fix=_REBUILD)
        want = part.files[name]["size_bytes"]
        if not os.path.exists(path):
            raise errors.FormatError("file of the store missing", path=path, expected=f"{want} bytes", fix=_REBUILD)
        if os.path.getsize(path) != want:
            raise errors.TruncatedFileError(
                "file of the store has another size", path=path, got=os.path.getsize(path), expected=want, fix=_REBUILD
            )
        return path

    def check_file(self, part: Part, name: str) -> list[int]:
        """Compares size and CRC32C of a metadata file with the manifest's. Returns the CRC32C of each of its windows."""
        path = self._checked_path(part, name)
        (found, sums), want = file_sums(self.engine, path), part.files[name]["crc32c"]
        if found != want:
            raise errors.ChecksumError(
                "damaged file of the store", path=path, got=f"CRC32C {found:08x}", expected=f"{want:08x}", fix=_REBUILD
            )
        return sums

    def checked_windows(self, part: Part, name: str) -> Iterator[np.ndarray]:
        """A metadata file in windows. It is read twice, so that not one byte is handed out before the whole was found right."""
        sums = self.check_file(part, name)
        return read_windows(self.engine, os.path.join(part.directory, name), sums=sums)

    def _open_segment(self, part: Part, number: int, segment: Segment) -> FileHandle:
        path = os.path.join(self.path, segment.path)
        try:
            file = self.engine.open(path)
        except errors.FileMissingError as error:
            raise errors.FormatError("data file of the store missing", path=path, fix=_REBUILD) from error
        try:
            if file.size_bytes != segment.size_bytes:
                raise errors.TruncatedFileError(
                    "data file has another size", path=path, got=file.size_bytes, expected=segment.size_bytes, fix=_REBUILD
                )
            expected = segment_header(self.manifest["store_id"], part.generation, number, segment)
            check_segment_header(read_range(self.engine, file, 0, SEGMENT_HEADER_BYTES).tobytes(), expected, path)
        except BaseException:
            self.engine.close_file(file)
            raise
        if self.record_engine is self.engine:
            return file
        self.engine.close_file(file)
        return self.record_engine.open(path)

    def load_index(self) -> Any:
        """The IVF index of all parts, its ids record numbers, checked before FAISS sees a byte of it; None for an empty store.

        Raises what reading it raises, and FormatError where lists do not fit the store.
        """
        faiss, stage, merged = load_faiss(), self.manifest["first_stage"], None
        for part in self.parts:
            source = _Bytes(self.checked_windows(part, FIRST_STAGE_NAME))
            try:
                index = faiss.read_index(faiss.PyCallbackIOReader(source.read))
            finally:  # now, not whenever it is collected: the engine may be closed by then
                source.close()
            got, expected = (index.ntotal, index.d, index.nlist), (part.count, stage["dim"], stage["nlist"])
            if got != expected:
                path = os.path.join(part.directory, FIRST_STAGE_NAME)
                raise errors.FormatError("first stage does not fit the store", path=path, got=got, expected=expected, fix=_REBUILD)
            if merged is None:
                merged = index
            else:
                merged.merge_from(index, 0)  # ids are record numbers already
        return merged

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Reads and checks every byte that means anything. Returns the number of live records. Raises what it finds."""
        for part in self.parts:
            for name in part.files:
                self.check_file(part, name)
        total = sum(part.count for part in self.parts)
        if self.texts.count() != total:
            raise errors.FormatError(
                "texts and records differ in number", path=self.path, got=self.texts.count(), expected=total, fix=_REBUILD
            )
        gone = 0 if self.deleted is None else int(np.unpackbits(self.deleted).sum())
        if total - gone != self.count:
            raise errors.FormatError("records do not add up", path=self.path, got=total - gone, expected=self.count, fix=_REBUILD)
        done = 0
        for part in self.parts:
            end = part.first_number + part.count
            for first in range(part.first_number, end, 1024):
                numbers = np.arange(first, min(first + 1024, end))
                for tier in (self.full, self.compact):
                    if tier is not None:
                        future = tier.read(numbers, gap_bytes=1 << 20)
                        tier.check(future.wait(), future.position_bytes, numbers)
                self.texts.get(numbers.tolist())
                done += len(numbers)
                progress(done, total)
        return self.count

    def close(self) -> None:
        """Closes the data files and the text databases. Reads under way finish."""
        for file in self._files:
            self.record_engine.close_file(file)
        self._files = []
        self.texts.close()

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def codebook_of(meta: dict[str, np.ndarray], tier: str, schema: RecordSchema, path: str) -> Codebook | None:
    """The codebook of a tier among the tensors of the base part's metadata; None where its format has none.

    Raises FormatError, naming `path`, where it is missing, malformed or of other records.
    """
    if not token_format(schema.format).needs_codebook or not meta:
        return None
    what = f"codebook of the {tier} records"
    tensors = {field.name: meta.get(f"{tier}.{field.name}") for field in fields(Codebook)}
    if any(tensor is None for tensor in tensors.values()):
        raise errors.FormatError(f"{what} missing", path=path, fix=_REBUILD)
    try:
        book = Codebook(**{name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
        token_format(schema.format).check_codebook(schema.dim, book)
    except errors.InvalidInputError as error:
        raise errors.FormatError(f"{what}: {error.what}", path=path, got=error.got, expected=error.expected, fix=_REBUILD) from error
    return book


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

    def close(self) -> None:
        """Closes the file that the arrays come from."""
        self._windows.close()
