"""A segment of postings that is open: its resident sections in memory, the others where a file of
an engine has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...storage import FileHandle, NativeEngine, Plan
from ...storage.files import Region, read_range
from ...suggestions import suggests_keywords
from .dictionary import Dictionary, parse_group
from .forward import ForwardRows, term_bytes
from .layout import COUNT, DICTIONARY, FLOAT, FORWARD, GROUP_TERMS, LENGTHS, LISTS, PLACES, TERMS
from .lengths import Lengths

_NAMES_KEPT = 1 << 16  # of terms that were asked for by number


@dataclass(frozen=True)
class OpenRegion:
    """A section that stays on storage: where it begins in a file that is open, and how long it
    is."""

    file: FileHandle
    offset_bytes: int
    size_bytes: int

    @classmethod
    def within(cls, file: FileHandle, region: Region) -> OpenRegion:
        """Raises TruncatedFileError for a file that ends before the section does."""
        if region.offset_bytes + region.size_bytes > file.size_bytes:
            raise errors.TruncatedFileError(
                "a section of postings",
                path=region.path,
                offset_bytes=region.offset_bytes,
                got=f"a file of {file.size_bytes} bytes",
                expected=f"at least {region.offset_bytes + region.size_bytes}",
                fix="restore the index from a copy, or build it again",
            )
        return cls(file, region.offset_bytes, region.size_bytes)

    def read(self, engine: NativeEngine, offset_bytes: int, size_bytes: int) -> np.ndarray:
        """uint8, of its own. Raises InvalidInputError for what lies outside, and what a read
        raises."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise errors.InvalidInputError(
                "bytes of a section",
                got=f"[{offset_bytes}, {offset_bytes + size_bytes})",
                expected=f"within {self.size_bytes}",
            )
        return read_range(engine, self.file, self.offset_bytes + offset_bytes, size_bytes)


