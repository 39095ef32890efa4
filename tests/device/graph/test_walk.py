"""Walks on a plain SSD, compared with walks in memory: results, hops and nodes, on random graphs
and on strange ones; faults and damage."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.graph import SsdGraphDevice
from espnx.device.vectors.interface import GRAPH_SEARCH
from espnx.storage import FaultRule, FaultyEngine
from tests.device.graph.made import DIM, StoredGraph, expected_walk, query_of, random_graph
from tests.storage.common import until

SHAPES = [(1, 1, 1), (2, 1, 1), (10, 3, 1), (10, 10, 4), (64, 10, 2), (500, 20, 8)]  # L, k, beam


def found(result: tuple[np.ndarray, np.ndarray]) -> list[tuple[float, int]]:
    ids, far = result
    assert (ids.dtype, far.dtype) == (np.int64, np.float32)
    return list(zip(far.tolist(), ids.tolist(), strict=True))


def assert_walks(
    graph: StoredGraph, path: str = "auto", shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> None:
    with SsdGraphDevice(graph, engine=path) as device:
        for length, k, beam in shapes:
            for seed in range(3):
                ticket = device.search(query_of(seed), length, k, beam_width=beam)
                expected, hops, nodes = expected_walk(graph, query_of(seed), length, k, beam)
                assert found(ticket.finish()) == expected, (length, k, beam)
                assert (ticket.walk.hops, ticket.walk.nodes, ticket.walk.distances) == (
                    hops,
                    nodes,
                    nodes,
                )
                assert ticket.walk.bytes_asked == nodes * 4096 == ticket.stats.bytes_asked
                assert ticket.walk.read_requests <= nodes


@pytest.mark.parametrize("coded", [False, True])
def test_random_graphs(folder: Path, path: str, coded: bool) -> None:
    for n in (1, 2, 30, 300):
        assert_walks(random_graph(folder, n, 8, seed=n, coded=coded), path)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(
    "neighbours",
    [
        [[], [], []],
        [[0], [1], [2]],
        [[1, 1, 1], [0, 0, 1], []],
        [[1], [0], [3], [2]],  # two parts: the other one is not found
        [[1], [2], [3], [4], [5], [0]],  # a ring
        [list(range(6)) * 3] * 6,
    ],
    ids=["edgeless", "self", "double", "parts", "ring", "complete"],
)
def test_strange_graphs(folder: Path, neighbours: list[list[int]], coded: bool) -> None:
    vectors = np.random.default_rng(3).integers(0, 256, (len(neighbours), DIM)).astype(np.uint8)
    assert_walks(StoredGraph(folder, vectors, neighbours, [0], coded=coded))


@pytest.mark.parametrize("coded", [False, True])
def test_equal_vectors_are_ordered_by_number(folder: Path, coded: bool) -> None:
    rng = np.random.default_rng(1)
    graph = StoredGraph(
        folder,
        np.ones((60, DIM), np.uint8),
        rng.integers(0, 60, (60, 5)).tolist(),
        [59],
        coded=coded,
    )
    assert_walks(graph)


def test_entry_points(folder: Path) -> None:
    vectors = np.random.default_rng(3).integers(0, 256, (40, DIM)).astype(np.uint8)
    neighbours = np.random.default_rng(4).integers(0, 40, (40, 3)).tolist()
    assert_walks(StoredGraph(folder, vectors, neighbours, [0, 39, 17, 5, 6]))
    empty = StoredGraph(folder, vectors[:0], [], [])
    with SsdGraphDevice(empty) as device:
        assert found(device.search(query_of(0), 5, 2).finish()) == []


@pytest.mark.parametrize("coded", [False, True])
def test_nodes_of_one_page(folder: Path, coded: bool) -> None:
    """Several nodes in a page: each counts for itself unless the graph hands over all that came;
    then no page's nodes are read again."""
    alone = random_graph(folder, 200, 8, per_page=8, coded=coded)
    with SsdGraphDevice(alone) as device:
        for seed in range(3):
            ticket = device.search(query_of(seed), 30, 10)
            assert found(ticket.finish()) == expected_walk(alone, query_of(seed), 30, 10, 4)[0]
            assert ticket.walk.bytes_moved <= ticket.walk.bytes_asked, (
                "nodes of one page and hop are read together"
            )
        asked = device.search(query_of(0), 30, 10)
        asked.finish()
    wanted = query_of(0).numpy().astype(int)
    for alone.shared_slots in (1, 3, 8):
        alone.parsed.clear()
        with SsdGraphDevice(alone) as device:
            ticket = device.search(query_of(0), 30, 10)
            result = found(ticket.finish())
        assert all(
            far == ((alone.vectors[node].astype(int) - wanted) ** 2).sum() for far, node in result
        )
        assert result == sorted(set(result))
        assert ticket.walk.distances == len(set(alone.parsed)) > ticket.walk.nodes, (
            "what came before is not measured again"
        )
    assert [far for far, _ in result] <= [far for far, _ in found(asked.finish())], (
        "what came along can only help here"
    )


