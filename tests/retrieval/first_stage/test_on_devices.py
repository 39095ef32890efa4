"""First stages on devices of every kind: what a search finds is what it finds without one, to the
bit; an emulated device takes its time for what they read; what was recorded can be replayed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.device.emulation.device import Emulation
from espnx.device.emulation.faults import DeviceFault
from espnx.device.emulation.topology import Topology
from espnx.device.interface import RecordDevice
from espnx.device.kinds import CLUSTERS, POSTINGS, RECORDS
from espnx.device.model.spec import load_spec
from espnx.device.near_storage import NearStorageDevice
from espnx.device.plain import SsdDevice
from espnx.device.trace.reader import read_trace
from espnx.device.trace.recording import recorded
from espnx.device.trace.replay import replay
from espnx.device.trace.writer import TraceWriter
from espnx.graph.devices.walks import WALKS
from espnx.postings.stored import terms as stored_terms
from espnx.retrieval.first_stage.clusters import stage as clusters
from espnx.retrieval.first_stage.devices import StageDevices, asked_of_devices
from espnx.retrieval.first_stage.graph import stage as graph
from espnx.retrieval.search.result import SearchResult
from tests.retrieval.common import build, corpus, toy_encoder
from tests.retrieval.first_stage.test_lexical import ASKED, DOCUMENTS, Counting
from tests.sweeps import some

STAGES = ("graph", "clusters", "ivf", "bm25", "splade")
GONE = [f"doc-{number}" for number in range(0, 400, 9)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three parts with graphs of their own and one that is too small for one; deleted documents;
    two tiers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "FLAT_MAX", 40)
        patch.setattr(clusters, "FLAT_MAX", 40)
        patch.setattr(
            "espnx.retrieval.first_stage.lexical.stage.remembered_sparse_encoder",
            lambda name: Counting(),
        )
        path = tmp_path_factory.mktemp("on_devices") / "s"
        build(
            path,
            DOCUMENTS[:250],
            first_stages=STAGES,
            nlist=16,
            sparse_encoder=Counting(),
            coarse="int8",
        )
        for begin, end in ((250, 320), (320, 385), (385, 400)):
            espnx.add(path, DOCUMENTS[begin:end])
        espnx.delete(path, GONE)
        yield path


class OnlyRecords(NearStorageDevice):
    """A device of another package, which keeps records and nothing else."""

    name = "only-records"

    def open_records(self, engine: Any, compute: Any) -> RecordDevice:
        return SsdDevice(self.path).open_records(engine, compute)


@contextmanager
def devices_of(kind: str, store: Path, trace: Path) -> Iterator[list[NearStorageDevice]]:
    name, _, how = kind.partition(", ")
    with ExitStack() as opened:
        if name == "only-records":
            yield [OnlyRecords(store)]
            return
        options = {} if name == "ssd" else {"stretch": 0}
        devices = espnx.device.open(name, [store], **options)
        for each in devices:
            opened.callback(each.close)
        if how == "recorded":
            writer = opened.enter_context(TraceWriter(trace, "a test", devices))
            devices = recorded(devices, writer)
        yield devices


KINDS = ("ssd", "smartssd", "ragx", "ssd, recorded", "smartssd, recorded", "only-records")
SEARCHES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "few candidates": {"candidates": 12},
    "first stage alone": {"rerank": 0, "candidates": 40},
    "partly re-ranked": {"rerank": 5, "candidates": 30},
    "cascade": {"cascade": 6, "candidates": 30},
    "reads ahead": {"prefetch_step": 0.3, "candidates": 25},
    "reads ahead twice": {"prefetch_step": (0.1, 0.6), "candidates": 25},
    "some documents": {"include": [f"doc-{i}" for i in range(0, 400, 3)], "candidates": 20},
    "few documents": {"include": [f"doc-{i}" for i in range(200, 215)], "candidates": 20},
    "without some": {"exclude": [f"doc-{i}" for i in range(100, 300)], "candidates": 20},
}
NAMED: Sequence[Any] = (*STAGES, ("bm25", "ivf"), ("graph", "bm25", "splade"))
#: Stages, a search, and how many queries of it together: one, or nine, in turn.
SEARCHED = [
    (named, what, (1, 9)[(i + j) % 2])
    for i, named in enumerate(NAMED)
    for j, what in enumerate(SEARCHES)
]


@pytest.fixture(scope="module")
def plain(store: Path) -> Iterator[Callable[..., list[SearchResult]]]:
    """What is found without a device."""
    with espnx.open(store, toy_encoder()) as index:

        @functools.cache
        def search(named: Any, what: str, count: int) -> list[SearchResult]:
            found = index.search(ASKED[:count], k=10, first_stage=named, **SEARCHES[what])
            assert not any(each.stage_device_bytes for each in found)
            return found

        yield search


def told(results: Sequence[SearchResult]) -> list[Any]:
    """Everything of a ranking: ids, scores to the bit, and what each stage said of each hit."""
    return [
        [(hit, sorted(hit.found_by.items()), np.float32(hit.score).tobytes()) for hit in each.hits]
        for each in results
    ]


@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_what_is_found_is_the_same(
    store: Path, plain: Callable[..., list[SearchResult]], tmp_path: Path, kind: str
) -> None:
    with (
        devices_of(kind, store, tmp_path / "trace") as devices,
        espnx.open(store, toy_encoder(), device=devices) as index,
    ):
        for named, what, count in SEARCHED:
            wanted = plain(named, what, count)
            found = index.search(ASKED[:count], k=10, first_stage=named, **SEARCHES[what])
            assert told(found) == told(wanted), (named, what)
            read, on_device = (
                sum(each.stage_bytes for each in found),
                sum(each.stage_device_bytes for each in found),
            )
            assert (read > 0) == (named != "ivf"), (named, what)
            if kind == "only-records":
                assert on_device == 0
            elif kind == "ragx" and "graph" in named:  # its spec says nothing of a walk's time
                assert on_device < read
            else:
                assert on_device == read, (named, what)
                check_use(found[0], on_device)


def check_use(found: SearchResult, on_device: int) -> None:
    """Of an emulated device: it read all, and says how long that takes."""
    use = found.device
    if use is not None:
        assert "past the devices" not in use.why
        assert (use.modelled_s is not None) == (use.flash_bytes > 0), use.why
        assert use.flash_bytes >= on_device


def test_what_is_read_past_the_devices_has_no_time(store: Path) -> None:
    """And it is said why: the device cannot, or the files lie elsewhere."""
    (device,) = espnx.device.open("ragx", [store], stretch=0)
    with closing(device), espnx.open(store, toy_encoder(), device=device) as index:
        found = index.search(ASKED[0], k=3, first_stage="graph")
        assert found.device is not None
        assert (found.device.virtual_s, found.device.modelled_s) == (None, None)
        assert "of first stages were read past the devices: a walk on device 'ragx'" in (
            found.device.why
        )
        assert "flash.read_latency" in found.device.why
        scanned = index.search(ASKED[0], k=3, first_stage="bm25")
        assert scanned.device is not None
        assert scanned.device.modelled_s is not None
    stages = StageDevices("auto", [OnlyRecords(store), OnlyRecords(store / "elsewhere")])
    assert stages.of(POSTINGS, str(store / "part.bin")) is None
    assert stages.of(WALKS, str(store.parent / "part.bin")) is None
    assert stages.past == {
        str(store / "part.bin"): "device only-records keeps no posting lists",
        str(store.parent / "part.bin"): "it lies on none of the devices",
    }


@pytest.mark.parametrize("named", ["graph", "clusters", "bm25", "splade"])
def test_how_long_a_first_stage_takes(store: Path, tmp_path: Path, named: str) -> None:
    """On an emulated device: what its commands cost, all parts of the store beside one another,
    by hand from the trace."""
    (device,) = espnx.device.open("smartssd", [store], stretch=0)
    with (
        closing(device),
        TraceWriter(tmp_path / "trace", "a test", [device]) as writer,
        espnx.open(store, toy_encoder(), device=recorded([device], writer)) as index,
    ):
        index.search(ASKED[0], k=3, first_stage=named)  # a filter of what is deleted is read once
        before = writer.commands
        found = index.search(ASKED[0], k=3, first_stage=named, rerank=0, candidates=20)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()[1:-1]]
    asked = [line for line in lines if line["n"] >= before]
    verb = {"graph": "walk", "clusters": "distances"}.get(named, "scan")
    assert {line["verb"] for line in asked} == {verb}
    assert 2 <= len(asked) <= 4
    with Topology(load_spec("smartssd"), 1, stretch=0) as topology:
        last = []
        for line in asked:
            if line["verb"] == "scan":
                pages = [
                    -(-(begin + size) // 4096) - begin // 4096 for begin, size in line["lists"]
                ]
                last.append(
                    topology.transfer(
                        0, "flash_to_host", 4096 * sum(pages), requests=len(line["lists"])
                    )
                )
                continue
            if line["verb"] == "distances":
                last.append(
                    topology.transfer(
                        0, "flash_to_host", line["bytes"], requests=len(line["clusters"])
                    )
                )
                continue
            waits, (left,) = list[Any](), line["pages"]
            while left:
                waits = [
                    topology.transfer(
                        0, "flash_to_host", 4096 * min(left, 4), waits, requests=min(left, 4)
                    )
                ]
                left -= min(left, 4)
            last += waits
        expected_s = topology.wait(last)
    assert found.device is not None
    assert found.device.modelled_s == pytest.approx(expected_s, rel=1e-6)
    assert expected_s >= 82e-6


@pytest.mark.parametrize("kind", ["ssd", "smartssd"])
def test_what_was_recorded_can_be_replayed(store: Path, tmp_path: Path, kind: str) -> None:
    """Every command of a search: of its first stages, and its records."""
    with (
        devices_of(f"{kind}, recorded", store, tmp_path / "trace") as devices,
        espnx.open(store, toy_encoder(), device=devices) as index,
    ):
        for named in NAMED:
            index.search(ASKED[:2], k=5, first_stage=named, candidates=20)
    trace = read_trace(tmp_path / "trace")
    with (
        devices_of(f"{kind}, recorded", store, tmp_path / "again") as devices,
        espnx.open(store, toy_encoder()) as index,
    ):
        there = asked_of_devices(index.store.first_stage, index.store.parts)
        assert {kind: len(some) for kind, some in there.items()} == {
            WALKS: 3,
            CLUSTERS: 3,
            POSTINGS: 8,
        }
        with espnx.open(store, toy_encoder(), device=devices) as again:
            tiers = [again.store.full, again.store.coarse]
            found = replay(trace, devices, {**there, RECORDS: tiers}, with_host=False)
    told = [
        [json.loads(line) for line in path.read_text().splitlines()[1:-1]]
        for path in (tmp_path / "trace", tmp_path / "again")
    ]
    for verb in ("walk", "distances", "scan"):
        lines = [[line for line in each if line["verb"] == verb] for each in told]
        assert found.verbs[verb].count == len(lines[0]) > 3
        payloads = [
            sorted((line["payload"], line.get("filter", "")) for line in each) for each in lines
        ]
        assert payloads[0] == payloads[1]
        assert sorted(line["bytes"] for line in lines[0] if verb != "walk") == sorted(
            line["bytes"] for line in lines[1] if verb != "walk"
        )
    assert found.verbs["maxsim"].count > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("verb", ["walk", "distances", "scan"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("die", errors.DeviceFailedError),
        ("nan", errors.DeviceFailedError),
        ("short", errors.ShortReadError),
        ("drop", errors.DeadlineExceededError),
    ],
)
def test_a_device_that_fails(
    store: Path,
    plain: Callable[..., list[SearchResult]],
    verb: str,
    fault: Any,
    error: type[Exception],
) -> None:
    """No ranking, early or late; the one after is right."""
    named = {"walk": "graph", "distances": "clusters", "scan": "bm25"}[verb]
    for prefetch in (0, 0.5):
        (device,) = Emulation("smartssd").together(
            [store], stretch=0, faults=[DeviceFault(fault, verb=verb, nth=2)]
        )
        with closing(device), espnx.open(store, toy_encoder(), device=device) as index:
            with pytest.raises(error):
                index.search(ASKED[0], k=10, first_stage=named, prefetch_step=prefetch)
            if fault != "die":
                found = index.search(ASKED[0], k=10, first_stage=named)
                assert told([found]) == told(plain(named, "as it is", 1))


def test_one_of_another_term(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a term that shares its hash with one of the query is found out; the query is asked
    again, with the weights that follow: here all words with the same first letter have the same
    hash."""
    monkeypatch.setattr(stored_terms, "hash_of", lambda data: (data or b"-")[0] << 56)
    every = corpus(60)
    for number, text in enumerate(("apple cedar", "axe", "bough axe", "beech")):
        some = [replace(each, text=text) for each in every[15 * number : 15 * (number + 1)]]
        if number:
            espnx.add(folder / "s", some)
        else:
            build(folder / "s", some, first_stages="bm25")
    (device,) = espnx.device.open("smartssd", [folder / "s"], stretch=0)
    with (
        closing(device),
        espnx.open(folder / "s", toy_encoder()) as plainly,
        espnx.open(folder / "s", toy_encoder(), device=device) as index,
    ):
        for text in ("axe", "bough", "axe bough", "apple axe"):
            wanted, found = (each.search(text, k=80, rerank=0) for each in (plainly, index))
            assert told([found]) == told([wanted])
            assert len(found) > 5
