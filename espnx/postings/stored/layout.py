"""The sections of a segment: what each is called, how it begins, and what is checked when it is
read. docs/postings-format.md has the specification; the lists themselves are
``csrc/cpu/postings/list.hpp``'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import errors
from ...storage.files import crc32c

DICTIONARY, LENGTHS, TERMS, LISTS, FORWARD, PLACES = (
    "dict",
    "lengths",
    "terms",
    "lists",
    "forward",
    "places",
)
REMOVED = "removed"  # of no segment: see espnx.postings.deletions
#: Sections that searches keep in memory; the others stay on storage.
RESIDENT = (DICTIONARY, LENGTHS, PLACES)

#: What a posting carries, in the order of ``csrc/cpu/postings/list.hpp``.
COUNT, IMPACT, FLOAT = 0, 1, 2

LIST_ALIGN_BYTES = 64
RECORDS_MAX = 2**31 - 1
TERMS_MAX = 2**32 - 2
GROUP_TERMS = 64

#: Of a resident section. `crc32c`: of everything behind it in the section.
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("crc32c", "<u4"),
        ("salt", "<u4"),
        ("kind", "<u4"),
        ("n_terms", "<u4"),
        ("n_records", "<u8"),
        ("n_postings", "<u8"),
        ("sum_lengths", "<u8"),
        ("lists_bytes", "<u8"),
        ("spare", "<u8"),
    ]
)
HEADER_BYTES = HEADER.itemsize  # 64
GROUP = np.dtype([("crc32c", "<u4"), ("salt", "<u4"), ("first_term", "<u4"), ("count", "<u4")])


def seal(section: str, fields: Mapping[str, Any], arrays: list[np.ndarray]) -> np.ndarray:
    """uint8: a resident section of these arrays, each at a multiple of 8 bytes."""
    parts = [np.zeros(1, HEADER).view(np.uint8)]
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += [data, np.zeros(-data.size % 8, np.uint8)]
    whole = np.concatenate(parts)
    header = whole[:HEADER_BYTES].view(HEADER)
    header["magic"] = magic_of(section)
    for name, value in fields.items():
        header[name] = value
    header["crc32c"] = crc32c(whole[12:])
    return whole


def magic_of(section: str) -> bytes:
    return b"ESP" + section[:4].encode().ljust(4, b"_") + b"2"


class Sealed:
    """A resident section that is read: its header, and its arrays one after the other.

    Raises FormatError, ChecksumError, TruncatedFileError: it is not what was written.
    """

    def __init__(self, section: str, data: np.ndarray, path: str):
        self.section, self.path, self._data, self._at = section, path, data, HEADER_BYTES
        if data.dtype != np.uint8 or data.ndim != 1 or data.size < HEADER_BYTES:
            raise errors.TruncatedFileError(
                f"section {section} of postings",
                path=path,
                got=f"{data.size} bytes",
                expected=HEADER_BYTES,
            )
        self.header = np.frombuffer(data[:HEADER_BYTES].tobytes(), HEADER)[0]
        if bytes(self.header["magic"]) != magic_of(section):
            raise errors.FormatError(
                f"section {section} of postings",
                path=path,
                got=bytes(self.header["magic"]),
                expected=magic_of(section),
            )
        found = crc32c(np.ascontiguousarray(data[12:]))
        if found != int(self.header["crc32c"]):
            raise errors.ChecksumError(
                f"section {section} of postings is damaged",
                path=path,
                got=f"CRC32C {found:08x}",
                expected=f"{int(self.header['crc32c']):08x}",
                fix="restore the index from a copy, or build it again",
            )

    def take(self, dtype: str, count: int) -> np.ndarray:
        """The next array; a view."""
        kind = np.dtype(dtype)
        size = kind.itemsize * count
        if count < 0 or size > self._data.size - self._at:
            self.refuse(f"{self._data.size} bytes", f"at least {self._at + size}")
        found = self._data[self._at : self._at + size].view(kind)
        self._at += size + -size % 8
        return found

    def end(self) -> None:
        if self._at != self._data.size:
            self.refuse(f"{self._data.size} bytes", self._at)

    def refuse(self, got: object, expected: object) -> None:
        raise errors.FormatError(
            f"section {self.section} of postings", path=self.path, got=got, expected=expected
        )
