"""Forward records: for each record its terms and impacts, so that candidates get exact scores by a
read of a few hundred bytes each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ...storage import FileHandle, NativeEngine
from ...storage.files import StreamWriter, read_range
from ...storage.native import load_native
from .layout import PLACES, Sealed, seal

FIXED_BYTES = 16  # of a record: its header
GROUP_RECORDS = 64
TERMS_OF_A_RECORD_MAX = 65_535
_ENTRY = np.dtype([("record", "<u4"), ("term", "<u4"), ("value", "<u4")])
_BUFFER_BYTES = 64 << 10


def term_bytes(n_terms: int) -> int:
    """Bytes of a term's number in a record."""
    return 2 if n_terms <= 65_536 else 4


class ForwardRows:
    """The places of forward records: computed from how many terms each has, two bytes a record and
    an offset for every 64.

    Attributes:
        counts: uint16 [n]: terms of each record.
        groups: int64 [ceil(n / 64)]: where every 64th begins.
        size_bytes: of all.
    """

    def __init__(self, counts: np.ndarray, groups: np.ndarray, size_bytes: int, row_bytes: int):
        self.counts, self.groups, self.size_bytes, self._row_bytes = (
            counts,
            groups,
            size_bytes,
            row_bytes,
        )
        self._counts = torch.from_numpy(np.require(counts, requirements=["C", "W"]))
        self._groups = torch.from_numpy(np.require(groups, requirements=["C", "W"]))

    @classmethod
    def of(cls, counts: np.ndarray, row_bytes: int) -> ForwardRows:
        """Counts offsets of records with so many terms each, uint16."""
        offsets, end = load_native().lay_out_records(
            torch.from_numpy(counts), FIXED_BYTES, row_bytes, 0
        )
        return cls(counts, offsets.numpy()[::GROUP_RECORDS].copy(), end, row_bytes)

    def place(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 (offset_bytes, size_bytes) of these records."""
        if not len(records):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        numbers = torch.from_numpy(np.ascontiguousarray(records, np.int64))
        begin = torch.zeros(1, dtype=torch.int64)
        _, offsets, sizes = load_native().locate_records(
            numbers, self._counts, self._groups, begin, FIXED_BYTES, self._row_bytes
        )
        return offsets.numpy(), sizes.numpy()

    @property
    def memory_bytes(self) -> int:
        return self.counts.nbytes + self.groups.nbytes

    def section(self, salt: int) -> np.ndarray:
        """uint8: as it is stored."""
        fields = {"salt": salt, "n_records": len(self.counts), "lists_bytes": self.size_bytes}
        return seal(PLACES, fields, [self.counts, self.groups])

    @classmethod
    def parse(
        cls, data: np.ndarray, path: str, salt: int, n_records: int, n_postings: int, row_bytes: int
    ) -> ForwardRows:
        """Raises FormatError, ChecksumError, TruncatedFileError."""
        sealed = Sealed(PLACES, data, path)
        if int(sealed.header["salt"]) != salt or int(sealed.header["n_records"]) != n_records:
            sealed.refuse(
                f"{int(sealed.header['n_records'])} records", f"{n_records}, of this segment"
            )
        counts, groups = (
            sealed.take("<u2", n_records),
            sealed.take("<i8", -(-n_records // GROUP_RECORDS)),
        )
        sealed.end()
        if int(counts.sum(dtype=np.int64)) != n_postings:
            sealed.refuse("counts", f"a sum of {n_postings}")
        found = cls.of(counts.copy(), row_bytes)
        if not np.array_equal(found.groups, groups) or found.size_bytes != int(
            sealed.header["lists_bytes"]
        ):
            sealed.refuse("offsets", "those that the counts give")
        return found


class ForwardSpool:
    """Turns postings, which come term after term, into records: by way of files of a range of
    records each, where they do not fit memory.

    Args:
        budget: entries that are sorted at a time.
        expected: entries that will come, about.
    """

    def __init__(
        self,
        engine: NativeEngine,
        directory: str,
        name: str,
        n_records: int,
        expected: int,
        budget: int,
    ):
        self._engine, self._n_records = engine, n_records
        n_files = max(1, -(-expected // budget))
        self._each = max(1, -(-n_records // n_files))
        self._held: list[np.ndarray] = []
        self._paths, self._writers = list[str](), list[StreamWriter]()
        self.counts = np.zeros(n_records, np.int64)
        if n_files > 1:
            self._paths = [
                os.path.join(directory, f"{name}-f{i}.tmp")
                for i in range(-(-n_records // self._each))
            ]
            self._writers = [
                StreamWriter(engine, path, buffer_bytes=_BUFFER_BYTES) for path in self._paths
            ]

    def add(self, terms: np.ndarray, records: np.ndarray, values: np.ndarray) -> None:
        """Postings, ascending by term; so the terms of each record come in order."""
        entries = np.empty(len(records), _ENTRY)
        entries["record"], entries["term"], entries["value"] = records, terms, values
        self.counts += np.bincount(records, minlength=self._n_records)
        if not self._writers:
            self._held.append(entries)
            return
        which = records // self._each
        entries = entries[np.argsort(which, kind="stable")]
        ends = np.cumsum(np.bincount(which, minlength=len(self._writers)))
        for i, (begin, end) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)):
            self._writers[i].write(entries[begin:end].view(np.uint8))

    def records(
        self, rows: ForwardRows, salt: int, kind: int, bytes_of_a_term: int
    ) -> Iterator[np.ndarray]:
        """uint8 arrays: the section ``forward``."""
        for first, entries in self._parts():
            entries = entries[np.argsort(entries["record"], kind="stable")]
            end = min(first + self._each, self._n_records)
            for begin in range(first, end, 1 << 16):
                stop = min(begin + (1 << 16), end)
                low, high = np.searchsorted(entries["record"], [begin, stop]).tolist()
                offsets, sizes = rows.place(np.arange(begin, stop))
                until = (
                    int(rows.place(np.array([stop]))[0][0])
                    if stop < self._n_records
                    else rows.size_bytes
                )
                part = entries[low:high]
                yield (
                    load_native()
                    .write_forward(
                        salt,
                        kind,
                        bytes_of_a_term,
                        begin,
                        torch.from_numpy(rows.counts[begin:stop].astype(np.int64)),
                        torch.from_numpy(part["term"].copy()),
                        torch.from_numpy(part["value"].copy()),
                        torch.from_numpy(offsets - offsets[0]),
                        torch.from_numpy(sizes),
                        until - int(offsets[0]),
                    )
                    .numpy()
                )

    def _parts(self) -> Iterable[tuple[int, np.ndarray]]:
        if not self._writers:
            yield 0, np.concatenate([np.empty(0, _ENTRY), *self._held])
            return
        for i, (path, writer) in enumerate(zip(self._paths, self._writers, strict=True)):
            writer.sync()
            writer.close()
            file: FileHandle = self._engine.open(path)
            try:
                yield (
                    i * self._each,
                    read_range(self._engine, file, 0, file.size_bytes).view(_ENTRY),
                )
            finally:
                self._engine.close_file(file)

    def close(self) -> None:
        """Removes its files."""
        self._held = []
        for path in self._paths:
            if os.path.exists(path):
                os.unlink(path)
        self._paths = []
