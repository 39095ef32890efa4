"""Decoding, searching and scanning on emulated topologies at toy size: every system is right,
devices change no bit, what passes the links is what the hand-over says, and a run in which the host
took too much is stretched further, or refused."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.benchmarks.device import emulated, postings, search, topology
from espnx.benchmarks.device.case import CASE
from espnx.benchmarks.device.emulated import WITHOUT, Stretches, Timed
from espnx.benchmarks.harness.result import make_document
from espnx.benchmarks.harness.traces import trace_folder
from espnx.device.emulation.report import Report
from espnx.device.model.spec import load_spec
from espnx.device.trace.reader import read_trace
from espnx.postings.split import store
from tests.benchmarks.common import MACHINE


def stretches(*, is_checked: bool = False, first: float = 1.0) -> Stretches:
    return Stretches(first, lambda text: None, is_checked=is_checked)


def toy(folder: Path) -> topology.Work:
    return topology.Work(
        folder, load_spec("smartssd"), batch=2, context=40, steps=2, layers=1, width=256, seed=1
    )


def test_every_system_decodes_right(folder: Path) -> None:
    rows = topology.measure(
        toy(folder), (1, 3), list(topology.SYSTEMS), stretches(), lambda text: None
    )
    assert [(row.params["devices"], row.system) for row in rows] == [
        (n, name) for n in (1, 3) for name in topology.SYSTEMS
    ]
    for row in rows:
        assert row.correct, row.system
        assert row.kind == "emulated"
        assert set(row.ratio) == (set() if row.system == WITHOUT else {WITHOUT})
        assert (row.metrics["x_rows"] > 0) == topology.SYSTEMS[row.system].has_x_rows
    by = {(row.params["devices"], row.system): row.metrics for row in rows}
    # Rows pass the link to the host only where nothing computes beside them (32 of 40: the others
    # wait to fill a block); else results do, 2 heads of 128 in fp16 for 2 sequences.
    assert (
        by[1, WITHOUT]["uplink_out_bytes"]
        == by[1, WITHOUT]["device_flash_read_bytes"]
        == 2 * 2 * 32 * 512
    )
    assert by[1, "attention+writeback"]["uplink_out_bytes"] == 2 * 2 * 128 * 2
    assert by[1, "attention"]["uplink_in_bytes"] > by[1, "attention+writeback"]["uplink_in_bytes"]
    assert (
        by[1, "attention"]["device_flash_write_bytes"]
        > 0
        == by[1, "attention+writeback"]["device_flash_write_bytes"]
    )
    make_document("c", None, None, MACHINE, rows)
    headers, cells = CASE.table(rows)
    assert all(len(line) == len(headers) for line in cells)
    assert list(folder.iterdir()) == []


def test_wrong_logits_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = topology._logits_in_memory
    monkeypatch.setattr(topology, "_logits_in_memory", lambda *given: right(*given) * 1.05)
    (row,) = topology.measure(toy(folder), (1,), [WITHOUT], stretches(), lambda text: None)
    assert not row.correct
    assert row.median_s is None
    assert CASE.table([row])[1][0][-1] == "NO"


def searches(folder: Path) -> search.Work:
    return search.Work(
        folder,
        load_spec("smartssd"),
        documents=320,
        batch=2,
        candidates=64,
        searches=2,
        k=5,
        seed=1,
    )


def test_every_system_finds_the_same(folder: Path) -> None:
    rows = search.measure(
        searches(folder), (1, 3), list(search.SYSTEMS), stretches(), lambda text: None
    )
    assert [(row.params["devices"], row.system) for row in rows] == [
        (n, name) for n in (1, 3) for name in search.SYSTEMS
    ]
    assert all(row.correct and row.kind == "emulated" for row in rows)
    by = {(row.params["devices"], row.system): row.metrics for row in rows}
    for count in (1, 3):
        assert (
            by[count, WITHOUT]["uplink_out_bytes"] == by[count, WITHOUT]["device_flash_read_bytes"]
        )
        near = by[count, "maxsim-2048"]
        assert near["device_flash_read_bytes"] == by[count, WITHOUT]["device_flash_read_bytes"]
        # Candidates that several queries share are read once, and each query's score of one is
        # eight bytes.
        assert 8 * 64 <= near["uplink_out_bytes"] <= 8 * 2 * 64 + 8 * 2 * search.PARTITIONS
    make_document("c", None, None, MACHINE, rows)
    headers, cells = CASE.table(rows)
    assert all(len(line) == len(headers) for line in cells)
    assert list(folder.iterdir()) == []


def test_wrong_hits_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = search._merged
    monkeypatch.setattr(search, "_hits_of_plain", lambda *given: [])
    assert not search.measure(searches(folder), (1,), [WITHOUT], stretches(), lambda text: None)[
        0
    ].correct
    assert right(searches(folder), [[[(1, 0.5)]], [[(3, 0.5), (2, 0.9)]]]) == [
        [(2, 0.9), (1, 0.5), (3, 0.5)]
    ]


def scans(folder: Path) -> postings.Work:
    return postings.Work(folder, load_spec("ragx"), passages=400, batch=3, searches=2, k=5, seed=1)


def test_both_placements_find_what_one_index_finds(folder: Path) -> None:
    """And links carry 12 bytes for each of the best of a device, 8 for each posting, or pages of
    lists."""
    rows = postings.measure(
        scans(folder), (1, 3), list(postings.SYSTEMS), stretches(), lambda text: None
    )
    assert [(row.params["devices"], row.system) for row in rows] == [
        (n, name) for n in (1, 3) for name in postings.SYSTEMS
    ]
    assert all(row.correct and row.kind == "emulated" for row in rows)
    by = {(row.params["devices"], row.system): row.metrics for row in rows}
    for count in (1, 3):
        assert 0 < by[count, "passages"]["to_host_bytes"] <= 12 * 5 * count
        assert (
            by[count, WITHOUT]["to_host_bytes"] * 3 == by[count, WITHOUT]["device_flash_read_bytes"]
        )
        assert by[count, WITHOUT]["to_devices_bytes"] == 0
    assert (
        by[1, "terms"]["to_host_bytes"]
        == by[3, "terms"]["to_host_bytes"]
        > by[3, "passages"]["to_host_bytes"]
    )
    make_document("c", None, None, MACHINE, rows)
    headers, cells = CASE.table(rows)
    assert all(len(line) == len(headers) for line in cells)
    assert list(folder.iterdir()) == []


def test_wrong_records_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = store.best_of
    monkeypatch.setattr(
        store, "best_of", lambda replies, n_parts, k: right(replies, n_parts, k)[1:]
    )
    (row,) = postings.measure(scans(folder), (2,), ["passages"], stretches(), lambda text: None)
    assert not row.correct
    assert row.median_s is None
    with pytest.raises(errors.InvalidInputError, match="does not scan"):
        postings.measure(
            replace(scans(folder), spec=load_spec("smartssd")),
            (1,),
            ["terms"],
            stretches(),
            lambda text: None,
        )


@pytest.mark.parametrize("show", ["topology", "search", "postings"])
def test_traces(folder: Path, show: str) -> None:
    """One of each system with each number of devices, of what it asked them."""
    (traces := folder / "traces").mkdir()
    if show == "topology":
        topology.measure(
            replace(toy(folder), record=traces), (2,), ["all"], stretches(), lambda text: None
        )
    elif show == "postings":
        postings.measure(
            replace(scans(folder), record=traces), (2,), ["terms"], stretches(), lambda text: None
        )
    else:
        search.measure(
            replace(searches(folder), record=traces),
            (2,),
            ["maxsim-56"],
            stretches(),
            lambda text: None,
        )
    (file,) = traces.glob("*.trace")
    trace = read_trace(file)
    assert (
        file.name
        == {"topology": "2-all.trace", "search": "2-maxsim-56.trace", "postings": "2-terms.trace"}[
            show
        ]
    )
    assert [each["kind"] for each in trace.devices] == ["emulated"] * 2
    assert {each.device for each in trace.commands} == {0, 1}
    assert {"topology": "visit", "search": "maxsim", "postings": "scan"}[show] in {
        each.verb for each in trace.commands
    }


def test_a_folder_for_traces_has_to_be_there(folder: Path) -> None:
    assert trace_folder(None) is None
    assert trace_folder(str(folder)) == folder.resolve()
    with pytest.raises(errors.InvalidInputError, match="existing directory"):
        trace_folder(str(folder / "none"))


# --- stretches ---


class Taken:
    """A run whose host takes so many seconds, beside devices of so many virtual ones."""

    def __init__(self, stretch: float, host_s: float, virtual_s: float):
        waited_s = stretch * virtual_s
        found = Report(stretch, host_s + waited_s, waited_s, 0.0)
        self.timed = Timed(found, (found.virtual_s,), virtual_s, "flash", {})


def test_a_run_is_repeated_until_its_times_are_the_devices() -> None:
    asked = list[float]()

    def run(stretch: float) -> Taken:
        asked.append(stretch)
        return Taken(stretch, 1.0, 0.01)

    finder = stretches(is_checked=True, first=10.0)
    found = finder.settled("a", 1, run)
    assert len(asked) == 2
    assert found.timed.report.host_share == pytest.approx(0.1)
    finder.settled("a", 4, run)
    assert asked[2:] == [pytest.approx(4 * asked[1])], "four devices take a quarter of the time"
    finder.settled("b", 1, run)
    assert asked[3] == 10.0


def test_nobody_waited_for_the_devices() -> None:
    """Says that the stretch was too small, and not by how much."""
    assert emulated.fitting(Report(2.0, 1.0, 0.0, 1.0)) == 32.0


def test_a_host_that_takes_too_much_is_refused() -> None:
    with pytest.raises(errors.TimesNotValidError, match="stretch of"):
        stretches(is_checked=True).settled("a", 1, lambda stretch: Taken(stretch, stretch, 1e-3))


@pytest.mark.parametrize("show", ["topology", "search", "postings"])
def test_the_case(folder: Path, show: str) -> None:
    parser = ArgumentParser()
    CASE.configure(parser)
    args: Any = parser.parse_args(
        ["--path", str(folder), "--show", show, "--system", "without", "--stretch", "1"]
    )
    args.quick, args.seed, args.pairs = True, 1, 1
    assert [row.system for row in CASE.run(args, lambda text: None)] == ["without"] * 2
    args.system = "nothing"
    with pytest.raises(errors.InvalidInputError, match="--system"):
        CASE.run(args, lambda text: None)


def test_logits_of_every_number_of_devices_are_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, count = topology._run, iter(range(9))

    def run(*given: Any) -> Any:
        found = right(*given)
        return topology._Run(
            found.timed,
            found.x_rows,
            found.logits + torch.tensor(1e-6 * next(count)),
            found.effective_path,
        )

    monkeypatch.setattr(topology, "_run", run)
    rows = topology.measure(toy(folder), (1, 2), ["attention"], stretches(), lambda text: None)
    assert [row.correct for row in rows] == [True, False]
    assert [name for name, system in topology.SYSTEMS.items() if system.is_exact] == [
        "attention",
        "attention+writeback",
    ]
