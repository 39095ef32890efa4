"""A first stage that stays on SSD: lists of near vectors (espnx/clusters), of which a query reads
the nearest, all at once, and a device measures them where it can.

In memory are the heads of the lists, or nothing but a codebook where these are in a graph. A part
of a store has lists of its own. A small one has none: its vectors are looked at one by one, in
memory, until parts are merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch

from .... import errors
from ....clusters.closure import FLAT_HEADS_MAX, HNSW_M
from ....clusters.coding import ListCoding, grid_of
from ....clusters.facts import read_lists
from ....clusters.index import ClusterIndex
from ....clusters.making import LEAST_MEMORY_BYTES, least_memory
from ....clusters.options import DTYPES, HEADS_IN, PACKINGS, ClusterOptions, check_options
from ....clusters.planning import ClusterPlan, plan
from ....device.clusters.layout import FORMATS, entry_bytes
from ....device.kinds import CLUSTERS, PartKind
from ....graph.devices.walks import WALKS
from ....graph.options import stored_rows
from ....graph.vectors import Vectors
from ....storage import NativeEngine
from ....storage.parse import Fields
from ...encoder import Encoded
from ..devices import StageDevices
from ..document_vector import DocumentVector
from ..flat import FlatPart
from ..interface import Documents, Entries, LoadedStage, StoredEntries, alive
from ..ivf.probing import STEPS, describe_steps, distinct_sample, hits_of, known_of, parse_steps
from .entries import (
    FIX,
    GRAPH,
    IN_PLACE,
    Recipe,
    flat_entries,
    flat_vectors,
    list_entries,
    sections_of,
    work_directory,
)
from .part import ClusterPart
from .search import DEFAULT_CANDIDATES, LoadedClusters

#: Parts of fewer documents have no lists: a search would read a large share of what there is.
FLAT_MAX = 1024
#: What was trained: what a step of rounded values is worth, and what is taken off each before.
GRID = "grid"
_RECALL = 0.98  # of the exhaustive candidates, what the store's own effort is to find
_ROWS = 8192  # vectors at a time
_BUDGET_BYTES = 256 << 20  # of a build, where heads do not take more
_SAMPLED = 16_384  # of what the grid is chosen by
_SAMPLED_BYTES = 64 << 20
# of hierarchical clustering: rounds of k-means, branches
_ROUNDS, _BRANCHES = 10, 32


@dataclass(frozen=True)
class ClusterSettings:
    """The options of lists, as `espnx.clusters.build` describes them.

    Attributes:
        heads_share, n_lists, list_bytes, replicas, packing: see there; `n_lists` is of each part of
            a store. Pages have 4096 bytes: a store's sections begin at multiples of that.
        vector_dtype: ``float16``, ``float32``, or ``int8``: each value as one of 255 steps.
        heads: ``memory`` or ``graph``.
    """

    heads_share: float = 0.125
    n_lists: int | None = None
    list_bytes: int = 12288
    replicas: int = 8
    packing: str = "co-access"
    vector_dtype: str = "float16"
    heads: str = "memory"

    def __post_init__(self) -> None:
        self.check(1)

    def check(self, dim: int) -> str:
        """The format of stored vectors of so many values. Raises InvalidInputError for options that
        cannot be."""
        source = Vectors(1, dim, np.dtype(np.float32), lambda: iter(()), "first-stage vectors")
        return check_options(self.options(1), source)[0]

    def options(self, threads: int) -> ClusterOptions:
        """The options of a build."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return ClusterOptions(metric="ip", threads=threads, **own)

    @classmethod
    def parse(cls, said: Fields, dim: int) -> ClusterSettings:
        """The opposite of `describe`. Raises FormatError."""
        try:
            made = cls(
                said.real("heads_share"),
                said.whole("n_lists") if "n_lists" in said else None,
                said.whole("list_bytes"),
                said.whole("replicas"),
                said.choice("packing", PACKINGS),
                said.choice("vector_dtype", DTYPES),
                said.choice("heads", HEADS_IN),
            )
            made.check(dim)
        except errors.InvalidInputError as error:
            said.refuse("vector_dtype", f"{error.expected} as {error.what}", error.got)
        return made

    def describe(self) -> dict[str, Any]:
        """What manifests keep of it."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.n_lists is None:
            del own["n_lists"]
        return own | {"vector_dtype": self.dtype_name}

    @property
    def dtype_name(self) -> str:
        """The dtype of stored vectors."""
        return str(FORMATS[self.check(1)])


@dataclass(frozen=True, eq=False)
class ClusterStage:
    """See `FirstStage`. Similarities are inner products with vectors as they are stored.

    Where it decides the order of the records, they lie as the lists do: near ones beside one
    another.

    Attributes:
        document_vector: the vector of a document that lists hold.
        grid: float32 [1 + dim]: of rounded values the step and what is taken off before, trained
            once, so that merging parts rounds nothing again; empty before, and where values are
            not rounded.
        probed: lists of a part that a search for `DEFAULT_CANDIDATES` reads to find 98 % of the
            exhaustive ones; 0 before it is measured.
        pages: of 4096 bytes, that such a search reads.
        bytes_per_record: in memory, measured; 0 before.
        steps: share of a search's lists -> share of its candidates that are known by then.
    """

    kind: ClassVar[str] = "clusters"
    follows: ClassVar[bool] = True
    in_place: ClassVar[frozenset[str]] = IN_PLACE
    Settings: ClassVar[type[ClusterSettings]] = ClusterSettings

    document_vector: DocumentVector
    settings: ClusterSettings
    grid: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    probed: int = 0
    pages: float = 0.0
    bytes_per_record: float = 0.0
    steps: Mapping[float, float] = field(default_factory=dict)

    # --- settings ---

    @classmethod
    def new(
        cls, settings: ClusterSettings, pooling: str | None, d_cls: int, dim: int
    ) -> ClusterStage:
        """Raises InvalidInputError for settings that do not fit the dimensions."""
        stage = cls(DocumentVector.new(pooling, d_cls, dim), settings)
        settings.check(stage.vector_dim)
        return stage

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> ClusterStage:
        """Raises FormatError."""
        vector = DocumentVector.parse(fields, d_cls, dim)
        pages, each = fields.real("pages"), fields.real("bytes_per_record")
        for name, value in (("pages", pages), ("bytes_per_record", each)):
            if not 0 <= value < math.inf:
                fields.refuse(name, "0 or more")
        return cls(
            vector,
            ClusterSettings.parse(fields, vector.dim),
            probed=fields.whole("probed", 0, 1 << 31),
            pages=pages,
            bytes_per_record=each,
            steps=parse_steps(fields),
        )

    def describe(self) -> dict[str, Any]:
        return {
            **self.document_vector.describe(),
            **self.settings.describe(),
            "probed": self.probed,
            "pages": self.pages,
            "bytes_per_record": self.bytes_per_record,
            "steps": describe_steps(self.steps),
        }

    @staticmethod
    def in_words(description: Mapping[str, Any]) -> str:
        """What `describe` says, and what it means for a search."""
        heads = "memory" if description["heads"] == "memory" else "a graph on SSD"
        values = f"{description['dim']} dimensions as {description['vector_dtype']}"
        words = [
            f"clusters of {description['vector']} vectors, {values}",
            f"lists of {description['list_bytes']} bytes or less, heads in {heads}",
        ]
        if description["pages"]:
            words.append(
                f"searches for {DEFAULT_CANDIDATES} candidates read {description['probed']:,} "
                f"lists on about {math.ceil(description['pages']):,} pages"
            )
        return ", ".join(words)

    @property
    def vector_dim(self) -> int:
        return self.document_vector.dim

    @property
    def is_cls_similarity(self) -> bool:
        return self.document_vector.pooling is None

    def vector(self, document: Encoded) -> torch.Tensor:
        return self.document_vector.of_document(document)

    def fresh(self) -> ClusterStage:
        return ClusterStage(self.document_vector, self.settings)

    # --- what is trained: where values are rounded, how; each part has heads of its own ---

    @property
    def _is_rounded(self) -> bool:
        return self.settings.vector_dtype == "int8"

    def train(self, documents: Documents, memory_bytes: int) -> ClusterStage:
        if not self._is_rounded:
            return self.fresh()
        count, dim = len(documents), self.vector_dim
        least = np.full(dim, np.inf, np.float32)
        most = -least
        for rows in documents.vectors(_ROWS):
            least, most = np.minimum(least, rows.min(axis=0)), np.maximum(most, rows.max(axis=0))
        size = min(count, _SAMPLED, max(1, min(_SAMPLED_BYTES, memory_bytes // 4) // (4 * dim)))
        rng = np.random.default_rng(0)
        chosen = np.sort(rng.choice(count, size=size, replace=False)).astype(np.int64)
        step, centre = grid_of(documents.vector_sample(chosen), least, most)
        return replace(self.fresh(), grid=np.concatenate([[step], centre]).astype(np.float32))

    def arrays(self) -> dict[str, np.ndarray]:
        return {GRID: self.grid} if len(self.grid) else {}

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> ClusterStage:
        if not self._is_rounded:
            return self
        found, shape = arrays.get(GRID), (1 + self.vector_dim,)
        fits = found is not None and found.dtype == np.float32 and found.shape == shape
        if found is None or not fits or not np.isfinite(found).all() or found[0] <= 0:
            raise errors.FormatError(
                "steps of the first stage's vectors do not fit",
                path=path,
                got=None if found is None else f"{found.dtype} {found.shape}",
                expected=f"float32 {shape}, finite, the first above 0",
                fix=FIX,
            )
        return replace(self, grid=found)

    # --- entries ---

    @property
    def _flat_dtype(self) -> np.dtype:
        """The dtype of the vectors of small parts: lists will be made of them."""
        return np.dtype("<f2" if self.settings.dtype_name == "float16" else "<f4")

    def _recipe(self, count: int) -> Recipe:
        options = self.settings.options(torch.get_num_threads())
        format, dim = self.settings.check(self.vector_dim), self.vector_dim  # noqa: A001
        coding = (
            ListCoding(format, dim, "ip", step=float(self.grid[0]), centre=self.grid[1:])
            if self._is_rounded
            else ListCoding(format, dim, "ip")
        )
        return Recipe(coding, options, self._budget_bytes(count))

    def _budget_bytes(self, count: int) -> int:
        """Memory that making lists of so many vectors takes: no more than they need."""
        format, dim = self.settings.check(self.vector_dim), self.vector_dim  # noqa: A001
        entries = self.settings.replicas * entry_bytes(format, dim)
        all_of_them = min(_BUDGET_BYTES, count * (4 * 8 * (dim + 1) + 3 * entries))
        return max(
            LEAST_MEMORY_BYTES, all_of_them, least_memory(self.settings.options(1), count, dim)
        )

    def add_bytes(self, count: int) -> int:
        if count < FLAT_MAX:
            return 2 * count * self.vector_dim * 4
        # Numbers and labels of the records, and their order.
        return self._budget_bytes(count) + 32 * count

    def build_operations(self, count: int) -> int:
        heads = self.settings.options(1).heads_of(count)
        levels = max(1, math.ceil(math.log(max(2, heads), _BRANCHES)))
        compared = heads if heads <= FLAT_HEADS_MAX else 128 * HNSW_M
        return 2 * count * self.vector_dim * (_ROUNDS * _BRANCHES * levels + compared)

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        count, dim = len(documents), self.vector_dim
        if count >= FLAT_MAX:
            source = Vectors(
                count,
                dim,
                np.dtype(np.float32),
                lambda: documents.vectors(_ROWS),
                "first-stage vectors",
            )
            recipe = self._recipe(count)
            return list_entries(source, np.arange(count), order, recipe, documents.scratch)
        rows = np.empty((count, dim), self._flat_dtype)
        at = 0
        for block in documents.vectors(_ROWS):
            rows[at : at + len(block)] = stored_rows(block, at, "ip", self._flat_format)
            at += len(block)
        return flat_entries(rows, np.arange(count), order)

    @property
    def _flat_format(self) -> str:
        return "fp16" if self._flat_dtype == np.dtype("<f2") else "fp32"

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        numbers, rows = self._alive(parts, deleted)
        if len(rows) < FLAT_MAX:
            return flat_entries(rows, numbers, order)
        blocks = range(0, len(rows), _ROWS)
        source = Vectors(
            len(rows),
            self.vector_dim,
            rows.dtype,
            lambda: (rows[first : first + _ROWS] for first in blocks),
            "first-stage vectors",
        )
        recipe = self._recipe(len(rows))
        return list_entries(source, numbers, order, recipe, work_directory(parts))

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[ClusterStage, Entries]:
        changed = replace(self.fresh(), grid=self.grid)
        return changed, changed.merge(parts, deleted, order)

    def _alive(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the records that are alive, int64, ascending; their vectors)"""
        numbers = [np.arange(part.first_number, part.first_number + part.count) for part in parts]
        kept = [alive(own, deleted) for own in numbers]
        out = np.empty((sum(int(own.sum()) for own in kept), self.vector_dim), self._flat_dtype)
        end = 0
        with NativeEngine() as engine:
            for part, own in zip(parts, kept, strict=True):
                place = end + np.cumsum(own) - 1
                end += int(own.sum())
                if part.count < FLAT_MAX:
                    held = flat_vectors(part, self._flat_dtype, self.vector_dim)
                    out[place[own]] = held[own]
                    continue
                opened = ClusterPart(part, self.vector_dim, engine)
                try:
                    for rows, vectors in opened.all_vectors(engine):
                        some = own[rows]
                        out[place[rows[some]]] = vectors[some]
                finally:
                    opened.close()
        found = [own[chosen] for own, chosen in zip(numbers, kept, strict=True)]
        return np.concatenate([np.empty(0, np.int64), *found]), out

    # --- search ---

    def check(self, parts: Sequence[StoredEntries]) -> None:
        with NativeEngine() as engine:
            for part in parts:
                if part.count < FLAT_MAX:
                    flat_vectors(part, self._flat_dtype, self.vector_dim)
                    continue
                ClusterPart(part, self.vector_dim, engine).close()
                with ClusterIndex(sections_of(part), threads=1) as opened:
                    opened.verify()

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: int | None = None,
        deleted: np.ndarray | None = None,
        device: StageDevices | None = None,
    ) -> LoadedClusters:
        if gpu is not None:
            raise errors.PathUnavailableError(
                "clusters on a GPU", got="first_stage_on='cuda'", expected="'cpu'"
            )
        device = device or StageDevices()
        with ExitStack() as opened:
            engine = NativeEngine(device.engine)
            opened.callback(engine.close)
            # The base is where most lists are; what was added since is smaller by far.
            each: list[ClusterPart | FlatPart] = []
            for part in parts:
                if part.count < FLAT_MAX:
                    rows = flat_vectors(part, self._flat_dtype, self.vector_dim)
                    each.append(FlatPart(part.first_number, rows))
                    continue
                own = 1 if any(isinstance(one, ClusterPart) for one in each) else threads
                each.append(ClusterPart(part, self.vector_dim, engine, threads=own, device=device))
                opened.callback(each[-1].close)
            loaded = LoadedClusters(
                each, engine, self.document_vector.of_query, self.probed, self.steps
            )
            opened.pop_all()
            return loaded

    def on_devices(self, parts: Sequence[StoredEntries]) -> dict[PartKind, list[Any]]:
        """What `load` opens on devices, by the kind of part."""
        found: dict[PartKind, list[Any]] = {CLUSTERS: []}
        for part in parts:
            if part.count < FLAT_MAX:
                continue
            sections = sections_of(part)
            found[CLUSTERS].append(sections)
            if GRAPH in sections.regions:
                with NativeEngine("posix", threads=1, pool_bytes=0) as engine:
                    found.setdefault(WALKS, []).append(read_lists(engine, sections).graph)
        return found

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> ClusterStage:
        if not isinstance(loaded, LoadedClusters):
            raise errors.InvalidInputError(
                "tune", got=type(loaded).__name__, expected="what this stage has loaded"
            )
        count = loaded.count
        vectors = loaded.vectors if documents is None else documents.vector_sample
        sample = distinct_sample(count, self.vector_dim, vectors)
        wanted = min(DEFAULT_CANDIDATES, count)
        truth = [known_of(scores) for _, scores in loaded.exhaustive(sample, wanted)]
        needed = _RECALL * sum(map(len, truth))

        def enough(lists: int) -> bool:
            return hits_of(truth, loaded.start(list(sample), wanted, lists).complete()) >= needed

        low, high = 0, 1
        while high < loaded.n_lists and not enough(high):
            low, high = high, min(2 * high, loaded.n_lists)
        # To the nearest sixteenth: closer than that, the sample of queries decides.
        while high - low > max(1, high // 16):
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        search = loaded.start(list(sample), wanted, high)
        early = {step: search.advance(step) for step in STEPS}
        final = search.complete()
        total = max(1, sum(len(numbers) for numbers, _ in final))
        steps = {
            step: sum(
                len(np.intersect1d(a, b)) for (a, _), (b, _) in zip(known, final, strict=True)
            )
            / total
            for step, known in early.items()
        }
        return replace(
            self,
            probed=high,
            pages=search.pages / max(1, len(sample)),
            bytes_per_record=loaded.memory_bytes / max(1, count),
            steps=steps,
        )

    def resident_bytes(self, records: int) -> int:
        if records < FLAT_MAX:
            return records * self.vector_dim * (4 + self._flat_dtype.itemsize)
        if self.bytes_per_record:
            return math.ceil(records * self.bytes_per_record)
        memory = self._planned(records).memory
        return memory["total_bytes"] + memory["table_bytes"]  # a device has the table, too

    def stored_bytes(self, records: int) -> int:
        """What so many will take on SSD."""
        if records < FLAT_MAX:
            return records * self.vector_dim * self._flat_dtype.itemsize
        return self._planned(records).disk["total_bytes"]

    def _planned(self, records: int) -> ClusterPlan:
        settings = self.settings
        return plan(
            records,
            self.vector_dim,
            vector_dtype=settings.dtype_name,
            heads_share=settings.heads_share,
            n_lists=settings.n_lists,
            list_bytes=settings.list_bytes,
            heads=settings.heads,
        )
