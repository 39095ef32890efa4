"""Traces: what they hold of a generation and a search, that recording changes nothing, that a
replay asks the same, what is no trace."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.conformance.row_checks import CHECKS
from espnx.device.kinds import RECORDS
from espnx.device.near_storage import NearStorageDevice
from espnx.device.trace.reader import Trace, read_trace
from espnx.device.trace.recording import recorded
from espnx.device.trace.replay import _Replay, replay
from espnx.device.trace.writer import TraceWriter
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.tiny import enabled, prompt
from tests.retrieval.common import queries
from tests.storage.common import interrupted, until


def generate(devices: list[NearStorageDevice], **options: Any) -> tuple[list[int], dict[str, Any]]:
    model = enabled("llama")
    with espnx.KVCache(model.config, device=devices, spill_interval=4, **options) as cache:
        found = model.generate(
            **prompt([40, 9]), past_key_values=cache, max_new_tokens=12, do_sample=False
        )
        return found.flatten().tolist(), cache.stats()


@pytest.fixture
def generated(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A trace of a generation on two devices, and the cache's own counters."""
    devices = espnx.device.open("ssd", [tmp_path / "a", tmp_path / "b"])
    wanted, _ = generate(devices)
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        found, stats = generate(recorded(devices, writer))
    assert found == wanted
    return tmp_path / "trace", stats


def test_a_generation(generated: tuple[Path, dict[str, Any]]) -> None:
    path, stats = generated
    trace = read_trace(path)
    assert [each["name"] for each in trace.devices] == ["ssd", "ssd"]
    verbs = Counter(each.verb for each in trace.commands)
    assert verbs["attend"] == verbs["ahead"] - sum(1 for each in unused(trace))
    assert {"put", "ahead", "attend"} <= set(verbs)
    assert (
        sum(each.size_bytes for each in trace.commands if each.verb == "put")
        == stats["bytes_written"]
    )
    assert (
        sum(each.size_bytes for each in trace.commands if each.verb == "attend")
        == stats["bytes_asked"]
    )
    asked = {each.number: each for each in trace.commands if each.verb == "ahead"}
    for each in trace.commands:
        assert each.took_s >= 0 <= each.host_s <= each.at_s
        if each.verb == "attend":
            waits_for = asked[each.detail.whole("waits_for")]
            assert waits_for.end_s <= each.at_s
            assert waits_for.size_bytes == each.size_bytes
    assert sum(each.host_s for each in trace.commands) <= trace.wall_s + trace.commands[0].at_s


def unused(trace: Trace) -> list[Any]:
    consumed = {
        each.detail.whole("waits_for")
        for each in trace.commands
        if each.verb in ("attend", "visit")
    }
    return [each for each in trace.commands if each.verb == "ahead" and each.number not in consumed]


@pytest.mark.parametrize("with_host", [True, False])
def test_a_replayed_generation(
    generated: tuple[Path, dict[str, Any]], tmp_path: Path, with_host: bool
) -> None:
    """The same commands of the same sizes: a recorded replay is the same trace, but for the
    times."""
    trace = read_trace(generated[0])
    again = espnx.device.open("ssd", [tmp_path / "c", tmp_path / "d"])
    with TraceWriter(tmp_path / "again", "a replay", again) as writer:
        found = replay(trace, recorded(again, writer), with_host=with_host)
    second = read_trace(tmp_path / "again")

    def asked(of: Trace, device: int) -> list[tuple[str, int]]:
        return [(each.verb, each.size_bytes) for each in of.commands if each.device == device]

    for device in range(2):
        assert asked(second, device) == asked(trace, device)
    assert found.recorded_s == trace.wall_s
    assert found.replayed_s > 0
    assert {verb: times.count for verb, times in found.verbs.items()} == Counter(
        each.verb for each in trace.commands
    )


def test_x_rows_are_visited(tmp_path: Path) -> None:
    devices = espnx.device.open("ssd", [tmp_path / "a"])
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        generate(recorded(devices, writer), x_rows=1)
    trace = read_trace(tmp_path / "trace")
    assert any(
        each.verb == "visit" and each.detail.real("host_in_s") >= 0 for each in trace.commands
    )
    replay(trace, espnx.device.open("ssd", [tmp_path / "b"]))


