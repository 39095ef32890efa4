"""The manifest of a directory of postings: what it holds, which files, how texts are cut. docs/postings-format.md has the specification."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import errors
from ..storage import NativeEngine
from ..storage.files import Region
from ..storage.manifest import read_manifest, write_manifest
from ..storage.parse import Fields
from .analyzer import Analyzer
from .bm25 import BM25, VARIANTS
from .stored.layout import COUNT, DICTIONARY, FLOAT, FORWARD, IMPACT, LENGTHS, LISTS, RECORDS_MAX, ROWS, TERMS

MAGIC, VERSION = "espnx-postings", 1
KINDS = {"bm25": COUNT, "impact": IMPACT, "float": FLOAT}
SECTIONS = (DICTIONARY, LENGTHS, TERMS, LISTS, FORWARD, ROWS)
SEGMENTS_MAX = 4096
#: How a collection is split: each part has all postings of its records, or all postings of its terms.
PLACEMENTS = ("passages", "terms")
PARTS_MAX = 4096
_REBUILD = "restore the index from a copy, or build it again"


@dataclass(frozen=True)
class SegmentFacts:
    """A segment in the directory: files ``NAME.SECTION``.

    Attributes:
        name: of its files.
        first_number: of its record 0.
        n_records: numbers from there on; some may be of deleted records.
        sizes: bytes of each section.
    """

    name: str
    first_number: int
    n_records: int
    sizes: dict[str, int]

    def file_name(self, section: str) -> str:
        return f"{self.name}.{section}"

    def regions(self, directory: str) -> dict[str, Region]:
        """Where its sections lie."""
        return {section: Region(os.path.join(directory, self.file_name(section)), 0, size) for section, size in self.sizes.items()}


@dataclass(frozen=True)
class SplitFacts:
    """Of a directory that holds one part of a collection which is split over several.

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
    """

    kind: str
    analyzer: Analyzer
    bm25: BM25
    segments: tuple[SegmentFacts, ...] = ()
    generation: int = 1
    deletions: str | None = None
    n_deleted: int = 0
    split: SplitFacts | None = None

    @property
    def end_number(self) -> int:
        """The number of the next record that is added."""
        return self.segments[-1].first_number + self.segments[-1].n_records if self.segments else 0

    @property
    def file_names(self) -> set[str]:
        """All files but the manifest."""
        named = {segment.file_name(section) for segment in self.segments for section in segment.sizes}
        return named | ({self.deletions} if self.deletions else set())

    @property
    def size_bytes(self) -> int:
        return sum(size for segment in self.segments for size in segment.sizes.values())

    def next(self, **changes: Any) -> Facts:
        """The next version."""
        return replace(self, generation=self.generation + 1, **changes)


def write_facts(engine: NativeEngine, directory: str, facts: Facts) -> None:
    """Publishes a version. Everything that it names must be on disk. Raises WriteError, DiskFullError."""
    fields: dict[str, Any] = {
        "kind": facts.kind, "analyzer": facts.analyzer.fields | {"digest": facts.analyzer.digest}, "bm25": asdict(facts.bm25),
        "segments": [asdict(segment) for segment in facts.segments], "generation": facts.generation, "deletions": facts.deletions or "",
        "n_deleted": facts.n_deleted,
    }  # fmt: skip
    if facts.split is not None:
        fields["split"] = asdict(facts.split)
    write_manifest(engine, directory, MAGIC, VERSION, fields)


def read_facts(engine: NativeEngine, directory: str) -> Facts:
    """Raises StoreNotFoundError, FormatError, ReadError."""
    path = os.path.join(directory, "MANIFEST.json")
    fields = Fields(read_manifest(engine, directory, MAGIC, VERSION), path, fix=_REBUILD)
    segments = []
    at = 0
    for each in fields.each("segments", count=SEGMENTS_MAX):
        sizes = each.inner("sizes")
        names = [section for section in SECTIONS if section in sizes]
        segment = SegmentFacts(
            each.file_name("name"), each.whole("first_number"), each.whole("n_records", most=RECORDS_MAX),
            {name: sizes.whole(name) for name in names},
        )  # fmt: skip
        if segment.first_number < at:
            each.refuse("first_number", f"at least {at}")
        at = segment.first_number + segment.n_records
        segments.append(segment)
    try:
        analyzer, bm25 = parse_analyzer(fields.inner("analyzer")), _bm25(fields.inner("bm25"))
    except errors.InvalidInputError as error:
        raise errors.FormatError("manifest of postings", path=path, got=str(error), fix=_REBUILD) from error
    deletions = fields.text("deletions", most=255)
    return Facts(
        fields.choice("kind", KINDS), analyzer, bm25, tuple(segments), fields.whole("generation", 1),
        fields.file_name("deletions") if deletions else None, fields.whole("n_deleted"),
        _split(fields.inner("split")) if "split" in fields else None,
    )  # fmt: skip


def check_whole_collection(facts: Facts, directory: str) -> None:
    """Raises InvalidInputError for a part of a collection, which is searched, and changed, with its other parts or not at all."""
    if facts.split is not None:
        raise errors.InvalidInputError(
            f"postings in {directory}", got=f"part {facts.split.part} of {facts.split.n_parts} of a collection", expected="a whole one",
            fix="search it by espnx.postings.SplitPostings([...]), or with --also; to change it, build it again",
        )  # fmt: skip


def parse_analyzer(fields: Fields) -> Analyzer:
    """Of its fields and their digest, as a manifest has them. Raises FormatError, and InvalidInputError for what no analyzer has."""
    is_named = isinstance(fields.values().get("stop_words"), str)
    words = fields.text("stop_words") if is_named else tuple(fields.texts("stop_words", count=100_000))
    stemmer = fields.text("stemmer") if "stemmer" in fields else None
    found = Analyzer(fields.text("pattern"), fields.flag("lower"), words, stemmer)
    if found.digest != fields.hexadecimal("digest", 64):
        fields.refuse("digest", f"{found.digest}, of the analyzer that this espnx makes of it")
    return found


def _split(fields: Fields) -> SplitFacts:
    n_parts = fields.whole("n_parts", 1, PARTS_MAX)
    return SplitFacts(
        fields.hexadecimal("collection", 32), fields.whole("part", most=n_parts - 1), n_parts, fields.choice("placement", PLACEMENTS),
        fields.whole("n_records", most=RECORDS_MAX * PARTS_MAX),
    )  # fmt: skip


def _bm25(fields: Fields) -> BM25:
    return BM25(fields.choice("variant", VARIANTS), fields.real("k1"), fields.real("b"), fields.real("delta"))
