"""Walks of many queries as commands of a device: what the graph finds by itself, on devices of
every kind; how long an emulated one takes; what a trace says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.device
import espnx.graph
from espnx import errors
from espnx.device.emulation.device import Emulation
from espnx.device.emulation.faults import DeviceFault
from espnx.device.emulation.topology import Topology, Transfer
from espnx.device.model.spec import load_spec
from espnx.device.near_storage import NearStorageDevice
from espnx.device.trace.reader import read_trace
from espnx.device.trace.recording import recorded
from espnx.device.trace.replay import replay
from espnx.device.trace.writer import TraceWriter
from espnx.graph.devices.walks import WALKS
from espnx.graph.filters import RowFilter
from espnx.graph.neighbours import Neighbours

SMART = load_spec("smartssd")
#: But for pages of codes, of which those that were read last are kept.
FIELDS = ("ids", "distances", "pages", "measured", "estimated")


@contextmanager
def on(name: str, folder: Path, **options: Any) -> Iterator[NearStorageDevice]:
    if name != "ssd":
        options = {"stretch": 0} | options
    with closing(espnx.device.open(name, folder, **options)) as device:
        yield device


@contextmanager
def recording(device: NearStorageDevice, graph: Path, path: Path) -> Iterator[Any]:
    """Walks on a device, which are written down."""
    with (
        TraceWriter(path, "a test", [device]) as writer,
        closing(WALKS.open_on(recorded([device], writer)[0], graph)) as walks,
    ):
        yield walks


def some(n: int) -> list[RowFilter | None]:
    """All rows; many, few and none of them."""
    rng = np.random.default_rng(4)
    masks = [rng.random(n) < 0.3, np.arange(n) < 9, np.zeros(n, bool)]
    return [None, *map(RowFilter.of, masks)]


def assert_same(found: Neighbours, wanted: Neighbours) -> None:
    for name in FIELDS:
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("name", ["ssd", "smartssd"])
def test_what_is_found_is_the_same(
    graph: Path, queries: np.ndarray, tmp_path: Path, name: str
) -> None:
    """Rows, distances and what they cost, to the bit. Of a batch: one alone has several pages under
    way, and goes as they come."""
    with (
        espnx.graph.open(graph) as index,
        on(name, tmp_path) as device,
        closing(WALKS.open_on(device, graph)) as walks,
    ):
        before = walks.stats()
        for include in some(len(index)):
            found = walks.walk(queries[:20], 7, list_size=30, include=include)
            wanted = index.search(queries[:20], 7, list_size=30, include=include)
            assert_same(found.finish(), wanted)
            assert found.stats.bytes_moved == found.finish().total_bytes
            assert (found.stats.read_requests > 0) == (found.stats.bytes_moved > 0)
            before = before + found.stats
        assert walks.stats().bytes_moved == before.bytes_moved
        assert [each.path for each in walks.path_report()] == [
            each.path for each in index.path_report()
        ]
        with pytest.raises(errors.InvalidInputError, match="list_size"):
            walks.walk(queries, 7, list_size=6)


def rounds_by_hand(found: Neighbours, beam: int) -> float:
    """Virtual seconds of the rounds of all walks on one SmartSSD, and of what a filter has read
    before."""
    with Topology(SMART, 1, stretch=0) as topology:
        before, last = list[Transfer](), list[Transfer]()
        for size_bytes, requests in (
            (-(-found.filter_bytes // 4096) * 4096, found.filter_requests),
            (found.shared_pages * found.page_bytes, found.shared_requests),
        ):
            if size_bytes:
                before = [
                    topology.transfer(0, "flash_to_host", size_bytes, before, requests=requests)
                ]
        for pages in found.pages.tolist():
            waits, left = list(before), pages
            for _ in range(-(-pages // beam)):
                size = min(beam, left)
                left -= size
                waits = [
                    topology.transfer(
                        0, "flash_to_host", size * found.page_bytes, waits, requests=size
                    )
                ]
            last += waits
        return topology.wait(last) if last else 0.0


@pytest.mark.parametrize("count", [1, 20])
def test_how_long_it_takes_an_emulated_device(
    graph: Path, queries: np.ndarray, tmp_path: Path, count: int
) -> None:
    """Its rounds, one after the other, beside those of the other walks."""
    if graph.name == "paged":
        pytest.skip("pages of codes come between: tests/device/cost")
    beam = 4 if count == 1 else 1
    with on("smartssd", tmp_path) as device, closing(WALKS.open_on(device, graph)) as walks:
        topology: Topology = device.topology  # type: ignore[attr-defined]
        for include in some(3000)[:3]:
            begun = topology.now()
            found = walks.walk(queries[:count], 7, list_size=30, include=include).finish()
            took_s = topology.now() - begun
            assert took_s == pytest.approx(rounds_by_hand(found, beam), rel=1e-9)
            assert took_s >= 82e-6 * int(found.pages.max() / beam)
        passed = topology.traffic()["device 0 flash read"].amount
        assert passed >= walks.stats().bytes_moved


def test_what_is_found_early_comes_at_the_end(
    graph: Path, queries: np.ndarray, tmp_path: Path
) -> None:
    """Of an emulated device; of this machine's, before."""
    with on("smartssd", tmp_path) as device, closing(WALKS.open_on(device, graph)) as walks:
        topology: Topology = device.topology  # type: ignore[attr-defined]
        ticket = walks.walk(queries[:20], 7, list_size=30)
        ids, far = ticket.partial(5)
        at_s = topology.now()
        found = ticket.finish()
        assert (ids.tolist(), far.tolist()) == (found.ids.tolist(), found.distances.tolist())
        assert topology.now() == at_s >= 82e-6 * int(found.pages.max())