def test_a_walk_is_the_same_whatever_the_order_of_arrival(folder: Path) -> None:
    """Reads that are late by chance, walks beside each other: results and counters do not
    change."""
    graph = random_graph(folder, 300, 10, seed=9)
    rules = [FaultRule("delay", operation="read", probability=0.3, value=2_000_000)]
    with SsdGraphDevice(graph) as device:
        expected = [
            (found(ticket.finish()), ticket.walk.hops, ticket.walk.nodes)
            for ticket in (device.search(query_of(i), 20, 5) for i in range(8))
        ]
    for seed in range(3):
        with (
            FaultyEngine(rules, seed=seed) as engine,
            SsdGraphDevice(graph, engine=engine, walks=4) as device,
        ):
            tickets = [device.search(query_of(i), 20, 5) for i in range(8)]
            assert [
                (found(ticket.finish()), ticket.walk.hops, ticket.walk.nodes) for ticket in tickets
            ] == expected
            assert device.walk_stats().nodes == sum(ticket.walk.nodes for ticket in tickets)
            assert device.stats().bytes_asked == device.walk_stats().bytes_asked


def test_searches_from_several_threads(folder: Path) -> None:
    graph = random_graph(folder, 200, 8)
    with SsdGraphDevice(graph) as device, ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda seed: found(device.search(query_of(seed), 20, 5).finish()), range(40))
        )
    assert results == [expected_walk(graph, query_of(seed), 20, 5, 4)[0] for seed in range(40)]


