"""What kept records are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ...storage import Future
from ...storage.parse import Fields
from ..command import Command
from ..interface import Pairs, RecordQuery
from ..pages import page_reads
from ..record_layout import RecordLayout

#: Of the queries of one request, in values: what a trace asks for is made in memory.
VALUES_MAX = 1 << 31


@dataclass(frozen=True, eq=False)
class MaxsimCommand(Command):
    """Scores of records. Attributes: see `KeptRecords.maxsim`."""

    verb: ClassVar[str] = "maxsim"
    takes_more: ClassVar[bool] = True
    numbers: np.ndarray
    queries: Sequence[RecordQuery]
    pairs: Pairs | None = None
    _: KW_ONLY
    gap_bytes: int = 0
    is_urgent: bool = True
    deadline_s: float = 30.0

    def can_be(self, values: np.ndarray) -> np.ndarray:
        """See `Command`. Scores are sums of products of finite numbers."""
        found: np.ndarray = np.isfinite(values)
        return found

    @property
    def items(self) -> np.ndarray:
        """See `Command`."""
        return np.ascontiguousarray(self.numbers, dtype=np.int64)

    @property
    def n_results(self) -> int:
        """See `Command`: a score of each pair."""
        return len(self.numbers) if self.pairs is None else len(self.pairs)

    def share(self, places: np.ndarray) -> tuple[MaxsimCommand, np.ndarray]:
        """See `Command`."""
        if self.pairs is None:
            return replace(self, numbers=self.items[places]), places
        mine = np.flatnonzero(np.isin(self.pairs.item, places))
        pairs = Pairs(np.searchsorted(places, self.pairs.item[mine]), self.pairs.query[mine])
        return replace(self, numbers=self.items[places], pairs=pairs), mine

    def begin_line(self, stored: RecordLayout, memo: dict[Any, Any]) -> dict[str, Any]:
        """See `Command`."""
        return {
            "bytes": stored_bytes(stored, self.numbers),
            "places": self.numbers.tolist(),
            "queries": [len(query.tokens) for query in self.queries],
            "pairs": self.n_results,
            "gap_bytes": self.gap_bytes,
            "is_urgent": self.is_urgent,
            "deadline_s": self.deadline_s,
            "waited_s": 0.0,
            **self._pages(stored),
        }

    def _pages(self, stored: RecordLayout) -> dict[str, int]:
        """What flash reads, whole pages in so many requests, and the tokens of the records."""
        places = stored.locate(np.ascontiguousarray(self.numbers))
        file, offset_bytes, size_bytes = (each.numpy() for each in places)
        begins, sizes = page_reads(file, offset_bytes, size_bytes, self.gap_bytes)
        tokens = int(stored.n_tokens[self.numbers].sum())
        return {"read_bytes": int(sizes.sum()), "requests": int(begins.sum()), "tokens": tokens}

    @classmethod
    def of_line(cls, said: Fields, stored: RecordLayout, memo: dict[Any, Any]) -> MaxsimCommand:
        """See `Command`."""
        numbers, schema = numbers_said(said, stored), stored.schema
        lengths = said.wholes("queries", most=1 << 20, count=1 << 20)
        if sum(lengths) * schema.dim > VALUES_MAX:
            said.refuse("queries", f"at most {VALUES_MAX} values", [sum(lengths), schema.dim])
        queries = [
            RecordQuery(torch.zeros(1, schema.d_cls), torch.zeros(n, schema.dim), 1.0)
            for n in lengths
        ]
        pairs = None
        if len(queries) != 1:
            count = said.whole("pairs", most=1 << 31)
            if count and not (len(numbers) and queries):
                said.refuse("pairs", "0 without records or queries")
            which = np.arange(count, dtype=np.int64)
            pairs = Pairs(which * len(numbers) // max(count, 1), which % max(len(queries), 1))
        gap_bytes = said.whole("gap_bytes") if "gap_bytes" in said else 0
        is_urgent = said.flag("is_urgent") if "is_urgent" in said else True
        return cls(numbers, queries, pairs, gap_bytes=gap_bytes, is_urgent=is_urgent)


@dataclass(frozen=True, eq=False)
class ReadCommand(Command):
    """Whole records, to be checked or copied. Attributes: see `KeptRecords.read`."""

    verb: ClassVar[str] = "read"
    is_done: ClassVar[bool] = True
    numbers: np.ndarray
    _: KW_ONLY
    gap_bytes: int = 0
    deadline_s: float = 30.0

    def begin_line(self, stored: RecordLayout, memo: dict[Any, Any]) -> dict[str, Any]:
        """See `Command`."""
        return {"bytes": stored_bytes(stored, self.numbers), "places": self.numbers.tolist()}

    @classmethod
    def of_line(cls, said: Fields, stored: RecordLayout, memo: dict[Any, Any]) -> ReadCommand:
        """See `Command`."""
        return cls(numbers_said(said, stored))

    def replayed(self, said: Fields, found: Future, memo: dict[Any, Any]) -> None:
        """See `Command`."""
        found.wait()


def stored_bytes(layout: RecordLayout, numbers: np.ndarray) -> int:
    """Bytes of some records."""
    return int(layout.schema.sizes(layout.n_tokens[numbers]).sum())


def numbers_said(said: Fields, layout: RecordLayout) -> np.ndarray:
    """The numbers of the records that a line of a trace names. Raises FormatError."""
    return np.array(
        said.wholes("places", most=max(len(layout.n_tokens) - 1, 0), count=1 << 28), dtype=np.int64
    )
