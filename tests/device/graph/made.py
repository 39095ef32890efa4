"""A graph on storage for tests, in a format of its own, and a walk over it in memory, written apart
from the one that it judges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from espnx import errors
from espnx.device.vectors.interface import Estimate, Nodes
from espnx.storage import Engine, FileHandle, Plan
from espnx.storage.files import crc32c

DIM = 5
PAGE_BYTES = 4096


class StoredGraph:
    """Keeps `Graph`: slots of one size, `per_page` of them in each page of 4096 bytes, checked page
    by page.

    A slot holds int32 node number, int32 neighbours, the vector (uint8 [5]), then the neighbours as
    int32 and, with `coded`, their codes: their vectors' values divided by 16.
    """

    format, dim, metric = "uint8", DIM, "l2"

    def __init__(
        self,
        folder: Path,
        vectors: np.ndarray,
        neighbours: Sequence[Sequence[int]],
        entry: Sequence[int],
        *,
        per_page: int = 1,
        coded: bool = False,
    ):
        self.vectors, self.neighbours, self.entry, self.coded = (
            vectors,
            [list(each) for each in neighbours],
            list(entry),
            coded,
        )
        self.n_nodes, self.per_page = len(vectors), per_page
        # of each page that is read: so many of its first nodes are handed over, too
        self.shared_slots = 0
        self.slot_bytes = PAGE_BYTES // per_page
        self.path = folder / "graph.bin"
        pages = bytearray(-(-self.n_nodes // per_page) * PAGE_BYTES)
        for node in range(self.n_nodes):
            at = node // per_page * PAGE_BYTES + node % per_page * self.slot_bytes
            slot = self._slot(node)
            assert len(slot) <= self.slot_bytes
            pages[at : at + len(slot)] = slot
        self.path.write_bytes(pages)
        self.sums = [
            crc32c(bytes(pages[at : at + PAGE_BYTES])) for at in range(0, len(pages), PAGE_BYTES)
        ]
        self.parsed: list[int] = []

    def _slot(self, node: int) -> bytes:
        near = np.array(self.neighbours[node], np.int32)
        inside = near[(near >= 0) & (near < self.n_nodes)]
        codes = (self.vectors[inside] // 16).tobytes() if self.coded else b""
        return (
            np.array([node, len(near)], np.int32).tobytes()
            + self.vectors[node].tobytes()
            + near.tobytes()
            + codes
        )

    def open(self, engine: Engine) -> list[FileHandle]:
        self.file = engine.open(self.path)
        return [self.file]

    def entry_points(self, query: torch.Tensor) -> np.ndarray:
        return np.array(self.entry, np.int64)

    def plan(self, nodes: np.ndarray) -> Plan:
        pages = nodes // self.per_page
        sums = [self.sums[page] for page in pages]
        return Plan.of(
            self.file, (pages * PAGE_BYTES).tolist(), [PAGE_BYTES] * len(nodes), crc32c=sums
        )

    def parse(self, nodes: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray) -> Nodes:
        data = memory.numpy()
        numbers, offsets, near, codes = [], [], [], []
        for node, at in zip(nodes.tolist(), position_bytes.tolist(), strict=True):
            for slot in sorted({*range(self.shared_slots), node % self.per_page}):
                begin = at + slot * self.slot_bytes
                number, count = data[begin : begin + 8].view(np.int32).tolist()
                if number != node // self.per_page * self.per_page + slot:
                    if slot != node % self.per_page and count == 0:  # behind the last node
                        continue
                    raise errors.StaleDataError("node", got=number, expected=node)
                numbers.append(number)
                offsets.append(begin + 8)
                ends = begin + 8 + DIM
                near.append(data[ends : ends + 4 * count].copy().view(np.int32).astype(np.int64))
                codes.append(
                    data[ends + 4 * count : ends + 4 * count + DIM * count].reshape(count, DIM)
                )
        self.parsed += numbers
        first = np.concatenate([[0], np.cumsum([len(each) for each in near])]).astype(np.int64)
        everything = np.concatenate(near) if near else np.empty(0, np.int64)
        return Nodes(
            np.array(numbers),
            np.array(offsets),
            everything,
            first,
            np.concatenate(codes) if self.coded else None,
        )

    def estimator(self, query: torch.Tensor) -> Estimate | None:
        if not self.coded:
            return None
        wanted = query.numpy().astype(np.float32)

        def estimate(nodes: np.ndarray, codes: np.ndarray | None) -> np.ndarray:
            assert codes is not None
            assert (codes == self.vectors[nodes] // 16).all(), "the codes of other nodes"
            return ((codes.astype(np.float32) * 16 + 8 - wanted) ** 2).sum(1).astype(np.float32)

        return estimate


def expected_walk(
    graph: StoredGraph, query: torch.Tensor, length: int, k: int, beam: int
) -> tuple[list[tuple[float, int]], int, int]:
    """(the k nearest as (distance, node), hops, nodes measured) of a walk over what the graph was
    made of. Nodes share nothing here."""
    wanted = query.numpy().astype(int)

    def far(node: int) -> float:
        return float(((graph.vectors[node].astype(int) - wanted) ** 2).sum())

    def guess(node: int) -> float:
        return float(((graph.vectors[node] // 16 * 16.0 + 8 - wanted) ** 2).sum())

    measured = set(graph.entry)
    hops = 1 if measured else 0
    open_ = [] if graph.coded else [(far(node), node) for node in measured]
    done = set[int]()
    listed = sorted(open_)[:length]
    met = set(graph.entry)
    turn = sorted(measured) if graph.coded else []
    while True:
        if graph.coded:
            for node in turn:
                for near in graph.neighbours[node]:
                    if near not in met:
                        met.add(near)
                        listed.append((guess(near), near))
            listed = sorted(listed)[:length]
        turn = [node for _, node in listed if node not in done][:beam]
        if not turn:
            break
        done.update(turn)
        wave = (
            set(turn) if graph.coded else {near for node in turn for near in graph.neighbours[node]}
        )
        wave -= measured
        hops += bool(wave)
        measured |= wave
        if not graph.coded:
            listed = sorted(listed + [(far(node), node) for node in wave])[:length]
    return sorted((far(node), node) for node in measured)[:k], hops, len(measured)


def random_graph(
    folder: Path, n: int, degree: int, seed: int = 0, **options: bool | int
) -> StoredGraph:
    """Each node has `degree` neighbours: some near, some anywhere; itself and doubles among
    them."""
    rng = np.random.default_rng(seed)
    vectors = rng.integers(0, 256, (n, DIM)).astype(np.uint8)
    far = ((vectors[:, None].astype(int) - vectors[None].astype(int)) ** 2).sum(2)
    near = np.argsort(far, axis=1)[:, : degree // 2 + 1]
    anywhere = rng.integers(0, n, (n, degree - near.shape[1]))
    neighbours = np.concatenate([near, anywhere], axis=1).tolist()
    return StoredGraph(folder, vectors, neighbours, [int(rng.integers(n))], **options)  # type: ignore[arg-type]


def query_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(1000 + seed).integers(0, 256, DIM).astype(np.uint8)
    )
