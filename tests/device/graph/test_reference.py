"""Walks of a device beside the same walk in plain Python, to the bit: what is found, ties, and
every round; over each kind of graph that devices take."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx.graph
from espnx import errors
from espnx.device.graph import SsdGraphDevice
from espnx.device.vectors.interface import Estimate, Graph
from espnx.graph.hnsw import HnswGraph, Links, write_hnsw
from espnx.ops.distances import distances
from espnx.storage import NativeEngine
from espnx.storage.native import load_native
from tests.device.graph.made import query_of, random_graph
from tests.device.graph.reference_walk import ReferenceWalk

SHAPES = [(1, 1, 1), (3, 2, 2), (10, 10, 3), (40, 10, 1), (40, 7, 8), (700, 20, 5)]  # L, k, beam


def assert_walks_alike(
    graph: Graph, queries: Iterable[torch.Tensor], shapes: list[tuple[int, int, int]] = SHAPES
) -> None:
    with NativeEngine() as engine, SsdGraphDevice(graph, engine=engine) as device:
        for query in queries:
            for length, k, beam in shapes:
                ticket = device.search(query, length, k, beam_width=beam)
                ids, far = ticket.finish()
                wanted = ReferenceWalk(graph, engine, query, length, k, beam).run()
                found = list(zip(far.tolist(), ids.tolist(), strict=True))
                # of which some may be no numbers
                assert repr(found) == repr(wanted.found), (length, k, beam)
                rounds = [
                    (each.nodes.tolist(), each.bytes_moved, each.distances, each.read_requests)
                    for each in ticket.rounds
                ]
                assert rounds == wanted.rounds, (length, k, beam)
                counted = ticket.walk
                assert (counted.distances, counted.estimates, counted.hops) == (
                    wanted.distances,
                    wanted.estimates,
                    len(wanted.rounds),
                )
                assert counted.nodes == sum(len(nodes) for nodes, _, _, _ in wanted.rounds)
                assert counted.read_requests == sum(requests for _, _, _, requests in wanted.rounds)
                assert counted.bytes_moved == sum(moved for _, moved, _, _ in wanted.rounds)


def vectors_of(n: int, dim: int, dtype: str, seed: int, *, alike: bool = False) -> np.ndarray:
    random = np.random.default_rng(seed)
    if alike:
        return np.full((n, dim), 3, dtype)
    if np.dtype(dtype).kind == "f":
        return random.standard_normal((n, dim)).astype(dtype)
    low = 0 if dtype == "uint8" else -128
    return random.integers(low, low + 256, (n, dim)).astype(dtype)


def as_query(vector: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(vector if vector.dtype.kind in "iu" else vector.astype(np.float32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codes", ["inline", "memory"])
@pytest.mark.parametrize(
    ("n", "dim", "dtype", "metric"),
    [
        (600, 24, "float32", "l2"),
        (601, 17, "float32", "ip"),
        (333, 24, "float16", "cosine"),
        (500, 24, "uint8", "l2"),
        (257, 31, "int8", "ip"),
        (1, 8, "float32", "l2"),
        (2, 8, "uint8", "l2"),
    ],
)
def test_graphs_with_codes(
    tmp_path: Path, codes: str, n: int, dim: int, dtype: str, metric: str
) -> None:
    base = vectors_of(n, dim, dtype, n)
    espnx.graph.build(
        base,
        tmp_path / "graph",
        metric=metric,
        codes=codes,
        max_degree=12,
        list_size=20,
        num_entry_points=9,
        threads=1,
        vector_dtype=dtype,
        **({} if codes == "inline" else {"inline_pq": 5}),
    )
    queries = [*vectors_of(3, dim, dtype, 1), base[0]]
    if metric == "cosine":
        queries = [each / np.linalg.norm(each.astype(np.float32)) for each in queries]
    assert_walks_alike(espnx.graph.StoredGraph(tmp_path / "graph"), map(as_query, queries))


@pytest.mark.parametrize("codes", ["inline", "memory"])
def test_equal_vectors_with_codes(tmp_path: Path, codes: str) -> None:
    base = vectors_of(300, 8, "uint8", 0, alike=True)
    espnx.graph.build(
        base,
        tmp_path / "graph",
        codes=codes,
        max_degree=8,
        list_size=12,
        threads=1,
        vector_dtype="uint8",
    )
    assert_walks_alike(
        espnx.graph.StoredGraph(tmp_path / "graph"),
        map(as_query, [base[0], vectors_of(1, 8, "uint8", 1)[0]]),
    )


class Coded(HnswGraph):
    """With layers above, and codes in memory: coarse vectors, or what a test puts there."""

    guessed: np.ndarray | None = None  # float32 [n]

    def estimator(self, query: torch.Tensor) -> Estimate:  # type: ignore[override]
        if (guessed := self.guessed) is None:
            pages = np.fromfile(Path(self.directory) / "vectors.bin", np.uint8).reshape(-1, 4096)
            held = pages[:, : 4096 // self.dim * self.dim].reshape(-1, self.dim)
            guessed = np.square(held // 32 * np.float32(32) - query.numpy().astype(np.float32)).sum(
                axis=1
            )

        def estimate(nodes: np.ndarray, codes: np.ndarray | None) -> np.ndarray:
            assert codes is None
            found: np.ndarray = guessed[nodes]
            return found

        return estimate


def layered(n: int, m: int, seed: int) -> Links:
    """Links at random, a third of the nodes reaching each next layer; itself and doubles among a
    node's neighbours."""
    random = np.random.default_rng(seed)
    layers = np.minimum(random.geometric(2 / 3, n), 5).astype(np.uint8)
    rows = []
    for node in range(n):
        for layer in range(1, layers[node]):
            there = np.flatnonzero(layers > layer)
            row = np.full(m, -1, "<i4")
            count = random.integers(0, m + 1)
            row[:count] = random.choice(there, count)
            rows.append(row)
    lowest = random.integers(0, n, (n, 2 * m)).astype("<i4")
    lowest[random.random(n) < 0.2, m:] = -1
    return Links(layers, lowest, np.array(rows, "<i4").reshape(-1, m), int(np.argmax(layers)))


