"""What a store's manifest says, read into types: every value has the type and the range that it can
have, or the store is not opened."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ... import errors
from ...device.record_layout import FORMAT_NUMBERS, RecordSchema
from ...ops.maxsim.limits import DIM_MAX
from ...storage import NativeEngine
from ...storage.manifest import NAME as MANIFEST_NAME
from ...storage.manifest import read_manifest
from ...storage.parse import Fields
from ..first_stage.interface import FirstStage
from ..first_stage.registry import described, parse_stage
from .part import GROUP_RECORDS, PartEntry
from .part_file import REBUILD, VERSION

MAGIC = "espnx-embedding-store"
BUILDING = "building"  # a directory beside the manifest: of a build under way
_GENERATION_MAX = 10**15
_PARTS_MAX, _DIRECTORIES_MAX, _BITMAP_MAX = 1 << 16, 4096, 1 << 37
#: Of what was trained, what an exact score depends on: the first stage and a coarse tier choose
#: documents, they score none.
_SCORING = ("projection", "full.")
_PAYS = 0.2  # share from which compacting is advised


@dataclass(frozen=True)
class DeletedEntry:
    """The bitmap of deleted records: that of records below `records`; those from there on are
    alive."""

    path: str
    size_bytes: int
    crc32c: int
    records: int


@dataclass(frozen=True)
class EncoderEntry:
    """Whose vectors a store holds: the encoder's name (None: documents brought their vectors), and
    the dimensions that it delivers."""

    name: str | None
    d_cls: int
    dim: int


@dataclass(frozen=True)
class Manifest:
    """A version of a store: what is written to MANIFEST.json and read from it, each value of the
    type and range that it must have.

    Attributes:
        score_space: see `score_space`.
        schema: of the records. coarse: of the coarse tier, or None.
        count: documents that are alive. tokens: of all records.
        is_normalised: whether projected rows keep the length that they had; None without a
            projection.
        first_stage: without what was trained.
        directories: where data segments go beside the store's own.
        parts: ascending; numbers of records are theirs alone.
    """

    store_id: str
    generation: int
    base_generation: int
    score_space: str
    encoder: EncoderEntry
    schema: RecordSchema
    coarse: RecordSchema | None
    count: int
    tokens: int
    is_normalised: bool | None
    first_stage: FirstStage
    cls_weight: float
    directories: tuple[str, ...]
    parts: tuple[PartEntry, ...]
    deleted: DeletedEntry | None

    def fields(self) -> dict[str, Any]:
        """The fields of MANIFEST.json."""
        schema, coarse = self.schema, self.coarse
        return {
            "store_id": self.store_id,
            "generation": self.generation,
            "base_generation": self.base_generation,
            "score_space": self.score_space,
            "records": {
                "count": self.count,
                "format": schema.format,
                "d_cls": schema.d_cls,
                "dim": schema.dim,
                "tokens": self.tokens,
            },
            "coarse": None if coarse is None else {"format": coarse.format, "dim": coarse.dim},
            "projection": None
            if self.is_normalised is None
            else {"is_normalised": self.is_normalised},
            "encoder": asdict(self.encoder),
            "first_stage": described(self.first_stage),
            "cls_weight": self.cls_weight,
            "directories": list(self.directories),
            "parts": [part.fields() for part in self.parts],
            "deleted": None if self.deleted is None else asdict(self.deleted),
        }

    @property
    def tiers(self) -> dict[str, RecordSchema]:
        """The schemas of the records by name, the full one first."""
        return (
            {"full": self.schema}
            if self.coarse is None
            else {"full": self.schema, "coarse": self.coarse}
        )

    @property
    def end_number(self) -> int:
        """Record numbers lie below it. Each part begins at a multiple of 64; numbers left out
        between parts are nobody's."""
        return self.parts[-1].end_number if self.parts else 0

    @property
    def dead_share(self) -> float:
        """Share of the records that are deleted ones, whose space compacting frees."""
        total = sum(part.count for part in self.parts)
        return 1 - self.count / total if total else 0.0

    @property
    def added_share(self) -> float:
        """Share of the records that were added: they lie apart from the others of their lists until
        the store is compacted."""
        total = sum(part.count for part in self.parts)
        return 1 - self.parts[0].count / total if total else 0.0

    @property
    def compacting_pays(self) -> bool:
        """Whether a fifth of the store is dead or lies out of order, or nothing is alive."""
        return bool(self.parts) and max(self.dead_share, self.added_share) >= _PAYS


