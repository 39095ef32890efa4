"""What a first stage is. Whoever builds, changes and searches stores sees this file and the
registry, and no kind of index.

    FirstStage     settings, and once trained what was trained. Of documents it makes entries: the
                   order in which their records are to lie, and named sections that a part of the
                   store keeps. It merges the entries of parts. It holds none itself.
    LoadedStage    the entries of all parts, ready to be searched from any number of threads.
    StageSearch    some queries under way, in as many steps as are wanted.

A store keeps the stage's kind and `describe()` in its manifest, what was trained beside its base,
and sections with every part. Deleted records stay among the entries until parts are merged or
compacted; a search is told which records it may find.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from ...storage.files import Region
from ..encoder import Encoded
from .devices import StageDevices

#: Of one query: record numbers int64 [m] and similarities float32 [m], best first.
Candidates = tuple[np.ndarray, np.ndarray]
#: What a kind of stage may be called.
KIND = re.compile(r"[a-z0-9_]{1,16}")
#: What a section may be called; `several.py` puts a kind and a dot before the names of its stages'
#: sections.
SECTION_NAME = re.compile(r"[a-z0-9_]{1,16}(\.[a-z0-9_]{1,16})?")
#: Candidates of a search whose caller names no number, where finding them costs little.
CANDIDATES = 1000


@dataclass(frozen=True, eq=False)
class Allowed:
    """Which records a search may find.

    Attributes:
        bitmap: uint8; bit i % 8 of byte i // 8 is set where record i may be found.
        count: how many may.
    """

    bitmap: np.ndarray
    count: int


def alive(numbers: np.ndarray, deleted: np.ndarray) -> np.ndarray:
    """Whether each of some records is alive, bool. `deleted`: bitmap of deleted records, as
    `Allowed.bitmap`; records beyond its end are alive."""
    found = np.ones(len(numbers), bool)
    known = numbers < 8 * len(deleted)
    found[known] = (deleted[numbers[known] >> 3] >> (numbers[known] & 7).astype(np.uint8)) & 1 == 0
    return found


@dataclass(frozen=True)
class Entries:
    """What a stage makes of documents, or of the parts that it merges. Whoever takes it reads
    `order` to its end first, then the sections in their order, each once.

    Attributes:
        order: int64, in any pieces: numbers of the documents (or of the merged records) in the
            order in which their records are to lie. Each number is there once.
        sections: name -> bytes, in any pieces (arrays of any type); what `load` and `merge` find
            again. Names: `SECTION_NAME`.
    """

    order: Iterable[np.ndarray]
    sections: Mapping[str, Iterable[np.ndarray]]


class Documents(Protocol):
    """Documents that a stage is trained on, or that it takes up. Numbered 0, 1, ... as they came.

    Attributes:
        scratch: directory for what a stage makes of them and cannot hold; what is left there when
            it fails is removed with the build.
    """

    @property
    def scratch(self) -> str: ...

    def __len__(self) -> int: ...

    def vectors(self, rows: int) -> Iterator[np.ndarray]:
        """What `FirstStage.vector` made of each, in order: float32 [m, vector_dim] with m <= rows.
        May be called again."""
        ...

    def vector_sample(self, numbers: np.ndarray) -> np.ndarray:
        """The same of some of them. `numbers`: int64, ascending."""
        ...

    def texts(self, order: np.ndarray | None = None) -> Iterator[str]:
        """The text of each, in this order of their numbers; None: as they came. May be called
        again."""
        ...


class StoredEntries(Protocol):
    """What one part of a store keeps of a stage. Reading raises ChecksumError, FormatError, ...: no
    damaged section is handed out.

    Attributes:
        path: of the file, for messages.
        first_number, count: of the records, which are numbered from the first on in the order that
            `Entries.order` gave them.
    """

    @property
    def path(self) -> str: ...

    @property
    def first_number(self) -> int: ...

    @property
    def count(self) -> int: ...

    def size_bytes(self, name: str) -> int:
        """Bytes of a section."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A section as a whole: uint8, aligned to 8 bytes and writable."""
        ...

    def windows(self, name: str) -> Generator[np.ndarray, None, None]:
        """A section in pieces, uint8. Damage may be found with the last one: what was made of the
        others is not to be used then."""
        ...

    def place(self, name: str) -> Region:
        """The place of a section of `FirstStage.in_place`, for searches that read parts of it. They
        check what they read."""
        ...


@dataclass(frozen=True)
class NoSettings:
    """The settings of a stage that has no options of its own."""


