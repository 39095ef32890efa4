"""External ids and texts of records: rows that one read fetches, found by record number; and record
numbers, found by id.

Of them stays in memory, once it was needed, where each group of rows begins, and one hash for every
255 ids. Sections of a file that holds records beside them, a part of a store:

    rows      groups of about 4 KiB: where each row of the group ends, then the rows: CRC32C, kind
              of the id, size of the id, id, text
    groups    int64, first record and offset of each group, and of what would be the next
    ids       blocks of 4 KiB: (hash of the id, record) ascending by hash, and the block's CRC32C
    fences    uint64, the first hash of each block
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from ... import errors
from ..engine import FileHandle, Plan
from ..files import Section, crc32c
from ..native import NativeEngine
from .ids import DocumentId

_ROW = struct.Struct("<IB3xI")  # CRC32C of what follows, 0: an int, 1: a str; size of the id
_ENTRY = np.dtype([("hash", "<u8"), ("record", "<u8")])
#: In the order in which they are written.
SECTIONS = ("rows", "groups", "ids", "fences")
BLOCK_BYTES, BLOCK_ENTRIES = 4096, 255
#: A group takes no more, unless one row does; and no more rows.
_GROUP_BYTES, _GROUP_ROWS = 4096, 64
_END_BYTES = 4
_TAIL = struct.Struct("<II8x")  # CRC32C of the entries, how many there are
_IDS_AT_ONCE = 4096
_BLOCKS_AT_ONCE = 16
_READ_BYTES = 16 << 20
_REBUILD = "restore the store from a copy, or build it again"


def id_hash(identifier: DocumentId) -> int:
    """64 bits of an id and its type."""
    key = b"i%d" % identifier if isinstance(identifier, int) else b"s" + identifier.encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _row(number: int, identifier: DocumentId, text: str, salt: int) -> bytes:
    is_int = isinstance(identifier, int)
    key = (
        identifier.to_bytes(8, "little", signed=True)
        if isinstance(identifier, int)
        else identifier.encode()
    )
    row = _ROW.pack(0, not is_int, len(key)) + key + text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", crc32c(row[4:], crc32c(struct.pack("<Q", number), salt))) + row[4:]


class SectionWriter(Protocol):
    """A file that takes named sections."""

    def section(
        self, name: str, chunks: Iterable[bytes | np.ndarray], *, align_bytes: int = 8
    ) -> None:
        """Appends one, of these bytes."""


def write_texts(
    file: SectionWriter, rows: Iterable[tuple[DocumentId, str]], first_number: int, salt: int
) -> np.ndarray:
    """The four sections, of (id, text) in record order. Holds 32 bytes a record while it writes,
    and some for each group.

    Returns the numbers of records whose id has the hash of another one's, ascending: nearly always
    none, unless ids come twice.
    """
    of_ids, firsts, offsets = array("Q"), [0], [0]

    def bytes_of_groups() -> Iterator[bytes]:
        group, held = list[bytes](), 0
        for place, (identifier, text) in enumerate(rows):
            row = _row(first_number + place, identifier, text, salt)
            of_ids.append(id_hash(identifier))
            if group and (held + _END_BYTES + len(row) > _GROUP_BYTES or len(group) == _GROUP_ROWS):
                yield close(group)
                group, held = [], 0
            group.append(row)
            held += _END_BYTES + len(row)
        if group:
            yield close(group)

    def close(group: list[bytes]) -> bytes:
        data = np.cumsum([len(row) for row in group]).astype("<u4").tobytes() + b"".join(group)
        firsts.append(firsts[-1] + len(group))
        offsets.append(offsets[-1] + len(data))
        return data

    file.section("rows", bytes_of_groups())
    file.section("groups", [np.array([firsts, offsets], dtype="<i8")])
    hashes = np.frombuffer(of_ids, np.uint64) if of_ids else np.zeros(0, np.uint64)
    order = np.argsort(hashes, kind="stable")
    file.section("ids", _blocks(hashes, order, salt))
    file.section("fences", [hashes[order[::BLOCK_ENTRIES]]])
    is_next = np.diff(hashes[order], prepend=0, append=0) == 0
    is_next[[0, -1]] = False
    return np.sort(order[is_next[1:] | is_next[:-1]]) + first_number


def _blocks(hashes: np.ndarray, order: np.ndarray, salt: int) -> Iterator[bytes]:
    for number, begin in enumerate(range(0, len(order), BLOCK_ENTRIES)):
        records = order[begin : begin + BLOCK_ENTRIES]
        entries = np.zeros(BLOCK_ENTRIES, dtype=_ENTRY)
        entries["hash"][: len(records)], entries["record"][: len(records)] = (
            hashes[records],
            records,
        )
        data = entries.tobytes()
        yield data + _TAIL.pack(_block_sum(number, data, len(records), salt), len(records))


def _block_sum(number: int, data: bytes, count: int, salt: int) -> int:
    return crc32c(data, crc32c(struct.pack("<QI", number, count), salt))


class PartTexts:
    """Ids and texts of one part, read by whoever has its file open.

    Args:
        opened: the file and its sections; asked for at every call, so that a file may be open for
            that call alone.
        first_number, count: of the part's records. salt: of the store.
    """

    def __init__(self, engine: NativeEngine, path: str, first_number: int, count: int, salt: int):
        self._engine, self._path, self._first, self._count, self._salt = (
            engine,
            path,
            first_number,
            count,
            salt,
        )
        self._fences: np.ndarray | None = None
        self._groups: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of the tables that were needed so far."""
        return sum(
            table.nbytes for table in (*(self._groups or ()), self._fences) if table is not None
        )

    def get(
        self, file: FileHandle, sections: dict[str, Section], numbers: Sequence[int]
    ) -> list[tuple[DocumentId, str]]:
        """(id, text) of each record number, in the order asked. Raises ChecksumError, FormatError:
        no wrong text is handed out."""
        result: list[tuple[DocumentId, str]] = []
        firsts, offsets = self._group_table(file, sections)
        places = np.asarray(numbers, dtype=np.int64) - self._first
        of = np.searchsorted(firsts, places, side="right") - 1
        sizes = offsets[of + 1] - offsets[of]
        begin = 0
        while begin < len(places):
            held = np.cumsum(sizes[begin : begin + _IDS_AT_ONCE])
            end = begin + max(1, int(np.searchsorted(held, _READ_BYTES, side="right")))
            wanted = np.unique(of[begin:end])
            read = self._read(
                file,
                sections["rows"].offset_bytes + offsets[wanted],
                offsets[wanted + 1] - offsets[wanted],
            )
            groups = dict(
                zip(
                    wanted.tolist(),
                    zip(read, firsts[wanted].tolist(), firsts[wanted + 1].tolist(), strict=True),
                    strict=True,
                )
            )
            for place, group in zip(
                places[begin:end].tolist(), of[begin:end].tolist(), strict=True
            ):
                rows, first, last = groups[group]
                result.append(
                    self._parse(place + self._first, self._row(rows, last - first, place - first))
                )
            begin = end
        return result

    def _row(self, group: bytes, records: int, place: int) -> bytes:
        """The row of the record with this place in its group; empty where the group's ends are
        damaged."""
        begin = struct.unpack_from("<I", group, _END_BYTES * (place - 1))[0] if place else 0
        end, rows = struct.unpack_from("<I", group, _END_BYTES * place)[0], _END_BYTES * records
        return group[rows + begin : rows + end]

    def _group_table(
        self, file: FileHandle, sections: dict[str, Section]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(first place of each group, its offset in the rows), int64 [groups + 1] each."""
        if self._groups is None:
            table, rows = self._section(sections, "groups"), self._section(sections, "rows")
            data = self._whole(file, table, "damaged table of texts")
            firsts, offsets = (
                np.frombuffer(data, dtype="<i8").reshape(2, -1)
                if len(data) % 16 == 0
                else np.zeros((2, 1), np.int64)
            )
            sizes, records = np.diff(offsets), np.diff(firsts)
            ends = (
                firsts[:1].tolist(),
                firsts[-1:].tolist(),
                offsets[:1].tolist(),
                offsets[-1:].tolist(),
            )
            if (
                ends != ([0], [self._count], [0], [rows.size_bytes])
                or (records < 1).any()
                or (sizes < _END_BYTES * records).any()
            ):
                raise errors.FormatError(
                    "malformed table of texts",
                    path=self._path,
                    offset_bytes=table.offset_bytes,
                    fix=_REBUILD,
                )
            self._groups = firsts, offsets
        return self._groups

    def _read(self, file: FileHandle, offsets: np.ndarray, sizes: np.ndarray) -> list[bytes]:
        if not len(offsets):
            return []
        memory, at = self._arrived(file, offsets, sizes)
        return [
            memory[begin : begin + size].tobytes()
            for begin, size in zip(at.tolist(), sizes.tolist(), strict=True)
        ]

    def _arrived(
        self, file: FileHandle, offsets: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(bytes, where each range begins in them)."""
        offset_bytes = torch.from_numpy(offsets.astype(np.int64))
        plan = Plan(
            torch.full_like(offset_bytes, file.number),
            offset_bytes,
            torch.from_numpy(sizes.astype(np.int64)),
        )
        future = self._engine.read(plan, gap_bytes=16 << 10)
        return future.wait().numpy(), future.position_bytes.numpy()

    def _parse(self, number: int, row: bytes) -> tuple[DocumentId, str]:
        crc, is_text, size = _ROW.unpack_from(row) if len(row) >= _ROW.size else (None, 0, 0)
        end = _ROW.size + size
        if crc != crc32c(struct.pack("<Q", number) + row[4:], self._salt):
            raise errors.ChecksumError(
                f"damaged text of record {number}", path=self._path, fix=_REBUILD
            )
        try:
            if is_text > 1 or end > len(row) or (not is_text and size != 8):
                raise ValueError("no id")
            key = row[_ROW.size : end]
            return (key.decode() if is_text else int.from_bytes(key, "little", signed=True)), row[
                end:
            ].decode("utf-8", "surrogatepass")
        except ValueError as error:
            raise errors.FormatError(
                f"malformed text of record {number}", path=self._path, got=str(error), fix=_REBUILD
            ) from error

    def numbers(
        self,
        file: FileHandle,
        sections: dict[str, Section],
        ids: Sequence[DocumentId],
        alive: Callable[[int], bool] = lambda number: True,
    ) -> np.ndarray:
        """int64 [m]: the record number of each id, -1 where there is none that is alive. Reads some
        blocks of 4 KiB, never all ids."""
        result = np.full(len(ids), -1, dtype=np.int64)
        for begin in range(0, len(ids) if self._count else 0, _IDS_AT_ONCE):
            chosen = ids[begin : begin + _IDS_AT_ONCE]
            asked = [
                (place, number)
                for place, number in self._candidates(file, sections, chosen)
                if alive(number)
            ]
            rows = self.get(file, sections, [number for _, number in asked])
            for (place, number), (identifier, _) in zip(asked, rows, strict=True):
                if identifier == chosen[place] and type(identifier) is type(chosen[place]):
                    result[begin + place] = number
        return result

    def _candidates(
        self, file: FileHandle, sections: dict[str, Section], ids: Sequence[DocumentId]
    ) -> Iterator[tuple[int, int]]:
        """(place in `ids`, record number) of every record whose id has the hash of one that is
        asked for."""
        hashes = np.array([id_hash(identifier) for identifier in ids], dtype=np.uint64)
        fences = self._fence_hashes(file, sections)
        first = np.maximum(np.searchsorted(fences, hashes, side="left") - 1, 0)
        last = np.maximum(np.searchsorted(fences, hashes, side="right") - 1, 0)
        wanted = np.unique(
            np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)])
        )
        section = self._section(sections, "ids", BLOCK_BYTES * len(fences))
        read = self._read(
            file, section.offset_bytes + BLOCK_BYTES * wanted, np.full(len(wanted), BLOCK_BYTES)
        )
        blocks = {
            number: self._block(number, data)
            for number, data in zip(wanted.tolist(), read, strict=True)
        }
        for place, value in enumerate(hashes):
            for number in range(first[place], last[place] + 1):
                entries = blocks[number]
                begin, end = (
                    np.searchsorted(entries["hash"], value, side="left"),
                    np.searchsorted(entries["hash"], value, side="right"),
                )
                for record in entries["record"][begin:end].tolist():
                    yield place, self._first + record

    def first_by_hash(
        self, file: FileHandle, sections: dict[str, Section], numbers: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(hashes uint64, record numbers int64) of the `count` of some records whose ids have the
        lowest hashes, ascending; of all, where they are fewer. Reads blocks of ids until they are
        found."""
        wanted = np.zeros(self._count, bool)
        wanted[numbers - self._first] = True
        n_blocks = len(self._fence_hashes(file, sections))
        section = self._section(sections, "ids", BLOCK_BYTES * n_blocks)
        found, held = [np.empty(0, _ENTRY)], 0
        for begin in range(0, n_blocks, _BLOCKS_AT_ONCE):
            blocks = np.arange(begin, min(begin + _BLOCKS_AT_ONCE, n_blocks))
            read = self._read(
                file, section.offset_bytes + BLOCK_BYTES * blocks, np.full(len(blocks), BLOCK_BYTES)
            )
            for number, data in zip(blocks.tolist(), read, strict=True):
                entries = self._block(number, data)
                found.append(entries[wanted[entries["record"].astype(np.int64)]])
                held += len(found[-1])
            if held >= min(count, len(numbers)):
                break
        entries = np.concatenate(found)[:count]
        return entries["hash"], entries["record"].astype(np.int64) + self._first

    def _block(self, number: int, data: bytes) -> np.ndarray:
        crc, count = _TAIL.unpack_from(data, BLOCK_BYTES - _TAIL.size)
        entries = np.frombuffer(data, dtype=_ENTRY, count=BLOCK_ENTRIES)[
            : min(count, BLOCK_ENTRIES)
        ]
        if crc != _block_sum(number, data[: -_TAIL.size], count, self._salt):
            raise errors.ChecksumError("damaged table of ids", path=self._path, fix=_REBUILD)
        if count > BLOCK_ENTRIES or (entries["record"] >= self._count).any():
            raise errors.FormatError("malformed table of ids", path=self._path, fix=_REBUILD)
        return entries

    def _fence_hashes(self, file: FileHandle, sections: dict[str, Section]) -> np.ndarray:
        if self._fences is None:
            blocks = -(-self._count // BLOCK_ENTRIES)
            section = self._section(sections, "fences", 8 * blocks)
            self._fences = np.frombuffer(
                self._whole(file, section, "damaged table of ids"), dtype="<u8"
            )
        return self._fences

    def _whole(self, file: FileHandle, section: Section, otherwise: str) -> bytes:
        """A section that stays in memory. Raises ChecksumError."""
        data = self._read(file, np.array([section.offset_bytes]), np.array([section.size_bytes]))[0]
        if crc32c(data) != section.crc32c:
            raise errors.ChecksumError(
                otherwise, path=self._path, offset_bytes=section.offset_bytes, fix=_REBUILD
            )
        return data

    def _section(
        self, sections: dict[str, Section], name: str, size_bytes: int | None = None
    ) -> Section:
        section = sections.get(name)
        if section is None or size_bytes not in (None, section.size_bytes):
            raise errors.FormatError(
                f"section {name} does not fit the part",
                path=self._path,
                expected=f"{size_bytes} bytes",
                fix=_REBUILD,
            )
        return section
