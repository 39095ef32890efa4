"""A seventh verb in a package of its own: two files (data/own_verb) and no edit of ours. Plain,
emulated, recorded, replayed, striped over several devices, and verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espnx import errors
from espnx.device.emulation.device import Emulation
from espnx.device.emulation.faults import DeviceFault
from espnx.device.model.spec import load_preset
from espnx.device.near_storage import NearStorageDevice
from espnx.device.registry import open_device
from espnx.device.several import SeveralParts
from espnx.device.trace.reader import read_trace
from espnx.device.trace.recording import recorded
from espnx.device.trace.replay import replay
from espnx.device.trace.writer import TraceWriter
from espnx.integrations.device_checks import checks_of
from espnx.storage.files import crc32c
from tests.data.own_verb.stored_items import ITEMS, ItemDevice, Items

RNG = np.random.default_rng(1)
EVERY = [RNG.bytes(int(size)) for size in RNG.integers(1, 9000, 600)]
SUMS = [crc32c(each) for each in EVERY]
NAME = "tests.data.own_verb.stored_items:ItemDevice"


def stored(folder: Path, numbers: list[int]) -> Items:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items").write_bytes(b"".join(EVERY[i] for i in numbers))
    return Items(folder / "items", np.array(numbers), np.array([len(EVERY[i]) for i in numbers]))


def emulated(
    folder: Path, *, near: bool = True, count: int = 1, **options: Any
) -> list[NearStorageDevice]:
    spec = load_preset("ragx")
    assert spec.accelerator is not None
    spec = replace(
        spec, accelerator=replace(spec.accelerator, verbs=(*spec.accelerator.verbs, "checksum"))
    )
    paths = [folder / str(i) for i in range(count)]
    return list(Emulation(spec).together(paths, stretch=0, near_storage=near, **options))


@pytest.fixture
def items(tmp_path: Path) -> Items:
    return stored(tmp_path, list(range(len(EVERY))))


def test_plain(items: Items, tmp_path: Path) -> None:
    part = ItemDevice(tmp_path).open_part(ITEMS, items)
    assert part.checksum(range(600)).finish().tolist() == SUMS
    part.close()
    with pytest.raises(
        errors.InvalidInputError, match=r"stored items on device .*a device that does not keep them"
    ):
        open_device("espnx.device.example.ram_device:RamDevice", tmp_path).open_part(ITEMS, items)


@pytest.mark.parametrize("near", [True, False])
def test_emulated(items: Items, tmp_path: Path, near: bool) -> None:
    """Results to the bit, in the time of bytes over rate; group by group."""
    [device] = emulated(tmp_path, near=near)
    part = device.open_part(ITEMS, items)
    assert part.checksum(range(600)).finish().tolist() == SUMS
    topology: Any = device.topology  # type: ignore[attr-defined]
    pages = -(-sum(map(len, EVERY)) // 4096) * 4096
    traffic = topology.traffic()
    assert traffic["device 0 flash read"].amount == pages
    assert traffic["device 0 link in"].amount == (8 * 600 if near else 0)
    assert traffic["device 0 link out"].amount == (4 * 600 if near else pages)
    assert topology.now() >= pages / topology.spec.flash.read_bandwidth.value
    ticket, times, is_all = part.checksum(range(600)), list[float](), False
    while not is_all:
        _, is_all = ticket.next()
        times.append(topology.now())
    assert times == sorted(times)
    assert len(set(times)) > 1
    part.close()
    device.close()


@pytest.mark.parametrize(
    ("kind", "error"), [("drop", errors.DeadlineExceededError), ("short", errors.ShortReadError)]
)
def test_faults(items: Items, tmp_path: Path, kind: Any, error: type[Exception]) -> None:
    [device] = emulated(tmp_path, faults=[DeviceFault(kind)])
    part = device.open_part(ITEMS, items)
    with pytest.raises(error, match="ragx 0"):
        part.checksum([1, 2]).finish()
    assert part.checksum([1, 2]).finish().tolist() == SUMS[1:3]
    part.close()
    device.close()


def test_recorded_and_replayed(items: Items, tmp_path: Path) -> None:
    devices = [ItemDevice(tmp_path)]
    with TraceWriter(tmp_path / "trace", "a test", devices) as writer:
        part = recorded(devices, writer)[0].open_part(ITEMS, items)
        assert part.checksum([5, 3]).finish().tolist() == [SUMS[5], SUMS[3]]
        ticket, is_all = part.checksum([9]), False
        while not is_all:
            is_all = ticket.next()[1]
        with pytest.raises(errors.InvalidInputError):
            part.checksum([600])
        part.close()
    opened, first, second, refused = read_trace(tmp_path / "trace").commands
    assert (opened.verb, opened.detail.texts("files")) == ("open_items", [str(items.path)])
    assert [(each.verb, each.detail.wholes("items", count=9)) for each in (first, second)] == [
        ("checksum", [5, 3]),
        ("checksum", [9]),
    ]
    assert first.size_bytes == len(EVERY[5]) + len(EVERY[3])
    assert refused.failed == "InvalidInputError"
    again = emulated(tmp_path)
    with TraceWriter(tmp_path / "again", "a replay", again) as writer:
        found = replay(read_trace(tmp_path / "trace"), recorded(again, writer), {ITEMS: [items]})
    assert found.verbs["checksum"].count == 2
    asked = [each for each in read_trace(tmp_path / "again").commands if each.verb == "checksum"]
    assert [each.detail.wholes("items", count=9) for each in asked] == [[5, 3], [9]]
    with pytest.raises(errors.InvalidInputError, match="stored items that a trace asks for"):
        replay(read_trace(tmp_path / "trace"), devices)
    with pytest.raises(errors.FormatError, match="verb"):
        replay(read_trace(tmp_path / "trace"), [open_device("ssd", tmp_path)], {})


@pytest.mark.parametrize("on", ["plain", "emulated"])
def test_striped(tmp_path: Path, on: str) -> None:
    """Item i on device i modulo 3: what they give back is that of one device."""
    devices: list[NearStorageDevice] = (
        emulated(tmp_path, count=3)
        if on == "emulated"
        else [ItemDevice(tmp_path / str(i)) for i in range(3)]
    )
    parts = [
        device.open_part(ITEMS, stored(tmp_path / str(i), list(range(i, 600, 3))))
        for i, device in enumerate(devices)
    ]
    every = ITEMS.wrap(SeveralParts, parts, lambda numbers: numbers % 3)
    some = [599, 0, 7, 300, 44, 2]
    assert every.checksum(some).finish().tolist() == [SUMS[i] for i in some]
    ticket, named, is_all = every.checksum(some), list[int](), False
    while not is_all:
        items, is_all = ticket.next()
        named += items.tolist()
    assert sorted(named) == list(range(6))
    assert len(every.path_report()) == 3
    assert every.stats().bytes_asked > 0
    every.close()


def test_verified(tmp_path: Path) -> None:
    """By the checks that it brings; a device that is wrong is found, and one that has no such verb
    is asked nothing."""
    device = ItemDevice(tmp_path)
    mine = {name: check for name, check in checks_of(device, 0) if name.startswith("items")}
    assert len(mine) == 6
    for check in mine.values():
        assert check(device, lambda: None) is None
    [other] = emulated(tmp_path)
    (tmp_path / "0").mkdir()
    for on_emulated in ITEMS.checks.values():
        assert on_emulated(other) is None
    assert not any(
        name.startswith("items") for name, _ in checks_of(open_device("ssd", tmp_path), 0)
    )
    with pytest.MonkeyPatch.context() as patch:
        # before all have arrived
        patch.setattr(
            "tests.data.own_verb.stored_items.ChecksumTicket.finish", lambda self: self.sums
        )
        with pytest.raises(errors.NotConformingError):
            mine["items: sums every item"](device, lambda: None)
