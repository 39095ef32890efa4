"""Records on emulated devices: the plain device's scores to the bit, in the time of bytes over
rate; what ends a request ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.cost.work import GROUP_BYTES
from espnx.device.emulation.device import Emulation
from espnx.device.emulation.paced import PacedPart
from espnx.device.emulation.topology import Topology
from espnx.device.interface import Pairs, RecordQuery
from espnx.device.kinds import RECORDS
from espnx.device.model.spec import Accelerator, DeviceSpec
from espnx.device.records.ssd import SsdRecordDevice
from espnx.device.workers import clock_of
from espnx.device.wrapper import topologies_of
from espnx.retrieval.search.index import Index
from espnx.storage import NativeEngine
from tests.device.emulation.test_topology import MB, spec
from tests.retrieval.common import build, corpus, queries

N = 2000
DIM = 64


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two MB of records, and more."""
    path = tmp_path_factory.mktemp("records") / "s"
    build(path, corpus(N, dim=DIM, tokens=(8, 20)), dims=(16, DIM))
    return path


def asked(count: int = 1) -> list[RecordQuery]:
    return [
        RecordQuery(each.cls.reshape(1, -1), each.tokens, 1.0) for each in queries(count, dim=DIM)
    ]


def scoring(of: DeviceSpec) -> DeviceSpec:
    """The same device, whose accelerator computes MaxSim."""
    assert of.accelerator is not None
    return replace(
        of, accelerator=Accelerator((*of.accelerator.verbs, "maxsim"), of.accelerator.rates)
    )


@contextmanager
def emulated(store: Path, topology: Topology, *, near: bool = False) -> Iterator[Index]:
    with ExitStack() as opened:
        engine = opened.enter_context(NativeEngine())
        device = RECORDS.front(
            SsdRecordDevice(engine),
            lambda part, layout: RECORDS.wrap(
                PacedPart, part, layout, topology, 0, RECORDS.verbs, near_storage=near
            ),
        )
        opened.callback(device.close)
        yield opened.enter_context(espnx.open(store, None, engine=engine, device=device))


@pytest.mark.parametrize("near", [False, True])
def test_a_search_is_the_same(store: Path, near: bool) -> None:
    with (
        Topology(scoring(spec()), 1, stretch=0) as topology,
        emulated(store, topology, near=near) as index,
        espnx.open(store, None) as plain,
    ):
        for options in ({}, {"rerank": 20}, {"prefetch_step": (0.1, 0.5)}, {"candidates": 300}):
            wanted, found = (
                each.search(queries(4, dim=DIM), k=30, **{"candidates": 90, **options})
                for each in (plain, index)
            )
            assert [result.hits for result in found] == [result.hits for result in wanted]
        assert topology.now() > 0


