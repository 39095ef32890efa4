"""The first stage that a build takes unless told otherwise: an inverted file (FAISS) over one
vector a document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from .... import errors
from ....checks import check_whole
from ....ops.quantise import KMEANS_ROUNDS
from ....storage.parse import Fields
from ...encoder import Encoded
from ..devices import StageDevices
from ..document_vector import DocumentVector
from ..interface import CANDIDATES, Documents, Entries, LoadedStage, StoredEntries, alive
from .arrays import (
    CENTROIDS,
    PARAMETERS,
    Filling,
    code_bytes,
    empty_index,
    enter,
    list_codes,
    list_numbers,
    list_sizes,
    order_of_lists,
    parameter_values,
    reconstructed,
    runs_of,
    sort_lists,
    train_arrays,
)
from .arrays import CODES as CODE_NAMES
from .gpu import GpuLoadedIvf
from .probing import RECALL, describe_steps, distinct_sample, measure, parse_steps
from .search import ListRuns, LoadedIvf

#: Sections of a part: numbers of the lists that hold records, ascending, how many each holds, and
#: the codes in the order of the records.
LISTS, SIZES, CODES = "lists", "sizes", "codes"
_LISTS_MAX = 1 << 27
# A sample is held once as it was read and once by FAISS, and product quantisation takes what the
# centroids leave of it beside that.
_SAMPLE_SHARE = 4
_ROWS_PER_LIST = 64  # FAISS asks for 39, and uses 256 at most
_ROWS = 8192  # vectors at a time: small beside any budget, large enough for BLAS
_FIX = "restore the store from a copy, or build it again"


@dataclass(frozen=True)
class IvfSettings:
    """The options of inverted lists.

    Attributes:
        code: of the lists: ``flat``, ``sq8``, ``sq6``, ``sq4`` or ``pqM``.
        nlist: number of lists; None chooses from the number of documents.
    """

    code: str = "sq8"
    nlist: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.code, str) or (
            self.code not in CODE_NAMES and re.fullmatch(r"pq[0-9]+", self.code) is None
        ):
            raise errors.InvalidInputError(
                "first-stage code", got=repr(self.code), expected=f"{', '.join(CODE_NAMES)} or pqM"
            )
        if self.nlist is not None:
            check_whole("nlist", self.nlist, 1)


@dataclass(frozen=True, eq=False)
class IvfStage:
    """See `FirstStage`. Records lie in the order of their lists, so that what is fetched together
    lies together.

    Attributes:
        document_vector: the vector that lists hold of each document.
        code: of the lists, see `ivf_arrays.CODES`.
        wanted_lists: to train; None chooses from the number of documents.
        trained: centroids and parameters of the code; empty before.
        nprobe, steps: how many lists find 98 % of the exhaustive candidates, and how soon they are
            known (see `probing.measure`).
    """

    kind: ClassVar[str] = "ivf"
    follows: ClassVar[bool] = False  # records lie in the order of lists
    in_place: ClassVar[frozenset[str]] = frozenset()
    Settings: ClassVar[type[IvfSettings]] = IvfSettings

    document_vector: DocumentVector
    code: str
    nlist: int = 0
    wanted_lists: int | None = None
    trained: Mapping[str, np.ndarray] = field(default_factory=dict)
    nprobe: int = 0
    steps: Mapping[float, float] = field(default_factory=dict)

    # --- settings ---

    @classmethod
    def new(cls, settings: IvfSettings, pooling: str | None, d_cls: int, dim: int) -> IvfStage:
        """Raises InvalidInputError for settings that do not fit the dimensions."""
        return cls(
            DocumentVector.new(pooling, d_cls, dim), settings.code, wanted_lists=settings.nlist
        )

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> IvfStage:
        """Raises FormatError."""
        of = DocumentVector.parse(fields, d_cls, dim)
        nlist = fields.whole("nlist", most=_LISTS_MAX)
        code = fields.text("code", most=16)
        try:
            code_bytes(code, of.dim)
        except errors.InvalidInputError as error:
            fields.refuse("code", error.expected)
        return cls(
            of,
            code,
            nlist,
            nprobe=fields.whole("nprobe", 0, max(nlist, 1)),
            steps=parse_steps(fields),
        )

    def describe(self) -> dict[str, Any]:
        return {
            **self.document_vector.describe(),
            "code": self.code,
            "nlist": self.nlist,
            "nprobe": self.nprobe,
            "steps": describe_steps(self.steps),
        }

    @property
    def dim(self) -> int:
        return self.document_vector.dim

    @property
    def vector_dim(self) -> int:
        return self.document_vector.dim

    @property
    def is_cls_similarity(self) -> bool:
        return self.document_vector.pooling is None

    def vector(self, document: Encoded) -> torch.Tensor:
        return self.document_vector.of_document(document)

    # --- what is trained ---

    def fresh(self) -> IvfStage:
        return IvfStage(self.document_vector, self.code, wanted_lists=self.wanted_lists)

    def train(self, documents: Documents, memory_bytes: int) -> IvfStage:
        count, lists = len(documents), self.lists_of(len(documents))
        wanted = min(
            count,
            max(_ROWS_PER_LIST * lists, 256),
            max(256, memory_bytes // _SAMPLE_SHARE // (4 * self.dim)),
        )
        chosen = np.sort(np.random.default_rng(0).choice(count, size=wanted, replace=False)).astype(
            np.int64
        )
        sample = documents.vector_sample(chosen)
        lists = min(lists, len(sample))
        return replace(
            self, nlist=lists, trained=train_arrays(sample, lists, self.code), nprobe=0, steps={}
        )

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self.trained)

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> IvfStage:
        for name, shape in (
            (CENTROIDS, (self.nlist, self.dim)),
            (PARAMETERS, (parameter_values(self.code, self.dim),)),
        ):
            found = arrays.get(name)
            if found is None or found.dtype != np.float32 or found.shape != shape:
                raise errors.FormatError(
                    f"{name} of the first stage do not fit",
                    path=path,
                    got=None if found is None else f"{found.dtype} {found.shape}",
                    expected=f"float32 {shape}",
                    fix=_FIX,
                )
        return replace(self, trained={name: arrays[name] for name in (CENTROIDS, PARAMETERS)})

    # --- entries ---

    @property
    def code_bytes(self) -> int:
        """Bytes of one vector."""
        return code_bytes(self.code, self.dim)

    def _empty_index(self) -> Any:
        return empty_index(self.trained, self.code, self.dim)

    def add_bytes(self, count: int) -> int:
        return count * (self.code_bytes + 8) * 3 // 2  # FAISS grows its lists by doubling

    def build_operations(self, count: int) -> int:
        lists = self.lists_of(count)
        # vectors with every centroid
        compared = count + KMEANS_ROUNDS * min(count, _ROWS_PER_LIST * lists)
        return 2 * compared * lists * self.dim

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        index = self._empty_index()
        enter(index, documents.vectors(_ROWS))
        sort_lists(index)
        sizes = list_sizes(index)
        lists = np.flatnonzero(sizes)
        return Entries(list_numbers(index), _sections(lists, sizes[lists], list_codes(index)))

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        return self._merged(parts, deleted)[1]

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[IvfStage, Entries]:
        """Lists that hold nothing alive are left out; records of several parts come into the order
        of their cells."""
        kept, entries = self._merged(parts, deleted, numbered_anew=True)
        trained = {**self.trained, CENTROIDS: self.trained[CENTROIDS][kept]}
        return replace(self, nlist=len(kept), trained=trained, nprobe=0, steps={}), entries

    def _merged(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, *, numbered_anew: bool = False
    ) -> tuple[np.ndarray, Entries]:
        """(lists that hold anything, ascending; entries). Holds the codes and 40 bytes a record."""
        numbers = np.concatenate(
            [np.arange(part.first_number, part.first_number + part.count) for part in parts]
        )
        lists = np.concatenate([np.repeat(*self._lists(part)) for part in parts])
        found = alive(numbers, deleted)
        numbers, lists = numbers[found], lists[found]
        order = np.argsort(lists, kind="stable")
        numbers, lists = numbers[order], lists[order]
        kept, sizes = runs_of(lists)
        if not numbered_anew:
            return kept, Entries([numbers], _sections(kept, sizes, self._codes(parts, numbers)))
        codes = np.concatenate(
            [np.empty((0, self.code_bytes), np.uint8), *self._codes(parts, numbers)]
        )
        order = order_of_lists(self._empty_index(), sizes, codes)
        return kept, Entries(
            [numbers[order]], _sections(np.arange(len(kept)), sizes, iter([codes[order]]))
        )

    def _codes(self, parts: Sequence[StoredEntries], numbers: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the codes of some records, uint8, in their order."""
        size = self.code_bytes
        out = np.empty((len(numbers), size), dtype=np.uint8)
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        for part in parts:
            first, rest = part.first_number, np.empty(0, np.uint8)
            for piece in part.windows(CODES):
                data = np.concatenate([rest, piece]) if len(rest) else piece
                rows = data[: len(data) // size * size].reshape(-1, size)
                begin, end = np.searchsorted(ascending, (first, first + len(rows)))
                out[order[begin:end]] = rows[ascending[begin:end] - first]
                first, rest = first + len(rows), data[rows.size :].copy()
        yield out

    def _lists(self, part: StoredEntries) -> tuple[np.ndarray, np.ndarray]:
        """(numbers int32, sizes int64) of the lists of a part. Raises FormatError for what cannot
        be."""

        def refuse(what: str, got: object, expected: object) -> None:
            raise errors.FormatError(what, path=part.path, got=got, expected=expected, fix=_FIX)

        for name, row_bytes in ((LISTS, 4), (SIZES, 8)):
            if part.size_bytes(name) % row_bytes or part.size_bytes(name) > row_bytes * min(
                self.nlist, part.count
            ):
                refuse(
                    f"{name} of the first stage",
                    f"{part.size_bytes(name)} bytes",
                    f"at most {self.nlist} lists of {row_bytes} bytes",
                )
        if part.size_bytes(CODES) != part.count * self.code_bytes:
            refuse(
                "codes do not fit the part", part.size_bytes(CODES), part.count * self.code_bytes
            )
        lists, sizes = part.read(LISTS).view("<i4"), part.read(SIZES).view("<i8")
        if (
            len(lists) != len(sizes)
            or not len(lists)
            or lists[0] < 0
            or lists[-1] >= self.nlist
            or (np.diff(lists) <= 0).any()
        ):
            refuse(
                "lists do not fit the first stage",
                f"{len(lists)} lists",
                f"numbers below {self.nlist}, ascending",
            )
        if (sizes < 1).any() or sizes.max() > part.count or int(sizes.sum()) != part.count:
            refuse("lists do not fit the part", int(sizes.sum()), part.count)
        return lists, sizes

    def check(self, parts: Sequence[StoredEntries]) -> None:
        for part in parts:
            self._lists(part)

    # --- search ---

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: int | None = None,
        deleted: np.ndarray | None = None,
        device: StageDevices | None = None,
    ) -> LoadedIvf:
        index, known = None, [self._lists(part) for part in parts]
        if parts:
            index, total = self._empty_index(), np.zeros(self.nlist, dtype=np.int64)
            for lists, sizes in known:
                total[lists] += sizes
            filling = Filling(index, total)
            for part, (lists, sizes) in zip(parts, known, strict=True):
                codes = part.windows(CODES)
                try:
                    filling.add(lists, sizes, codes, part.first_number)
                finally:
                    # now, not whenever it is collected: whatever it reads from may be closed by
                    # then
                    codes.close()
        searched = (
            index,
            self._runs(parts, known),
            self.document_vector.of_query,
            self.nprobe,
            self.steps,
        )
        return (
            LoadedIvf(*searched, threads)
            if gpu is None
            else GpuLoadedIvf(*searched, threads=threads, device=gpu)
        )

    def _runs(
        self, parts: Sequence[StoredEntries], known: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> ListRuns:
        empty = np.empty(0, np.int64)
        ends = [
            part.first_number + np.cumsum(sizes)
            for part, (_, sizes) in zip(parts, known, strict=True)
        ]
        begins = [end - sizes for end, (_, sizes) in zip(ends, known, strict=True)]
        lists = [lists.astype(np.int64) for lists, _ in known]
        return ListRuns(
            np.concatenate([empty, *lists]),
            np.concatenate([empty, *begins]),
            np.concatenate([empty, *ends]),
            self.nlist,
        )

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> IvfStage:
        if not isinstance(loaded, LoadedIvf):
            raise errors.InvalidInputError(
                "tune", got=type(loaded).__name__, expected="what this stage has loaded"
            )
        count = loaded.index.ntotal
        vectors = (
            (lambda chosen: reconstructed(loaded.index, chosen))
            if documents is None
            else documents.vector_sample
        )
        nprobe, steps = measure(
            loaded, distinct_sample(count, self.dim, vectors), min(CANDIDATES, count), RECALL
        )
        return replace(self, nprobe=nprobe, steps=steps)

    def lists_of(self, records: int) -> int:
        """Lists that training on so many records makes."""
        return min(self.wanted_lists or choose_nlist(records), records)

    def resident_bytes(self, records: int) -> int:
        trained = sum(array.nbytes for array in self.trained.values())
        if not self.trained:
            trained = 4 * (
                self.lists_of(records) * self.dim + parameter_values(self.code, self.dim)
            )
        return trained + records * (self.code_bytes + 8)


def choose_nlist(records: int) -> int:
    """4 sqrt(n), FAISS's own rule of thumb, bounded so that every centroid has the 39 training
    points FAISS asks for."""
    return max(1, min(round(4 * records**0.5), records // 39))


def _sections(lists: np.ndarray, sizes: np.ndarray, codes: Iterator[np.ndarray]) -> dict[str, Any]:
    return {LISTS: [lists.astype("<i4")], SIZES: [sizes.astype("<i8")], CODES: codes}
