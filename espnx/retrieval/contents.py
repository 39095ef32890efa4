"""What a store's manifest says, read into types: every value has the type and the range that it can have, or the store is not opened."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..storage import NativeEngine
from ..storage.manifest import NAME as MANIFEST_NAME
from ..storage.manifest import read_manifest
from ..storage.parse import Fields
from .lists import code_bytes
from .part import GROUP_RECORDS, PartEntry
from .part_file import REBUILD, VERSION
from .record import FORMAT_NUMBERS

MAGIC = "espnx-embedding-store"
_GENERATION_MAX = 10**15
_PARTS_MAX, _DIM_MAX, _LISTS_MAX, _BITMAP_MAX = 1 << 16, 1 << 16, 1 << 27, 1 << 37
_PAYS = 0.2  # share from which compacting is advised
_POOLINGS = ("cls", "mean", "muvera")


@dataclass(frozen=True)
class DeletedEntry:
    """The bitmap of deleted records: that of records below `records`; those from there on are alive."""

    path: str
    size_bytes: int
    crc32c: int
    records: int


@dataclass(frozen=True)
class Contents:
    """A version of a store.

    Attributes:
        fields: of the manifest, each with the type and range that it must have.
        parts: ascending; numbers of records are theirs alone.
        code_bytes: of a vector in the first stage.
    """

    fields: dict[str, Any]
    store_id: str
    generation: int
    base_generation: int
    parts: tuple[PartEntry, ...]
    deleted: DeletedEntry | None
    nlist: int
    code_bytes: int

    @property
    def end_number(self) -> int:
        """Record numbers lie below it."""
        return self.parts[-1].end_number if self.parts else 0

    @property
    def dead_share(self) -> float:
        """Share of the records that are deleted ones, whose space compacting frees."""
        total = sum(part.count for part in self.parts)
        return 1 - self.fields["records"]["count"] / total if total else 0.0

    @property
    def added_share(self) -> float:
        """Share of the records that were added: they lie apart from the others of their lists until the store is compacted."""
        total = sum(part.count for part in self.parts)
        return 1 - self.parts[0].count / total if total else 0.0

    @property
    def compacting_pays(self) -> bool:
        """Whether a fifth of the store is dead or lies out of order, or nothing is alive."""
        return bool(self.parts) and max(self.dead_share, self.added_share) >= _PAYS


def read_contents(engine: NativeEngine, path: str | os.PathLike[str]) -> Contents:
    """Raises StoreNotFoundError; FormatError, naming the manifest, for a value that cannot be."""
    return parse_contents(read_manifest(engine, path, MAGIC, VERSION), os.path.join(path, MANIFEST_NAME))


def parse_contents(manifest: Mapping[str, Any], path: str) -> Contents:
    fields = Fields(manifest, path, fix=REBUILD)
    store_id, generation = fields.hexadecimal("store_id", 32), fields.whole("generation", 1, _GENERATION_MAX)
    _check_records(fields)
    nlist, size = _check_first_stage(fields)
    tiers = ["full", "compact"] if "compact" in fields else ["full"]
    parts = tuple(PartEntry.parse(each, tiers) for each in fields.each("parts", count=_PARTS_MAX))
    at = 0
    for number, part in enumerate(parts):
        if part.first_number < at or part.first_number % GROUP_RECORDS or (number == 0 and part.first_number):
            fields.refuse("parts", "parts whose records begin at ascending multiples of 64, the first at 0", part.first_number)
        at = part.end_number
    if parts and not nlist:
        fields.refuse("first_stage", "lists, where there are records", 0)
    records = fields.inner("records")
    total = sum(part.count for part in parts)
    if records.whole("count") > total or records.whole("tokens") != sum(part.tokens for part in parts):
        records.refuse("count", f"what the parts hold: at most {total} records, and their tokens")
    if "directories" in fields:
        fields.texts("directories", count=4096)
    return Contents(
        fields=dict(manifest), store_id=store_id, generation=generation, base_generation=fields.whole("base_generation", 1, generation),
        parts=parts, deleted=_parse_deleted(fields, at), nlist=nlist, code_bytes=size,
    )  # fmt: skip


def _check_records(fields: Fields) -> None:
    records, encoder = fields.inner("records"), fields.inner("encoder")
    records.choice("format", FORMAT_NUMBERS)
    for owner, name, least in ((records, "d_cls", 0), (records, "dim", 1), (encoder, "d_cls", 0), (encoder, "dim", 1)):
        owner.whole(name, least, _DIM_MAX)
    if "name" in encoder:
        encoder.text("name")
    if "compact" in fields:
        compact = fields.inner("compact")
        compact.choice("format", FORMAT_NUMBERS)
        compact.whole("dim", 1, _DIM_MAX)
    fields.real("cls_weight")
    if "projection" in fields:
        fields.inner("projection").flag("is_normalised")


def _check_first_stage(fields: Fields) -> tuple[int, int]:
    """(lists, bytes of a code)."""
    stage = fields.inner("first_stage")
    stage.choice("kind", ("ivf",))
    stage.choice("vector", _POOLINGS)
    nlist, dim = stage.whole("nlist", most=_LISTS_MAX), stage.whole("dim", 1, 1 << 24)
    stage.whole("nprobe", 0, max(nlist, 1))
    steps, parameters = stage.inner("steps"), stage.inner("parameters")
    for name in steps:
        steps.real(name)
    for name in parameters:
        if name in parameters:  # not null
            parameters.whole(name, most=1 << 63)
    try:
        return nlist, code_bytes(stage.text("code", most=16), dim)
    except errors.InvalidInputError as error:
        stage.refuse("code", error.expected)


def _parse_deleted(fields: Fields, end_number: int) -> DeletedEntry | None:
    if "deleted" not in fields:
        return None
    deleted = fields.inner("deleted")
    records = deleted.whole("records", 1, end_number)
    size = deleted.whole("size_bytes", -(-records // 8), _BITMAP_MAX)
    return DeletedEntry(deleted.text("path"), size, deleted.whole("crc32c", most=2**32 - 1), records)


def contents_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest that its writer does not add itself, as a copy."""
    own = ("magic", "version", "byte_order", "checksum")
    return {key: copy.deepcopy(value) for key, value in manifest.items() if key not in own}