class FirstStage(Protocol):
    """See the module. Frozen: what changes something returns another one.

    A kind's class also has ``Settings``, a frozen dataclass of the options that a build may give
    it, each with a default (none: it has no options); ``new(settings, pooling, d_cls, dim)``, the
    untrained stage of a build with these and the `BuildOptions.pooling`; and ``parse(fields, d_cls,
    dim)``, the stage that wrote them with `describe`, without what was trained. All raise typed
    errors for what does not fit. Options of which the stored entries depend belong into `describe`.

    Attributes:
        kind: by which the registry knows the class.
        vector_dim: of the vector that it wants of every document; 0: none.
        is_cls_similarity: whether its similarities stand for inner products of CLS vectors, so that
            they may be added to MaxSim.
        follows: whether `add` and `merge` can take the order of the records from another stage.
        in_place: names of the sections that searches read where they lie; they begin at multiples
            of 4096 bytes.
    """

    @property
    def kind(self) -> str: ...

    @property
    def vector_dim(self) -> int: ...

    @property
    def is_cls_similarity(self) -> bool: ...

    @property
    def follows(self) -> bool: ...

    @property
    def in_place(self) -> frozenset[str]: ...

    def describe(self) -> dict[str, Any]:
        """What the manifest keeps: JSON, from which ``parse`` makes the stage again."""
        ...

    def vector(self, document: Encoded) -> torch.Tensor:
        """The vector of a document: float32 [vector_dim]."""
        ...

    def fresh(self) -> Self:
        """The same settings, nothing trained or measured."""
        ...

    def train(self, documents: Documents, memory_bytes: int) -> Self:
        """Trained on (a sample of) documents, of which there is one at least. Seeded.
        `memory_bytes`: that it may take."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """What was trained, by name."""
        ...

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> Self:
        """The opposite. Raises FormatError, naming the file they come from, for arrays that are
        missing or do not fit the settings."""
        ...

    def add_bytes(self, count: int) -> int:
        """Memory that `add` takes for so many documents."""
        ...

    def build_operations(self, count: int) -> int:
        """Multiplications and additions of training on so many documents and adding them, at least:
        what a plan of a build is made of."""
        ...

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        """Makes the entries of a part of these documents. Nothing is trained.

        `order`: int64, as `Entries.order`, where another stage has decided it; given to a stage
        that `follows` alone."""
        ...

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        """Makes the entries of one part of the records of some that are `alive`. May hold 60 bytes
        a record and the sections. `order`: see `add`; of record numbers."""
        ...

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[Self, Entries]:
        """Merges all parts of a store for its new base, as `merge` does: what nothing alive needs
        any more may be left out of what was trained."""
        ...

    def check(self, parts: Sequence[StoredEntries]) -> None:
        """Raises FormatError for entries that do not fit the stage or their part."""
        ...

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: int | None = None,
        deleted: np.ndarray | None = None,
        device: StageDevices | None = None,
    ) -> LoadedStage:
        """Entries of all parts of a store; none of an empty one.

        Args:
            threads: that may work at a time for one search; the caller's is one of them.
            gpu: number of the one to search on; None for the CPU.
            deleted: bitmap of deleted records, see `merge`; None: there is none. Searches are told
                what they may find: this is for similarities that depend on what else is there.
            device: opens a part of a device for each section in place: of the one that was named,
                and that the section lies on. Searches read by such parts alone, and `StageReads`
                says which bytes a named device has read. None: of this machine's SSD.

        Raises:
            what `check` raises; PathUnavailableError, MissingDependencyError where it cannot search
            on a GPU.
        """
        ...

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> Self:
        """Measured on the entries of a base: what `effort` ``auto`` means. `documents`: those of
        the base, where they are still there."""
        ...

    def resident_bytes(self, records: int) -> int:
        """Memory that so many of them take when they are loaded, with what was trained, or will be
        on so many."""
        ...


class LoadedStage(Protocol):
    """See the module. Searches change nothing of it.

    Attributes:
        auto_effort: what an effort of None means.
        default_candidates: of a search whose caller names no number: where each costs a read of its
            own, they are few.
        hit_rates: share of a search's candidates that are known after a share of its work,
            measured; empty where unknown.
        needs_vectors: whether `prepare` looks at a query's vectors; where it does not, a text need
            not be encoded for it.
        finds_equals: whether a search for enough candidates finds every record that scores as one
            of them does.
    """

    @property
    def auto_effort(self) -> int: ...

    @property
    def default_candidates(self) -> int: ...

    @property
    def hit_rates(self) -> Mapping[float, float]: ...

    @property
    def needs_vectors(self) -> bool: ...

    @property
    def finds_equals(self) -> bool: ...

    def prepare(self, query: Encoded, text: str | None = None) -> Any:
        """A query as `start` takes it, opaque to whoever searches. `text`: where the query was
        given as one."""
        ...

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> StageSearch:
        """Begins a search.

        Args:
            queries: prepared.
            candidates: wanted of each.
            effort: the stage's own measure of how much is looked at, 1 or more (lists, of an IVF);
                None: `auto_effort`. What holds no record that may be found does not count.
            allowed: which records may be found; None for every one.
            at_least: more is looked at than `effort` says where that finds fewer records.
            deadline_s: of the reads of each query; what is in memory takes as long as it takes.
        """
        ...

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        """Memory that one query of such a search takes at most while it is under way."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StageReads:
    """What a first stage has read from storage for a search.

    Attributes:
        requests, bytes_asked: of all queries together. bytes_moved: whole blocks, and what was read
            for nothing.
        device_bytes: of these, what devices have read that somebody has named
            (`StageDevices.of`): emulated ones take their time for it.
    """

    requests: int = 0
    bytes_asked: int = 0
    bytes_moved: int = 0
    device_bytes: int = 0

    def __add__(self, other: StageReads) -> StageReads:
        return StageReads(
            self.requests + other.requests,
            self.bytes_asked + other.bytes_asked,
            self.bytes_moved + other.bytes_moved,
            self.device_bytes + other.device_bytes,
        )


class StageSearch(Protocol):
    """See the module. Results are of each query, in their order; m <= candidates, equal
    similarities by the lower record number."""

    def advance(self, share: float) -> list[Candidates]:
        """What is known after that share of the work (some, at least), continuing where the last
        call stopped."""
        ...

    def complete(self) -> list[Candidates]:
        """What the whole search found."""
        ...

    @property
    def reads(self) -> StageReads:
        """What all of it has read, once it is complete; nothing, of a stage in memory."""
        ...
