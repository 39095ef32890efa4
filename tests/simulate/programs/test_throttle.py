"""Recorded programs under a throttle, against a walk by hand; steps; emulated devices' traces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.simulate.machines import machine_of
from espnx.device.model.spec import load_spec
from espnx.device.trace.reader import Trace, read_trace
from espnx.errors import FormatError, InvalidInputError
from espnx.simulate.decoding.machine import Machine
from espnx.simulate.programs.answer import answer, step_times
from espnx.simulate.programs.requests import requests_of
from espnx.simulate.programs.throttle import Throttle

MB = 10**6


def trace_of(folder: Path, *lines: dict[str, Any], devices: int = 1, **head: Any) -> Trace:
    named = [{"name": "ssd", "kind": "plain", "path": "/x"}] * devices
    first = {"espnx_trace": 3, "program": "p", "devices": named, **head}
    text = "".join(json.dumps(each) + "\n" for each in (first, *lines, {"end": len(lines)}))
    (folder / "run.trace").write_text(text)
    return read_trace(folder / "run.trace")


def read(n: int, at_s: float, size: int, **more: Any) -> dict[str, Any]:
    known = {"n": n, "device": 0, "verb": "read", "at_s": at_s, "took_s": 1e-6, "host_s": 0.0}
    return {**known, "after": n - 1, "part": 0, "bytes": size, **more}


def disk(n: int = 1) -> Machine:
    return machine_of(load_spec("990-pro"), n, computes_inside=False)


def by_hand(sizes: Sequence[int], gaps: Sequence[float], throttle: Throttle) -> float:
    """Read after read: pieces begin in line as grants allow, pass the flash and then the link."""
    spec = load_spec("990-pro")
    assert spec.flash.read_latency is not None
    now = flash = link = begun = 0.0
    past: list[tuple[float, float]] = []
    for size, gap in zip(sizes, gaps, strict=True):
        now += gap
        at = now + spec.flash.read_latency.value
        n = max(min(16, max(1, size // 4096)), -(-size * 16 // int(throttle.grant_bytes)))
        for _ in range(n):
            piece, begun = size / n, max(begun, at)
            most = throttle.grant_bytes * (1 + 1e-9)
            while sum(each for _, each in past) + piece > most and past:
                begun = max(begun, past.pop(0)[0] + throttle.window_s)
            past.append((begun, piece))
            flash = max(flash, begun) + piece / spec.flash.read_bandwidth.value
            link = max(link, flash) + piece / spec.links.device.value
        now = link
    return now


@pytest.mark.parametrize("seed", range(3))
def test_a_throttle_by_hand(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([4096, 3 * MB, 37 * MB, 150 * MB, 90_001]) for _ in range(12)]
    gaps = [0.0, *(rng.choice([0.0, 1e-4, 0.03, 0.25]) for _ in sizes[1:])]
    lines, at_s = [], 0.0
    for n, (size, gap) in enumerate(zip(sizes, gaps, strict=True)):
        at_s += gap + 1e-3
        lines.append(read(n, at_s, size, host_s=gap))
    throttle = Throttle(400 * MB)
    found = answer(disk(), trace_of(tmp_path, *lines), throttle=throttle)
    # the host scores each in a microsecond beside its read
    assert found.predicted_s == pytest.approx(by_hand(sizes, gaps, throttle), rel=1e-6)
    assert found.predicted_s > 1.01 * answer(disk(), trace_of(tmp_path, *lines)).predicted_s


def test_a_grant_is_read_at_once(tmp_path: Path) -> None:
    """Of 100 MB at 400 MB/s the last begin after two windows."""
    one = trace_of(tmp_path, read(0, 0.0, 100 * MB))
    slow = answer(disk(), one, throttle=Throttle(400 * MB)).predicted_s
    assert 0.2 < slow < 0.21
    small = trace_of(tmp_path, read(0, 0.0, 30 * MB))
    free = answer(disk(), small).predicted_s
    assert answer(disk(), small, throttle=Throttle(400 * MB)).predicted_s == pytest.approx(
        free, rel=0.05
    )


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_no_throttle(rate: float) -> None:
    with pytest.raises(InvalidInputError, match="throttle"):
        Throttle(rate)


def test_steps_have_the_host_s_part(tmp_path: Path) -> None:
    """Before the first command and behind the last; a step without a command is the host's."""
    trace = trace_of(
        tmp_path, read(0, 0.0, MB), read(1, 1.0, MB, host_s=0.9), read(2, 2.0, MB, host_s=0.9)
    )
    first, second, empty = step_times(disk(), trace, [(0.8, 1.5), (1.5, 2.5), (3.0, 3.25)])
    alone = answer(disk(), trace_of(tmp_path, read(0, 0.0, MB))).predicted_s
    assert first == pytest.approx(0.2 + alone + 0.5, abs=1e-5)
    assert second == pytest.approx(0.5 + alone + 0.5, abs=1e-5)
    assert empty == pytest.approx(0.25)


