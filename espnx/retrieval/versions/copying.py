"""Live records of some parts, in any order: read, checked and handed on bit for bit. What merging
and compacting share.

However many files the parts have, a few are open at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from ... import errors
from ...device.record_layout import HEADER_BYTES, RecordLayout
from ...storage import Plan
from ...storage.documents.ids import DocumentId
from ...storage.engine import FileHandle
from ..first_stage.interface import Entries, alive
from ..store.part import Part
from ..store.rows import Fill
from ..store.store import StoreTexts, Version, placement_of

FILES_OPEN = 16
_ROWS_AT_ONCE = 512


def live_numbers(parts: Sequence[Part], deleted: np.ndarray) -> np.ndarray:
    """int64, ascending: of the records that are `alive`."""
    numbers = np.concatenate([np.arange(part.first_number, part.end_number) for part in parts])
    return numbers[alive(numbers, deleted)]


def merged_order(entries: Entries, live: np.ndarray) -> np.ndarray:
    """The order in which the first stage wants the live records to lie, int64. Raises
    InvalidInputError unless each is there once: no record is lost and none is copied twice,
    whatever a first stage does."""
    order = np.concatenate([np.empty(0, np.int64), *entries.order])
    if not np.array_equal(np.sort(order), live):
        raise errors.InvalidInputError(
            "order of a first stage",
            got=f"{len(order)} records",
            expected=f"each of {len(live)} live ones, once",
        )
    return order


class Source:
    """Reads what parts hold of some records. A context manager: files stay open between calls.

    Attributes:
        tiers: by name; what they say of places and checksums is used here, their reads are not.
        n_tokens: uint16, by record number.
    """

    def __init__(self, version: Version, parts: Sequence[Part]):
        self._engine, self._parts = version.engine, list(parts)
        self.n_tokens = np.zeros(parts[-1].end_number, dtype=np.uint16)
        for part in parts:
            self.n_tokens[part.first_number : part.end_number] = part.meta["n_tokens"]
        self._segments = {
            tier: [(part, i) for part in parts for i in range(len(part.segments(tier)))]
            for tier in version.tiers
        }
        self.tiers = {tier: self._tier(version, tier) for tier in version.tiers}
        self._texts = StoreTexts(parts, lambda number: True)
        self._open: OrderedDict[tuple[str, int], FileHandle] = OrderedDict()

    def _tier(self, version: Version, name: str) -> RecordLayout:
        files = [
            FileHandle(
                -1,
                part.segment_path(name, number),
                part.segments(name)[number].size_bytes,
                False,
                1,
                "",
                "",
            )
            for part, number in self._segments[name]
        ]
        groups, begins = placement_of(self._parts, name)
        schema, book = version.schema_of(name), version.codebook(name)
        return RecordLayout(
            schema, self.n_tokens, groups, begins, files, salt=version.salt, codebook=book
        )

    def records(self, name: str, numbers: np.ndarray) -> Fill:
        """Reads records now, and checks them; returns the function that copies their vectors into a
        block."""
        tier = self.tiers[name]
        segment, offsets, sizes = (each.numpy() for each in tier.locate(numbers))
        used = (
            tier.schema.fixed_bytes
            - HEADER_BYTES
            + self.n_tokens[numbers].astype(np.int64) * tier.schema.row_bytes
        )
        bodies: list[np.ndarray] = [np.empty(0, np.uint8)] * len(numbers)
        for which in np.unique(segment).tolist():
            rows = np.flatnonzero(segment == which)
            file = self._file(name, which)
            future = self._engine.read(
                Plan.of(file, offsets[rows].tolist(), sizes[rows].tolist()), gap_bytes=64 << 10
            )
            memory, positions = future.wait(), future.position_bytes
            tier.check(memory, positions, numbers[rows])
            source = memory.numpy()
            for row, at in zip(rows.tolist(), (positions + HEADER_BYTES).tolist(), strict=True):
                bodies[row] = source[at : at + used[row]]

        def fill(block: np.ndarray, offsets: np.ndarray) -> None:
            for body, at in zip(bodies, (offsets + HEADER_BYTES).tolist(), strict=True):
                block[at : at + len(body)] = body

        return fill

    def _file(self, tier: str, which: int) -> FileHandle:
        key = tier, which
        if key not in self._open:
            while len(self._open) >= FILES_OPEN:
                self._engine.close_file(self._open.popitem(last=False)[1])
            part, number = self._segments[tier][which]
            self._open[key] = part.open_segment(tier, number)
        self._open.move_to_end(key)
        return self._open[key]

    def rows(self, numbers: np.ndarray) -> Iterator[tuple[DocumentId, str]]:
        """(id, text) of records."""
        for begin in range(0, len(numbers), _ROWS_AT_ONCE):
            yield from self._texts.get(numbers[begin : begin + _ROWS_AT_ONCE].tolist())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            self._engine.close_file(file)
        self._open.clear()
