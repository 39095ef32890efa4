"""The resident dictionary of a segment: from a term to its list, in at most 24 bytes a term, and
the terms themselves on storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors
from ...storage.files import crc32c
from .layout import (
    COUNT,
    DICTIONARY,
    GROUP,
    GROUP_TERMS,
    IMPACT,
    LIST_ALIGN_BYTES,
    RECORDS_MAX,
    Sealed,
    seal,
)

#: What a step of an impact may be worth: 2 to the power of these. All of them, and 255 of each, are
#: numbers of float32.
EXPONENT_LEAST, EXPONENT_MOST = -126, 120
STEPS = 255


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Terms of a segment, ordered by hash; term number t is the t-th.

    Attributes:
        salt: of the segment, in each of its lists.
        kind: what its postings carry: `espnx.postings.stored.layout.COUNT`, `IMPACT` or `FLOAT`.
        n_records, n_postings, sum_lengths: of the segment.
        hashes: uint64 [n].
        first: uint32 [n + 1], in units of 64 bytes: where each list begins in ``lists``, and the
            end.
        df: uint32 [n]: records that have the term.
        groups: uint64 [n / 64 + 1]: where each 64 terms begin in ``terms``, and the end.
        first_layer: uint16 [n], in units of 64 bytes: of impacts, the size of a list's first layer;
            0: it has one.
        largest: float32 [n]: of impacts and floats, the largest weight in a list.
        exponents: int8 [n]: of impacts, a step in a list is worth 2 to the power of it; None:
            values are what they are.
    """

    salt: int
    kind: int
    n_records: int
    n_postings: int
    sum_lengths: int
    hashes: np.ndarray
    first: np.ndarray
    df: np.ndarray
    groups: np.ndarray
    first_layer: np.ndarray | None = None
    largest: np.ndarray | None = None
    exponents: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def lists_bytes(self) -> int:
        return int(self.first[-1]) * LIST_ALIGN_BYTES

    @property
    def memory_bytes(self) -> int:
        held = (
            self.hashes,
            self.first,
            self.df,
            self.groups,
            self.first_layer,
            self.largest,
            self.exponents,
        )
        return sum(each.nbytes for each in held if each is not None)

    def place(self, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 (offset_bytes, size_bytes) of these terms' lists."""
        begin = self.first[terms].astype(np.int64)
        return begin * LIST_ALIGN_BYTES, (self.first[terms + 1] - begin) * LIST_ALIGN_BYTES

    def section(self) -> np.ndarray:
        """uint8: as it is stored."""
        fields: dict[str, Any] = {
            "salt": self.salt,
            "kind": self.kind,
            "n_terms": len(self),
            "n_records": self.n_records,
            "n_postings": self.n_postings,
            "sum_lengths": self.sum_lengths,
            "lists_bytes": self.lists_bytes,
        }
        arrays = [self.hashes, self.first, self.df, self.groups]
        arrays += [
            each for each in (self.first_layer, self.largest, self.exponents) if each is not None
        ]
        return seal(DICTIONARY, fields, arrays)

    def steps(self, terms: np.ndarray) -> np.ndarray:
        """float64: what one step of the values of these terms' lists is worth."""
        return (
            np.ones(len(terms))
            if self.exponents is None
            else np.ldexp(1.0, self.exponents[terms].astype(np.int32))
        )

    @classmethod
    def parse(cls, data: np.ndarray, path: str) -> Dictionary:
        """Raises FormatError, ChecksumError, TruncatedFileError."""
        sealed = Sealed(DICTIONARY, data, path)
        header = sealed.header
        n, n_records = int(header["n_terms"]), int(header["n_records"])
        kind = int(header["kind"])
        if kind > 2 or n_records > RECORDS_MAX:
            sealed.refuse(f"kind {kind}, {n_records} records", "what a dictionary may have")
        found = cls(
            int(header["salt"]),
            kind,
            n_records,
            int(header["n_postings"]),
            int(header["sum_lengths"]),
            sealed.take("<u8", n),
            sealed.take("<u4", n + 1),
            sealed.take("<u4", n),
            sealed.take("<u8", -(-n // GROUP_TERMS) + 1),
            None if kind == COUNT else sealed.take("<u2", n),
            None if kind == COUNT else sealed.take("<f4", n),
            sealed.take("i1", n) if kind == IMPACT else None,
        )
        sealed.end()
        # By a checksum that fits this is what somebody wrote; what follows keeps a wrong writer
        # from leading reads astray.
        rising = bool(
            (found.first[1:] > found.first[:-1]).all()
            and (found.hashes[1:] >= found.hashes[:-1]).all()
        )
        rising = rising and bool((found.groups[1:] > found.groups[:-1]).all())
        fits = bool(
            (found.df <= n_records).all() and (found.df > 0).all()
        ) and found.lists_bytes == int(header["lists_bytes"])
        if not rising or not fits or int(found.first[0]) != 0 or int(found.groups[0]) != 0:
            sealed.refuse(
                "terms out of order, or with lists that overlap",
                "terms in the order of their hashes, each with a list",
            )
        if found.largest is not None and not bool(
            ((found.largest > 0) & np.isfinite(found.largest)).all()
        ):
            sealed.refuse("largest weights that are none", "numbers above 0")
        held = found.exponents
        if held is not None and not bool(
            ((held >= EXPONENT_LEAST) & (held <= EXPONENT_MOST)).all()
        ):
            sealed.refuse("exponents beyond float32", f"{EXPONENT_LEAST} to {EXPONENT_MOST}")
        return found


class TermsWriter:
    """Makes the section ``terms``: groups of 64 terms, each with a header, lengths and bytes."""

    def __init__(self, salt: int):
        self._salt, self._open, self._count = salt, list[bytes](), 0
        self._groups: list[np.ndarray] = []
        self.offsets = [0]

    def add(self, terms: list[bytes]) -> None:
        """The next terms, in the order of their numbers."""
        self._open += terms
        while len(self._open) >= GROUP_TERMS:
            self._close(self._open[:GROUP_TERMS])
            del self._open[:GROUP_TERMS]

    def _close(self, terms: list[bytes]) -> None:
        body = np.array([len(term) for term in terms], "<u4").tobytes() + b"".join(terms)
        header = np.array([(0, self._salt, self._count, len(terms))], GROUP)
        header["crc32c"] = crc32c(header.tobytes()[4:] + body)
        self._groups.append(np.frombuffer(header.tobytes() + body, np.uint8))
        self._count += len(terms)
        self.offsets.append(self.offsets[-1] + self._groups[-1].size)

    def end(self) -> None:
        """No more are to come."""
        if self._open:
            self._close(self._open)
            self._open = []

    def parts(self) -> Iterator[np.ndarray]:
        """uint8 arrays: the section."""
        yield from self._groups


def parse_group(data: np.ndarray, dictionary: Dictionary, group: int, path: str) -> list[bytes]:
    """The terms of one group. Raises ChecksumError, FormatError."""
    what = f"terms {group * GROUP_TERMS}.. of postings"
    expected = min(GROUP_TERMS, len(dictionary) - group * GROUP_TERMS)
    if data.size < GROUP.itemsize + 4 * expected:
        raise errors.TruncatedFileError(
            what, path=path, got=f"{data.size} bytes", expected=GROUP.itemsize + 4 * expected
        )
    raw = data.tobytes()
    header = np.frombuffer(raw[: GROUP.itemsize], GROUP)[0]
    if int(header["salt"]) != dictionary.salt or int(header["crc32c"]) != crc32c(raw[4:]):
        raise errors.ChecksumError(
            f"{what} are damaged", path=path, fix="restore the index from a copy, or build it again"
        )
    lengths = np.frombuffer(raw, "<u4", expected, GROUP.itemsize).astype(np.int64)
    ends = GROUP.itemsize + 4 * expected + np.cumsum(lengths)
    if (
        int(header["count"]) != expected
        or int(header["first_term"]) != group * GROUP_TERMS
        or int(ends[-1]) != len(raw)
    ):
        raise errors.FormatError(
            what,
            path=path,
            got=f"{header['count']} terms from {header['first_term']}",
            expected=expected,
        )
    return [
        raw[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]
