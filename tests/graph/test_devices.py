"""A graph on near-storage devices, and a graph for each of several directories."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx.device
import espnx.graph
from espnx import errors
from espnx.device.graph import SsdGraphDevice
from espnx.storage import FaultRule, NativeEngine
from espnx.storage.manifest import read_manifest, write_manifest
from tests.graph.conftest import exact, recall_of
from tests.storage.common import interrupted


def test_a_device_walks_over_a_stored_graph(
    graph: Path, base: np.ndarray, queries: np.ndarray
) -> None:
    if graph.name == "paged":
        with pytest.raises(errors.InvalidInputError, match="pages of their own"):
            espnx.graph.StoredGraph(graph)
        return
    true = exact(base.astype(np.float16), queries, 10)
    with SsdGraphDevice(espnx.graph.StoredGraph(graph)) as device, espnx.graph.open(graph) as index:
        tickets = [
            device.search(torch.from_numpy(query), 60, 10, beam_width=1) for query in queries
        ]
        found = np.stack([ticket.finish()[0] for ticket in tickets])
        hops = np.mean([ticket.walk.hops for ticket in tickets])
        own = index.search(queries, 10, list_size=60, beam_width=1)
        whole = device.search(torch.from_numpy(queries[0]), 3000, 5).finish()
    # The device expands a page's other nodes when they become candidates by their codes, the
    # searcher by their vectors.
    assert recall_of(found, true) > recall_of(own.ids, true) - 0.02
    assert hops < 2 * own.pages.mean()
    assert whole[0].tolist() == true[0, :5].tolist()


def test_through_the_device_interface(
    graph: Path, tmp_path: Path, queries: np.ndarray, base: np.ndarray
) -> None:
    if graph.name == "paged":
        pytest.skip("codes in pages of their own")
    device = espnx.device.open("ssd", path=tmp_path)
    try:
        with device.open_graph(espnx.graph.StoredGraph(graph)) as walked:
            ids, _ = walked.search(torch.from_numpy(queries[0]), 3000, 3).finish()
    finally:
        device.close()
    assert ids.tolist() == exact(base.astype(np.float16), queries[:1], 3)[0].tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_private_graphs_find_what_one_finds(
    tmp_path: Path, base: np.ndarray, queries: np.ndarray, count: int
) -> None:
    paths = [tmp_path / str(number) for number in range(count)]
    reports = espnx.graph.build_private(
        base, paths, max_degree=16, list_size=40, num_entry_points=20
    )
    assert sum(each.n for each in reports) == len(base)
    true = exact(base.astype(np.float16), queries, 10)
    with espnx.graph.PrivateGraphs(paths) as graphs:
        assert len(graphs) == len(base)
        whole = graphs.search(queries, 10, list_size=3000)
        some = graphs.search(queries, 10, list_size=40)
    assert np.array_equal(np.sort(whole.ids), np.sort(true)), (
        "ties may change places by the rounding of float32"
    )
    assert recall_of(some.ids, true) > 0.95
    assert (some.pages > 0).all()


@pytest.mark.parametrize("count", [1, 3])
def test_filters_of_private_graphs_are_of_the_whole_input(
    tmp_path: Path, base: np.ndarray, queries: np.ndarray, count: int
) -> None:
    """As numbers and as a mask; where one graph has none of the rows, where few are measured, where
    most are walked over."""
    paths = [tmp_path / str(number) for number in range(count)]
    espnx.graph.build_private(base, paths, max_degree=16, list_size=40, num_entry_points=20)
    stored, rows = base.astype(np.float16), np.arange(len(base))
    with espnx.graph.PrivateGraphs(paths) as graphs:
        for included in (np.array([2999, 5]), rows[::7], rows[rows % 50 != 0], rows[:900]):
            true = included_exact(stored, queries, np.sort(included))
            found = graphs.search(queries, 10, list_size=3000, include=included)
            assert np.array_equal(np.sort(found.ids), np.sort(true))
            mask = np.isin(rows, included)
            for other in (
                {"include": mask},
                {"exclude": ~mask},
                {"include": torch.from_numpy(mask), "exclude": rows[~mask]},
            ):
                again = graphs.search(queries, 10, list_size=3000, **other)
                assert np.array_equal(again.ids, found.ids)
                assert np.array_equal(again.distances, found.distances)
        assert (graphs.search(queries, 3, include=[]).ids == -1).all()
        for wrong in ([3000], [-1], np.ones(2999, bool), [0.5]):
            with pytest.raises(errors.InvalidInputError, match="rows to exclude"):
                graphs.search(queries, 10, exclude=wrong)


def included_exact(base: np.ndarray, queries: np.ndarray, included: np.ndarray) -> np.ndarray:
    """int64 [q, 10]: the nearest of these rows; -1 where there are fewer."""
    nearest = included[exact(base[included], queries, 10)]
    return np.pad(nearest, ((0, 0), (0, 10 - nearest.shape[1])), constant_values=-1)


def test_private_graphs_are_those_of_one_build(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.uint8).reshape(6, 2)
    paths, others, two = ([tmp_path / f"{name}{number}" for number in range(3)] for name in "abc")
    espnx.graph.build_private(base, paths)
    espnx.graph.build_private(base, others, memory="8GiB")
    espnx.graph.build_private(base, two[:2])
    espnx.graph.build(base, tmp_path / "own")
    for order in ((0, 1, 2), (2, 0, 1)):
        for built in (paths, others):
            with espnx.graph.PrivateGraphs([built[i] for i in order]) as graphs:
                assert graphs.search(base, 1).ids[:, 0].tolist() == list(range(6))
    for wrong, said in (
        ([*paths[:2], others[2]], "of 2 builds"),
        (paths[:2], r"\[0, 1\] of 3"),
        ([paths[0], paths[1], paths[1]], r"\[0, 1, 1\]"),
        ([*two[:2], two[0]], r"\[0, 0, 1\] of 2"),
        ([*paths, tmp_path / "own"], "own; got a graph of its own"),
    ):
        with pytest.raises(errors.InvalidInputError, match=said):
            espnx.graph.PrivateGraphs(wrong)
    with NativeEngine() as engine:
        fields = read_manifest(engine, paths[0], "espnx-graph", 1)
        for share in (
            {"collection": "0" * 32, "number": 3, "count": 3},
            {"collection": "x", "number": 0, "count": 3},
            [],
            "0",
        ):
            write_manifest(engine, paths[0], "espnx-graph", 1, {**fields, "share": share})
            with pytest.raises(errors.FormatError, match="field share"):
                espnx.graph.open(paths[0])
    for values in (("0" * 31, 0, 1), ("0" * 32, 1, 1), ("0" * 32, 0, 0)):
        with pytest.raises(errors.InvalidInputError):
            espnx.graph.GraphShare(*values)


def test_ctrl_c_while_a_private_graph_stalls(
    tmp_path: Path, base: np.ndarray, queries: np.ndarray
) -> None:
    """It waits for no deadline, nor does closing the graphs."""
    paths = [tmp_path / str(number) for number in range(2)]
    espnx.graph.build_private(base[:500], paths, max_degree=16, list_size=40)
    stalled = FaultRule("never", operation="read", nth=3)
    begun = float("inf")
    with (
        interrupted(lambda: time.monotonic() > begun + 0.3),
        pytest.raises(KeyboardInterrupt),
        espnx.graph.PrivateGraphs(paths, rules=[stalled]) as graphs,
    ):
        begun = time.monotonic()
        graphs.search(queries, 10, deadline_s=100.0)
    assert time.monotonic() - begun < 50


def test_fewer_vectors_than_directories(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    espnx.graph.build_private(np.eye(3, dtype=np.float32), paths)
    with espnx.graph.PrivateGraphs(paths) as graphs:
        found = graphs.search(np.eye(3, dtype=np.float32), 5)
    assert found.ids[:, 0].tolist() == [0, 1, 2]
    assert (found.ids[:, 3:] == -1).all()
