"""A first stage that is nobody's but these tests': exact, in memory. And documents and entries for
stages that have no store."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

import espnx
from espnx import errors
from espnx.retrieval.first_stage.interface import (
    Allowed,
    Candidates,
    Documents,
    Entries,
    LoadedStage,
    StageReads,
    StoredEntries,
)
from espnx.storage.files import Region
from espnx.storage.parse import Fields


@dataclass(frozen=True)
class ExactStage:
    """Keeps the CLS vector of every document and looks at all of them, last document first:
    whatever assumes an order shows."""

    kind: ClassVar[str] = "exact"
    follows: ClassVar[bool] = False
    in_place: ClassVar[frozenset[str]] = frozenset()
    is_cls_similarity: ClassVar[bool] = True
    vector_dim: int
    mean: float | None = None

    @classmethod
    def new(cls, settings: Any, pooling: str | None, d_cls: int, dim: int) -> ExactStage:
        return cls(d_cls)

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> ExactStage:
        return cls(fields.whole("dim", d_cls, d_cls))

    def describe(self) -> dict[str, Any]:
        return {"dim": self.vector_dim}

    def vector(self, document: espnx.Encoded) -> torch.Tensor:
        return document.cls

    def fresh(self) -> ExactStage:
        return ExactStage(self.vector_dim)

    def train(self, documents: Documents, memory_bytes: int) -> ExactStage:
        return ExactStage(
            self.vector_dim, float(documents.vector_sample(np.arange(len(documents))).mean())
        )

    def arrays(self) -> dict[str, np.ndarray]:
        return {"mean": np.float32([self.mean or 0.0])}

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> ExactStage:
        return ExactStage(self.vector_dim, float(arrays["mean"][0]))

    def add_bytes(self, count: int) -> int:
        return 4 * self.vector_dim * count

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        vectors = np.concatenate(list(documents.vectors(7)))
        return Entries([np.arange(len(vectors))[::-1]], {"vectors": [vectors[::-1]]})

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        numbers, vectors = self._all(parts)
        dead = np.flatnonzero(np.unpackbits(deleted, bitorder="little"))
        alive = np.flatnonzero(~np.isin(numbers, dead))[::-1]
        return Entries([numbers[alive]], {"vectors": [vectors[alive]]})

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[ExactStage, Entries]:
        return self, self.merge(parts, deleted)

    def check(self, parts: Sequence[StoredEntries]) -> None:
        for part in parts:
            if part.size_bytes("vectors") != 4 * self.vector_dim * part.count:
                raise errors.FormatError(
                    "vectors do not fit the part", path=part.path, got=part.size_bytes("vectors")
                )

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: Any = None,
        deleted: Any = None,
        device: Any = None,
    ) -> LoadedExact:
        self.check(parts)
        return LoadedExact(*self._all(parts))

    def _all(self, parts: Sequence[StoredEntries]) -> tuple[np.ndarray, np.ndarray]:
        numbers = [np.arange(part.first_number, part.first_number + part.count) for part in parts]
        vectors = [part.read("vectors").view("<f4").reshape(-1, self.vector_dim) for part in parts]
        empty = np.empty((0, self.vector_dim), np.float32)
        return np.concatenate([np.empty(0, np.int64), *numbers]), np.concatenate([empty, *vectors])

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> ExactStage:
        return self

    def build_operations(self, count: int) -> int:
        return 0

    def resident_bytes(self, records: int) -> int:
        return records * (8 + 4 * self.vector_dim)


@dataclass(frozen=True)
class LoadedExact:
    """Every vector and its record's number; an effort means nothing to it."""

    numbers: np.ndarray
    vectors: np.ndarray
    auto_effort: int = 1
    default_candidates: int = 1000
    needs_vectors: bool = True
    finds_equals: bool = True
    hit_rates: Mapping[float, float] = field(default_factory=dict)

    def prepare(
        self, query: espnx.Encoded, text: str | None = None
    ) -> tuple[str | None, np.ndarray]:
        return text, query.cls.numpy()

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> ExactSearch:
        some = (
            slice(None)
            if allowed is None
            else np.unpackbits(allowed.bitmap, bitorder="little")[self.numbers].astype(bool)
        )
        return ExactSearch(
            self.numbers[some], self.vectors[some], [vector for _, vector in queries], candidates
        )

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        return 12 * len(self.numbers)

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExactSearch:
    numbers: np.ndarray
    vectors: np.ndarray
    queries: list[np.ndarray]
    candidates: int

    def advance(self, share: float) -> list[Candidates]:
        return [
            self._best(query, max(1, round(share * len(self.numbers)))) for query in self.queries
        ]

    def complete(self) -> list[Candidates]:
        return self.advance(1.0)

    @property
    def reads(self) -> StageReads:
        return StageReads()

    def _best(self, query: np.ndarray, known: int) -> Candidates:
        numbers, scores = self.numbers[:known], (self.vectors[:known] @ query).astype(np.float32)
        order = np.lexsort((numbers, -scores))[: self.candidates]
        return numbers[order], scores[order]


@dataclass(frozen=True)
class InMemoryDocuments:
    """Vectors as a stage's `Documents`."""

    rows: np.ndarray
    scratch: str = "."

    def __len__(self) -> int:
        return len(self.rows)

    def vectors(self, rows: int) -> Iterator[np.ndarray]:
        return (self.rows[first : first + rows] for first in range(0, len(self.rows), rows))

    def vector_sample(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows[numbers]

    def texts(self, order: np.ndarray | None = None) -> Iterator[str]:
        numbers = range(len(self.rows)) if order is None else order.tolist()
        return (f"text of {number}" for number in numbers)


class InMemoryEntries:
    """What a stage made, as its `StoredEntries`. `order`: what it made of it."""

    path = "memory"

    def __init__(self, entries: Entries, first_number: int = 0):
        self.order = np.concatenate(list(entries.order))
        self.first_number, self.count = first_number, len(self.order)
        self._files: dict[str, Any] = {}
        self._sections = {
            name: np.concatenate(
                [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces]
            )
            for name, pieces in entries.sections.items()
        }

    def size_bytes(self, name: str) -> int:
        return len(self._sections[name])

    def read(self, name: str) -> np.ndarray:
        return self._sections[name].copy()

    def place(self, name: str) -> Region:
        """In a file that is there as long as this is, behind a block of something else."""
        file = self._files[name] = tempfile.NamedTemporaryFile(dir=".")  # noqa: SIM115
        file.write(b"x" * 4096 + self._sections[name].tobytes())
        file.flush()
        return Region(file.name, 4096, len(self._sections[name]))

    def windows(self, name: str) -> Generator[np.ndarray, None, None]:
        data = self._sections[name]
        yield from (data[first : first + 1000] for first in range(0, len(data), 1000))
