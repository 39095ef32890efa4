"""What a build is trained to (first stage, projection, codebooks), as a value: made once, kept in a
directory, shared by any number of stores. Exact scores of stores that share it are of one score
space: their rankings may be merged.

    DIR/MANIFEST.json        settings, sizes and checksums, written last
    DIR/trained.safetensors  tensors by the names that a store's base has for them
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from ... import errors
from ...checks import check_path
from ...device.record_layout import FORMAT_NUMBERS, RecordSchema
from ...ops.maxsim import Codebook
from ...storage import NativeEngine
from ...storage.files import crc32c, read_file, write_file
from ...storage.manifest import NAME as MANIFEST_NAME
from ...storage.manifest import read_manifest, write_manifest
from ...storage.native import given_engine
from ...storage.parse import Fields, check_plain_file
from ...storage.replacing import StoreKind, VersionedFiles, versioned, writing_to
from ..first_stage.interface import FirstStage
from ..first_stage.registry import described, parse_stage
from ..store.projection import Projection
from ..store.store import STAGE_PREFIX, codebook_of, projection_of, stage_model
from . import under_way
from .options import COARSE_FORMATS

MAGIC, VERSION, TENSORS = "espnx-trained", 1, "trained.safetensors"
_FILES = VersionedFiles((TENSORS,))
KIND = StoreKind(
    MAGIC,
    VERSION,
    "what was trained",
    lambda path: {each for each in under_way.others(path) if not _FILES.is_own(each)},
)
_SIZE_MAX, _DIM_MAX = 1 << 36, 1 << 16
_FIX = "restore it from a copy, or train again"


@dataclass(frozen=True, eq=False)
class Trained:
    """See the module. What `espnx.train` returns and `espnx.build` takes.

    Attributes:
        schema: of the records, in the dimensions that are stored. coarse: of the coarse tier, or
            None.
        encoder: name of the encoder whose vectors it was trained on; None: documents brought them.
        dim: of the encoder's token vectors.
        first_stage: trained; nothing measured, since that is of the documents of a store.
        tensors: ``projection``, ``full.centroids``, ... by name.
        is_normalised: whether projected rows keep the length that they had.
    """

    schema: RecordSchema
    coarse: RecordSchema | None
    encoder: str | None
    dim: int
    first_stage: FirstStage
    tensors: Mapping[str, np.ndarray]
    is_normalised: bool = False

    @property
    def model(self) -> dict[str, np.ndarray]:
        """All that was trained, as a store's base keeps it."""
        return {**self.tensors, **stage_model(self.first_stage)}

    @cached_property
    def id(self) -> str:
        """16 bytes in hexadecimal, of all of it: equal ones were trained to the same."""
        hasher = hashlib.sha256(json.dumps(self._settings(), sort_keys=True).encode())
        hasher.update(save_safetensors(self.model))
        return hasher.hexdigest()[:32]

    @property
    def projection(self) -> Projection | None:
        """The projection from the encoder's dimensions to the records'."""
        return projection_of(self.tensors, (self.dim, self.schema.dim), self.is_normalised, TENSORS)

    def codebook(self, tier: str) -> Codebook | None:
        """The codebook of ``full`` or ``coarse`` records; None where their format needs none."""
        schema = self.schema if tier == "full" else self.coarse
        return None if schema is None else codebook_of(self.tensors, tier, schema, TENSORS)

    def _settings(self) -> dict[str, Any]:
        return {
            "format": self.schema.format,
            "coarse": None if self.coarse is None else self.coarse.format,
            "encoder": {"name": self.encoder, "d_cls": self.schema.d_cls, "dim": self.dim},
            "dim": self.schema.dim,
            "is_normalised": self.is_normalised,
            "first_stage": described(self.first_stage),
        }

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        engine: NativeEngine | None = None,
    ) -> None:
        """Writes it to a directory, which is made if need be and must hold nothing else but, with
        `replace`, what was trained before.

        Raises InvalidInputError for one that does; StoreBusyError, DiskFullError, WriteError.
        """
        where = check_path("path of what was trained", path)
        with (
            given_engine(engine) as owned,
            writing_to(where, KIND, replace=replace) as is_replacement,
        ):
            self.write(owned, where, is_replacement=is_replacement)

    def write(self, engine: NativeEngine, where: str, *, is_replacement: bool) -> None:
        """The same, to a directory that this process alone writes to. Raises DiskFullError,
        WriteError."""
        generation = _FILES.begin(engine, where, KIND, is_replacement=is_replacement)
        file = os.path.join(where, versioned(TENSORS, generation))
        size, crc = write_file(engine, file, save_safetensors(self.model))
        engine.sync_directory(where)
        fields = {
            "generation": generation,
            "id": self.id,
            **self._settings(),
            "tensors": {"size_bytes": size, "crc32c": crc},
        }
        write_manifest(engine, where, MAGIC, VERSION, fields)
        _FILES.keep(where, generation)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, engine: NativeEngine | None = None) -> Trained:
        """Reads what `save` wrote. Raises StoreNotFoundError; FormatError, ChecksumError, ...:
        nothing damaged is loaded."""
        where = check_path("path of what was trained", path)
        with given_engine(engine) as owned:
            fields = Fields(
                read_manifest(owned, where, MAGIC, VERSION),
                os.path.join(where, MANIFEST_NAME),
                fix=_FIX,
            )
            file = os.path.join(where, versioned(TENSORS, fields.whole("generation", 1)))
            model = _read_tensors(owned, file, fields.inner("tensors"))
        return cls._parse(fields, model, file)

    @classmethod
    def _parse(cls, fields: Fields, model: dict[str, np.ndarray], file: str) -> Trained:
        encoder = fields.inner("encoder")
        d_cls, dim = encoder.whole("d_cls", 0, _DIM_MAX), encoder.whole("dim", 1, _DIM_MAX)
        stored = fields.whole("dim", 1, dim)
        stage = parse_stage(fields.inner("first_stage"), d_cls, dim)
        arrays = {
            name.removeprefix(STAGE_PREFIX): array
            for name, array in model.items()
            if name.startswith(STAGE_PREFIX)
        }
        found = cls(
            schema=RecordSchema(fields.choice("format", FORMAT_NUMBERS), d_cls, stored),
            coarse=RecordSchema(fields.choice("coarse", COARSE_FORMATS), 0, stored)
            if "coarse" in fields
            else None,
            encoder=encoder.text("name") if "name" in encoder else None,
            dim=dim,
            first_stage=stage.with_arrays(arrays, file),
            tensors={
                name: array for name, array in model.items() if not name.startswith(STAGE_PREFIX)
            },
            is_normalised=fields.flag("is_normalised"),
        )
        if (found.projection is None) != (stored == dim):
            fields.refuse("dim", f"{dim}, or a projection", stored)
        for tier in ("full", "coarse"):
            found.codebook(tier)
        if fields.hexadecimal("id", 32) != found.id:
            fields.refuse("id", found.id)
        return found


def _read_tensors(engine: NativeEngine, path: str, entry: Fields) -> dict[str, np.ndarray]:
    size = entry.whole("size_bytes", 1, _SIZE_MAX)
    try:
        found = check_plain_file(path)
    except OSError as error:
        raise errors.FormatError(
            "file of what was trained missing", path=path, got=str(error), fix=_FIX
        ) from error
    if found != size:
        raise errors.TruncatedFileError(
            "file of what was trained has another size",
            path=path,
            got=found,
            expected=size,
            fix=_FIX,
        )
    data = read_file(engine, path)
    if crc32c(data) != entry.whole("crc32c", most=2**32 - 1):
        raise errors.ChecksumError(
            "damaged file of what was trained",
            path=path,
            got=f"CRC32C {crc32c(data):08x}",
            fix=_FIX,
        )
    try:
        return dict(load_safetensors(data))
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise errors.FormatError(
            "damaged file of what was trained", path=path, got=str(error), fix=_FIX
        ) from error