@pytest.mark.parametrize(
    ("kind", "n", "dim", "dtype", "metric"),
    [
        (HnswGraph, 500, 16, "uint8", "l2"),
        (HnswGraph, 301, 13, "float32", "ip"),
        (HnswGraph, 60, 1500, "float32", "l2"),
        (HnswGraph, 400, 32, "int8", "l2"),
        (HnswGraph, 200, 65, "float16", "ip"),
        (HnswGraph, 1, 4, "uint8", "l2"),
        (Coded, 300, 16, "uint8", "l2"),
        (Coded, 1, 4, "uint8", "l2"),
    ],
)
def test_layers_above(
    tmp_path: Path, kind: type[HnswGraph], n: int, dim: int, dtype: str, metric: str
) -> None:
    base = vectors_of(n, dim, dtype, n)
    write_hnsw(tmp_path / "hnsw", base, layered(n, 4, n), metric=metric)
    assert_walks_alike(
        kind(tmp_path / "hnsw"), map(as_query, [*vectors_of(4, dim, dtype, 1), base[0]])
    )


@pytest.mark.parametrize("kind", [HnswGraph, Coded])
def test_equal_vectors_in_layers(tmp_path: Path, kind: type[HnswGraph]) -> None:
    base = vectors_of(120, 8, "uint8", 0, alike=True)
    write_hnsw(tmp_path / "hnsw", base, layered(120, 3, 5))
    assert_walks_alike(
        kind(tmp_path / "hnsw"), map(as_query, [base[0], vectors_of(1, 8, "uint8", 1)[0]])
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("shared_slots", [0, 1, 3, 8])
def test_nodes_that_come_along(tmp_path: Path, coded: bool, shared_slots: int) -> None:
    graph = random_graph(tmp_path, 203, 8, per_page=8, coded=coded)
    graph.shared_slots = shared_slots
    graph.entry = [5, 5, 200, 17]
    assert_walks_alike(graph, map(query_of, range(3)))


@pytest.mark.parametrize("kind", [HnswGraph, Coded])
def test_distances_that_are_no_numbers(tmp_path: Path, kind: type[HnswGraph]) -> None:
    """Products that overflow, of both signs: infinities, and sums of such that are no numbers."""
    base = vectors_of(150, 4, "int8", 3).astype(np.float32)
    base[::3] *= np.float32(2e36)
    write_hnsw(tmp_path / "hnsw", base, layered(150, 3, 5), metric="ip")
    query = torch.tensor([1e5, 1e5, -1e5, 1.0])
    graph = kind(tmp_path / "hnsw")
    if isinstance(graph, Coded):
        graph.guessed = distances(
            query,
            torch.from_numpy(base.view(np.uint8).ravel()),
            torch.arange(150) * 16,
            "fp32",
            "ip",
        ).numpy()
    assert_walks_alike(graph, [query])
    with SsdGraphDevice(graph) as device:
        far = device.search(query, 150, 150).finish()[1]
    assert np.isnan(far).any()
    assert np.isinf(far).any()
    assert np.isfinite(far).any()


def native_walk(**change: int) -> object:
    options = {
        "n_nodes": 10,
        "k": 2,
        "list_size": 4,
        "beam_width": 1,
        "by_codes": False,
        "upper_layers": None,
        **change,
    }
    return load_native().RoundWalk(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"n_nodes": -1},
        {"n_nodes": 2**32},
        {"k": 0},
        {"list_size": 1},
        {"beam_width": 0},
        {"upper_layers": -1},
    ],
)
def test_a_walk_that_cannot_be(change: dict[str, int]) -> None:
    with pytest.raises(errors.InvalidInputError):
        native_walk(**change)


class Wrong:
    """Says that it has read what it has not, or says it wrong."""

    def __init__(self, arrival: dict[str, list[int]] | None):
        self.walk, self.arrival = native_walk(), arrival

    def read(self, nodes: torch.Tensor) -> None:
        if self.arrival is not None:
            given = {
                "numbers": [3],
                "ids": [3],
                "distances": [1],
                "neighbours": [5],
                "begin": [0],
                "end": [1],
                **self.arrival,
            }
            own = [
                torch.tensor(each, dtype=torch.float32 if name == "distances" else torch.int64)
                for name, each in given.items()
            ]
            self.walk.arrived(*own)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arrival",
    [
        {"numbers": [10]},
        {"numbers": [-1]},
        {"neighbours": [10]},
        {"neighbours": [-1]},
        {"end": [2]},
        {"begin": [-1]},
        {"begin": [2]},
        {"ids": []},
        {"distances": []},
        {"numbers": [3, 3], "ids": [3, 3], "distances": [1, 1], "begin": [0, 0], "end": [1, 1]},
    ],
)
def test_what_never_arrived(arrival: dict[str, list[int]]) -> None:
    source = Wrong(arrival)
    with pytest.raises(errors.InvalidInputError):
        source.walk.run(source, torch.tensor([3]))  # type: ignore[attr-defined]


def test_nothing_arrives() -> None:
    source = Wrong(None)
    with pytest.raises(RuntimeError, match="was not read"):
        source.walk.run(source, torch.tensor([3]))  # type: ignore[attr-defined]
    with pytest.raises(errors.InvalidInputError, match="entries must be nodes"):
        source.walk.run(source, torch.tensor([10]))  # type: ignore[attr-defined]
