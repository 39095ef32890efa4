"""What holds for every device that walks over a graph: the walk of plain Python over the same
graph, node by node and hop by hop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import numpy as np
import torch

from ... import errors
from ...storage import Engine, FaultyEngine, FileHandle, Plan
from ...storage.files import crc32c
from ..near_storage import NearStorageDevice
from ..vectors.interface import Estimate, GraphDevice, Nodes
from .faults import fault_checks
from .requirement import in_threads, raises, require

_DIM, _DEGREE, _NODES = 24, 8, 150
_PAGE = np.dtype(
    [
        ("node", "<i8"),
        ("vector", "u1", _DIM),
        ("neighbours", "<i8", _DEGREE),
        ("rest", "u1", 4096 - 8 - _DIM - 8 * _DEGREE),
    ]
)


class _Pages:
    """Keeps `Graph`: a page for each node, with its checksum. Vectors are whole numbers, so that
    distances are exact."""

    n_nodes, format, dim, metric = _NODES, "uint8", _DIM, "l2"

    def __init__(self, path: str):
        rng = np.random.default_rng(7)
        self.path, pages = path, np.zeros(_NODES, _PAGE)
        pages["node"], pages["vector"] = np.arange(_NODES), rng.integers(0, 256, (_NODES, _DIM))
        pages["neighbours"] = rng.integers(0, _NODES, (_NODES, _DEGREE))
        pages["neighbours"][:, 0] = (np.arange(_NODES) + 1) % _NODES  # all can be reached
        pages["rest"] = rng.integers(0, 256, pages["rest"].shape)
        pages.tofile(path)
        self.pages, self.sums = (
            pages,
            np.array([crc32c(page.tobytes()) for page in pages], np.int64),
        )

    def open(self, engine: Engine) -> Sequence[FileHandle]:
        self.file = engine.open(self.path)
        return [self.file]

    def entry_points(self, query: torch.Tensor) -> np.ndarray:
        return np.array([3, 100])

    def plan(self, nodes: np.ndarray) -> Plan:
        sizes = [_PAGE.itemsize] * len(nodes)
        return Plan.of(
            self.file, (nodes * _PAGE.itemsize).tolist(), sizes, crc32c=self.sums[nodes].tolist()
        )

    def parse(self, nodes: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray) -> Nodes:
        pages = [
            memory.numpy()[at : at + _PAGE.itemsize].view(_PAGE)[0]
            for at in position_bytes.tolist()
        ]
        for node, page in zip(nodes.tolist(), pages, strict=True):
            if page["node"] != node:
                raise errors.StaleDataError("a node", got=int(page["node"]), expected=node)
        near = np.concatenate([page["neighbours"] for page in pages])
        return Nodes(nodes, position_bytes + 8, near, np.arange(0, len(near) + 1, _DEGREE))

    def estimator(self, query: torch.Tensor) -> Estimate | None:
        return None

    def walk(
        self, query: torch.Tensor, list_size: int, k: int, beam_width: int
    ) -> tuple[list[tuple[float, int]], int, int]:
        """(the k nearest, as (distance, node); hops; nodes) of a walk: the `beam_width` nearest of
        the `list_size` candidates are expanded in each hop, until all are, and their neighbours
        become candidates together."""
        far = ((self.pages["vector"].astype(int) - query.numpy().astype(int)) ** 2).sum(1).tolist()
        met, done, hops = set(self.entry_points(query).tolist()), set[int](), 1
        listed = sorted((far[node], node) for node in met)[:list_size]
        while turn := [node for _, node in listed if node not in done][:beam_width]:
            done.update(turn)
            wave = {near for node in turn for near in self.pages["neighbours"][node].tolist()} - met
            met |= wave
            hops += bool(wave)
            listed = sorted([*listed, *((far[node], node) for node in wave)])[:list_size]
        return sorted((far[node], node) for node in met)[:k], hops, len(met)

    def require_right(
        self,
        graphs: GraphDevice,
        seed: int,
        list_size: int,
        k: int,
        beam_width: int,
        deadline_s: float = 30.0,
    ) -> None:
        query = torch.from_numpy(
            np.random.default_rng(seed).integers(0, 256, _DIM).astype(np.uint8)
        )
        ticket = graphs.search(query, list_size, k, beam_width=beam_width, deadline_s=deadline_s)
        ids, distances = ticket.finish()
        wanted, hops, nodes = self.walk(query, list_size, k, beam_width)
        what, found = (
            f"a walk with list_size={list_size}, k={k}, beam_width={beam_width}",
            list(zip(distances.tolist(), ids.tolist(), strict=True)),
        )
        require(found == wanted, f"{what}: distances and nodes", got=found, expected=wanted)
        counted = (
            ticket.walk.hops,
            ticket.walk.nodes,
            len(ticket.rounds),
            sum(len(each.nodes) for each in ticket.rounds),
        )
        require(
            counted == (hops, nodes, hops, nodes),
            f"{what}: hops and nodes, of all and by round",
            got=counted,
            expected=(hops, nodes),
        )
        asked = ticket.walk.bytes_asked
        require(
            asked == nodes * _PAGE.itemsize,
            f"{what}: bytes asked",
            got=asked,
            expected=nodes * _PAGE.itemsize,
        )


@contextmanager
def _pages(device: NearStorageDevice) -> Iterator[_Pages]:
    path = os.path.join(device.path, "verify.graph")
    try:
        yield _Pages(path)
    finally:
        with suppress(OSError):
            os.unlink(path)


def walks_as_plain_python(device: NearStorageDevice) -> None:
    """Lists from the shortest to one of all nodes, which finds the nearest of all; beams;
    counters."""
    with _pages(device) as pages, closing(device.open_graph(pages)) as graphs:
        for seed in range(4):
            for list_size, k, beam_width in (
                (1, 1, 1),
                (10, 10, 1),
                (10, 3, 4),
                (40, 10, 7),
                (_NODES, 10, 4),
                (_NODES, _NODES, 400),
            ):
                pages.require_right(graphs, seed, list_size, k, beam_width)


def refuses_what_does_not_fit(device: NearStorageDevice) -> None:
    query = torch.zeros(_DIM, dtype=torch.uint8)
    with _pages(device) as pages, closing(device.open_graph(pages)) as graphs:
        for given, list_size, k, beam_width in (
            (query[:-1], 5, 3, 4),
            (query.float(), 5, 3, 4),
            (query, 2, 3, 4),
            (query, 5, 0, 4),
            (query, 5, 3, 0),
        ):
            with raises(errors.InvalidInputError):
                graphs.search(given, list_size, k, beam_width=beam_width).finish()
        pages.require_right(graphs, 1, 20, 5, 4)


def answers_threads_at_once(device: NearStorageDevice) -> None:
    with _pages(device) as pages, closing(device.open_graph(pages)) as graphs:

        def ask(first: int) -> None:
            for seed in range(first, first + 5):
                pages.require_right(graphs, seed, 20, 5, 4)

        in_threads(ask, (0, 100, 200, 300))


def is_closed(device: NearStorageDevice) -> None:
    """Twice."""
    with _pages(device) as pages:
        graphs = device.open_graph(pages)
        for _ in range(2):
            graphs.close()
        with raises(errors.EngineClosedError):
            graphs.search(torch.zeros(_DIM, dtype=torch.uint8), 5, 3)


@contextmanager
def _asked(
    device: NearStorageDevice, *, engine: FaultyEngine, deadline_s: float
) -> Iterator[Callable[[], None]]:
    with _pages(device) as pages, closing(device.open_graph(pages, engine=engine)) as graphs:
        yield lambda: pages.require_right(graphs, 5, 20, 5, 4, deadline_s)


CHECKS = (walks_as_plain_python, refuses_what_does_not_fit, answers_threads_at_once, is_closed)
FAULT_CHECKS = fault_checks(_asked)
