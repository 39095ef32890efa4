"""A part of a store: what one build or one addition published, or what several of them were merged
into.

Everything of an added part lies in one file: records of every tier, ids and texts, lists and codes.
A base's records may lie in many files, on several devices; what else it holds lies in one file
beside them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from ... import errors
from ...storage import NativeEngine
from ...storage.documents.ids import DocumentId
from ...storage.documents.rows import PartTexts
from ...storage.engine import FileHandle
from ...storage.files import BLOCK_BYTES, Region, Section
from ...storage.parse import Fields
from ..first_stage.interface import SECTION_NAME
from .part_file import (
    MAIN,
    REBUILD,
    FileFacts,
    check_section,
    open_file,
    read_section,
    section_windows,
)

GROUP_RECORDS = 64  # as in csrc/device/records.hpp
PART_NAME = "part.bin"
_RECORDS_MAX = 1 << 40
_SEGMENTS_MAX = 1 << 20


def stage_section(name: str) -> str:
    """The section of a part's file that holds one of the first stage's. Raises InvalidInputError
    for a name that cannot be."""
    if SECTION_NAME.fullmatch(name) is None:
        raise errors.InvalidInputError(
            "section of a first stage", got=repr(name), expected=SECTION_NAME.pattern
        )
    return f"stage.{name}"


@dataclass(frozen=True)
class Segment:
    """`records` records from `first_record` on in a data file. `path` is relative to the store, or
    absolute on another device."""

    path: str
    first_record: int
    records: int
    size_bytes: int

    @classmethod
    def parse(cls, fields: Fields) -> Segment:
        return cls(
            fields.text("path"),
            fields.whole("first_record", most=_RECORDS_MAX),
            fields.whole("records", 1, _RECORDS_MAX),
            fields.whole("size_bytes", 1),
        )


@dataclass(frozen=True)
class PartEntry:
    """What the manifest says of a part.

    Attributes:
        generation: that wrote it; its files say the same. directory: of them, in the store.
        first_number: of its records, a multiple of 64. count: of them, deleted ones too. tokens:
            that they hold.
        path, size_bytes: of the file that holds everything but the records; in an added part these
            too.
        segments: tier -> data files.
    """

    generation: int
    directory: str
    first_number: int
    count: int
    tokens: int
    path: str
    size_bytes: int
    segments: dict[str, list[Segment]] = field(default_factory=dict)

    @property
    def end_number(self) -> int:
        return self.first_number + self.count

    @property
    def data_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(
            {
                self.path: self.size_bytes,
                **{s.path: s.size_bytes for each in self.segments.values() for s in each},
            }.values()
        )

    @property
    def files(self) -> Iterator[str]:
        """Paths of all its files."""
        yield self.path
        for tier in self.segments.values():
            yield from (segment.path for segment in tier)

    def moved(self, targets: Mapping[str, str]) -> PartEntry:
        """The same, with other paths for some of its files."""
        segments = {
            tier: [replace(each, path=targets.get(each.path, each.path)) for each in listed]
            for tier, listed in self.segments.items()
        }
        return replace(self, path=targets.get(self.path, self.path), segments=segments)

    def fields(self) -> dict[str, Any]:
        """The fields that the manifest has of it."""
        return asdict(self)

    @classmethod
    def parse(cls, fields: Fields, tiers: Sequence[str]) -> PartEntry:
        """Raises FormatError where a value cannot be, or where segments do not cover the part's
        records."""
        first, count = (
            fields.whole("first_number", most=_RECORDS_MAX),
            fields.whole("count", 1, _RECORDS_MAX),
        )
        listed = fields.inner("segments")
        segments = {
            tier: [Segment.parse(each) for each in listed.each(tier, count=_SEGMENTS_MAX)]
            for tier in tiers
        }
        for tier, each in segments.items():
            at = first
            for segment in each:
                if segment.first_record != at or segment.first_record % GROUP_RECORDS:
                    listed.refuse(
                        tier,
                        f"a segment that begins at record {at}, a multiple of {GROUP_RECORDS}",
                        segment.first_record,
                    )
                at += segment.records
            if at != first + count:
                listed.refuse(tier, f"segments of {count} records", f"{at - first} records")
        return cls(
            fields.whole("generation", 1),
            fields.file_name("directory"),
            first,
            count,
            fields.whole("tokens", most=count * 65535),
            fields.text("path"),
            fields.whole("size_bytes", 1),
            segments,
        )


class Part:
    """A part that is there, for reading. Its file is open for a call alone, or until `close` after
    `keep_open`.

    Args:
        path: the store's directory. salt: seeds checksums of records and texts.

    It is a `StoredEntries` of the first stage.
    """

    def __init__(
        self, path: str, engine: NativeEngine, entry: PartEntry, *, store_id: str, salt: int
    ):
        self.entry, self.path, self._root, self._engine = (
            entry,
            os.path.join(path, entry.path),
            path,
            engine,
        )
        self.first_number, self.count, self.end_number = (
            entry.first_number,
            entry.count,
            entry.end_number,
        )
        self._store_id = store_id
        self._texts = PartTexts(engine, self.path, entry.first_number, entry.count, salt)
        self._kept: tuple[FileHandle, dict[str, Section]] | None = None

    def segments(self, tier: str) -> list[Segment]:
        return self.entry.segments.get(tier, [])

    def segment_path(self, tier: str, number: int) -> str:
        return os.path.join(self._root, self.segments(tier)[number].path)

    def open_segment(self, tier: str, number: int) -> FileHandle:
        """A data file of a tier, checked against the manifest; the caller's to close, but for that
        of `keep_open`.

        Raises what `open_file` raises."""
        segment = self.segments(tier)[number]
        if segment.path == self.entry.path and self._kept is not None:
            return self._kept[0]
        return open_file(
            self._engine, self.segment_path(tier, number), self._facts(number, segment)
        )[0]

    def _facts(self, number: int, segment: Segment) -> FileFacts:
        if segment.path == self.entry.path:
            return self._main_facts
        return FileFacts(
            self._store_id,
            self.entry.generation,
            number,
            segment.first_record,
            segment.records,
            segment.size_bytes,
        )

    @property
    def _main_facts(self) -> FileFacts:
        entry = self.entry
        return FileFacts(
            self._store_id,
            entry.generation,
            MAIN,
            entry.first_number,
            entry.count,
            entry.size_bytes,
        )

    @contextmanager
    def opened(self) -> Iterator[tuple[FileHandle, dict[str, Section]]]:
        """The part's file and its sections."""
        if self._kept is not None:
            yield self._kept
            return
        file, sections = open_file(self._engine, self.path, self._main_facts)
        try:
            yield file, sections
        finally:
            self._engine.close_file(file)

    def keep_open(self) -> None:
        self._kept = open_file(self._engine, self.path, self._main_facts)

    def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            self._engine.close_file(kept[0])

    @cached_property
    def meta(self) -> dict[str, np.ndarray]:
        """Token counts, offsets of the records, and lists: checked against each other, and that
        they are what the manifest says."""
        meta = self._tensors("meta")
        groups = -(-self.count // GROUP_RECORDS)
        shapes: dict[str, tuple[Any, int | None]] = {"n_tokens": (np.uint16, self.count)}
        shapes |= {f"{tier}_group_offset_bytes": (np.int64, groups) for tier in self.entry.segments}
        for name, (dtype, length) in shapes.items():
            found = meta.get(name)
            if (
                found is None
                or found.dtype != dtype
                or found.ndim != 1
                or length not in (None, len(found))
            ):
                self._refuse(
                    f"metadata {name} does not fit the manifest",
                    None,
                    f"{np.dtype(dtype)} [{length}]",
                )
        if int(meta["n_tokens"].sum(dtype=np.int64)) != self.entry.tokens:
            self._refuse(
                "tokens do not add up", int(meta["n_tokens"].sum(dtype=np.int64)), self.entry.tokens
            )
        for tier, segments in self.entry.segments.items():
            offsets = meta[f"{tier}_group_offset_bytes"]
            if (offsets < 0).any() or (
                offsets > max(segment.size_bytes for segment in segments)
            ).any():
                self._refuse(
                    f"offsets of {tier} records outside their files",
                    int(offsets.max()),
                    "less than a file's size",
                )
        return meta

    def _refuse(self, what: str, got: object, expected: object) -> None:
        raise errors.FormatError(what, path=self.path, got=got, expected=expected, fix=REBUILD)

    @cached_property
    def model(self) -> dict[str, np.ndarray]:
        """What was trained, of a base: of the first stage (``first_stage.``), projection,
        codebooks."""
        return self._tensors("model")

    def _tensors(self, name: str) -> dict[str, np.ndarray]:
        with self.opened() as (file, sections):
            data = read_section(self._engine, file, self._section(sections, name))
        try:
            return load_safetensors(data.tobytes())
        except (SafetensorError, TypeError, KeyError, ValueError) as error:
            raise errors.FormatError(
                f"damaged {name}", path=self.path, got=str(error), fix=REBUILD
            ) from error

    def _section(self, sections: dict[str, Section], name: str) -> Section:
        if name not in sections:
            raise errors.FormatError(f"no section {name}", path=self.path, fix=REBUILD)
        return sections[name]

    # --- sections of the first stage, see `StoredEntries` ---

    def size_bytes(self, name: str) -> int:
        with self.opened() as (_, sections):
            return self._section(sections, stage_section(name)).size_bytes

    def read(self, name: str) -> np.ndarray:
        with self.opened() as (file, sections):
            return read_section(self._engine, file, self._section(sections, stage_section(name)))

    def windows(self, name: str) -> Generator[np.ndarray, None, None]:
        with self.opened() as (file, sections):
            yield from section_windows(
                self._engine, file, self._section(sections, stage_section(name))
            )

    def place(self, name: str) -> Region:
        with self.opened() as (_, sections):
            section = self._section(sections, stage_section(name))
            if section.offset_bytes % BLOCK_BYTES:
                self._refuse(
                    f"section {name} of the first stage",
                    f"at byte {section.offset_bytes}",
                    f"a multiple of {BLOCK_BYTES}",
                )
            return Region(self.path, section.offset_bytes, section.size_bytes)

    @property
    def texts_resident_bytes(self) -> int:
        """Bytes that ids and texts keep in memory."""
        return self._texts.resident_bytes

    def texts(self, numbers: Sequence[int]) -> list[tuple[DocumentId, str]]:
        """(id, text) of record numbers, in the order asked; no wrong one is handed out."""
        with self.opened() as (file, sections):
            return self._texts.get(file, sections, numbers)

    def numbers(self, ids: Sequence[DocumentId], alive: Callable[[int], bool]) -> np.ndarray:
        """int64 [m]: the record number of each id, -1 where there is none alive."""
        with self.opened() as (file, sections):
            return self._texts.numbers(file, sections, ids, alive)

    def first_by_hash(self, numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `PartTexts.first_by_hash`."""
        with self.opened() as (file, sections):
            return self._texts.first_by_hash(file, sections, numbers, count)

    def verify(self) -> None:
        """Reads every section and compares its checksum. Raises ChecksumError."""
        with self.opened() as (file, sections):
            for section in sections.values():
                check_section(self._engine, file, section)