def test_the_host_beside_emulated_devices(tmp_path: Path) -> None:
    """What it does counts as much less as the wall was stretched; what a command took was the
    devices' own time, and is not known of the host."""
    lines = [read(0, 0.0, MB), read(1, 10.0, MB, host_s=8.0, took_s=50.0)]
    alone = answer(disk(), trace_of(tmp_path, read(0, 0.0, MB), stretch=100.0)).predicted_s
    found = answer(disk(), trace_of(tmp_path, *lines, stretch=100.0))
    assert found.host_s == pytest.approx(0.08)
    assert found.predicted_s == pytest.approx(0.08 + 2 * alone)
    still = answer(disk(), trace_of(tmp_path, *lines, stretch=0.0))
    assert (still.host_s, still.predicted_s) == (0.0, pytest.approx(2 * alone))
    with pytest.raises(FormatError, match="stretch"):
        trace_of(tmp_path, *lines, stretch=-1.0)


def test_commands_keep_their_drive(tmp_path: Path) -> None:
    """Where there are as many; on others they are spread anew."""
    lines = [read(n, 0.0, 64 * MB, device=1, after=-1) for n in range(2)]
    both = answer(disk(2), trace_of(tmp_path, *lines, devices=2))
    one = answer(disk(1), trace_of(tmp_path, *lines, devices=2))
    spread = answer(disk(3), trace_of(tmp_path, *lines, devices=2))
    assert both.predicted_s == pytest.approx(one.predicted_s, rel=1e-6)
    assert spread.predicted_s < 0.4 * one.predicted_s


def test_writes_go_on_until_a_flush(tmp_path: Path) -> None:
    segments = [{"number": 0, "heads": [0, 8, 1], "n_rows": 128}]
    put = read(0, 0.0, 200 * MB, verb="put", segments=segments)
    other = read(1, 1e-3, 4096, host_s=1e-3)
    flush = read(2, 2e-3, 0, verb="flush", host_s=1e-3)
    del flush["bytes"]
    trace = trace_of(tmp_path, put, other, flush)
    found = answer(disk(), trace)
    assert found.verbs["put"].predicted_s < 1e-4
    write = load_spec("990-pro").flash.write_bandwidth
    assert write is not None
    assert found.verbs["flush"].predicted_s == pytest.approx(200 * MB / write.value, rel=0.1)


def test_pages_and_products_of_records(tmp_path: Path) -> None:
    keep = read(0, 0.0, 0, verb="keep_records", part=3, dim=64)
    score = read(
        1, 1.0, 5000, verb="maxsim", part=3, places=[4, 5], queries=[8, 16], pairs=3,
        read_bytes=12288, requests=2, tokens=30,
    )  # fmt: skip
    request = requests_of(trace_of(tmp_path, keep, score))[1]
    assert request is not None
    assert (request.read_bytes, request.requests) == (12288, 2)
    # 2 x 64 x 30 tokens x 12 of a query x 1.5 queries a record
    assert request.flops_per_byte * 12288 == pytest.approx(2 * 64 * 30 * 12 * 1.5)


def ahead(n: int, size: int, window: int | None) -> dict[str, Any]:
    known = {} if window is None else {"read_ahead_bytes": window}
    return read(n, n * 1e-6, size, verb="ahead", ticket=n, took_s=1e-7, **known)


def attend(n: int, at_s: float, size: int, ticket: int, host_s: float) -> dict[str, Any]:
    return read(
        n, at_s, size, verb="attend", ticket=ticket, waits_for=ticket, queries=[1, 1, 1, 128],
        host_s=host_s,
    )  # fmt: skip