def read_store_manifest(engine: NativeEngine, path: str | os.PathLike[str]) -> Manifest:
    """Raises StoreNotFoundError, which names a build that was interrupted there; FormatError,
    naming the manifest, for a value that cannot be."""
    try:
        found = read_manifest(engine, path, MAGIC, VERSION)
    except errors.StoreNotFoundError as error:
        if not os.path.isdir(os.path.join(path, BUILDING)):
            raise
        fix = "a build was interrupted here: the same build goes on"
        raise errors.StoreNotFoundError(
            "no published store", path=path, expected=error.expected, fix=fix
        ) from None
    return parse_manifest(found, os.path.join(path, MANIFEST_NAME))


def data_directories(path: str | os.PathLike[str]) -> list[str]:
    """The directories in which the data files of a store may lie, its own first. Raises as
    `read_store_manifest`."""
    with NativeEngine(pool_bytes=1 << 20) as engine:
        return [os.fspath(path), *read_store_manifest(engine, path).directories]


def parse_manifest(found: Mapping[str, Any], path: str) -> Manifest:
    """The opposite of `Manifest.fields`. Raises FormatError, naming `path`."""
    fields = Fields(found, path, fix=REBUILD)
    generation, encoder, records = (
        fields.whole("generation", 1, _GENERATION_MAX),
        _parse_encoder(fields),
        fields.inner("records"),
    )
    if "coarse" not in set(fields):
        fields.refuse("coarse", "an object, or null")
    coarse = _parse_schema(fields.inner("coarse"), 0) if "coarse" in fields else None
    tiers = ["full"] if coarse is None else ["full", "coarse"]
    parts = tuple(PartEntry.parse(each, tiers) for each in fields.each("parts", count=_PARTS_MAX))
    at = 0
    for number, part in enumerate(parts):
        if (
            part.first_number < at
            or part.first_number % GROUP_RECORDS
            or (number == 0 and part.first_number)
        ):
            fields.refuse(
                "parts",
                "parts whose records begin at ascending multiples of 64, the first at 0",
                part.first_number,
            )
        at = part.end_number
    total = sum(part.count for part in parts)
    if records.whole("count") > total or records.whole("tokens") != sum(
        part.tokens for part in parts
    ):
        records.refuse("count", f"what the parts hold: at most {total} records, and their tokens")
    return Manifest(
        store_id=fields.hexadecimal("store_id", 32),
        generation=generation,
        base_generation=fields.whole("base_generation", 1, generation),
        score_space=fields.hexadecimal("score_space", 32),
        encoder=encoder,
        schema=_parse_schema(records, records.whole("d_cls", 0, DIM_MAX)),
        coarse=coarse,
        count=records.whole("count"),
        tokens=records.whole("tokens"),
        is_normalised=fields.inner("projection").flag("is_normalised")
        if "projection" in fields
        else None,
        first_stage=parse_stage(fields.inner("first_stage"), encoder.d_cls, encoder.dim),
        cls_weight=fields.real("cls_weight"),
        directories=tuple(fields.texts("directories", count=_DIRECTORIES_MAX)),
        parts=parts,
        deleted=_parse_deleted(fields, at),
    )


def _parse_encoder(fields: Fields) -> EncoderEntry:
    encoder = fields.inner("encoder")
    name = encoder.text("name") if "name" in encoder else None
    return EncoderEntry(name, encoder.whole("d_cls", 0, DIM_MAX), encoder.whole("dim", 1, DIM_MAX))


def _parse_schema(fields: Fields, d_cls: int) -> RecordSchema:
    return RecordSchema(
        fields.choice("format", FORMAT_NUMBERS), d_cls, fields.whole("dim", 1, DIM_MAX)
    )


def _parse_deleted(fields: Fields, end_number: int) -> DeletedEntry | None:
    if "deleted" not in fields:
        return None
    deleted = fields.inner("deleted")
    records = deleted.whole("records", 1, end_number)
    size = deleted.whole("size_bytes", -(-records // 8), _BITMAP_MAX)
    return DeletedEntry(
        deleted.text("path"), size, deleted.whole("crc32c", most=2**32 - 1), records
    )


def score_space(settings: Mapping[str, Any], model: Mapping[str, np.ndarray]) -> str:
    """Which stores give scores that may be compared: 16 bytes in hexadecimal, the same where every
    document would get the same score.

    Args:
        settings: all that an exact score depends on and that is no tensor: encoder, dimensions,
            format, CLS weight; JSON.
        model: what was trained, by name.
    """
    hasher = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(name for name in model if name.startswith(_SCORING)):
        tensor = np.ascontiguousarray(model[name])
        hasher.update(f"\0{name} {tensor.dtype.str} {tensor.shape}\0".encode())
        hasher.update(tensor.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()[:32]
