"""Lengths of records in two bytes each: exact, with codes of their own for the few above 64,511."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import errors
from .layout import LENGTHS, Sealed, seal

#: Codes from here on stand for the lengths in a table.
FIRST_LONG = 64_512
_LONG_MAX = 65_536 - FIRST_LONG


@dataclass(frozen=True, eq=False)
class Lengths:
    """Attributes:
    codes: uint16 [n].
    long: uint64 [at most 1024]: the length of code `FIRST_LONG` + i, ascending.
    """

    codes: np.ndarray
    long: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> Lengths:
        """Raises InvalidInputError where more than 1024 different lengths are above 64,511."""
        is_long = lengths >= FIRST_LONG
        long = np.unique(lengths[is_long]).astype("<u8")
        if len(long) > _LONG_MAX:
            raise errors.InvalidInputError(
                "lengths of records",
                got=f"{len(long)} different ones above {FIRST_LONG - 1} terms",
                expected=f"at most {_LONG_MAX}",
                fix="cut records of so many words into passages",
            )
        codes = lengths.astype("<u2")
        codes[is_long] = FIRST_LONG + np.searchsorted(long, lengths[is_long])
        return cls(codes, long)

    @property
    def table(self) -> np.ndarray:
        """int64: the length of each code that there is."""
        if len(self.long):
            return np.concatenate([np.arange(FIRST_LONG), self.long.astype(np.int64)])
        return np.arange(int(self.codes.max(initial=0)) + 1)

    def section(self, salt: int) -> np.ndarray:
        """uint8: as they are stored."""
        return seal(
            LENGTHS,
            {"salt": salt, "n_records": len(self.codes), "n_terms": len(self.long)},
            [self.codes, self.long],
        )

    @classmethod
    def parse(
        cls, data: np.ndarray, path: str, salt: int, n_records: int, sum_lengths: int
    ) -> Lengths:
        """Raises FormatError, ChecksumError, TruncatedFileError."""
        sealed = Sealed(LENGTHS, data, path)
        if int(sealed.header["salt"]) != salt or int(sealed.header["n_records"]) != n_records:
            sealed.refuse(
                f"{int(sealed.header['n_records'])} lengths", f"{n_records}, of this segment"
            )
        found = cls(
            sealed.take("<u2", n_records), sealed.take("<u8", int(sealed.header["n_terms"]))
        )
        sealed.end()
        table = found.table
        if int(found.codes.max(initial=0)) >= max(len(table), 1) or len(found.long) > _LONG_MAX:
            sealed.refuse(f"code {int(found.codes.max())}", f"below {len(table)}")
        if int(np.bincount(found.codes, minlength=len(table))[: len(table)] @ table) != sum_lengths:
            sealed.refuse("lengths", f"a sum of {sum_lengths}")
        return found