def test_one_of_many_in_line(graph: Path, queries: np.ndarray, tmp_path: Path) -> None:
    """More walks than are under way at a time, 64 here."""
    many = np.concatenate([queries, queries[:10]])
    with on("smartssd", tmp_path) as device, closing(WALKS.open_on(device, graph)) as walks:
        topology: Topology = device.topology  # type: ignore[attr-defined]
        assert walks.stored.walks == 64
        found = walks.walk(many, 5, list_size=20).finish()
        rounds = found.pages + (found.code_pages > 0) * found.pages
        assert topology.now() >= 82e-6 * int((rounds[:6] + rounds[64:]).max())


def test_without_the_latency_of_a_read(graph: Path, tmp_path: Path) -> None:
    with on("ragx", tmp_path) as device:
        assert "flash.read_latency" in device.refuses(WALKS)
        with pytest.raises(errors.InvalidInputError, match="latency"):
            WALKS.open_on(device, graph)


@pytest.mark.parametrize("name", ["ssd", "smartssd"])
def test_a_trace(graph: Path, queries: np.ndarray, tmp_path: Path, name: str) -> None:
    """Says what was asked and what was read; a replay asks the same, and reads the same."""
    with on(name, tmp_path) as device:
        with recording(device, graph, tmp_path / "trace") as walks:
            tickets = [
                walks.walk(queries[:9], 5, list_size=20, include=include) for include in some(3000)
            ]
            tickets[0].partial(3)
            found = [ticket.finish() for ticket in tickets]
            walks.walk(queries, 5, list_size=20).cancel()
        opened, *lines = [
            json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()[1:-1]
        ]
        assert (opened["verb"], opened["nodes"], opened["metric"]) == ("open_walks", 3000, "l2")
        cancelled = lines.pop()
        assert (cancelled["verb"], cancelled["failed"]) == ("walk", "cancelled")
        assert [line["pages"] for line in lines] == [each.pages.tolist() for each in found]
        assert [line["bytes"] for line in lines] == [each.total_bytes for each in found]
        for line in lines:
            said = (line["queries"], line["k"], line["list_size"], line["beam"])
            assert said == (9, 5, 20, 1)
        assert [("filter" in line) for line in lines] == [False, True, True, True]
        trace = read_trace(tmp_path / "trace")
        with pytest.raises(errors.InvalidInputError, match="graphs that a trace"):
            replay(trace, [device], {WALKS: []})
        with TraceWriter(tmp_path / "again", "a replay", [device]) as writer:
            times = replay(trace, recorded([device], writer), {WALKS: [graph]})
        assert times.verbs["walk"].count == 4
        again = [json.loads(line) for line in (tmp_path / "again").read_text().splitlines()[2:-1]]
        for name in ("pages", "payload", "list_size", "k"):
            assert [line[name] for line in again] == [line[name] for line in lines]
        assert [line.get("filter") for line in again] == [line.get("filter") for line in lines]