class Segment:
    """Posting lists of records 0 to n - 1, open for searches. Every method may be called from any
    thread.

    Args:
        engine: that reads the sections on storage; stays the caller's, and open for as long as this
            is used.
        regions: of the sections that are not resident, and of those that are unless they are given.
        resident: uint8 arrays of resident sections that the caller has in memory; they must not
            change.
        first_number: of record 0, in results.

    Attributes:
        dictionary: its terms.
        lengths: of its records, in terms; None for impacts.
        rows: where its forward records lie; None for counts.

    Raises:
        FormatError, ChecksumError, TruncatedFileError, FileMissingError, ReadError: a section that
            is not what was written.
    """

    @suggests_keywords
    def __init__(
        self,
        engine: NativeEngine,
        regions: Mapping[str, Region],
        *,
        resident: Mapping[str, np.ndarray] | None = None,
        first_number: int = 0,
    ):
        self._engine, self.first_number = engine, first_number
        self._files: dict[str, FileHandle] = {}
        self._names: dict[int, bytes] = {}
        try:
            self._load(regions, resident or {})
        except BaseException:
            self.close()
            raise

    def _load(self, regions: Mapping[str, Region], resident: Mapping[str, np.ndarray]) -> None:
        def section(name: str) -> tuple[np.ndarray, str]:
            if name in resident:
                return resident[name], name
            region = self._open(regions, name)
            return region.read(self._engine, 0, region.size_bytes), region.file.path

        self.dictionary = Dictionary.parse(*section(DICTIONARY))
        held = self.dictionary
        self.lengths = None
        if held.kind == COUNT:
            self.lengths = Lengths.parse(
                *section(LENGTHS), held.salt, held.n_records, held.sum_lengths
            )
        self.lists, self.terms = self._open(regions, LISTS), self._open(regions, TERMS)
        expected_bytes = [
            (LISTS, self.lists, held.lists_bytes),
            (TERMS, self.terms, int(held.groups[-1])),
        ]
        self.rows = None
        if held.kind != COUNT:
            row_bytes = self.forward_term_bytes + (4 if held.kind == FLOAT else 1)
            self.rows = ForwardRows.parse(
                *section(PLACES), held.salt, held.n_records, held.n_postings, row_bytes
            )
            self.forward = self._open(regions, FORWARD)
            expected_bytes.append((FORWARD, self.forward, self.rows.size_bytes))
        for name, region, expected in expected_bytes:
            if region.size_bytes != expected:
                raise errors.FormatError(
                    f"section {name} of postings",
                    path=region.file.path,
                    got=f"{region.size_bytes} bytes",
                    expected=expected,
                )
        self._length_table = None if self.lengths is None else self.lengths.table
        self._codes = (
            None
            if self.lengths is None
            else torch.from_numpy(np.require(self.lengths.codes, requirements=["C", "W"]))
        )

    def _open(self, regions: Mapping[str, Region], name: str) -> OpenRegion:
        if name not in regions:
            raise errors.InvalidInputError(
                "sections of postings",
                got=", ".join(regions) or "none",
                expected=f"{name} among them",
            )
        region = regions[name]
        if region.path not in self._files:
            self._files[region.path] = self._engine.open(region.path)
        return OpenRegion.within(self._files[region.path], region)

    def __len__(self) -> int:
        return self.dictionary.n_records

    @property
    def files(self) -> Sequence[FileHandle]:
        """The files that are open for it, until `close`."""
        return list(self._files.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes that stay in memory."""
        of_lengths = (
            0 if self.lengths is None else self.lengths.codes.nbytes + self.lengths.long.nbytes
        )
        of_rows = 0 if self.rows is None else self.rows.memory_bytes
        return self.dictionary.memory_bytes + of_lengths + of_rows

    @property
    def forward_term_bytes(self) -> int:
        """Bytes of a term's number in a forward record."""
        return term_bytes(len(self.dictionary))

    def term(self, number: int) -> bytes:
        """The bytes of a term: one read. Raises ChecksumError, FormatError, and what a read
        raises."""
        group = number // GROUP_TERMS
        return self.group(group)[number - group * GROUP_TERMS]

    def group(self, group: int) -> list[bytes]:
        """The 64 terms from number 64 `group` on; fewer at the end."""
        begin, end = int(self.dictionary.groups[group]), int(self.dictionary.groups[group + 1])
        return parse_group(
            self.terms.read(self._engine, begin, end - begin),
            self.dictionary,
            group,
            self.terms.file.path,
        )

    def names(
        self, numbers: np.ndarray, deadline_s: float = 30.0
    ) -> tuple[list[bytes], np.ndarray]:
        """The bytes of terms; and of the reads for those that no call has asked for before, all at
        once: int64 [3], requests, bytes asked, bytes moved. Raises as `term`."""
        known, costs = self._names, np.zeros(3, np.int64)
        wanted = numbers.tolist()
        found = {number: known[number] for number in wanted if number in known}
        missing = np.array([number for number in wanted if number not in found], np.int64)
        if len(missing):
            groups = np.unique(missing // GROUP_TERMS)
            begins = self.dictionary.groups[groups].astype(np.int64)
            sizes = self.dictionary.groups[groups + 1].astype(np.int64) - begins
            lies = Plan.of(
                self.terms.file,
                torch.from_numpy(begins + self.terms.offset_bytes),
                torch.from_numpy(sizes),
            )
            future = self._engine.read(lies, deadline_s=deadline_s)
            memory, at = future.wait().numpy(), future.position_bytes.tolist()
            read = {
                group: parse_group(
                    memory[at[i] : at[i] + size], self.dictionary, group, self.terms.file.path
                )
                for i, (group, size) in enumerate(zip(groups.tolist(), sizes.tolist(), strict=True))
            }
            costs += [future.request_count, future.bytes_asked, future.bytes_moved]
            found |= {
                number: read[number // GROUP_TERMS][number % GROUP_TERMS]
                for number in missing.tolist()
            }
            if len(known) + len(missing) > _NAMES_KEPT:
                # another one: whoever looks into the one before still finds all of it there
                known = self._names = {}
            known.update(found)
        return [found[number] for number in wanted], costs

    def view(self, allowed: torch.Tensor | None, norms: torch.Tensor | None) -> dict[str, Any]:
        """What the compiled part is told of it."""
        held = self.dictionary
        return {
            "salt": held.salt,
            "kind": held.kind,
            "n_records": held.n_records,
            "first_number": self.first_number,
            "file": self.lists.file.number,
            "begin_bytes": self.lists.offset_bytes,
            "size_bytes": self.lists.size_bytes,
            "name": self.lists.file.path,
            "allowed": allowed,
            "lengths": self._codes,
            "norms": norms,
        }

    @property
    def codes(self) -> torch.Tensor:
        """uint16 [n]: codes of lengths, whose meaning `length_table` has; of counts alone."""
        if self._codes is None:
            raise errors.StateError("lengths of records", got="impacts", expected="counts")
        return self._codes

    @property
    def length_table(self) -> np.ndarray:
        """int64: the length of each code; of counts alone."""
        if self._length_table is None:
            raise errors.StateError("lengths of records", got="impacts", expected="counts")
        return self._length_table

    def close(self) -> None:
        """Closes its files."""
        for file in self._files.values():
            self._engine.close_file(file)
        self._files = {}
