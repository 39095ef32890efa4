"""A first stage that stays on SSD: a graph of the documents' vectors (espnx/graph), whose pages a
search reads as it walks.

Memory hardly grows with the number of documents; instead a candidate costs about a read, so a
search takes few of them. A part of a store has a graph of its own. A small one has none: its
vectors are looked at one by one, in memory, until parts are merged.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from .... import errors
from ....device.kinds import PartKind
from ....graph.build import make_graph
from ....graph.codes.codebook import codebook_bytes, may_rotate, rotation_fit_bytes
from ....graph.devices.walks import WALKS
from ....graph.format import CODEBOOK, CODES, ENTRIES, NODES, ROWS, GraphSections, section_of
from ....graph.layout import choose_layout
from ....graph.options import GraphOptions
from ....graph.write import graph_files
from ....storage.parse import Fields
from ...encoder import Encoded
from ..devices import StageDevices
from ..document_vector import DocumentVector
from ..flat import FlatPart
from ..interface import Documents, Entries, LoadedStage, NoSettings, StoredEntries, alive
from ..ivf.probing import STEPS, describe_steps, distinct_sample, hits_of, known_of, parse_steps
from .search import DEFAULT_CANDIDATES, GraphPart, LoadedGraph

log = logging.getLogger(__name__)

#: Sections of a part: what the graph's manifest says, and what its files hold; or the vectors
#: alone.
MANIFEST, VECTORS = "graph", "vectors"
_FILES = (NODES, ROWS, CODES, CODEBOOK, ENTRIES)
#: Parts of fewer documents have no graph: a walk over one would read as much as there is.
FLAT_MAX = 1024
_MAX_DEGREE = 64
_RECALL = 0.98  # of the exhaustive candidates, what the store's own effort is to find
_LONG = 4.0  # such a list is told to whoever builds
_EFFORTS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # list sizes tried, in candidates
_ROWS = 8192  # vectors at a time
_FP16_MAX = 65504.0
_FIX = "restore the store from a copy, or build it again"


@dataclass(frozen=True, eq=False)
class GraphStage:
    """See `FirstStage`. Similarities are inner products with vectors as float16.

    Where it decides the order of the records, they lie as the graph's nodes do: neighbours beside
    one another.

    Attributes:
        document_vector: the vector of a document that the graph holds.
        list_size: of a walk for `DEFAULT_CANDIDATES` that finds 98 % of the exhaustive ones; 0
            before it is measured.
        pages_per_candidate: that such a walk reads, for each candidate of its list.
        steps: share of a walk's pages -> share of its candidates that are known by then.
    """

    kind: ClassVar[str] = "graph"
    follows: ClassVar[bool] = True
    in_place: ClassVar[frozenset[str]] = frozenset(map(section_of, _FILES))

    document_vector: DocumentVector
    list_size: int = 0
    pages_per_candidate: float = 1.0
    steps: Mapping[float, float] = field(default_factory=dict)

    # --- settings ---

    @classmethod
    def new(cls, settings: NoSettings, pooling: str | None, d_cls: int, dim: int) -> GraphStage:
        """Raises InvalidInputError for settings that do not fit the dimensions."""
        stage = cls(DocumentVector.new(pooling, d_cls, dim))
        # refuses what no page holds
        choose_layout(
            1, stage.vector_dim, "fp16", max_degree=_MAX_DEGREE, codes="inline", code_bytes=None
        )
        return stage

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> GraphStage:
        """Raises FormatError."""
        pages = fields.real("pages_per_candidate")
        if not 0 < pages < math.inf:
            fields.refuse("pages_per_candidate", "a number above 0")
        return cls(
            DocumentVector.parse(fields, d_cls, dim),
            fields.whole("list_size", 0, 1 << 20),
            pages,
            parse_steps(fields),
        )

    def describe(self) -> dict[str, Any]:
        return {
            **self.document_vector.describe(),
            "list_size": self.list_size,
            "pages_per_candidate": self.pages_per_candidate,
            "steps": describe_steps(self.steps),
        }

    @staticmethod
    def in_words(description: Mapping[str, Any]) -> str:
        """What `describe` says, and what it means for a search."""
        list_size, words = (
            int(description["list_size"]),
            [f"graph of {description['vector']} vectors, {description['dim']} dimensions"],
        )
        if list_size:
            pages = math.ceil(list_size * description["pages_per_candidate"])
            words.append(
                f"walks for {DEFAULT_CANDIDATES} candidates keep {list_size:,} and read about "
                f"{pages:,} pages"
            )
        if list_size >= _LONG * DEFAULT_CANDIDATES:
            words.append("long ones, as where many documents have almost the same vector")
        return ", ".join(words)

    @property
    def vector_dim(self) -> int:
        return self.document_vector.dim

    @property
    def is_cls_similarity(self) -> bool:
        return self.document_vector.pooling is None

    def vector(self, document: Encoded) -> torch.Tensor:
        return self.document_vector.of_document(document)

    def fresh(self) -> GraphStage:
        return GraphStage(self.document_vector)

    # --- what is trained: nothing; each graph has a codebook of its own ---

    def train(self, documents: Documents, memory_bytes: int) -> GraphStage:
        return self.fresh()

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    def with_arrays(self, arrays: Mapping[str, np.ndarray], path: str) -> GraphStage:
        return self

    # --- entries ---

    def add_bytes(self, count: int) -> int:
        # Vectors as float16 and, with the dimension that inner products need, as float32; edges
        # with room to grow, and a copy of them.
        each = 2 * self.vector_dim + 4 * (self.vector_dim + 1) + 4 * _MAX_DEGREE * 3
        return count * each + rotation_fit_bytes(
            count, self.vector_dim, self._code_bytes(count), use_opq=True
        )

    def build_operations(self, count: int) -> int:
        # Each walk measures about as many vectors as its list has candidates times a third of a
        # node's neighbours.
        return 2 * count * self.vector_dim * 100 * _MAX_DEGREE // 3

    def add(self, documents: Documents, order: np.ndarray | None = None) -> Entries:
        rows = np.empty((len(documents), self.vector_dim), np.float16)
        at = 0
        for block in documents.vectors(_ROWS):
            rows[at : at + len(block)] = self._fitting(block)
            at += len(block)
        return _entries(rows, np.arange(len(rows)), order)

    def _fitting(self, block: np.ndarray) -> np.ndarray:
        """Raises InvalidInputError for a value that float16 does not hold."""
        if block.size and (most := float(np.abs(block).max())) > _FP16_MAX:
            raise errors.InvalidInputError(
                "a first-stage vector's value",
                got=f"{most:g}",
                expected=f"at most {_FP16_MAX:g}",
                fix="scale the vectors, or use ivf",
            )
        return block

    def merge(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> Entries:
        numbers, rows = self._alive(parts, deleted)
        return _entries(rows, numbers, order)

    def compact(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray, order: np.ndarray | None = None
    ) -> tuple[GraphStage, Entries]:
        return self.fresh(), self.merge(parts, deleted, order)

    def _alive(
        self, parts: Sequence[StoredEntries], deleted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the records that are alive, their vectors), by number."""
        numbers, vectors = [np.empty(0, np.int64)], [np.empty((0, self.vector_dim), np.float16)]
        for part in parts:
            with self._opened(part, threads=1) as opened:
                for rows, found in opened.all_vectors():
                    own = part.first_number + rows
                    kept = alive(own, deleted)
                    numbers.append(own[kept])
                    vectors.append(found[kept])
        return np.concatenate(numbers), np.concatenate(vectors)

    # --- search ---

    def check(self, parts: Sequence[StoredEntries]) -> None:
        for part in parts:
            self._opened(part, threads=1).close()

    def load(
        self,
        parts: Sequence[StoredEntries],
        *,
        threads: int = 1,
        gpu: int | None = None,
        deleted: np.ndarray | None = None,
        device: StageDevices | None = None,
    ) -> LoadedGraph:
        if gpu is not None:
            raise errors.PathUnavailableError(
                "a graph on a GPU", got="first_stage_on='cuda'", expected="'cpu'"
            )
        with ExitStack() as opened:
            # The base is where most walks go; what was added since is smaller by far.
            each: list[GraphPart | FlatPart] = []
            for part in parts:
                each.append(self._opened(part, threads=1 if each else threads, device=device))
                opened.callback(each[-1].close)
            loaded = LoadedGraph(
                each,
                self.document_vector.of_query,
                self.list_size,
                self.pages_per_candidate,
                self.steps,
            )
            opened.pop_all()
            return loaded

    def _opened(
        self, part: StoredEntries, threads: int, device: StageDevices | None = None
    ) -> GraphPart | FlatPart:
        if part.count < FLAT_MAX:
            size_bytes = part.count * self.vector_dim * 2
            if part.size_bytes(VECTORS) != size_bytes:
                raise errors.FormatError(
                    "vectors do not fit the part",
                    path=part.path,
                    got=part.size_bytes(VECTORS),
                    expected=size_bytes,
                    fix=_FIX,
                )
            return FlatPart(
                part.first_number,
                part.read(VECTORS).view("<f2").reshape(part.count, self.vector_dim),
            )
        device = device or StageDevices()
        walks = device.open(WALKS, part.path, _sections(part), threads=threads)
        stored = walks.stored
        if (stored.n, stored.dim, stored.metric) != (part.count, self.vector_dim, "ip"):
            walks.close()
            raise errors.FormatError(
                "a graph that does not fit its part",
                path=part.path,
                got=f"{stored.n} vectors of {stored.dim}, {stored.metric}",
                expected=f"{part.count} of {self.vector_dim}, ip",
                fix=_FIX,
            )
        return GraphPart(
            part.first_number, walks, is_on_device=device.of(WALKS, part.path) is not None
        )

    def on_devices(self, parts: Sequence[StoredEntries]) -> dict[PartKind, list[Any]]:
        """What `load` opens on devices, by the kind of part."""
        return {WALKS: [_sections(part) for part in parts if part.count >= FLAT_MAX]}

    def tune(self, loaded: LoadedStage, documents: Documents | None) -> GraphStage:
        if not isinstance(loaded, LoadedGraph):
            raise errors.InvalidInputError(
                "tune", got=type(loaded).__name__, expected="what this stage has loaded"
            )
        count = loaded.count
        vectors = loaded.vectors if documents is None else documents.vector_sample
        sample = distinct_sample(count, self.vector_dim, vectors)
        wanted = min(DEFAULT_CANDIDATES, count)
        truth = [known_of(similarities) for _, similarities in loaded.exhaustive(sample, wanted)]
        for effort in _EFFORTS:
            list_size = max(1, math.ceil(effort * wanted))
            search = loaded.start(list(sample), wanted, list_size)
            found = search.complete()
            if hits_of(truth, found) >= _RECALL * sum(map(len, truth)) or list_size >= count:
                break
        pages = max(1.0, search.pages / max(1, len(sample)))
        tuned = replace(self, list_size=list_size, pages_per_candidate=pages / list_size)
        again = LoadedGraph(
            loaded.parts, self.document_vector.of_query, list_size, tuned.pages_per_candidate, {}
        ).start(list(sample), wanted)
        steps = {}
        for step in STEPS:
            early = again.advance(step)
            known = sum(
                len(np.intersect1d(a, b)) for (a, _), (b, _) in zip(early, found, strict=True)
            )
            steps[step] = known / max(1, sum(len(numbers) for numbers, _ in found))
        again.complete()
        if list_size >= _LONG * wanted and list_size < count:
            log.warning("first stage: %s", self.in_words(tuned.describe()))
        return replace(tuned, steps=steps)

    def resident_bytes(self, records: int) -> int:
        if records < FLAT_MAX:
            return 4 * records * self.vector_dim
        code_bytes = self._code_bytes(records)
        is_rotated = may_rotate(records, self.vector_dim, code_bytes, use_opq=True)
        # and entry points
        return codebook_bytes(self.vector_dim, is_rotated=is_rotated) + 1000 * (4 + code_bytes)

    def _code_bytes(self, count: int) -> int:
        return choose_layout(
            count, self.vector_dim, "fp16", max_degree=_MAX_DEGREE, codes="inline", code_bytes=None
        ).code_bytes


