"""Shared by the tests of the benchmarks: a small data file."""

from __future__ import annotations

from pathlib import Path

import pytest

from espnx.benchmarks.harness import doubts
from espnx.benchmarks.harness.processes import Worker
from espnx.benchmarks.io.content import DataFile, ensure_file
from tests.benchmarks.common import HereSession

FILE_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def no_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ratio is withheld: how unsteady this machine is while tests run says nothing about the
    benchmarks."""
    monkeypatch.setattr(doubts, "WIDE_SHARE", float("inf"))
    monkeypatch.setattr(doubts, "SLOWER", float("inf"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes but those of other programs."""
    monkeypatch.setattr(Worker, "instead", HereSession)


@pytest.fixture(params=["here", pytest.param("processes", marks=pytest.mark.sweep)])
def here_or_not(request: pytest.FixtureRequest) -> None:
    """With a process for each system, too."""
    if request.param == "here":
        request.getfixturevalue("here")


@pytest.fixture
def data(tmp_path: Path) -> DataFile:
    """8 MiB of known content."""
    return ensure_file(tmp_path / "data", FILE_BYTES, 1, lambda text: None)
