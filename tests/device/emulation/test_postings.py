"""Posting lists on emulated devices: what one index finds, to the bit, in the time of bytes over
rate; both placements; faults; traces."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.device.emulation.device import EmulatedDevice, Emulation
from espnx.device.emulation.faults import DeviceFault
from espnx.device.kinds import POSTINGS
from espnx.device.near_storage import NearStorageDevice
from espnx.device.postings import ScanCommand
from espnx.device.trace.reader import Trace, read_trace
from espnx.device.trace.recording import recorded
from espnx.device.trace.replay import replay
from espnx.device.trace.writer import TraceWriter
from espnx.postings import Found, Postings, SplitPostings, build_split
from espnx.postings.split.parts import read_parts
from tests.postings.common import corpus

DOCUMENTS, QUERIES = corpus(400, seed=3), corpus(12, seed=9, longest=7)
KINDS = {
    "drop": errors.DeadlineExceededError,
    "short": errors.ShortReadError,
    "nan": errors.DeviceFailedError,
    "die": errors.DeviceFailedError,
}


@pytest.fixture(scope="module", params=["passages", "terms"])
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def paths(placement: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = [tmp_path_factory.mktemp("emulated") / f"part-{i}" for i in range(3)]
    build_split(found, terms=DOCUMENTS, placement=placement)
    return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Found:
    path = tmp_path_factory.mktemp("one")
    Postings.build(path / "one", terms=DOCUMENTS)
    with Postings.open(path / "one") as one:
        return one.search(QUERIES, 10)


def opened(name: str, paths: list[Path], **options: object) -> list[NearStorageDevice]:
    return espnx.device.open(name, paths, **{"stretch": 0, **options})


def assert_same(found: Found, wanted: Found) -> None:
    assert found.numbers.tolist() == wanted.numbers.tolist()
    assert found.scores.tobytes() == wanted.scores.tobytes()


@pytest.mark.parametrize("name", ["ragx", "smartssd", "970-evo"])
@pytest.mark.parametrize("near", [True, False])
def test_results_are_those_of_one_index_and_links_carry_what_is_said(
    paths: list[Path], wanted: Found, name: str, near: bool
) -> None:
    """Of a device that scans, commands and replies cross the link; of any other the pages of the
    lists do."""
    devices = opened(name, paths, near_storage=near)
    with SplitPostings(paths, device=devices) as postings:
        found = postings.search(QUERIES, 10)
    assert_same(found, wanted)
    first = devices[0]
    assert isinstance(first, EmulatedDevice)
    traffic, scans = first.topology.traffic(), name == "ragx" and near
    for part in range(3):
        assert traffic[f"device {part} flash read"].amount == found.flash_bytes[:, part].sum() > 0
        assert traffic[f"device {part} link in"].amount == (
            found.command_bytes[:, part].sum() if scans else 0
        )
        assert (
            traffic[f"device {part} link out"].amount
            == (found.reply_bytes if scans else found.flash_bytes)[:, part].sum()
        )
    for each in devices:
        each.close()


def test_the_time_of_one_command(placement: str, tmp_path: Path) -> None:
    """Flash, then the processor, then the link: no one's time is in another's, for one list
    alone."""
    build_split(
        [tmp_path / "part"], terms=[["a", str(i)] for i in range(60_000)], placement=placement
    )
    spec = espnx.device.model.spec.load_spec("ragx")  # type: ignore[attr-defined]
    (device,) = Emulation(spec).together([tmp_path / "part"], stretch=0)
    with SplitPostings([tmp_path / "part"], device=device) as postings:
        found = postings.search([["a"]], 100)
        taken = device.topology.now()
    link, flash = spec.links.device.value, spec.flash.read_bandwidth.value
    parts = [
        int(found.command_bytes[0, 0]) / link,
        int(found.flash_bytes[0, 0]) / flash,
        5.0 * 60_000 / spec.accelerator.peak.value,
        int(found.reply_bytes[0, 0]) / link,
    ]
    assert found.reply_bytes[0, 0] == (1200 if placement == "passages" else 480_000)
    assert max(parts) <= taken <= sum(parts) * 1.001
    assert taken == pytest.approx(sum(parts), rel=0.02)


@pytest.mark.parametrize("kind", list(KINDS))
def test_scans_that_fail(paths: list[Path], wanted: Found, kind: str) -> None:
    """The error names the device; all that was under way ends, and what is asked next is
    answered."""
    devices = opened("ragx", paths, faults=[DeviceFault(kind, "scan", nth=3, device=1)])  # type: ignore[arg-type]
    with SplitPostings(paths, device=devices) as postings:
        with pytest.raises(KINDS[kind], match="ragx 1"):
            postings.search(QUERIES, 10, deadline_s=0.3)
        if kind == "die":
            with pytest.raises(errors.DeviceFailedError, match="ragx 1"):
                postings.search(QUERIES, 10)
        else:
            assert_same(postings.search(QUERIES, 10), wanted)


def test_a_stall_takes_its_time(paths: list[Path], wanted: Found) -> None:
    devices = opened(
        "ragx", paths, faults=[DeviceFault("stall", "scan", nth=1, device=0, seconds=2.0)]
    )
    first = devices[0]
    assert isinstance(first, EmulatedDevice)
    with SplitPostings(paths, device=devices) as postings:
        assert_same(postings.search(QUERIES, 10), wanted)
        assert first.topology.now() > 2.0


def record(paths: list[Path], trace: Path, wanted: Found | None = None) -> None:
    devices = espnx.device.open("ssd", paths)
    with (
        TraceWriter(trace, "a test", devices) as writer,
        SplitPostings(paths, device=recorded(devices, writer)) as postings,
    ):
        found = postings.search(QUERIES, 10)
        filtered = postings.search(QUERIES[:2], 10, include=np.arange(100))
    assert wanted is None or found.numbers.tolist() == wanted.numbers.tolist()
    lines = [each for each in read_trace(trace).commands if each.verb == "scan"]
    assert len(lines) == np.count_nonzero(found.command_bytes) + np.count_nonzero(
        filtered.command_bytes
    )
    for part in range(len(paths)):
        here = [each for each in lines if each.device == part]
        sent, reply = (sum(each.detail.whole(name) for each in here) for name in ("sent", "reply"))
        assert sent == found.command_bytes[:, part].sum() + filtered.command_bytes[:, part].sum()
        assert reply == found.reply_bytes[:, part].sum() + filtered.reply_bytes[:, part].sum()


def test_a_replay_sends_the_same_commands(paths: list[Path], wanted: Found, tmp_path: Path) -> None:
    record(paths, tmp_path / "trace", wanted)
    trace = read_trace(tmp_path / "trace")
    again = opened("ragx", paths)
    with TraceWriter(tmp_path / "again", "a replay", again) as writer:
        found = replay(
            trace, recorded(again, writer), {POSTINGS: read_parts(paths)[0]}, with_host=False
        )
    second = read_trace(tmp_path / "again")

    def payloads(of: Trace, device: int) -> list[str]:
        lines = [each for each in of.commands if each.verb == "scan" and each.device == device]
        return [each.detail.text("payload", most=1 << 20) for each in lines]

    for device in range(3):
        assert payloads(second, device) == payloads(trace, device)
    assert found.verbs["scan"].count == sum(each.verb == "scan" for each in trace.commands)
    for each in trace.commands:
        if each.verb == "scan":
            command = ScanCommand.parse(base64.b64decode(each.detail.text("payload", most=1 << 20)))
            assert (
                each.size_bytes
                == command.lists.size_bytes
                == sum(size for _, size in each.detail.values()["lists"])
            )
    first = again[0]
    assert isinstance(first, EmulatedDevice)
    assert first.topology.now() > 0


def test_a_replay_without_its_lists(paths: list[Path], tmp_path: Path) -> None:
    record(paths, tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    for there in ([], read_parts(paths)[0][:1]):
        with pytest.raises(errors.InvalidInputError, match="posting lists that a trace asks for"):
            replay(trace, espnx.device.open("ssd", paths), {POSTINGS: there})


@pytest.mark.parametrize("payload", ["", "?", "AAAA", None, 7])
def test_lines_that_are_no_scan(paths: list[Path], tmp_path: Path, payload: object) -> None:
    record(paths, tmp_path / "trace")
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    next(line for line in lines if line.get("verb") == "scan")["payload"] = payload
    (tmp_path / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(errors.FormatError, match="payload"):
        replay(
            read_trace(tmp_path / "trace"),
            espnx.device.open("ssd", paths),
            {POSTINGS: read_parts(paths)[0]},
        )


def test_a_scan_that_fails_is_written(paths: list[Path], tmp_path: Path) -> None:
    devices = opened("ragx", paths, faults=[DeviceFault("die", "scan", nth=2, device=2)])
    with (
        TraceWriter(tmp_path / "trace", "a test", devices) as writer,
        SplitPostings(paths, device=recorded(devices, writer)) as postings,
        pytest.raises(errors.DeviceFailedError),
    ):
        postings.search(QUERIES, 10)
    failed = [each for each in read_trace(tmp_path / "trace").commands if each.failed]
    assert (
        {"DeviceFailedError"}
        <= {each.failed for each in failed}
        <= {"DeviceFailedError", "cancelled", "TransferCancelledError"}
    )