def _sections(part: StoredEntries) -> GraphSections:
    """The graph of a part. Raises FormatError."""
    try:
        manifest = json.loads(part.read(MANIFEST).tobytes())
    except ValueError as error:
        raise errors.FormatError(
            "what a graph says of itself", path=part.path, got=str(error), fix=_FIX
        ) from error
    if not isinstance(manifest, dict):
        raise errors.FormatError(
            "what a graph says of itself", path=part.path, got=type(manifest).__name__, fix=_FIX
        )
    codes = () if manifest.get("inline_pq") == manifest.get("max_degree") else (CODES,)
    names = (NODES, ROWS, CODEBOOK, ENTRIES, *codes)
    regions = {section_of(name): part.place(section_of(name)) for name in names}
    return GraphSections(part.path, manifest, regions)


def _entries(rows: np.ndarray, numbers: np.ndarray, order: np.ndarray | None) -> Entries:
    """The entries of a part: `rows`, float16 [n, dim], are of these document or record numbers."""
    if len(rows) < FLAT_MAX:
        found = numbers if order is None else order
        by_number = np.argsort(numbers, kind="stable")
        places = by_number[np.searchsorted(numbers[by_number], found)]
        return Entries([found], {VECTORS: [rows[places].astype("<f2")]})
    options = GraphOptions(
        metric="ip", max_degree=_MAX_DEGREE, vector_dtype="float16", threads=torch.get_num_threads()
    )
    graph, row_of = make_graph(rows, "the first stage", options)
    if order is None:
        order = numbers[row_of]
    labels = np.empty(len(rows), np.int64)  # of each row the place of its record
    by_number = np.argsort(numbers, kind="stable")
    labels[by_number[np.searchsorted(numbers[by_number], order)]] = np.arange(len(rows))
    files = graph_files(graph, row_of, "the first stage", lambda what, done, total: None, labels)
    # The manifest is known at once: what its sums are of is in memory.
    manifest = json.dumps(files.facts.manifest()).encode()
    sections: dict[str, Any] = {MANIFEST: [np.frombuffer(manifest, np.uint8)]}
    return Entries(
        [order], sections | {section_of(name): pieces for name, pieces in files.contents.items()}
    )
