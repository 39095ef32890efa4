"""The conformance suite over every device for rows that is here; what of it needs a device with a
file: faults, deadlines, kept rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device import registry
from espnx.device.conformance.row_checks import CHECKS, LAYOUTS, Open, rng
from espnx.device.interface import PIECE, RowDevice
from espnx.device.registry import device_names, open_device
from espnx.device.rows.file import SEGMENT_READ
from espnx.storage import FaultRule, FaultyEngine
from espnx.storage.native import load_native
from tests.device.rows import assert_right, attend, put, queries
from tests.storage.common import patiently

RAM = "espnx.device.example.ram_device:RamDevice"
CPU = torch.device("cpu")
PLAIN = LAYOUTS[0]


def open_rows(kind: str, directory: Path, **options: Any) -> RowDevice:
    return open_device(kind, directory).open_rows(**options)


@pytest.mark.parametrize("kind", ["ssd", "gpu", RAM])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_device(folder: Path, kind: str, check: Callable[[Open], None]) -> None:
    check(lambda **options: open_rows(kind, folder, compute=CPU, **options))


@pytest.mark.parametrize("kind", ["ssd", "gpu"])
@pytest.mark.parametrize(
    ("fault", "value", "expected"),
    [
        ("error", 5, errors.ReadError),
        ("flip", 24_005, errors.ChecksumError),
        ("never", 0, errors.DeadlineExceededError),
    ],
)
def test_reads_that_fail(
    folder: Path, kind: str, fault: str, value: int, expected: type[Exception]
) -> None:
    """A typed error, every ticket gone, and the same rows right at the next try."""

    def attempt(deadline_s: float) -> bool:
        engine = FaultyEngine([FaultRule(fault, operation="read", nth=1, count=1, value=value)])
        device = open_rows(kind, folder, compute=CPU, engine=engine, deadline_s=deadline_s)
        try:
            seen = [put(device, PLAIN, 1, range(2), 900, rng())[0].use(0)]
            device.flush()
            look = queries(PLAIN, 1, 2, 1, rng())
            with pytest.raises(expected):
                attend(device, PLAIN, seen, look)
            assert device.front() == -1
            assert_right(attend(device, PLAIN, seen, look), seen, look)
        finally:
            device.close()
            engine.close(grace_s=0.05)
        return True

    patiently(attempt, 0.15 if fault == "never" else 30.0)


@pytest.mark.parametrize("kind", ["ssd", "gpu"])
@pytest.mark.parametrize("next_kind", ["ssd", "gpu"])
def test_rows_that_are_kept(folder: Path, kind: str, next_kind: str) -> None:
    """Another device, of either kind, continues with them; their places are not used before another
    state is published."""
    device = open_rows(kind, folder, compute=CPU, name="rows")
    stored = [put(device, PLAIN, 2, range(2), 70, rng(i))[i] for i in range(2)]
    device.sync()
    places = [device.space.place(each.segment) for each in stored]
    device.close()
    device = open_rows(next_kind, folder, compute=CPU, name="rows")
    try:
        for each, segment in zip(stored, device.space.restore(places), strict=True):
            each.segment = segment
        seen, look = [each.use(i) for i, each in enumerate(stored)], queries(PLAIN, 2, 2, 1, rng())
        assert_right(attend(device, PLAIN, seen, look), seen, look)
        size = device.stats().stored_bytes
        assert size == sum(each.segment.size_bytes for each in stored)
        for each in stored:
            device.release(each.segment)
        assert device.stats().stored_bytes == size
        device.space.pin([])
        assert device.stats().stored_bytes == 0
    finally:
        device.close()


def test_two_that_claim_one_place(folder: Path) -> None:
    device = open_rows("ssd", folder, name="rows")
    try:
        place = device.space.place(put(device, PLAIN, 1, range(2), 70, rng())[0].segment)
        with pytest.raises(errors.FormatError, match="claim one place"):
            device.space.restore([place])
    finally:
        device.close()


def test_names() -> None:
    assert {"ssd", "gpu"} <= set(device_names())
    with pytest.raises(errors.InvalidInputError, match="smartssd, ssd") as caught:
        open_device("smart", "/nowhere")
    assert "espnx.devices" in str(caught.value)
    for wrong in ("espnx.device.example.ram_device:Missing", "no.such.module:Device"):
        with pytest.raises(errors.MissingDependencyError, match="cannot be loaded"):
            open_device(wrong, "/nowhere")


def test_our_own_are_opened_without_asking_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache is opened for every prompt, and the metadata of all packages take tens of
    milliseconds to read."""
    monkeypatch.setattr(registry, "entry_points", lambda **_: pytest.fail("packages were asked"))
    open_device("ssd", tmp_path / "rows").close()


def test_a_package_brings_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point, as an installed package has it; it replaces none of ours."""
    info = tmp_path / "ram_device-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ram-device\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nram = {RAM}\nssd = {RAM}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "ram" in device_names()
    for name, expected in (("ram", "RamDevice"), ("ssd", "SsdDevice")):
        device = open_device(name, tmp_path / "rows")
        assert type(device).__name__ == expected
        device.close()


@pytest.mark.parametrize("options", [{"engine": "no such engine"}, {"directory": "file/below"}])
def test_a_place_that_cannot_be_used(folder: Path, options: dict[str, Any]) -> None:
    """Shows before anything is opened, and leaves nothing."""
    (folder / "file").touch()
    directory = folder / options.pop("directory", "new")
    with pytest.raises(errors.EspnxError):
        open_device("ssd", directory).check(**options)
    open_device("ssd", folder / "other").check()
    assert not list((folder / "other").iterdir())


def test_tables_are_those_of_the_compiled_part() -> None:
    native = load_native()
    assert (SEGMENT_READ.names, PIECE.names) == (native.ROW_SEGMENT_FIELDS, native.ROW_PIECE_FIELDS)