def test_a_kept_cache(tmp_path: Path) -> None:
    """What was kept before is put anew by a replay, which has none of it."""
    model, ids = enabled("llama"), prompt([40])
    for run in range(2):
        devices = espnx.device.open("ssd", [tmp_path / "a"])
        with (
            TraceWriter(tmp_path / f"trace{run}", "a test", devices) as writer,
            espnx.KVCache(
                model.config, device=recorded(devices, writer), name="kept", x_rows=0
            ) as cache,
        ):
            text = (
                ids["input_ids"]
                if run == 0
                else torch.cat([cache.tokens, ids["input_ids"][:, :3]], dim=1)
            )  # type: ignore[list-item]
            model.generate(
                text,
                past_key_values=cache,
                max_new_tokens=3,
                do_sample=False,
                attention_mask=torch.ones_like(text),
            )
    trace = read_trace(tmp_path / "trace1")
    assert any(each.verb == "restore" and each.size_bytes for each in trace.commands)
    replay(trace, espnx.device.open("ssd", [tmp_path / "b"]))


def test_a_search(spread: tuple[Path, list[Path]], tmp_path: Path) -> None:
    path, directories = spread
    devices = espnx.device.open("ssd", [path, *directories])
    with (
        espnx.open(path, None) as plain,
        TraceWriter(tmp_path / "trace", "a test", devices) as writer,
        espnx.open(path, None, device=recorded(devices, writer)) as index,
    ):
        for options in ({}, {"cascade": 20}, {"prefetch_step": (0.1, 0.5)}):
            wanted, found = (
                each.search(queries(4), k=30, candidates=80, **options) for each in (plain, index)
            )
            assert [result.hits for result in found] == [result.hits for result in wanted]
        index.search(queries(1)[0], k=3)
    trace = read_trace(tmp_path / "trace")
    asked = [each for each in trace.commands if each.verb == "maxsim"]
    assert len({each.device for each in asked}) == 2
    assert len({each.part for each in asked}) == 4
    assert all(each.detail.real("waited_s") >= 0 for each in asked)
    with espnx.open(path, None, device=devices) as index:
        tiers = [index.store.full, index.store.coarse]
        before = index.device.stats().bytes_asked
        found = replay(trace, devices, {RECORDS: tiers})
        moved = index.device.stats().bytes_asked - before
    assert found.verbs["maxsim"].count == len(asked)
    assert moved == sum(
        each.size_bytes for each in trace.commands if each.verb in ("maxsim", "read")
    )
    for wrong in ((), tiers[:1]):
        with pytest.raises(errors.InvalidInputError, match="records that a trace asks for"):
            replay(trace, devices, {RECORDS: wrong})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_recorded_device_is_a_device(check: Any, folder: Path) -> None:
    devices = espnx.device.open("ssd", [folder])
    with TraceWriter(folder / "trace", "a test", devices) as writer:
        check(recorded(devices, writer)[0].open_rows)
    trace = read_trace(folder / "trace")
    assert {each.failed for each in trace.commands} <= {
        "",
        "InvalidInputError",
        "TransferCancelledError",
        "EngineClosedError",
        "NotConformingError",
        "StateError",
    }


def test_what_is_not_recorded_passes(tmp_path: Path) -> None:
    """Encoding is that of the device inside, and writes no line."""
    devices = espnx.device.open("smartssd", [tmp_path / "a"], stretch=0)
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        (device,) = recorded(devices, writer)
        assert device.encode(len, ["a", "b"]).value == 2
        assert getattr(device, "topology") is devices[0].topology  # type: ignore[attr-defined] # noqa: B009
    assert read_trace(tmp_path / "trace").commands == []


def test_an_error_is_written(tmp_path: Path) -> None:
    devices = espnx.device.open("ssd", [tmp_path / "a"])
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        rows = recorded(devices, writer)[0].open_rows()
        rows.close()
        with pytest.raises(errors.EngineClosedError):
            rows.flush()
    (command,) = read_trace(tmp_path / "trace").commands
    assert (command.verb, command.failed) == ("flush", "EngineClosedError")


HEAD = '{"espnx_trace":3,"program":"p","devices":[{"name":"ssd","kind":"plain","path":"/x"}]}\n'
OLD_HEAD = HEAD.replace("3", "1", 1)
LINE: dict[str, Any] = {
    "n": 0,
    "device": 0,
    "verb": "flush",
    "part": 0,
    "at_s": 0.0,
    "took_s": 0.0,
    "host_s": 0.0,
    "after": -1,
}


def lines(*given: dict[str, Any], end: int | None = None) -> str:
    """Of commands, and of the end."""
    return HEAD + "".join(
        json.dumps(each) + "\n" for each in (*given, {"end": len(given) if end is None else end})
    )


