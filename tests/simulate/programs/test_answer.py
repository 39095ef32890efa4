"""Recorded programs on other drives: by hand, spread over drives, and traces that say what cannot
be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espnx.device.trace.reader import Trace, read_trace
from espnx.errors import FormatError, InvalidInputError
from espnx.simulate.decoding.machine import Machine, load_system
from espnx.simulate.figures import middles
from espnx.simulate.programs.answer import Answer, answer
from espnx.simulate.programs.requests import Request, requests_of
from espnx.simulate.specs.kinds import NetworkSpec
from espnx.simulate.specs.load import load

HEAD = {
    "espnx_trace": 3,
    "program": "p",
    "devices": [{"name": "ssd", "kind": "plain", "path": "/x"}],
}
MB = 1 << 20


def machine(name: str) -> Machine:
    specs = load_system(name)
    return specs.machine(middles(specs.ranges))


def line(n: int, verb: str, at_s: float, took_s: float, **more: Any) -> dict[str, Any]:
    known = {"n": n, "device": 0, "verb": verb, "at_s": at_s, "took_s": took_s, "host_s": 0.0}
    return {**known, "after": n - 1, "part": 0, **more}


def trace_of(folder: Path, *lines: dict[str, Any]) -> Trace:
    text = "".join(json.dumps(each) + "\n" for each in (HEAD, *lines, {"end": len(lines)}))
    (folder / "run.trace").write_text(text)
    return read_trace(folder / "run.trace")


def read(n: int, at_s: float, took_s: float, size: int, **more: Any) -> dict[str, Any]:
    return line(n, "read", at_s, took_s, bytes=size, places=[], **more)


def test_reads_by_hand(tmp_path: Path) -> None:
    """One after another, from four drives at once, with the host's work between."""
    trace = trace_of(
        tmp_path, read(0, 0.0, 1e-4, 64 * MB), read(1, 0.5, 1e-4, 64 * MB, host_s=0.4999)
    )
    found = answer(machine("flexgen-4ssd"), trace)
    device = machine("flexgen-4ssd").device
    assert device.flash.read_bandwidth is not None
    latency_s = 0.0 if device.flash.read_latency is None else device.flash.read_latency.value
    each_s = 16 * MB / device.flash.read_bandwidth.value + latency_s
    # of 16 pieces the last passes the link when all of them have been read
    assert found.predicted_s == pytest.approx(2 * each_s + 0.4999, rel=0.02)
    assert found.predicted_s > 2 * each_s + 0.4999
    assert found.host_s == pytest.approx(0.4999)
    assert found.verbs["read"].count == 2
    assert found.bound == "program"


def test_the_host_s_computing_lasts_as_long_as_it_did(tmp_path: Path) -> None:
    """Where drives are faster than what was recorded."""
    found = answer(machine("flexgen-4ssd"), trace_of(tmp_path, read(0, 0.0, 0.25, MB)))
    assert found.predicted_s == pytest.approx(0.25)


def attends(folder: Path, heads: int) -> Trace:
    size = 64 * MB
    return trace_of(
        folder,
        line(0, "ahead", 0.0, 1e-5, bytes=size, ticket=0),
        line(
            1, "attend", 1e-4, 0.05, bytes=size, ticket=0, waits_for=0, queries=[2, heads, 1, 128]
        ),
    )


def test_rows_are_spread_by_sequence_and_head(tmp_path: Path) -> None:
    """Sixteen of them over 16 drives take about an eighth of what two take, each of which
    lies in one; a call to a drive takes as long for both."""
    many, few = (answer(machine("smartssd-16"), attends(tmp_path, heads)) for heads in (8, 1))
    assert few.busy_s["flash"] == pytest.approx(many.busy_s["flash"])  # the mean of all drives
    assert few.predicted_s > 6.5 * many.predicted_s
    # the rows are read once, by what is ahead
    assert many.verbs["ahead"].read_bytes == 64 * MB
    assert many.verbs["attend"].read_bytes == 0
    assert many.verbs["attend"].predicted_s > 0
    four = answer(machine("smartssd-4"), attends(tmp_path, 8))
    assert four.predicted_s > 3 * many.predicted_s


def test_reads_that_wait_for_one_another(tmp_path: Path) -> None:
    rounds = {"L": 4, "k": 1, "beam": 1, "rounds": [[1], [2], [3]]}
    trace = trace_of(tmp_path, line(0, "search", 0.0, 1e-6, bytes=3 * 4096, **rounds))
    (request,) = requests_of(trace)
    assert request == Request("search", 3 * 4096, units=3, rounds=3)
    walked = trace_of(
        tmp_path, line(0, "walk", 0.0, 1e-6, bytes=9 * 4096, beam=2, pages=[4, 5], k=1)
    )
    assert requests_of(walked)[0] == Request("walk", 9 * 4096, units=9, rounds=3)


def test_wear(tmp_path: Path) -> None:
    segments = [{"number": 0, "heads": [0, 8, 1], "n_rows": 128}]
    trace = trace_of(tmp_path, line(0, "put", 0.0, 0.1, bytes=8 * MB, segments=segments))
    found = answer(machine("smartssd-4"), trace)
    assert found.written_bytes == 8 * MB
    endurance = machine("smartssd-4").get("device.endurance")
    assert endurance is not None
    assert found.runs_until_worn == pytest.approx(4 * endurance / (8 * MB))
    assert isinstance(found, Answer)


