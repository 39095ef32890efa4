"""Clusters and encoders on emulated devices: the plain distances to the bit, in the time of bytes
over rate; the thesis's bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.device.emulation.device import EmulatedDevice
from espnx.device.vectors.interface import REPLY
from tests.device.clusters.made import Made, make, pairs

N, PER_CLUSTER, DIM = 300, 124, 128  # 16 KiB, as the thesis has them


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("clusters"), [PER_CLUSTER] * N, dim=DIM)


def opened(name: str, folder: Path, **options: object) -> EmulatedDevice:
    device = espnx.device.open(name, folder, **{"stretch": 0, **options})
    assert isinstance(device, EmulatedDevice)
    return device


@pytest.mark.parametrize(
    "name", ["cosmos-conventional", "cosmos-sync-pe", "cosmos-async-pe", "ragx", "smartssd"]
)
@pytest.mark.parametrize("near", [True, False])
def test_distances_are_the_plain_devices(made: Made, tmp_path: Path, name: str, near: bool) -> None:
    device, query = opened(name, tmp_path, near_storage=near), made.query()
    clusters = device.open_clusters(made.directory)
    asked = [3, 0, 3, 250]
    ticket = clusters.distances(query, asked)
    seen, finished = list[int](), False
    while not finished:
        items, finished = ticket.next()
        for item in items.tolist():
            assert pairs(ticket.reply(item)) == made.reply(query, asked[item])
        seen += items.tolist()
    assert seen == [0, 1, 2, 3]
    assert pairs(clusters.distances(query, asked).finish()) == [
        each for cluster in asked for each in made.reply(query, cluster)
    ]
    assert len(clusters.distances(query, []).finish()) == 0
    assert device.topology.now() > 0
    clusters.close()
    device.close()


def test_the_bound_of_in_storage_distances(made: Made, tmp_path: Path) -> None:
    """Conventionally the link bounds, with processing elements flash does: 4 times as many
    distances a second (section 3.5)."""
    taken = {}
    for name in ("cosmos-conventional", "cosmos-async-pe"):
        device = opened(name, tmp_path)
        clusters = device.open_clusters(made.directory)
        clusters.distances(made.query(), np.arange(N)).finish()
        taken[name], moved = device.topology.now(), device.topology.traffic()
        assert moved["device 0 flash read"].amount == N * 16384
        out = moved["device 0 link out"].amount
        assert out == (
            N * 16384 if name == "cosmos-conventional" else N * PER_CLUSTER * REPLY.itemsize
        )
        clusters.close()
        device.close()
    assert taken["cosmos-conventional"] == pytest.approx(N * 16384 / 133e6, rel=0.05)
    assert taken["cosmos-async-pe"] == pytest.approx(N * 16384 / 536e6, rel=0.05)


def test_empty_clusters(tmp_path: Path) -> None:
    made = make(tmp_path, [0, 5, 0, 1], dim=9)
    device, query = opened("cosmos-async-pe", tmp_path), made.query()
    with espnx.device.open("ssd", tmp_path).open_clusters(made.directory) as plain:  # type: ignore[attr-defined]
        wanted = plain.distances(query, [0, 1, 2, 3]).finish()
    clusters = device.open_clusters(made.directory)
    assert np.array_equal(clusters.distances(query, [0, 1, 2, 3]).finish(), wanted)
    assert len(clusters.distances(query, [0, 2]).finish()) == 0
    clusters.close()


def test_encode(tmp_path: Path) -> None:
    """On the host's cores, which is said; or in the time that the spec gives."""
    plain = espnx.device.open("ssd", tmp_path).encode(
        lambda texts: [len(text) for text in texts], ["a", "bcd"]
    )
    assert (plain.value, plain.kind, plain.computed_on) == ([1, 3], "measured", "the host's cores")
    device = opened("ragx", tmp_path)
    done = device.encode(lambda texts: [len(text) for text in texts], ["a", "bcd"], flop=2048e9)
    assert (done.value, done.kind, done.computed_on) == ([1, 3], "emulated", "ragx")
    assert done.seconds == pytest.approx(1.0)  # at 2048 GFLOPS
    with pytest.raises(errors.InvalidInputError, match="no flop"):
        device.encode(len, ["a"])
    assert opened("smartssd", tmp_path).encode(len, ["a"]).kind == "measured"


def test_what_a_device_of_another_package_lacks(tmp_path: Path) -> None:
    device = espnx.device.open("espnx.device.example.ram_device:RamDevice", tmp_path)
    with pytest.raises(errors.InvalidInputError, match="clusters of vectors on device"):
        device.open_clusters(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="graphs on device"):
        device.open_graph(None)  # type: ignore[arg-type]
    assert device.encode(len, ["a"]).value == 1
