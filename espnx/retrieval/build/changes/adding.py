"""Adds documents to a store: encoded in batches that fit the memory limit, each batch a part, all
of them one version.

Nothing is trained again: first stage, projection and codebooks are the store's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .... import errors
from ....device.record_layout import RecordSchema
from ....ops.maxsim import Codebook
from ....storage.documents.ids import DocumentId
from ...encoder import Encoder, remembered_encoder
from ...first_stage.interface import FirstStage
from ...store.part_file import FileWriter
from ...store.record import check_document, pack
from ...store.rows import Target, fills, format_until_coded
from ...store.store import Version
from ...versions.draft import Draft
from ...versions.part_writer import PartContents, finish_part
from ...versions.segments import NO_LIMIT, Layout, pieces
from ..arrange import checked_order
from ..budget import MemoryBudget
from ..builder import Progress
from ..documents import Document, batches, count_hint, decode_rows, encode

_DOCUMENTS_AT_ONCE = 256


class Batch:
    """Documents as a spool would hold them, in memory: vectors packed as records, in arrival order.
    What `rows.fills` reads, and the `Documents` of a first stage.

    Attributes:
        n_tokens: uint16 [m]. size_bytes: of the vectors held. scratch: see `Documents`.
    """

    codebook: Codebook | None = None
    scratch = ""  # known when the part has its place

    def __init__(self, schema: RecordSchema, stage: FirstStage, stored: str):
        self.schema, self._stage = schema, stage
        # what the vectors have to fit in the end
        self._checked = RecordSchema(stored, schema.d_cls, schema.dim)
        self.rows: list[tuple[DocumentId, str]] = []
        self.ids = set[tuple[type, DocumentId]]()
        self.size_bytes = 0
        self._blocks: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._vectors: list[np.ndarray] = []

    def append(self, documents: list[Document], encoder: Encoder | None) -> None:
        """Raises InvalidInputError for vectors that do not fit, or an encoder's exception."""
        encoded = encode(documents, encoder)
        for document, vectors in zip(documents, encoded, strict=True):
            check_document(vectors, self._checked, document.id)
        counts = np.array([len(vectors.tokens) for vectors in encoded], dtype=np.uint16)
        offsets, end = self.schema.lay_out(counts, 0)
        block = np.zeros(end, dtype=np.uint8)
        pack(encoded, self.schema, block, offsets, rows=[document.rows for document in documents])
        made = [self._stage.vector(vectors) for vectors in encoded]
        self._vectors.append(torch.stack(made).numpy().astype(np.float32))
        self._blocks.append(block)
        self._offsets.append(offsets + sum(len(each) for each in self._blocks[:-1]))
        self._counts.append(counts)
        self.rows += [(document.id, document.text) for document in documents]
        self.size_bytes += (
            len(block)
            + self._vectors[-1].nbytes
            + sum(len(document.text) for document in documents)
        )

    def seal(self) -> None:
        """No more documents."""
        self._block = np.concatenate(self._blocks)
        self._offset = np.concatenate(self._offsets)
        self.n_tokens, self._vectors = np.concatenate(self._counts), [np.concatenate(self._vectors)]
        self._blocks = []

    def read(self, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads the records of some documents: memory, uint8, and offsets."""
        return self._block, self._offset[arrivals]

    def __len__(self) -> int:
        return len(self.rows)

    def vectors(self, rows: int) -> Iterator[np.ndarray]:
        for first in range(0, len(self), rows):
            yield self._vectors[0][first : first + rows]

    def vector_sample(self, numbers: np.ndarray) -> np.ndarray:
        return self._vectors[0][numbers]

    def texts(self, order: np.ndarray | None = None) -> Iterator[str]:
        numbers = range(len(self.rows)) if order is None else order.tolist()
        return (self.rows[number][1] for number in numbers)


@dataclass
class Addition:
    """One call of `add`, under way. `remembers`: where `encoder` is None, the one that the store
    remembers is loaded when it is wanted."""

    version: Version
    draft: Draft
    encoder: Encoder | None
    replace: bool
    budget: MemoryBudget
    progress: Progress
    remembers: bool
    tokens: int = 0

    def __post_init__(self) -> None:
        built = self.version.manifest.encoder
        stored = self.version.schema_of("full")
        kept = format_until_coded(
            stored.format, len(self.version.tiers) > 1, self.version.projection is not None
        )
        self._schema = RecordSchema(kept, built.d_cls, built.dim)
        self._targets = {
            tier: Target(self.version.schema_of(tier), self.version.codebook(tier))
            for tier in self.version.tiers
        }
        self._limit_bytes = self.budget.record_bytes()

    def run(self, documents: Iterable[Any]) -> None:
        """Writes parts of the documents, and merges what has to be merged. Raises
        InvalidInputError, ..."""
        limit = self.budget.encoded_bytes()
        batch, seen, total = self._new_batch(), 0, count_hint(documents)
        for some in batches(documents, _DOCUMENTS_AT_ONCE, limit, self._schema.dim):
            self._check_new(some, batch)
            decoded = decode_rows(some, self._targets["full"].schema.format, self._schema.dim, None)
            if (
                self.encoder is None
                and self.remembers
                and any(document.vectors is None for document in decoded)
            ):
                self.encoder = remembered_encoder(self.version.manifest.encoder.name)
            batch.append(decoded, self.encoder)
            seen += len(some)
            self.progress("add", seen, total)
            if batch.size_bytes > limit // 2:
                self._write(batch)
                batch = self._new_batch()
        if len(batch):
            self._write(batch)
        if self.draft.added:
            self.draft.settle(self._limit_bytes)

    def _check_new(self, documents: list[Document], batch: Batch) -> None:
        """Raises InvalidInputError for an id that came before, or that the store holds; with
        `replace`, what it holds goes."""
        known = self.draft.numbers([document.id for document in documents])
        old = known[(known >= 0) & (known < self.version.manifest.end_number)]
        for document, number in zip(documents, known.tolist(), strict=True):
            key = type(document.id), document.id
            if key in batch.ids or number >= self.version.manifest.end_number:
                raise errors.InvalidInputError(
                    f"document id {document.id!r} occurs twice",
                    expected="unique ids",
                    fix="rename or drop one of the two",
                )
            if number >= 0 and not self.replace:
                raise errors.InvalidInputError(
                    f"document id {document.id!r} is in the store",
                    expected="new ids",
                    fix="replace it (replace=True, --replace), or drop it from the addition",
                )
            batch.ids.add(key)
        self.draft.delete(old)

    def _new_batch(self) -> Batch:
        return Batch(self._schema, self.version.first_stage, self.version.schema_of("full").format)

    def _write(self, batch: Batch) -> None:
        batch.seal()
        place, path = self.draft.place()
        batch.scratch = os.path.dirname(path)
        entries = self.version.first_stage.add(batch)
        order = np.concatenate(list(checked_order(entries, len(batch))))
        file, layouts = (
            FileWriter(self.version.engine, path),
            {tier: Layout(each.schema) for tier, each in self._targets.items()},
        )
        try:
            for tier, layout in layouts.items():
                for run in self._runs(batch, order):
                    fill = fills(batch, run, self.version.projection, [self._targets[tier]])[0]
                    layout.append(file, batch.n_tokens[run], fill, place.first_number, place.salt)
        except BaseException:
            file.abandon()
            raise
        rows = (batch.rows[arrival] for arrival in order.tolist())
        entry = finish_part(
            file,
            place,
            layouts,
            PartContents(rows, entries.sections, self.version.first_stage.in_place),
        )
        self.tokens += entry.tokens
        self.draft.append(entry, self._limit_bytes)

    def _runs(self, batch: Batch, order: np.ndarray) -> Iterator[np.ndarray]:
        return pieces(
            iter([order]),
            lambda some: batch.schema.sizes(batch.n_tokens[some]),
            self._limit_bytes,
            lambda: NO_LIMIT,
        )
