"""First stages that look words up: BM25 (`bm25`) and learned sparse vectors (`splade`), by posting
lists that stay on SSD (postings/).

Lists are of the records' own numbers, in the order in which records lie, so what one list names
lies together. In memory are dictionary and lengths. Statistics are of all parts and of what is
alive, so scores are those of an index that was built at once of what is there.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from .... import errors
from ....device.kinds import POSTINGS, PartKind
from ....postings.analyzer import Analyzer
from ....postings.build.builder import SegmentBuilder
from ....postings.compaction import merged_sections
from ....postings.devices.lists import SegmentLists
from ....postings.format import parse_analyzer
from ....postings.stored.layout import (
    COUNT,
    DICTIONARY,
    FORWARD,
    IMPACT,
    LENGTHS,
    LISTS,
    PLACES,
    TERMS,
)
from ....postings.stored.segment import Segment
from ....storage import NativeEngine
from ....storage.parse import Fields
from ...encoder import Encoded
from ...sparse_encoder import (
    SparseEncoder,
    SparseEncoderLike,
    check_same_sparse_encoder,
    remembered_sparse_encoder,
    sparse_encoder_of,
)
from ..devices import StageDevices
from ..in_turn import in_turn
from ..interface import Documents, Entries, LoadedStage, StoredEntries, alive
from .scans import ScannedPart
from .search import LoadedLexical, Words

_MEMORY_BYTES = 256 << 20  # of what is sorted at a time, as long as the stage is built
_ENCODED_AT_ONCE = 256
_NAME_MAX = 512


@dataclass(frozen=True)
class Bm25Settings:
    """The options of BM25.

    Attributes:
        language: of the texts: its stemmer (PyStemmer) cuts their endings off, and of English stop
            words are left out; ``none``: words as they stand.
    """

    language: str = "english"


@dataclass(frozen=True)
class SpladeSettings:
    """The options of learned sparse vectors.

    Attributes:
        sparse_encoder: the model, or a description as `espnx.load_sparse_encoder` takes it; None:
            ``splade-tiny``.
    """

    sparse_encoder: SparseEncoderLike | None = None


@dataclass(frozen=True, eq=False)
class _Lexical(ABC):
    """What both stages share; see `FirstStage`. Nothing is trained, nothing measured."""

    follows: ClassVar[bool] = True
    vector_dim: ClassVar[int] = 0
    is_cls_similarity: ClassVar[bool] = False
    kind: ClassVar[str]
    postings_kind: ClassVar[int]

    @property
    def _section_names(self) -> tuple[str, ...]:
        """The names of the sections, in the order in which they are written."""
        return (
            (LISTS, TERMS, LENGTHS, DICTIONARY)
            if self.postings_kind == COUNT
            else (LISTS, TERMS, FORWARD, PLACES, DICTIONARY)
        )

    @property
    def in_place(self) -> frozenset[str]:
        return frozenset(self._section_names)

    def vector(self, document: Encoded) -> torch.Tensor:
        return torch.empty(0)

    def fresh(self) -> Any:
        return self

    def train(self, documents: Documents, memory_bytes: int) -> Any:
        return self

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> Any:
        return self

    def add_bytes(self, count: int) -> int:
        return _MEMORY_BYTES + 16 * count

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        if order is None:
            order = np.arange(len(documents))
        sections = self._sections(documents, order)
        return Entries([order], in_turn(sections, self._section_names))

    def _sections(
        self, documents: Documents, order: np.ndarray
    ) -> Iterator[tuple[str, Iterable[np.ndarray]]]:
        with NativeEngine() as engine:
            builder = SegmentBuilder(
                engine,
                documents.scratch,
                kind=self.postings_kind,
                analyzer=self.analyzer,
                memory_bytes=_MEMORY_BYTES,
            )
            try:
                self._fill(builder, documents.texts(order))
                yield from builder.sections()
            finally:
                builder.close()

    @property
    @abstractmethod
    def analyzer(self) -> Analyzer:
        """The analyzer that cuts the texts; of weights it cuts none."""

    @abstractmethod
    def _fill(self, builder: SegmentBuilder, texts: Iterator[str]) -> None:
        """Hands every text over, as terms or as weights."""

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        if order is None:
            numbers = np.concatenate(
                [np.arange(part.first_number, part.first_number + part.count) for part in parts]
            )
            order = numbers[alive(numbers, deleted)]
        sections = self._merged_sections(parts, order)
        return Entries([order], in_turn(sections, self._section_names))

    def _merged_sections(
        self, parts: Sequence[StoredEntries], order: np.ndarray
    ) -> Iterator[tuple[str, Iterable[np.ndarray]]]:
        places = np.full(parts[-1].first_number + parts[-1].count, -1, np.int64)
        places[order] = np.arange(len(order))
        directory = parts[0].path.rpartition("/")[0]
        with NativeEngine() as engine:
            segments = list[Segment]()
            try:
                segments += (self._segment(engine, part) for part in parts)
                yield from merged_sections(
                    engine,
                    directory,
                    segments,
                    np.flatnonzero(places < 0),
                    salt=secrets.randbits(32),
                    kind=self.postings_kind,
                    n_records=len(order),
                    memory_bytes=_MEMORY_BYTES,
                    progress=None,
                    places=places,
                )
            finally:
                for segment in segments:
                    segment.close()

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[Any, Entries]:
        return self, self.merge(parts, deleted, order)

    def check(self, parts: Sequence[StoredEntries]) -> None:
        with NativeEngine() as engine:
            for part in parts:
                self._segment(engine, part).close()

    def _segment(self, engine: NativeEngine, part: StoredEntries) -> Segment:
        regions = {name: part.place(name) for name in self._section_names}
        segment = Segment(engine, regions, first_number=part.first_number)
        if (len(segment), segment.dictionary.kind) != (part.count, self.postings_kind):
            segment.close()
            raise errors.FormatError(
                f"posting lists of {self.kind} do not fit the part",
                path=part.path,
                got=f"{len(segment)} records, kind {segment.dictionary.kind}",
                expected=f"{part.count} records, kind {self.postings_kind}",
                fix="restore the store from a copy, or build it again",
            )
        return segment

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: int | None = None,
        deleted: np.ndarray | None = None,
        device: StageDevices | None = None,
    ) -> LoadedLexical:
        device = device or StageDevices()
        with ExitStack() as opened:
            engine, segments, scanned = NativeEngine(device.engine), list[Segment](), []
            opened.callback(engine.close)
            is_named = [device.of(POSTINGS, part.path) is not None for part in parts]
            for part, is_on_device in zip(parts, is_named, strict=True):
                if not any(is_named):
                    segments.append(self._segment(engine, part))
                    opened.callback(segments[-1].close)
                    continue
                lists = self._lists(part)
                scanned.append(
                    ScannedPart(
                        device.open(POSTINGS, part.path, lists, engine=engine), is_on_device
                    )
                )
                opened.callback(scanned[-1].lists.close)
                segments.append(lists.segment)
            loaded = LoadedLexical(engine, segments, self._words(), self.kind, deleted, scanned)
            opened.pop_all()
            return loaded

    def _lists(self, part: StoredEntries) -> SegmentLists:
        return SegmentLists(
            part.place(LISTS), part.count, lambda engine: self._segment(engine, part)
        )

    def on_devices(self, parts: Sequence[StoredEntries]) -> dict[PartKind, list[Any]]:
        """What `load` opens on devices, by the kind of part."""
        return {POSTINGS: [self._lists(part) for part in parts]}

    @abstractmethod
    def _words(self) -> Words:
        """What makes terms of the text of a query."""

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> Any:
        return self


@dataclass(frozen=True, eq=False)
class Bm25Stage(_Lexical):
    """BM25 with k1 1.5 and b 0.75, in the variant of Lucene, whose scores are bm25s's.

    Attributes:
        text: how texts and queries are cut into terms.
    """

    kind: ClassVar[str] = "bm25"
    Settings: ClassVar[type[Bm25Settings]] = Bm25Settings
    postings_kind: ClassVar[int] = COUNT

    text: Analyzer

    @classmethod
    def new(cls, settings: Bm25Settings, pooling: str | None, d_cls: int, dim: int) -> Bm25Stage:
        """Raises InvalidInputError for a language that has no stemmer, MissingDependencyError
        without PyStemmer."""
        return cls(Analyzer.of(settings.language))

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> Bm25Stage:
        """Raises FormatError."""
        try:
            return cls(parse_analyzer(fields.inner("analyzer")))
        except errors.InvalidInputError as error:
            fields.refuse("analyzer", error.expected, error.got)

    def describe(self) -> dict[str, Any]:
        return {"analyzer": self.text.fields | {"digest": self.text.digest}}

    @property
    def analyzer(self) -> Analyzer:
        return self.text

    def _fill(self, builder: SegmentBuilder, texts: Iterator[str]) -> None:
        for text in texts:
            builder.add_text(text)

    def _words(self) -> Words:
        return self.text.terms

    def build_operations(self, count: int) -> int:
        return 1000 * count  # cutting a text takes about a thousand steps

    def resident_bytes(self, records: int) -> int:
        # Two bytes a record; terms grow with the root of the text (Heaps), and take 24 bytes each.
        return 2 * records + 24 * int(100 * (100 * records) ** 0.5)


@dataclass(frozen=True, eq=False)
class SpladeStage(_Lexical):
    """Learned sparse vectors: inner products of weights of terms, each weight in a byte.

    Attributes:
        encoder_name: of the model whose weights these are.
        encoder: itself, once it was wanted.
    """

    kind: ClassVar[str] = "splade"
    Settings: ClassVar[type[SpladeSettings]] = SpladeSettings
    postings_kind: ClassVar[int] = IMPACT

    encoder_name: str
    given: SparseEncoder | None = None

    @classmethod
    def new(
        cls, settings: SpladeSettings, pooling: str | None, d_cls: int, dim: int
    ) -> SpladeStage:
        """Raises InvalidInputError without a sparse encoder, and what loading it raises."""
        encoder = sparse_encoder_of(settings.sparse_encoder or "splade-tiny")
        if encoder is None:
            raise errors.InvalidInputError(
                "sparse_encoder", got="None", expected="one, for a first stage of splade"
            )
        return cls(encoder.name, encoder)

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> SpladeStage:
        """Raises FormatError."""
        return cls(fields.text("encoder", most=_NAME_MAX))

    def describe(self) -> dict[str, Any]:
        return {"encoder": self.encoder_name}

    @cached_property
    def encoder(self) -> SparseEncoder:
        """Raises what `espnx.load_sparse_encoder` raises, where it is the one that the store
        remembers."""
        if self.given is not None:
            return self.given
        loaded = remembered_sparse_encoder(self.encoder_name)
        if loaded is None:
            raise errors.StateError("sparse encoder", got="none", expected=self.encoder_name)
        return loaded

    def with_sparse_encoder(self, encoder: SparseEncoder) -> SpladeStage:
        """The same, with the model at hand. Raises InvalidInputError for another one."""
        check_same_sparse_encoder(encoder, self.encoder_name)
        return replace(self, given=encoder)

    @property
    def analyzer(self) -> Analyzer:
        return Analyzer()

    def _fill(self, builder: SegmentBuilder, texts: Iterator[str]) -> None:
        while some := list(islice(texts, _ENCODED_AT_ONCE)):
            for vector in self.encoder.encode_documents(some):
                builder.add_vector(
                    dict(zip(vector.terms.tolist(), vector.weights.tolist(), strict=True))
                )

    def _words(self) -> Words:
        def words(text: str) -> dict[int, float]:
            vector = self.encoder.encode_queries([text])[0]
            return dict(zip(vector.terms.tolist(), vector.weights.tolist(), strict=True))

        return words

    def build_operations(self, count: int) -> int:
        return 0  # counted as encoding, by whoever knows the model

    def resident_bytes(self, records: int) -> int:
        return 6 * records + 24 * 30_000  # the place of each forward record; a vocabulary