def window_by_hand(sizes: Sequence[int], gaps: Sequence[float], window: float) -> float:
    """All is asked for at once. A piece begins when so many before it have come and been asked for
    by an attention that no more than a window's bytes are left with it."""
    spec = load_spec("990-pro")
    assert spec.flash.read_latency is not None
    latency_s = spec.flash.read_latency.value
    pieces = [
        (i, size / n)
        for i, size in enumerate(sizes)
        for n in [min(16, max(1, size // 4096))]
        for _ in range(n)
    ]
    taken: list[float] = []
    flash = link = attends_s = ended_s = 0.0
    current = -1
    for p, (i, size) in enumerate(pieces):
        if i != current:
            current, attends_s = i, ended_s + gaps[i]
        first = p
        while first > 0 and sum(each for _, each in pieces[first - 1 : p + 1]) <= window:
            first -= 1
        at = max(latency_s, taken[first - 1] if first else 0.0)
        flash = max(flash, at) + size / spec.flash.read_bandwidth.value
        link = max(link, flash) + size / spec.links.device.value
        taken.append(max(link, attends_s))
        ended_s = taken[-1]
    return ended_s


@pytest.mark.parametrize("window", [1, 5 * MB, 48 * MB, 300 * MB, None])
def test_rows_are_read_a_window_ahead(tmp_path: Path, window: int | None) -> None:
    rng = random.Random(window)
    sizes = [rng.choice([4096, 3 * MB, 37 * MB, 90_001]) for _ in range(9)]
    gaps = [rng.choice([1e-4, 0.01, 0.05]) for _ in sizes]
    lines, n, at_s = [ahead(i, size, window) for i, size in enumerate(sizes)], len(sizes), 0.01
    for i, (size, gap) in enumerate(zip(sizes, gaps, strict=True)):
        at_s += 1.0
        lines.append(attend(n + i, at_s, size, i, gap))
    found = answer(disk(), trace_of(tmp_path, *lines))
    by_hand_s = window_by_hand(sizes, gaps, float("inf") if window is None else window)
    assert found.predicted_s == pytest.approx(by_hand_s, rel=1e-4, abs=2e-5)


def test_what_is_forgotten_is_not_read(tmp_path: Path) -> None:
    """But for what the window had let begin."""
    many = [ahead(i, 20 * MB, 20 * MB) for i in range(20)]
    forget = read(20, 0.5, 0, verb="forget", took_s=1e-7)
    del forget["bytes"]
    again = [ahead(21, 20 * MB, 20 * MB) | {"at_s": 0.6}, attend(22, 0.7, 20 * MB, 21, 0.0)]
    found = answer(disk(), trace_of(tmp_path, *many, forget, *again)).predicted_s
    rate = load_spec("990-pro").flash.read_bandwidth.value
    assert 2 < found / (20 * MB / rate) < 2.2
    kept = answer(disk(), trace_of(tmp_path, *many, *(
        {**each, "n": each["n"] - 1, "after": each["n"] - 2} for each in again
    )))  # fmt: skip
    assert kept.predicted_s < found  # it was needed now, and went before the rest
    with pytest.raises(FormatError, match="read_ahead_bytes"):
        answer(disk(), trace_of(tmp_path, ahead(0, MB, 0)))


def test_tickets_in_any_order_are_read_once(tmp_path: Path) -> None:
    """Taken from the last one on, and one of them twice: no byte more, none less."""
    sizes = [3 * MB, 37 * MB, 90_001, 20 * MB]
    lines = [ahead(i, size, 5 * MB) for i, size in enumerate(sizes)]
    for n, ticket in enumerate([3, 1, 1, 2, 0], start=len(sizes)):
        lines.append(attend(n, 0.1 * n, sizes[ticket], ticket, 1e-3))
    found = answer(disk(), trace_of(tmp_path, *lines))
    rate = load_spec("990-pro").flash.read_bandwidth.value
    assert found.busy_s["flash"] == pytest.approx(sum(sizes) / rate)


def test_thousands_that_nobody_takes(tmp_path: Path) -> None:
    """Each costs as much as the first: the reads of a window, whatever waits behind it."""
    lines = [ahead(i, 8192, 16384) for i in range(20_000)]
    found = answer(disk(), trace_of(tmp_path, *lines))
    rate = load_spec("990-pro").flash.read_bandwidth.value
    assert found.busy_s["flash"] == pytest.approx(16384 / rate)
