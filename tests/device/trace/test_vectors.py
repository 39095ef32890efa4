"""Traces of clusters and of walks over graphs: which were measured, which nodes were read, and what
failed; results are the device's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.clusters import nearest_by_command, write_clusters
from espnx.device.kinds import CLUSTERS, GRAPHS
from espnx.device.trace.reader import read_trace
from espnx.device.trace.recording import recorded
from espnx.device.trace.replay import replay
from espnx.device.trace.writer import TraceWriter
from tests.device.graph.made import expected_walk, query_of, random_graph


def lines_of(path: Path) -> list[dict[str, Any]]:
    """But for the first."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:-1]]


@pytest.mark.parametrize("name", ["ssd", "smartssd"])
def test_walks(folder: Path, tmp_path: Path, name: str) -> None:
    graph = random_graph(folder, 200, 8)
    devices = espnx.device.open(name, [tmp_path], **({"stretch": 0} if name == "smartssd" else {}))
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        walked = recorded(devices, writer)[0].open_graph(graph)
        for seed in range(3):
            ticket = walked.search(query_of(seed), 20, 5)
            assert ticket.finish()[0].tolist() == [
                node for _, node in expected_walk(graph, query_of(seed), 20, 5, 4)[0]
            ]
            ticket.finish()  # written once
            rounds = [each.nodes.tolist() for each in ticket.rounds]
            assert ticket.stats.bytes_asked == ticket.walk.bytes_asked
            walked_requests = ticket.walk.read_requests
        assert walked.command(query_of(0), 20, 5).k == 5
        assert walked.graph is graph
        with pytest.raises(errors.InvalidInputError):
            walked.search(query_of(0), 1, 5)
        cancelled = walked.search(query_of(0), 20, 5)
        cancelled.cancel()
        walked.forget()
        assert walked.path_report()
        assert walked.capabilities == walked.capabilities
        assert walked.stats().stored_bytes > 0
        walked.close()
    opened, *walks, refused, ended = lines_of(tmp_path / "trace")
    assert (opened["verb"], opened["nodes"], opened["metric"], opened["files"]) == (
        "open_graph",
        200,
        "l2",
        [str(graph.path)],
    )
    assert [each["verb"] for each in walks] == ["search"] * 3
    assert (
        walks[-1]["rounds"],
        walks[-1]["L"],
        walks[-1]["k"],
        walks[-1]["beam"],
        walks[-1]["part"],
    ) == (rounds, 20, 5, 4, opened["part"])
    assert walks[-1]["bytes"] == sum(walks[-1]["round_bytes"])
    assert sum(walks[-1]["round_requests"]) == walked_requests
    assert (refused["failed"], ended["failed"]) == ("InvalidInputError", "cancelled")
    trace = read_trace(tmp_path / "trace")
    assert [each.size_bytes for each in trace.commands][1:4] == [each["bytes"] for each in walks]
    with pytest.raises(errors.InvalidInputError, match="graphs that a trace asks for"):
        replay(trace, devices)
    with TraceWriter(tmp_path / "again", "a replay", devices) as writer:
        replay(trace, recorded(devices, writer), {GRAPHS: [graph]})
    assert [each["rounds"] for each in lines_of(tmp_path / "again")[1:]] == [
        each["rounds"] for each in walks
    ]
    devices[0].close()


@pytest.mark.parametrize("query", [None, "?", "AAAA", 7])
def test_walks_whose_query_is_not_said(folder: Path, tmp_path: Path, query: object) -> None:
    """As in traces of before: nobody knows which way they went."""
    graph = random_graph(folder, 200, 8)
    devices = espnx.device.open("ssd", [tmp_path])
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        walked = recorded(devices, writer)[0].open_graph(graph)
        walked.search(query_of(0), 20, 5).finish()
        walked.close()
    head, opened, walk, end = (tmp_path / "trace").read_text().splitlines()
    said = json.loads(walk) | {"payload": query}
    if query is None:
        del said["payload"]
    (tmp_path / "trace").write_text("\n".join([head, opened, json.dumps(said), end, ""]))
    with pytest.raises(errors.FormatError, match="payload"):
        replay(read_trace(tmp_path / "trace"), devices, {GRAPHS: [graph]})
    devices[0].close()


def test_clusters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.integers(0, 256, (300, 16), dtype=np.uint8)
    write_clusters(tmp_path / "clusters", np.arange(300), vectors, np.arange(300) % 7, n_clusters=8)
    query, devices = torch.from_numpy(vectors[5]), espnx.device.open("ssd", [tmp_path])
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        clusters = recorded(devices, writer)[0].open_clusters(tmp_path / "clusters")
        ids, far = nearest_by_command(clusters, query, [5, 7, 1], 3)
        assert (ids[0], far[0]) == (5, 0)
        assert len(clusters.commands(query, [5, 7])) == 1
        ticket, finished = clusters.distances(query, [2, 3]), False
        while not finished:
            items, finished = ticket.next()
            assert all(len(ticket.reply(item)) for item in items.tolist())
        with pytest.raises(errors.InvalidInputError):
            clusters.distances(query, [8])
        cancelled = clusters.distances(query, [0])
        cancelled.cancel()
        with pytest.raises(errors.TransferCancelledError):
            cancelled.finish()
        assert ticket.stats.read_requests >= 1
        clusters.close()
    opened, *measured, refused, ended = lines_of(tmp_path / "trace")
    assert (opened["verb"], opened["clusters"], opened["dim"]) == ("open_clusters", 8, 16)
    assert [each["clusters"] for each in measured] == [[5, 7, 1], [2, 3]]
    assert [each["vectors"] for each in measured] == [86, 86]
    assert [each["bytes"] for each in measured] == [8192, 8192]
    assert (refused["failed"], ended["failed"]) == ("InvalidInputError", "cancelled")
    written = (tmp_path / "trace").read_text()
    with TraceWriter(tmp_path / "again", "a replay", devices) as writer:
        replay(
            read_trace(tmp_path / "trace"),
            recorded(devices, writer),
            {CLUSTERS: [tmp_path / "clusters"]},
        )
    again = lines_of(tmp_path / "again")
    assert [(each["clusters"], each["payload"]) for each in again[1:]] == [
        (each["clusters"], each["payload"]) for each in measured
    ]
    # Of traces of before nobody knows the query; the same vectors are measured.
    lines = [
        {key: value for key, value in json.loads(line).items() if key not in ("payload", "metric")}
        for line in written.splitlines()
    ]
    (tmp_path / "trace").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert (
        replay(read_trace(tmp_path / "trace"), devices, {CLUSTERS: [tmp_path / "clusters"]})
        .verbs["distances"]
        .count
        == 2
    )
    devices[0].close()