@pytest.mark.parametrize(
    ("field", "value"),
    [("payload", None), ("payload", "?"), ("payload", "AAAA"), ("filter", "AAAA"), ("queries", 0)],
)
def test_lines_that_are_no_walk(
    graph: Path, queries: np.ndarray, tmp_path: Path, field: str, value: object
) -> None:
    with on("ssd", tmp_path) as device:
        with recording(device, graph, tmp_path / "trace") as walks:
            walks.walk(queries[:2], 5, list_size=20, include=some(3000)[1]).finish()
        head, opened, line, end = (tmp_path / "trace").read_text().splitlines()
        said = json.loads(line) | {field: value}
        if value is None:
            del said[field]
        (tmp_path / "trace").write_text("\n".join([head, opened, json.dumps(said), end, ""]))
        with pytest.raises(errors.FormatError, match=field):
            replay(read_trace(tmp_path / "trace"), [device], {WALKS: [graph]})


def test_a_device_that_fails(graph: Path, queries: np.ndarray, tmp_path: Path) -> None:
    """A typed error, early or at the end, and right results afterwards."""
    kinds: list[tuple[Any, type[errors.EspnxError]]] = [
        ("nan", errors.DeviceFailedError),
        ("short", errors.ShortReadError),
        ("drop", errors.DeadlineExceededError),
    ]
    for kind, error in kinds:
        (device,) = Emulation("smartssd").together(
            [tmp_path], stretch=0, faults=[DeviceFault(kind, verb="walk", count=2)]
        )
        with closing(device), closing(WALKS.open_on(device, graph)) as walks:
            with pytest.raises(error):
                walks.walk(queries[:3], 5, list_size=20).finish()
            with pytest.raises(error):
                walks.walk(queries[:3], 5, list_size=20).partial(2)
            assert (walks.walk(queries[:3], 5, list_size=20).finish().ids >= 0).all()
    (device,) = Emulation("smartssd").together(
        [tmp_path], stretch=0, faults=[DeviceFault("die", verb="walk")]
    )
    with (
        closing(device),
        closing(WALKS.open_on(device, graph)) as walks,
        pytest.raises(errors.DeviceFailedError, match="walk"),
    ):
        walks.walk(queries[:3], 5, list_size=20)


def test_tickets_that_nobody_wants(graph: Path, queries: np.ndarray, tmp_path: Path) -> None:
    for name in ("ssd", "smartssd"):
        with on(name, tmp_path) as device, closing(WALKS.open_on(device, graph)) as walks:
            tickets = [walks.walk(queries, 5, list_size=500) for _ in range(3)]
            tickets[0].cancel()
            with pytest.raises(errors.TransferCancelledError):
                tickets[0].partial(1)
            walks.forget()
            if name == "ssd":  # an emulated one's walks have ended, and wait for the device alone
                with pytest.raises(errors.TransferCancelledError):
                    tickets[1].finish()
            assert (walks.walk(queries[:2], 5, list_size=20).finish().ids >= 0).all()