def test_the_command(folder: Path) -> None:
    with SsdGraphDevice(random_graph(folder, 10, 3)) as device:
        command = device.command(query_of(0), 20, 5)
    assert (command.opcode, command.list_size, command.k, command.beam_width, command.data_len) == (
        GRAPH_SEARCH,
        20,
        5,
        4,
        60,
    )
    assert command.payload == query_of(0).numpy().tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(DIM)}, "query against uint8 vectors; got torch.float32"),
        ({"query": torch.zeros(6, dtype=torch.uint8)}, "got 6 values; expected 5"),
        ({"query": torch.zeros(1, DIM, dtype=torch.uint8)}, "expected one query"),
        ({"k": 0}, "k, nodes wanted; got 0"),
        (
            {"list_size": 3},
            "list_size, candidates of a walk; got 3; expected a whole number, at least 4",
        ),
        ({"beam_width": 0}, "beam_width of a walk; got 0"),
    ],
)
def test_what_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    with (
        SsdGraphDevice(random_graph(folder, 10, 3)) as device,
        pytest.raises(errors.InvalidInputError, match=message),
    ):
        device.search(**{"query": query_of(0), "list_size": 8, "k": 4, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_a_neighbour_that_is_not_there(folder: Path, wrong: int, coded: bool) -> None:
    """Damage that a checksum does not see: it was written so."""
    graph = StoredGraph(
        folder, np.zeros((4, DIM), np.uint8), [[1], [2], [3, wrong], []], [0], coded=coded
    )
    graph.coded = False  # its codes are of fewer nodes
    with (
        SsdGraphDevice(graph) as device,
        pytest.raises(
            errors.FormatError,
            match=f"neighbour of node 2 of a graph; got {wrong}; expected 0 to 3",
        ),
    ):
        device.search(query_of(0), 10, 1).finish()


def test_an_entry_point_that_is_not_there(folder: Path) -> None:
    graph = StoredGraph(folder, np.zeros((4, DIM), np.uint8), [[], [], [], []], [4])
    with (
        SsdGraphDevice(graph) as device,
        pytest.raises(
            errors.FormatError, match="an entry point of a graph; got 4; expected 0 to 3"
        ),
    ):
        device.search(query_of(0), 10, 1).finish()


def test_a_graph_that_hands_over_other_nodes(folder: Path) -> None:
    graph = random_graph(folder, 30, 4)
    real = graph.parse
    graph.parse = lambda nodes, memory, position: real(nodes[:0], memory, position[:0])  # type: ignore[method-assign]
    with (
        SsdGraphDevice(graph) as device,
        pytest.raises(errors.FormatError, match="got other nodes in its place; expected that node"),
    ):
        device.search(query_of(0), 10, 1).finish()


def test_a_damaged_node(folder: Path) -> None:
    graph = random_graph(folder, 30, 4)
    with graph.path.open("r+b") as file:
        file.seek(graph.entry[0] * 4096 + 9)
        file.write(b"\xff")
        file.seek(graph.entry[0] * 4096 + 4000)
        file.write(b"\xff")
    with SsdGraphDevice(graph) as device, pytest.raises(errors.ChecksumError) as caught:
        device.search(query_of(0), 10, 1).finish()
    assert caught.value.path == str(graph.path)


def test_each_read_fails_in_turn(folder: Path, path: str) -> None:
    graph = random_graph(folder, 60, 4)
    expected = expected_walk(graph, query_of(0), 8, 3, 2)[0]
    for nth in range(1, 200):
        rule = FaultRule(operation="read", nth=nth, count=1)
        with (
            FaultyEngine([rule], path, poison=True) as engine,
            SsdGraphDevice(graph, engine=engine) as device,
        ):
            failed = None
            try:
                assert found(device.search(query_of(0), 8, 3, beam_width=2).finish()) == expected
            except errors.ReadError as error:
                failed = error
            assert (failed is None) == (engine.stats().fault_hits == 0)
            if failed is None:
                break
            assert failed.path == str(graph.path)
            assert found(device.search(query_of(0), 8, 3, beam_width=2).finish()) == expected
    assert nth > 3


def test_a_device_that_stalls(folder: Path) -> None:
    graph = random_graph(folder, 60, 4)
    engine = FaultyEngine([FaultRule("never", operation="read", nth=3, count=1)], poison=True)
    try:
        with SsdGraphDevice(graph, engine=engine) as device:
            ticket = device.search(query_of(0), 20, 3, deadline_s=0.2)
            with pytest.raises(errors.DeadlineExceededError):
                ticket.finish()
            assert (
                found(device.search(query_of(0), 20, 3).finish())
                == expected_walk(graph, query_of(0), 20, 3, 4)[0]
            )
    finally:
        engine.close(grace_s=0.05)


def test_a_caller_who_waits_no_longer(folder: Path) -> None:
    graph = random_graph(folder, 60, 4)
    engine = FaultyEngine([FaultRule("never", operation="read")], poison=True)
    try:
        with SsdGraphDevice(graph, engine=engine) as device:
            ticket = device.search(query_of(0), 20, 3)
            with pytest.raises(errors.DeadlineExceededError, match="a walk over a graph"):
                ticket.finish(timeout_s=0.01)
            ticket.cancel()
            with pytest.raises(errors.TransferCancelledError):
                ticket.finish()
    finally:
        engine.close(grace_s=0.05)


@pytest.mark.parametrize("how", ["cancel", "forget", "close"])
def test_whoever_waits_is_woken(folder: Path, how: str) -> None:
    """Walks that are under way, and those in line behind them."""
    graph = random_graph(folder, 60, 4)
    engine = FaultyEngine([FaultRule("never", operation="read")], poison=True)
    try:
        device = SsdGraphDevice(graph, engine=engine, walks=2)
        tickets = [device.search(query_of(seed), 20, 3) for seed in range(5)]
        raised: list[type] = []

        def wait(ticket: object) -> None:
            try:
                ticket.finish()  # type: ignore[attr-defined]
            except errors.EspnxError as error:
                raised.append(type(error))

        waiting = [threading.Thread(target=wait, args=(ticket,)) for ticket in tickets]
        for each in waiting:
            each.start()
        assert until(lambda: engine.stats().in_flight > 0)
        for call in (
            [each.cancel for each in tickets]
            if how == "cancel"
            else [{"forget": device.forget, "close": device.close}[how]]
        ):
            call()
        for each in waiting:
            each.join(20)
        assert raised == [errors.TransferCancelledError] * 5
        device.close()
        with pytest.raises(errors.EngineClosedError):
            device.search(query_of(0), 20, 3)
    finally:
        engine.close(grace_s=0.05)


def test_a_child_process_is_told(folder: Path) -> None:
    with SsdGraphDevice(random_graph(folder, 30, 4)) as device:
        ticket = device.search(query_of(0), 20, 3)
        expected = found(ticket.finish())
        child = os.fork()
        if child == 0:
            told = 0
            for call in (ticket.finish, lambda: device.search(query_of(0), 20, 3)):
                try:
                    call()
                except errors.InvalidInputError:
                    told += 1
            device.close()
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert found(ticket.finish()) == expected