def test_the_same_twice(tmp_path: Path) -> None:
    trace = attends(tmp_path, 8)
    assert answer(machine("smartssd-4"), trace) == answer(machine("smartssd-4"), trace)


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no part of a system serves; got reed"):
        answer(machine("smartssd-4"), trace_of(tmp_path, line(0, "reed", 0.0, 0.0)))
    with pytest.raises(InvalidInputError, match="no command that did not fail"):
        answer(machine("smartssd-4"), trace_of(tmp_path, read(0, 0.0, 0.0, 1, failed="ReadError")))
    for forged in ([1, 2], [1, 0, 1, 1]):
        with pytest.raises(FormatError, match="queries"):
            answer(
                machine("smartssd-4"),
                trace_of(tmp_path, line(0, "attend", 0.0, 0.0, bytes=1, queries=forged)),
            )
    with pytest.raises(FormatError, match="heads"):
        segment = {"number": 0, "heads": [0, 1], "n_rows": 1}
        answer(
            machine("smartssd-4"),
            trace_of(tmp_path, line(0, "put", 0.0, 0.0, bytes=1, segments=[segment])),
        )


def networked(name: str, bytes_per_s: float, latency_s: float) -> Machine:
    specs = replace(load_system(name), network=load(NetworkSpec, "ethernet-100g"))
    own = {"ethernet-100g.bandwidth": bytes_per_s, "ethernet-100g.latency": latency_s}
    return specs.machine(middles(specs.ranges) | own)


def put(n: int, at_s: float, size: int, heads: int = 8, **more: Any) -> dict[str, Any]:
    segments = [{"number": n, "heads": [0, heads, 1], "n_rows": 128}]
    return line(n, "put", at_s, 1e-6, bytes=size, segments=segments, **more)


def test_what_comes_by_a_network(tmp_path: Path) -> None:
    """Both ways pass it, at its rate and after its latency, which pieces do not add up."""
    size = 10 * MB
    trace = trace_of(tmp_path, read(0, 0.0, 1e-6, size))
    near = answer(machine("flexgen-4ssd"), trace)
    far = answer(networked("flexgen-4ssd", 1e7, 0.02), trace)
    assert far.bound == "network out"
    assert far.predicted_s == pytest.approx(size / 1e7 + 0.02, rel=0.02)
    assert far.predicted_s > 50 * near.predicted_s
    written = trace_of(tmp_path, put(0, 0.0, size))
    assert answer(networked("smartssd-4", 1e7, 0.02), written).bound == "network in"


def test_what_does_not_fit(tmp_path: Path) -> None:
    """What is kept at a time, by how many bytes; what was let go of leaves its place."""
    known = machine("smartssd-4")
    small = replace(known, values={**known.values, "smartssd.capacity": 2.0 * MB})
    assert answer(small, trace_of(tmp_path, put(0, 0.0, 8 * MB))).written_bytes == 8 * MB
    with pytest.raises(InvalidInputError, match=r"the drives of smartssd-4; got 4 MiB too much"):
        answer(small, trace_of(tmp_path, put(0, 0.0, 12 * MB)))
    # two sequences and heads lie on two drives alone
    with pytest.raises(InvalidInputError, match=r"4 MiB too much, at command 0"):
        answer(small, trace_of(tmp_path, put(0, 0.0, 8 * MB, heads=2)))
    twice = [put(0, 0.0, 8 * MB), put(1, 0.1, 8 * MB), line(2, "flush", 0.2, 0.0)]
    with pytest.raises(InvalidInputError, match=r"8 MiB too much, at command 1"):
        answer(small, trace_of(tmp_path, *twice))
    release = line(1, "release", 0.1, 0.0, segment=0)
    found = answer(small, trace_of(tmp_path, twice[0], release, put(2, 0.2, 8 * MB)))
    assert found.written_bytes == 16 * MB


def test_drives_are_written_in_turn(tmp_path: Path) -> None:
    """Their flash is at work at once, behind an uplink that all share."""
    size = 1000 * MB
    trace = trace_of(tmp_path, put(0, 0.0, size, heads=16), line(1, "flush", 1e-5, 0.0))
    known = machine("smartssd-16")
    found = answer(known, trace)
    flash_s = size / 16 / known.need("device.flash.write_bandwidth")
    uplink_s = size / known.need("device.links.uplink")
    # the last drive has its first piece after a sixteenth of the uplink's time
    most_s = max(flash_s, uplink_s) + flash_s / 16 + uplink_s / 8 + 1e-3
    assert flash_s < found.predicted_s < most_s


def test_rows_in_memory_are_no_flash(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"flexgen-dram.*kv: memory.*flexgen-4ssd"):
        answer(machine("flexgen-dram"), trace_of(tmp_path, read(0, 0.0, 1e-6, MB)))


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    known = answer(machine("isp-1"), trace_of(tmp_path, read(0, 0.0, 1e-6, MB)))
    assert known.unknown == ("endurance of hilos-isp",)
