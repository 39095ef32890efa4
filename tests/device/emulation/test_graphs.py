"""Graphs on emulated devices: the plain walk to the bit, in the time of rounds that wait for one
another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.emulation.device import EmulatedDevice, Emulation
from espnx.device.emulation.faults import DeviceFault
from espnx.device.graph import SsdGraphDevice
from espnx.device.kinds import GRAPHS, ROWS
from espnx.device.model.spec import DeviceSpec, load_preset
from tests.device.emulation.test_topology import figure
from tests.device.graph.made import DIM, expected_walk, query_of, random_graph


def walking(name: str) -> DeviceSpec:
    """Of RAGX nobody has published what a read takes alone, and without that there is no walk: 50
    us here."""
    found = load_preset(name)
    return (
        found
        if found.flash.read_latency
        else replace(found, flash=replace(found.flash, read_latency=figure(50e-6)))
    )


def opened(name: str, folders: list[Path], **options: object) -> list[EmulatedDevice]:
    return Emulation(walking(name)).together(folders, **{"stretch": 0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ragx", "970-evo", "smartssd"])
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("coded", [True, False])
def test_walks_are_the_plain_devices(folder: Path, name: str, near: bool, coded: bool) -> None:
    graph = random_graph(folder, 200, 8, coded=coded)
    with SsdGraphDevice(graph) as plain:
        expected = plain.search(query_of(0), 20, 5)
        ids, far = expected.finish()
    [device] = opened(name, [folder], near_storage=near)
    walked = device.open_graph(graph)
    assert walked.command(query_of(0), 20, 5).data_len == 60
    assert walked.graph is graph
    ticket = walked.search(query_of(0), 20, 5)
    found = ticket.finish()
    assert np.array_equal(found[0], ids)
    assert np.array_equal(found[1], far)
    assert ticket.walk == expected.walk
    assert [each.nodes.tolist() for each in ticket.rounds] == [
        each.nodes.tolist() for each in expected.rounds
    ]
    assert device.topology.now() > 0
    again = ticket.finish()
    assert np.array_equal(again[0], ids)
    walked.close()
    device.close()


def test_what_crosses_the_link(folder: Path) -> None:
    """A device that walks: query in, k entries out. One that does not: every page that was read."""
    graph = random_graph(folder, 200, 8)
    for near in (True, False):
        [device] = opened("ragx", [folder], near_storage=near)
        walked = device.open_graph(graph)
        ticket = walked.search(query_of(0), 20, 5)
        ticket.finish()
        moved = device.topology.traffic()
        assert (
            moved["device 0 flash read"].amount
            == ticket.walk.bytes_moved
            == sum(each.bytes_moved for each in ticket.rounds)
        )
        assert moved["device 0 link in"].amount == (DIM if near else 0)
        assert moved["device 0 link out"].amount == (60 if near else ticket.walk.bytes_moved)
        if near:
            assert moved["device 0 accelerator"].amount == 3 * DIM * ticket.walk.distances
        walked.close()
        device.close()


def test_rounds_wait_for_one_another(folder: Path) -> None:
    """A walk takes what the host sees of a read alone as often as it has rounds; walks beside one
    another take it together."""
    alone = load_preset("970-evo").flash.read_latency
    assert alone is not None
    folders = [folder / "a", folder / "b"]
    devices = opened("970-evo", folders)
    for each in folders:
        each.mkdir(exist_ok=True)
    parts = [
        device.open_graph(random_graph(each, 200, 8))
        for device, each in zip(devices, folders, strict=True)
    ]
    tickets = [part.search(query_of(0), 20, 5, beam_width=1) for part in parts]
    for ticket in tickets:
        ticket.finish()
    hops = tickets[0].walk.hops
    took_s = devices[0].topology.now()
    assert hops > 5
    assert hops * alone.value <= took_s < 1.15 * hops * alone.value
    for part, device in zip(parts, devices, strict=True):
        part.close()
        device.close()


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_round_takes_what_its_spec_says(folder: Path, near: bool, beam: int) -> None:
    """Of each round its latency, its requests or its bytes through flash, and what computing or the
    link takes."""
    made = walking("ragx")
    made = replace(made, flash=replace(made.flash, random_reads=figure(100_000.0)))
    [device] = Emulation(made).together([folder], stretch=0, near_storage=near)
    with device.open_graph(random_graph(folder, 200, 8)) as walked:
        ticket = walked.search(query_of(0), 20, 5, beam_width=beam)
        ticket.finish()
    rounds, peak, wire = ticket.rounds, 2048e9, 4e9
    assert sum(each.read_requests for each in rounds) == ticket.walk.read_requests
    # what the host sees of one read alone, less what that takes to pass
    before_s = 50e-6 - 1 / 100_000
    expected_s = sum(
        before_s + max(each.read_requests / 100_000, each.bytes_moved / 2.5e9) for each in rounds
    )
    if near:
        expected_s += sum(3.0 * DIM * each.distances / peak for each in rounds) + (DIM + 60) / wire
    assert device.topology.now() == pytest.approx(expected_s, rel=1e-9)
    device.close()


def test_a_spec_without_latency_does_not_walk(folder: Path) -> None:
    for name in ("ragx", "cosmos-sync-pe", "cpu-dram"):
        [device] = Emulation(name).together([folder], stretch=0)
        with pytest.raises(
            errors.InvalidInputError, match=r"flash\.read_latency.*flash\.cell_read_time"
        ):
            device.open_graph(random_graph(folder, 20, 4))
        assert "flash.read_latency" in device.refuses(GRAPHS)
        assert not device.refuses(ROWS)
        device.close()
    [device] = Emulation("smartssd").together([folder], stretch=0)
    assert not device.refuses(GRAPHS)
    device.close()


def test_faults(folder: Path) -> None:
    graph = random_graph(folder, 200, 8)

    def walk_with(kind: str, **options: object) -> np.ndarray:
        [device] = opened("ragx", [folder], faults=[DeviceFault(kind, "search", **options)])  # type: ignore[arg-type]
        walked = device.open_graph(graph)
        try:
            found: np.ndarray = walked.search(query_of(0), 20, 5, deadline_s=5.0).finish()[0]
            assert kind == "stall"
            assert device.topology.now() > 2.0
            return found
        finally:
            walked.close()
            device.close()

    assert len(walk_with("stall", seconds=2.0)) == 5
    for kind, error in [
        ("drop", errors.DeadlineExceededError),
        ("short", errors.ShortReadError),
        ("nan", errors.DeviceFailedError),
        ("die", errors.DeviceFailedError),
    ]:
        with pytest.raises(error, match="ragx 0"):
            walk_with(kind)


def test_what_the_walk_raises(folder: Path) -> None:
    graph = random_graph(folder, 200, 8)
    with graph.path.open("r+b") as file:
        file.seek(graph.entry[0] * 4096 + 4000)
        file.write(b"\xff")
    for stretch in (0, 1.0):
        [device] = opened("ragx", [folder], stretch=stretch)
        walked = device.open_graph(graph)
        with pytest.raises(errors.ChecksumError):
            walked.search(query_of(0), 20, 5).finish()
        with pytest.raises(errors.InvalidInputError):
            walked.search(torch.zeros(DIM), 20, 5)
        walked.close()
        device.close()


def test_the_wall_clock_moves_it(folder: Path) -> None:
    graph = random_graph(folder, 200, 8)
    [device] = opened("ragx", [folder], stretch=2.0)
    walked = device.open_graph(graph)
    tickets = [walked.search(query_of(seed), 20, 5) for seed in range(3)]
    for seed, ticket in enumerate(tickets):
        assert ticket.finish()[0].tolist() == [
            node for _, node in expected_walk(graph, query_of(seed), 20, 5, 4)[0]
        ]
    cancelled = walked.search(query_of(0), 20, 5)
    cancelled.cancel()
    with pytest.raises(errors.TransferCancelledError):
        cancelled.finish()
    walked.close()
    device.close()