LATER = {**LINE, "n": 1, "at_s": 1.0, "after": 0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no trace"),
        ("{}\n", "no trace"),
        ('{"espnx_trace":7}\n', "version of a trace.*got 7; expected one of 1, 2, 3"),
        (HEAD + json.dumps(LINE)[:-3], "stopped: record it again"),
        (HEAD.replace("3", "1", 1) + json.dumps(LINE)[:-3], "cut the last line off"),
        (lines(LINE, LATER | {"host_s": 1e300}), "host_s"),
        (lines(LINE, LATER | {"host_s": 1.01}), "host_s"),
        (HEAD[:-1], "without an end"),
        (HEAD + "no json\n", "line 2"),
        (HEAD + "[]\n", "an object"),
        (lines(LINE | {"device": 1}), "device"),
        (lines(LINE | {"at_s": -1.0}), "at_s"),
        (lines(LINE | {"took_s": "x"}), "took_s"),
        (lines(LINE, LINE), "no other line"),
        (HEAD + json.dumps(LINE)[:-3], "without an end"),
        (HEAD, "a trace without an end"),
        (lines(LINE)[: -len('{"end": 1}\n')], "a trace without an end"),
        (lines(LINE, LATER, end=1), "2, as many as there are"),
        (lines(LATER, LINE), "after"),
        (lines({**LATER, "after": -1}, LINE), "took_s"),
        (lines(LINE, LATER) + json.dumps(LATER) + "\n", "the last line"),
        (lines(LINE | {"after": 1000000000}), "after"),
        (lines(LINE | {"took_s": 2.0}, LATER | {"took_s": 2.0}), "after"),
        (lines({key: value for key, value in LINE.items() if key != "after"}), "after"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(errors.FormatError, match=says):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize(
    "line",
    [
        {"verb": "burn"},
        {"verb": "put"},
        {"verb": "put", "segments": [{"number": 0}]},
        {"verb": "release", "segment": 3},
        {"verb": "join", "of": [], "segments": []},
        {"verb": "attend", "ticket": 9},
        {"verb": "ahead", "ticket": 0, "views": [[0, 0, 0]]},
        {"verb": "maxsim", "part": 3, "places": [1]},
        {
            "verb": "put",
            "segments": [
                {
                    "number": 0,
                    "n_rows": 1 << 40,
                    "heads": [0, 2, 1],
                    "layout": {
                        "format": "fp16",
                        "d": 64,
                        "dv": 64,
                        "is_shared": False,
                        "least_rows": 1,
                    },
                }
            ],
        },
    ],
)
def test_lines_that_cannot_be_asked(tmp_path: Path, line: dict[str, Any]) -> None:
    """A typed error, and nothing is asked for that memory cannot hold."""
    (tmp_path / "trace").write_text(lines(LINE | line))
    with pytest.raises(errors.FormatError):
        replay(read_trace(tmp_path / "trace"), espnx.device.open("ssd", [tmp_path / "a"]))


@pytest.mark.parametrize("waits_for", ["a read", "the host"])
def test_ctrl_c_ends_a_replay(
    generated: tuple[Path, dict[str, Any]], tmp_path: Path, waits_for: str
) -> None:
    """Also where a read never ends, or the host worked for long; no thread is left."""
    trace = read_trace(generated[0])
    rules = [FaultRule("never", operation="read")] if waits_for == "a read" else []
    engine, begun = FaultyEngine(rules), time.monotonic()
    run = _Replay(
        trace,
        espnx.device.open("ssd", [tmp_path / "c", tmp_path / "d"]),
        {},
        waits_for == "the host",
        {"engine": engine, "deadline_s": 100.0},
    )
    if waits_for == "the host":
        run._host_s = {each.number: 100.0 for each in trace.commands}

    def is_under_way() -> bool:
        stalls = engine.stats().fault_hits > 0 or waits_for == "the host"
        return stalls and any(each.name == "espnx-replay" for each in threading.enumerate())

    with interrupted(is_under_way), pytest.raises(KeyboardInterrupt):
        run()
    assert time.monotonic() - begun < 50
    # one that was just being started when it came ends by itself
    assert until(lambda: not any(each.name == "espnx-replay" for each in threading.enumerate()))
    engine.close(grace_s=0.05)


def test_shapes_that_are_none(generated: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Of what was recorded, with one field forged."""
    written = generated[0].read_text().splitlines()
    at = next(number for number, line in enumerate(written) if '"verb":"attend"' in line)
    put = next(number for number, line in enumerate(written) if '"verb":"put"' in line)
    attend, rows = json.loads(written[at]), json.loads(written[put])
    rows["segments"][0]["heads"] = [0, 2]
    for number, forged in (
        (at, attend | {"queries": [1, 2]}),
        (at, attend | {"queries": []}),
        (put, rows),
    ):
        (tmp_path / "forged").write_text(
            "\n".join([*written[:number], json.dumps(forged), *written[number + 1 :]]) + "\n"
        )
        with pytest.raises(errors.FormatError, match=r"queries|heads"):
            replay(
                read_trace(tmp_path / "forged"),
                espnx.device.open("ssd", [tmp_path / "a", tmp_path / "b"]),
            )


def test_every_line_counts(generated: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A trace that ends after any of its lines but the last is refused; one of the version before
    was not."""
    written = generated[0].read_text().splitlines(keepends=True)
    assert read_trace(generated[0]).is_whole
    for count in range(1, len(written), 7):
        (tmp_path / "cut").write_text("".join(written[:count]))
        with pytest.raises(errors.FormatError, match="without an end"):
            read_trace(tmp_path / "cut")
    (tmp_path / "old").write_text(
        "".join([written[0].replace('"espnx_trace":3', '"espnx_trace":1'), *written[1:-1]])
    )
    old = read_trace(tmp_path / "old")
    assert (old.is_whole, len(old.commands)) == (False, len(written) - 2)


def test_the_host_s_work_beside_other_commands(tmp_path: Path) -> None:
    """It counts from where a command began or ended last, without what was waited for. Traces of
    the version before had 0 while another ran, and a replay waits for none of that."""
    devices = espnx.device.open("ssd", [tmp_path / "a"])
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        first = writer.begin(0, "flush")
        time.sleep(0.05)
        second = writer.begin(0, "flush")
        begun = time.perf_counter()
        time.sleep(0.05)
        writer.waited(time.perf_counter() - begun)
        third = writer.begin(0, "flush")
        for line in (first, second, third):
            writer.end(line)
        fourth = writer.begin(0, "flush")
        writer.end(fourth)
    trace = read_trace(tmp_path / "trace")
    assert trace.has_all_host_s
    _, second_s, third_s, _ = (each.host_s for each in trace.commands)
    assert second_s >= 0.05
    assert third_s < 0.05
    written = (tmp_path / "trace").read_text().replace('"espnx_trace":3', '"espnx_trace":2')
    (tmp_path / "old").write_text(written)
    assert read_trace(tmp_path / "old").is_whole
    assert not read_trace(tmp_path / "old").has_all_host_s


def test_lines_stand_in_the_order_of_ends(tmp_path: Path) -> None:
    """One whose result is taken late is not late in the trace, and one that nobody takes is there,
    too."""
    with TraceWriter(tmp_path / "trace", "a test", []) as writer:
        first, second, third = (writer.begin(0, "flush") for _ in range(3))
        writer.begin(0, "flush")
        writer.stop(second)
        writer.end(first)
        writer.stop(third)
        writer.write(second)
    written = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [each["n"] for each in written[1:-1]] == [1, 0, 2]
    assert (written[3]["failed"], written[-1]) == ("cancelled", {"end": 3})


def test_other_devices_than_recorded(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(lines())
    with pytest.raises(errors.InvalidInputError, match="devices for a trace"):
        replay(read_trace(tmp_path / "trace"), [])
    with pytest.raises(errors.FileMissingError):
        read_trace(tmp_path / "none")
    with pytest.raises(errors.WriteError):
        TraceWriter(tmp_path / "no" / "trace", "p", [])
    assert replay(read_trace(tmp_path / "trace"), espnx.device.open("ssd", [tmp_path])).verbs == {}


def test_random_bytes_are_no_trace(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    whole = lines(LINE, LATER).encode()
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
        (tmp_path / "trace").write_bytes(bytes(data))
        try:
            read_trace(tmp_path / "trace")
        except errors.EspnxError:
            continue


@pytest.mark.parametrize("program", ["", "a" * 4000, "a" * 100_000, "b\udcff c\0d", "é" * 5000])
def test_any_command_line_is_read_again(tmp_path: Path, program: str) -> None:
    """A prompt may be long, and arguments need not be text."""
    with TraceWriter(tmp_path / "t", program, []):
        pass
    said = read_trace(tmp_path / "t").program
    assert said == program or (said[:1] == program[:1] and len(said) <= 4096)
