"""Shared by the tests of the benchmarks: a small data file."""

from __future__ import annotations

from pathlib import Path

import pytest

from espnx.benchmarks.harness import doubts
from espnx.benchmarks.io.content import DataFile, ensure_file

FILE_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def no_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ratio is withheld: how unsteady this machine is while tests run says nothing about the benchmarks."""
    monkeypatch.setattr(doubts, "WIDE_SHARE", float("inf"))
    monkeypatch.setattr(doubts, "SLOWER", float("inf"))


@pytest.fixture
def data(tmp_path: Path) -> DataFile:
    """8 MiB of known content."""
    return ensure_file(tmp_path / "data", FILE_BYTES, 1, lambda text: None)
