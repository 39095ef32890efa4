"""Dropping and filling a file's pages, and seeing which are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from espnx.benchmarks.machine import page_cache


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(os.urandom((1 << 20) + 5))
    page_cache.drop(file)
    if page_cache.resident_fraction(file) == 1.0:
        pytest.skip(
            "the temporary directory is a file system in memory: its pages cannot be dropped"
        )
    return file


def test_drop_and_fill(path: Path) -> None:
    assert page_cache.prepare(path, "cold") == "cold"
    assert page_cache.resident_fraction(path) == 0.0
    assert page_cache.prepare(path, "warm") == "warm"
    assert page_cache.resident_fraction(path) == 1.0
    assert page_cache.prepare(path, "cold") == "cold"


def test_dirty_pages_are_dropped_too(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(bytes(1 << 19))
    assert page_cache.prepare(path, "cold") == "cold"
    assert path.read_bytes()[: 1 << 19] == bytes(1 << 19)


def test_pages_that_stay_are_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop is advice. Where it is not taken, the run counts as warm."""
    page_cache.fill(path)
    monkeypatch.setattr(page_cache, "drop", lambda path: None)
    assert page_cache.prepare(path, "cold") == "warm"


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert page_cache.resident_fraction(tmp_path / "empty") == 0.0
