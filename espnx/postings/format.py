"""The manifest of a directory of postings: what it holds, which files, how texts are cut.
docs/postings-format.md has the specification."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from typing import Any

from .. import errors
from ..storage import NativeEngine
from ..storage.documents import rows
from ..storage.files import Region, Section
from ..storage.manifest import NAME as MANIFEST
from ..storage.manifest import read_manifest, write_manifest
from ..storage.parse import Fields
from .analyzer import Analyzer
from .bm25 import BM25, VARIANTS
from .stored.layout import (
    COUNT,
    DICTIONARY,
    FLOAT,
    FORWARD,
    IMPACT,
    LENGTHS,
    LISTS,
    PLACES,
    RECORDS_MAX,
    TERMS,
)

MAGIC, VERSION = "espnx-postings", 2
KINDS = {"bm25": COUNT, "impact": IMPACT, "float": FLOAT}
#: In the order in which they lie in a segment's file.
SECTIONS = (*rows.SECTIONS, LISTS, TERMS, LENGTHS, FORWARD, PLACES, DICTIONARY)
#: Where each begins, in bytes; those that are not here at multiples of 64.
ALIGNMENT = {"ids": 4096, FORWARD: 4096}
#: Levels of additions keep their number below a hundred (`espnx.storage.levels`).
SEGMENTS_MAX = 1024
_SEGMENT_NAME = re.compile(r"s[0-9]{1,15}")
#: How a collection is split: each part has all postings of its records, or all postings of its
#: terms.
PLACEMENTS = ("passages", "terms")
PARTS_MAX = 4096
SUFFIX = "postings"
_SIZE_MAX = 1 << 53
_REBUILD = "restore the index from a copy, or build it again"


@dataclass(frozen=True)
class SegmentFacts:
    """A segment: the file ``NAME.postings`` in the directory.

    Attributes:
        name: of its file.
        first_number: of its record 0.
        n_records: numbers from there on; some may be of deleted records.
        sections: of the file, by name, in the order of `SECTIONS`.
    """

    name: str
    first_number: int
    n_records: int
    sections: dict[str, Section]

    @property
    def file_name(self) -> str:
        return f"{self.name}.{SUFFIX}"

    @property
    def end_number(self) -> int:
        return self.first_number + self.n_records

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return max(each.offset_bytes + each.size_bytes for each in self.sections.values())

    def regions(self, directory: str) -> dict[str, Region]:
        """The places of its sections."""
        path = os.path.join(directory, self.file_name)
        return {
            name: Region(path, each.offset_bytes, each.size_bytes)
            for name, each in self.sections.items()
        }

    def fields(self) -> dict[str, Any]:
        """The fields that a manifest holds."""
        sections = {name: [each.size_bytes, each.crc32c] for name, each in self.sections.items()}
        return {
            "name": self.name,
            "first_number": self.first_number,
            "n_records": self.n_records,
            "sections": sections,
        }


def section_offset(name: str, end_bytes: int) -> int:
    """The byte at which a section begins in a file whose sections end there so far."""
    alignment = ALIGNMENT.get(name, 64)
    return -(-end_bytes // alignment) * alignment


@dataclass(frozen=True)
class SplitFacts:
    """The place of a directory in a collection which is split over several.

    Attributes:
        collection: 32 hexadecimal digits, the same in all parts.
        part, n_parts: which of them this is.
        placement: a key of `PLACEMENTS`.
        n_records: of the whole collection.
    """

    collection: str
    part: int
    n_parts: int
    placement: str
    n_records: int


@dataclass(frozen=True)
class Facts:
    """What a manifest says.

    Attributes:
        kind: a key of `KINDS`.
        analyzer: of texts.
        bm25: how counts become scores where a search does not say.
        segments: ascending by number.
        generation: counts published versions, from 1.
        deletions: file of the deleted records, or None.
        n_deleted: records that were deleted.
        split: what this is a part of, or None.
        has_ids: whether records have ids of the caller's; else their numbers are all the ids there
            are.
        has_texts: whether texts are kept.
    """

    kind: str
    analyzer: Analyzer
    bm25: BM25
    segments: tuple[SegmentFacts, ...] = ()
    generation: int = 1
    deletions: str | None = None
    n_deleted: int = 0
    split: SplitFacts | None = None
    has_ids: bool = False
    has_texts: bool = False

    @property
    def has_documents(self) -> bool:
        """Whether segments have ids and texts of their records."""
        return self.has_ids or self.has_texts

    @property
    def end_number(self) -> int:
        """The number of the next record that is added."""
        return self.segments[-1].end_number if self.segments else 0

    @property
    def file_names(self) -> set[str]:
        """All files but the manifest."""
        return {segment.file_name for segment in self.segments} | (
            {self.deletions} if self.deletions else set()
        )

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


def write_facts(
    engine: NativeEngine, directory: str, facts: Facts, *, name: str = MANIFEST
) -> None:
    """Publishes a version; `name`: see `write_manifest`. Everything that it names must be on disk.
    Raises WriteError, DiskFullError."""
    fields: dict[str, Any] = {
        "kind": facts.kind,
        "analyzer": facts.analyzer.fields | {"digest": facts.analyzer.digest},
        "bm25": asdict(facts.bm25),
        "segments": [segment.fields() for segment in facts.segments],
        "generation": facts.generation,
        "deletions": facts.deletions or "",
        "n_deleted": facts.n_deleted,
        "has_ids": facts.has_ids,
        "has_texts": facts.has_texts,
    }
    if facts.split is not None:
        fields["split"] = asdict(facts.split)
    write_manifest(engine, directory, MAGIC, VERSION, fields, name=name)


def read_facts(engine: NativeEngine, directory: str, *, name: str = MANIFEST) -> Facts:
    """`name`: see `write_manifest`. Raises StoreNotFoundError, FormatError, ReadError."""
    path = os.path.join(directory, name)
    found = read_manifest(
        engine, directory, MAGIC, VERSION, name=name, built_by="espnx postings build"
    )
    fields = Fields(found, path, fix=_REBUILD)
    kind, has_ids, has_texts = (
        fields.choice("kind", KINDS),
        fields.flag("has_ids"),
        fields.flag("has_texts"),
    )
    wanted = _section_names(kind, has_documents=has_ids or has_texts)
    segments: list[SegmentFacts] = []
    for each in fields.each("segments", count=SEGMENTS_MAX):
        segments.append(_segment(each, wanted, segments[-1].end_number if segments else 0))
    if not segments or len({segment.name for segment in segments}) < len(segments):
        fields.refuse("segments", "one or more, each of a name of its own")
    try:
        analyzer, bm25 = parse_analyzer(fields.inner("analyzer")), _bm25(fields.inner("bm25"))
    except errors.InvalidInputError as error:
        raise errors.FormatError(
            "manifest of postings", path=path, got=str(error), fix=_REBUILD
        ) from error
    deletions, n_deleted = (
        fields.text("deletions", most=255),
        fields.whole("n_deleted", most=segments[-1].end_number),
    )
    if bool(deletions) != bool(n_deleted):
        fields.refuse("n_deleted", "above 0 where there are deletions, and only there")
    return Facts(
        kind,
        analyzer,
        bm25,
        tuple(segments),
        fields.whole("generation", 1),
        fields.file_name("deletions") if deletions else None,
        n_deleted,
        _split(fields.inner("split")) if "split" in fields else None,
        has_ids,
        has_texts,
    )


def _section_names(kind: str, *, has_documents: bool) -> list[str]:
    of_kind = (
        (LISTS, TERMS, LENGTHS, DICTIONARY)
        if KINDS[kind] == COUNT
        else (LISTS, TERMS, FORWARD, PLACES, DICTIONARY)
    )
    return [*(rows.SECTIONS if has_documents else ()), *of_kind]


def _segment(fields: Fields, names: list[str], first_number: int) -> SegmentFacts:
    """One that begins where the one before ends, with these sections. Raises FormatError."""
    name, given = fields.file_name("name"), fields.inner("sections")
    if _SEGMENT_NAME.fullmatch(name) is None:
        fields.refuse("name", "s and a number")
    if fields.whole("first_number") != first_number:
        fields.refuse("first_number", f"{first_number}, where the segment before ends")
    if sorted(given) != sorted(names):
        fields.refuse("sections", ", ".join(names), ", ".join(given)[:200])
    sections, end = dict[str, Section](), 0
    for section in names:
        values = given.wholes(section, most=_SIZE_MAX, count=2)
        if len(values) != 2 or values[1] >= 1 << 32:
            given.refuse(section, "bytes, and their CRC32C")
        sections[section] = Section(section_offset(section, end), *values)
        end = sections[section].offset_bytes + values[0]
    n_records = fields.whole("n_records", most=RECORDS_MAX)
    # of each: two bytes, in either
    if 2 * n_records > sections[LENGTHS if LENGTHS in sections else PLACES].size_bytes:
        fields.refuse("n_records", "as many as the sections have room for")
    return SegmentFacts(name, first_number, n_records, sections)


def check_whole_collection(facts: Facts, directory: str) -> None:
    """Raises InvalidInputError for a part of a collection, which is searched, and changed, with its
    other parts or not at all."""
    if facts.split is not None:
        raise errors.InvalidInputError(
            f"postings in {directory}",
            got=f"part {facts.split.part} of {facts.split.n_parts} of a collection",
            expected="a whole one",
            fix=(
                "search it by espnx.postings.SplitPostings([...]), or with --also; to change it, "
                "build it again"
            ),
        )


def parse_analyzer(fields: Fields) -> Analyzer:
    """Makes an analyzer of its fields and their digest, as a manifest has them. Raises FormatError,
    and InvalidInputError for what no analyzer has."""
    is_named = isinstance(fields.values().get("stop_words"), str)
    words = (
        fields.text("stop_words") if is_named else tuple(fields.texts("stop_words", count=100_000))
    )
    stemmer = fields.text("stemmer") if "stemmer" in fields else None
    found = Analyzer(fields.text("pattern"), fields.flag("lower"), words, stemmer)
    if found.digest != fields.hexadecimal("digest", 64):
        fields.refuse("digest", f"{found.digest}, of the analyzer that this espnx makes of it")
    return found


def _split(fields: Fields) -> SplitFacts:
    n_parts = fields.whole("n_parts", 1, PARTS_MAX)
    return SplitFacts(
        fields.hexadecimal("collection", 32),
        fields.whole("part", most=n_parts - 1),
        n_parts,
        fields.choice("placement", PLACEMENTS),
        fields.whole("n_records", most=RECORDS_MAX * PARTS_MAX),
    )


def _bm25(fields: Fields) -> BM25:
    return BM25(
        fields.choice("variant", VARIANTS),
        fields.real("k1"),
        fields.real("b"),
        fields.real("delta"),
    )
