"""Checks in a process of their own: what becomes of one that never ends, or that ends the process,
and of those after it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espnx import errors
from espnx.device.conformance.requirement import Found
from espnx.device.conformance.soak import soak
from espnx.device.conformance.verify import Check, Outcome, verify
from espnx.device.example.ram_device import RamRows
from espnx.device.interface import SegmentView
from espnx.device.near_storage import NearStorageDevice
from espnx.device.row_layout import RowLayout
from tests.forks import forking

HERE = "tests.device.test_verify"
DEADLINE_S = 1.2


class HangsRarely(RamRows):
    calls = 0

    def ahead(self, layout: RowLayout, views: list[SegmentView]) -> int:  # type: ignore[override]
        HangsRarely.calls += 1
        if HangsRarely.calls == 60:
            time.sleep(1000)
        return super().ahead(layout, views)


class Opened(NearStorageDevice):
    """Leaves a file in its directory."""

    def open_rows(self, directory: str | None = None, **options: object) -> HangsRarely:
        return HangsRarely()


def hangs_in_a_soak(device: NearStorageDevice, lives: Callable[[], None]) -> None:
    soak(device.open_rows, said=lambda made: lives())


def dies(device: NearStorageDevice, lives: Callable[[], None]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def is_slow(device: NearStorageDevice, lives: Callable[[], None]) -> Found:
    """Longer than the deadline, and alive."""
    for _ in range(5):
        time.sleep(DEADLINE_S / 4)
        lives()
    return Found("ok", "slow")


def fails(device: NearStorageDevice, lives: Callable[[], None]) -> None:
    raise errors.NotConformingError("this", got=1, expected=2)


def hangs(device: NearStorageDevice, lives: Callable[[], None]) -> None:
    lives()
    time.sleep(1000)


def checks(device: NearStorageDevice, soak_s: float) -> Iterator[tuple[str, Check]]:
    Path(device.path, "left").touch()
    every = (fails, hangs_in_a_soak, dies, is_slow, hangs, fails)
    yield from ((f"{number} {check.__name__}", check) for number, check in enumerate(every))


def run(name: str, folder: Path) -> list[Outcome]:
    return list(
        verify(
            name,
            str(folder),
            checks,
            soak_s=0,
            deadline_s=DEADLINE_S,
            said=lambda done, total: None,
        )
    )


@pytest.fixture
def quick_children(monkeypatch: pytest.MonkeyPatch) -> None:
    context = forking()
    monkeypatch.setattr("espnx.device.conformance.verify.get_context", lambda _: context)


@pytest.mark.usefixtures("quick_children")
def test_each_has_an_outcome(folder: Path) -> None:
    found = run(f"{HERE}:Opened", folder)
    assert [(each.check, each.outcome) for each in found] == [
        ("0 fails", "failed"),
        ("1 hangs_in_a_soak", "failed"),
        ("2 dies", "failed"),
        ("3 is_slow", "ok"),
        ("4 hangs", "failed"),
        ("5 fails", "failed"),
    ]
    assert found[0].message == "this; got 1; expected 2"
    assert f"no end after {DEADLINE_S:g} s; it stands in" in found[1].message
    assert "in ahead" in found[1].message
    assert found[1].duration_s >= DEADLINE_S
    assert found[2].message == "the process has ended: SIGSEGV"
    assert "in hangs" in found[4].message
    assert found[5].message == "not begun: 2 checks before it did not end"
    assert list(folder.iterdir()) == []


class DiesAtOnce(NearStorageDevice):
    def __init__(self, path: str):
        super().__init__(path)
        os._exit(7)


def test_a_device_that_cannot_be_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second in a process that is started as users have it."""
    with monkeypatch.context() as patch:
        patch.setattr("espnx.device.conformance.verify.get_context", lambda _: forking())
        with pytest.raises(errors.MissingDependencyError, match="cannot be loaded") as caught:
            run(f"{HERE}:Missing", folder)
    assert caught.value.expected == f"{HERE}:Missing"
    (found,) = run(f"{HERE}:DiesAtOnce", folder)
    assert (found.check, found.outcome, found.message) == (
        "opening it",
        "failed",
        "the process has ended: exit status 7",
    )
    assert list(folder.iterdir()) == []
