"""A graph on near-storage devices, and a graph for each of several directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import espnx.device
import espnx.graph
from espnx import errors
from espnx.device.graph import SsdGraphDevice
from tests.graph.conftest import exact, recall_of


def test_a_device_walks_over_a_stored_graph(graph: Path, base: np.ndarray, queries: np.ndarray) -> None:
    if graph.name == "paged":
        with pytest.raises(errors.InvalidInputError, match="pages of their own"):
            espnx.graph.StoredGraph(graph)
        return
    true = exact(base.astype(np.float16), queries, 10)
    with SsdGraphDevice(espnx.graph.StoredGraph(graph)) as device, espnx.graph.open(graph) as index:
        tickets = [device.search(torch.from_numpy(query), 60, 10, beam=1) for query in queries]
        found = np.stack([ticket.finish()[0] for ticket in tickets])
        hops = np.mean([ticket.walk.hops for ticket in tickets])
        own = index.search(queries, 10, list_size=60, beamwidth=1)
        whole = device.search(torch.from_numpy(queries[0]), 3000, 5).finish()
    # The device expands a page's other nodes when they become candidates by their codes, the searcher by their vectors.
    assert recall_of(found, true) > recall_of(own.ids, true) - 0.02
    assert hops < 2 * own.pages.mean()
    assert whole[0].tolist() == true[0, :5].tolist()


def test_through_the_device_interface(graph: Path, tmp_path: Path, queries: np.ndarray, base: np.ndarray) -> None:
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
def test_private_graphs_find_what_one_finds(tmp_path: Path, base: np.ndarray, queries: np.ndarray, count: int) -> None:
    paths = [tmp_path / str(number) for number in range(count)]
    reports = espnx.graph.build_private(base, paths, max_degree=16, search_list_size=40, num_entry_points=20)
    assert sum(each.n for each in reports) == len(base)
    true = exact(base.astype(np.float16), queries, 10)
    with espnx.graph.PrivateGraphs(paths) as graphs:
        assert len(graphs) == len(base)
        whole = graphs.search(queries, 10, list_size=3000)
        some = graphs.search(queries, 10, list_size=40)
        with pytest.raises(errors.InvalidInputError):
            graphs.search(queries, 10, include=[1])
    assert np.array_equal(np.sort(whole.ids), np.sort(true)), "ties may change places by the rounding of float32"
    assert recall_of(some.ids, true) > 0.95
    assert (some.pages > 0).all()


def test_fewer_vectors_than_directories(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    espnx.graph.build_private(np.eye(3, dtype=np.float32), paths)
    with espnx.graph.PrivateGraphs(paths) as graphs:
        found = graphs.search(np.eye(3, dtype=np.float32), 5)
    assert found.ids[:, 0].tolist() == [0, 1, 2]
    assert (found.ids[:, 3:] == -1).all()
