"""A first stage that another package brings: keeps the first dimensions of every document's vector
in memory, and looks at all of them.

With encoders whose first dimensions tell the most (Matryoshka), a quarter of the dimensions finds
nearly the same candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from espnx import Encoded, errors
from espnx.retrieval.first_stage.devices import StageDevices
from espnx.retrieval.first_stage.document_vector import DocumentVector
from espnx.retrieval.first_stage.interface import (
    CANDIDATES,
    Allowed,
    Candidates,
    Documents,
    Entries,
    LoadedStage,
    StageReads,
    StoredEntries,
)
from espnx.storage.parse import Fields

_METRICS = ("dot", "cosine")
_ROWS = 8192  # vectors at a time


@dataclass(frozen=True)
class NearSettings:
    """The options of a build.

    Attributes:
        dims: how many dimensions are kept; None: all.
        metric: ``dot`` or ``cosine``, of what is kept.
    """

    dims: int | None = None
    metric: str = "dot"

    def __post_init__(self) -> None:
        if self.dims is not None and (not isinstance(self.dims, int) or self.dims < 1):
            raise errors.InvalidInputError(
                "dims of near",
                got=repr(self.dims),
                expected="a whole number of at least 1, or None",
            )
        if self.metric not in _METRICS:
            raise errors.InvalidInputError(
                "metric of near", got=repr(self.metric), expected=" or ".join(_METRICS)
            )


@dataclass(frozen=True, eq=False)
class NearStage:
    """See `FirstStage`. Nothing is trained; records lie as documents came, or as another stage
    says.

    Attributes:
        document_vector: the vector of a document.
        dims: of it that are kept.
        metric: of the similarity.
    """

    kind: ClassVar[str] = "near"
    follows: ClassVar[bool] = True
    in_place: ClassVar[frozenset[str]] = frozenset()
    is_cls_similarity: ClassVar[bool] = False
    Settings: ClassVar[type[NearSettings]] = NearSettings

    document_vector: DocumentVector
    dims: int
    metric: str

    @classmethod
    def new(cls, settings: NearSettings, pooling: str | None, d_cls: int, dim: int) -> NearStage:
        of = DocumentVector.new(pooling, d_cls, dim)
        if settings.dims is not None and settings.dims > of.dim:
            raise errors.InvalidInputError(
                "dims of near",
                got=settings.dims,
                expected=f"at most {of.dim}, those of the vectors",
            )
        return cls(of, settings.dims or of.dim, settings.metric)

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> NearStage:
        of = DocumentVector.parse(fields, d_cls, dim)
        return cls(of, fields.whole("dims", 1, of.dim), fields.choice("metric", _METRICS))

    def describe(self) -> dict[str, Any]:
        return {**self.document_vector.describe(), "dims": self.dims, "metric": self.metric}

    @property
    def vector_dim(self) -> int:
        return self.document_vector.dim

    def vector(self, document: Encoded) -> torch.Tensor:
        return self.document_vector.of_document(document)

    def kept(self, vectors: np.ndarray) -> np.ndarray:
        """Of vectors [..., vector_dim]: float32 [..., dims], of length 1 where the metric wants
        that."""
        rows = np.ascontiguousarray(vectors[..., : self.dims], dtype="<f4")
        if self.metric == "cosine":
            rows = rows / np.maximum(
                np.linalg.norm(rows, axis=-1, keepdims=True), np.float32(1e-12)
            )
        return rows

    def fresh(self) -> NearStage:
        return self

    def train(self, documents: Documents, memory_bytes: int) -> NearStage:
        return self

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> NearStage:
        return self

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> NearStage:
        return self

    def add_bytes(self, count: int) -> int:
        return 4 * self.vector_dim * _ROWS

    def build_operations(self, count: int) -> int:
        return 0

    def resident_bytes(self, records: int) -> int:
        return 4 * self.dims * records

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        if order is None:
            return Entries(
                [np.arange(len(documents))], {"vectors": map(self.kept, documents.vectors(_ROWS))}
            )
        runs = (order[first : first + _ROWS] for first in range(0, len(order), _ROWS))
        return Entries([order], {"vectors": (self.kept(_sampled(documents, run)) for run in runs)})

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        numbers, vectors = self._all(parts)
        if order is None:
            dead = np.flatnonzero(np.unpackbits(deleted, bitorder="little"))
            order = numbers[~np.isin(numbers, dead)]
        return Entries([order], {"vectors": [vectors[np.searchsorted(numbers, order)]]})

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[NearStage, Entries]:
        return self, self.merge(parts, deleted, order)

    def check(self, parts: Sequence[StoredEntries]) -> None:
        for part in parts:
            if part.size_bytes("vectors") != 4 * self.dims * part.count:
                raise errors.FormatError(
                    "vectors of near do not fit the part",
                    path=part.path,
                    got=part.size_bytes("vectors"),
                )

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: int | None = None,
        deleted: np.ndarray | None = None,
        device: StageDevices | None = None,
    ) -> LoadedNear:
        self.check(parts)
        return LoadedNear(self, *self._all(parts))

    def _all(self, parts: Sequence[StoredEntries]) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of all records, ascending, and their vectors."""
        numbers = [np.arange(part.first_number, part.first_number + part.count) for part in parts]
        vectors = [part.read("vectors").view("<f4").reshape(-1, self.dims) for part in parts]
        return np.concatenate([np.empty(0, np.int64), *numbers]), np.concatenate(
            [np.empty((0, self.dims), np.float32), *vectors]
        )


def _sampled(documents: Documents, numbers: np.ndarray) -> np.ndarray:
    """Vectors of documents in any order."""
    ascending = np.argsort(numbers)
    found = documents.vector_sample(numbers[ascending])
    rows = np.empty_like(found)
    rows[ascending] = found
    return rows


@dataclass(frozen=True, eq=False)
class LoadedNear:
    """See `LoadedStage`. An effort means nothing to it: every vector is looked at."""

    stage: NearStage
    numbers: np.ndarray
    vectors: np.ndarray
    auto_effort: int = 1
    default_candidates: int = CANDIDATES
    needs_vectors: bool = True
    finds_equals: bool = True
    hit_rates: Mapping[float, float] = field(default_factory=dict)

    def prepare(self, query: Encoded, text: str | None = None) -> np.ndarray:
        return self.stage.kept(self.stage.document_vector.of_query(query))

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> NearSearch:
        some = (
            slice(None)
            if allowed is None
            else np.unpackbits(allowed.bitmap, bitorder="little")[self.numbers].astype(bool)
        )
        return NearSearch(self.numbers[some], self.vectors[some], queries, candidates)

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        return 12 * len(self.numbers)

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class NearSearch:
    """See `StageSearch`."""

    numbers: np.ndarray
    vectors: np.ndarray
    queries: Sequence[np.ndarray]
    candidates: int

    def advance(self, share: float) -> list[Candidates]:
        known = max(1, round(share * len(self.numbers)))
        return [self._best(query, known) for query in self.queries]

    def complete(self) -> list[Candidates]:
        return self.advance(1.0)

    @property
    def reads(self) -> StageReads:
        return StageReads()

    def _best(self, query: np.ndarray, known: int) -> Candidates:
        numbers, scores = self.numbers[:known], (self.vectors[:known] @ query).astype(np.float32)
        order = np.lexsort((numbers, -scores))[: self.candidates]
        return numbers[order], scores[order]
