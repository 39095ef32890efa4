"""A data file of a store: a header that says what the file is and whose, records, and named
sections. Written spec: docs/store-format.md.

Sections are what a part holds beside its records. The header names each with place, size and
CRC32C, so that opening a file costs one read, and a section is read when it is needed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ... import errors
from ...storage import NativeEngine, Plan
from ...storage.engine import FileHandle
from ...storage.files import Section, StreamWriter, aligned_empty, crc32c, read_range

VERSION = 5
HEADER_BYTES = 4096
# number of the file that holds a part's sections; those that hold records alone count from 0
MAIN = 0xFFFFFFFF
REBUILD = "restore the store from a copy, or build it again"
_MAGIC, _BYTE_ORDER_MARK = b"ESPNXSEG", 0x01020304
_FIXED = struct.Struct("<8sII16sQIIQQQ")
_SECTION = struct.Struct("<40sQQQ")
_MAX_SECTIONS = 60
_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True)
class FileFacts:
    """What a data file must be: store, generation of its part, number among its files, its records,
    its size."""

    store_id: str
    generation: int
    number: int
    first_record: int
    records: int
    size_bytes: int


def file_header(facts: FileFacts, sections: Mapping[str, Section]) -> bytes:
    """The first 4 KiB of a data file."""
    fixed = _FIXED.pack(
        _MAGIC,
        VERSION,
        _BYTE_ORDER_MARK,
        bytes.fromhex(facts.store_id),
        facts.generation,
        facts.number,
        len(sections),
        facts.first_record,
        facts.records,
        facts.size_bytes,
    )
    table = b"".join(
        _SECTION.pack(name.encode(), s.offset_bytes, s.size_bytes, s.crc32c)
        for name, s in sections.items()
    )
    body = (fixed + table).ljust(HEADER_BYTES - 4, b"\0")
    return body + struct.pack("<I", crc32c(body))


def parse_header(found: bytes, facts: FileFacts, path: str) -> dict[str, Section]:
    """The sections of a data file. Raises FormatError or ForeignFileError where it is not the file
    that the manifest means."""
    body = found[: HEADER_BYTES - 4]
    if (
        len(found) != HEADER_BYTES
        or found[:8] != _MAGIC
        or struct.unpack_from("<I", found, len(body))[0] != crc32c(body)
    ):
        raise errors.FormatError(
            "damaged header of a data file",
            path=path,
            offset_bytes=0,
            size_bytes=HEADER_BYTES,
            fix=REBUILD,
        )
    _, version, mark, owner, generation, number, count, first, records, size = _FIXED.unpack_from(
        found
    )
    if (owner.hex(), generation) != (facts.store_id, facts.generation):
        raise errors.ForeignFileError(
            "data file of another store",
            path=path,
            got=f"store {owner.hex()} generation {generation}",
            expected=f"store {facts.store_id} generation {facts.generation}",
        )
    got, want = (
        (version, mark, number, first, records, size),
        (VERSION, _BYTE_ORDER_MARK, facts.number),
    )
    if got != (*want, facts.first_record, facts.records, facts.size_bytes) or count > _MAX_SECTIONS:
        raise errors.FormatError(
            "data file does not fit the manifest",
            path=path,
            got=got,
            expected=str(facts),
            fix=REBUILD,
        )
    sections = {}
    for place in range(count):
        name, begin, length, crc = _SECTION.unpack_from(found, _FIXED.size + place * _SECTION.size)
        if begin < HEADER_BYTES or begin + length > size or crc >= 1 << 32:
            raise errors.FormatError(
                "section outside its file",
                path=path,
                got=f"{length} bytes at {begin}",
                expected=f"{size} bytes",
            )
        sections[name.rstrip(b"\0").decode(errors="replace")] = Section(begin, length, crc)
    return sections


class FileWriter:
    """Writes a data file: records and sections in any order, the header last, so that a torn file
    never looks whole.

    Attributes:
        stream: to append records to.
        sections: written so far.
    """

    def __init__(self, engine: NativeEngine, path: str, buffer_bytes: int = 1 << 20):
        self._engine, self.path = engine, path
        self.stream = StreamWriter(engine, path, buffer_bytes=buffer_bytes)
        self.sections: dict[str, Section] = {}
        self.stream.write(bytes(HEADER_BYTES))

    def section(
        self, name: str, chunks: Iterable[bytes | np.ndarray], *, align_bytes: int = 8
    ) -> None:
        """Appends a section of these bytes, which begins at a multiple of `align_bytes`."""
        self.stream.pad(align_bytes)
        begin, crc = self.stream.size_bytes, 0
        for chunk in chunks:
            data = (
                chunk
                if isinstance(chunk, bytes)
                else np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
            )
            crc = crc32c(data, crc)
            self.stream.write(data)
        self.sections[name] = Section(begin, self.stream.size_bytes - begin, crc)

    def finish(
        self, store_id: str, generation: int, number: int, first_record: int, records: int
    ) -> int:
        """Flushes everything, closes the file, and returns its size."""
        with self.stream:
            self.stream.pad(HEADER_BYTES)
            self.stream.sync()
        size = self.stream.size_bytes
        data = file_header(
            FileFacts(store_id, generation, number, first_record, records, size), self.sections
        )
        header = aligned_empty(HEADER_BYTES)
        header.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        file = self._engine.open(self.path, "r+")
        try:
            self._engine.write(Plan.of(file, [0], [HEADER_BYTES], [0]), header).wait()
            self._engine.sync(file)
        finally:
            self._engine.close_file(file)
        self._engine.sync_directory(os.path.dirname(self.path))
        return size

    def abandon(self) -> None:
        """Closes the file after a failure; the error that led here is the one to tell."""
        self.stream.__exit__(RuntimeError, None, None)


def open_file(
    engine: NativeEngine, path: str, facts: FileFacts
) -> tuple[FileHandle, dict[str, Section]]:
    """A data file that is what the manifest says, and its sections. Raises what opening and reading
    raise, FormatError, ForeignFileError, TruncatedFileError; ReadError that says what helps where
    too many files are open."""
    try:
        file = engine.open(path)
    except errors.FileMissingError as error:
        raise errors.FormatError(
            "data file of the store missing", path=path, fix=REBUILD
        ) from error
    try:
        if file.size_bytes != facts.size_bytes:
            raise errors.TruncatedFileError(
                "data file has another size",
                path=path,
                got=file.size_bytes,
                expected=facts.size_bytes,
                fix=REBUILD,
            )
        return file, parse_header(read_range(engine, file, 0, HEADER_BYTES).tobytes(), facts, path)
    except BaseException:
        engine.close_file(file)
        raise


def read_section(engine: NativeEngine, file: FileHandle, section: Section) -> np.ndarray:
    """A section as a whole, uint8, checked. Raises ChecksumError."""
    data = read_range(engine, file, section.offset_bytes, section.size_bytes)
    _check(file, section, crc32c(data))
    return data


def section_windows(
    engine: NativeEngine, file: FileHandle, section: Section
) -> Iterator[np.ndarray]:
    """A section in windows. Raises ChecksumError after the last one: what was made of the others is
    not to be used then."""
    yield from _windows(engine, file, section)


def check_section(engine: NativeEngine, file: FileHandle, section: Section) -> None:
    """Reads a section and compares its CRC32C with the header's. Raises ChecksumError."""
    for _ in _windows(engine, file, section):
        pass


def _windows(engine: NativeEngine, file: FileHandle, section: Section) -> Iterator[np.ndarray]:
    total, end = 0, section.offset_bytes + section.size_bytes
    for begin in range(section.offset_bytes, end, _WINDOW_BYTES):
        data = read_range(engine, file, begin, min(_WINDOW_BYTES, end - begin))
        total = crc32c(data, total)
        yield data
    _check(file, section, total)


def _check(file: FileHandle, section: Section, found: int) -> None:
    if found != section.crc32c:
        raise errors.ChecksumError(
            "damaged file of the store",
            path=file.path,
            offset_bytes=section.offset_bytes,
            size_bytes=section.size_bytes,
            got=f"CRC32C {found:08x}",
            expected=f"{section.crc32c:08x}",
            fix=REBUILD,
        )