def test_time_is_bytes_over_rate(store: Path) -> None:
    """To the host, the link is the narrowest; beside an accelerator, flash is, and 8 bytes a score
    pass the link."""
    for near, bound_s in ((False, None), (True, None)):
        made = scoring(spec(flash=100, link=50))
        with (
            Topology(made, 1, stretch=0) as topology,
            emulated(store, topology, near=near) as index,
        ):
            full, before = index.store.full, topology.now()
            full.maxsim(np.arange(N), asked()).finish()
            places = zip(*(each.tolist() for each in full.locate(np.arange(N))), strict=True)
            pages = {
                (file, page)
                for file, begin, size in places
                for page in range(begin // 4096, -(-(begin + size) // 4096))
            }
            size_bytes = 4096 * len(pages)  # each is read once
            taken, moved = topology.now() - before, topology.traffic()
            out = moved["device 0 link out"].amount
            assert moved["device 0 flash read"].amount == size_bytes < 4096 * N
            if near:
                assert out == 8 * N
                flop = 2.0 * DIM * len(asked()[0].tokens) * float(full.n_tokens.sum())
                bound_s = max(size_bytes / (100 * MB), flop / (10 * MB))
            else:
                assert out == size_bytes
                bound_s = size_bytes / (50 * MB)
            # Beside an accelerator a group is read whole before it is scored, and scored before
            # scores are sent.
            assert (
                bound_s * (1 - 1e-9)
                <= taken
                <= bound_s + (2 * GROUP_BYTES / (50 * MB) if near else 1e-9)
            )


def test_scores_come_group_by_group(store: Path) -> None:
    with Topology(spec(), 1, stretch=0) as topology, emulated(store, topology) as index:
        ticket = index.store.full.maxsim(np.arange(N), asked())
        seen, finished, times = list[int](), False, list[float]()
        while not finished:
            items, finished = ticket.next(1)
            seen += items.tolist()
            times.append(topology.now())
        assert seen == list(range(N))
        assert len(set(times)) > 3
        assert times == sorted(times)
        assert ticket.next() == (pytest.approx(np.empty(0)), True)
        assert ticket.finished_at > 0


def test_several_queries(store: Path) -> None:
    three, numbers = asked(3), np.array([3, 9, 4, 700])
    first, later = (
        Pairs(np.array([0, 1, 1, 3]), np.array([0, 2, 1, 1])),
        Pairs(np.array([0, 2]), np.array([1, 0])),
    )
    with (
        Topology(spec(), 1, stretch=0) as topology,
        emulated(store, topology) as index,
        espnx.open(store, None) as plain,
    ):
        found = []
        for each in (plain, index):
            ticket = each.store.full.maxsim(numbers, three, first)
            ticket.add(later)
            found.append(ticket.finish())
        assert np.array_equal(*found)
        assert len(index.store.full.maxsim(np.arange(0), asked()).finish()) == 0


def test_a_timeout_and_the_end(store: Path) -> None:
    """A device that is slow (in wall time) is waited for as long as was said; a request that is
    cancelled is over."""
    with Topology(spec(flash=5), 1, stretch=1) as topology, emulated(store, topology) as index:
        ticket = index.store.full.maxsim(np.arange(N), asked())
        assert [len(ticket.next(1, timeout_s=timeout_s)[0]) for timeout_s in (0.02, 0.02, 0.0)] == [
            0,
            0,
            0,
        ]
        ticket.cancel()
        with pytest.raises(errors.TransferCancelledError):
            ticket.finish()
        late = index.store.full.maxsim(np.arange(N), asked(), deadline_s=0.05)
        with pytest.raises((errors.DeadlineExceededError, errors.TransferCancelledError)):
            late.finish()
        assert len(index.store.full.maxsim(np.arange(1), asked()).finish()) == 1
        with pytest.raises(errors.InvalidInputError, match="hands out records"):
            _ = ticket.records


def test_damage(store: Path, tmp_path: Path) -> None:
    build(tmp_path / "s", corpus(60))
    with espnx.open(tmp_path / "s", None) as index:
        path, (_, offset, _) = (
            Path(index.store.full.files[0].path),
            index.store.full.locate(np.array([37])),
        )
    data = bytearray(path.read_bytes())
    data[int(offset[0]) + 20] ^= 4
    path.write_bytes(data)
    query = RecordQuery(torch.zeros(1, 16), torch.ones(2, 8), 1.0)
    with Topology(spec(), 1, stretch=0) as topology, emulated(tmp_path / "s", topology) as index:
        with pytest.raises(errors.ChecksumError, match="record 37"):
            index.store.full.maxsim(np.arange(60), [query]).finish()
        assert len(index.store.full.maxsim(np.arange(37), [query]).finish()) == 37


@pytest.mark.parametrize("n", [1, 3])
def test_an_index_on_devices_by_name(tmp_path: Path, n: int) -> None:
    build(tmp_path / "s", corpus(60), directories=[tmp_path / str(i) for i in range(n - 1)])
    devices = espnx.device.open(
        "smartssd", [tmp_path / "s", *(tmp_path / str(i) for i in range(n - 1))], stretch=0
    )
    with (
        espnx.open(tmp_path / "s", None) as plain,
        espnx.open(tmp_path / "s", None, device=devices) as index,
    ):
        wanted, found = (each.search(queries(3), k=20, candidates=60) for each in (plain, index))
        assert [result.hits for result in found] == [result.hits for result in wanted]
    for each in devices:
        each.close()


def test_records_of_a_device_have_its_clock(tmp_path: Path) -> None:
    """Whoever hands work on them to threads must hold it."""
    (device,) = Emulation("smartssd").together([tmp_path], stretch=0)
    with (
        closing(device),
        NativeEngine() as engine,
        closing(device.open_records(engine, torch.device("cpu"))) as records,
    ):
        assert clock_of(records) is device.clock is not None
        assert topologies_of(records) == [device.topology]
