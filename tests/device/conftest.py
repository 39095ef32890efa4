"""Folders in memory and engines on every path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.retrieval.common import memory_folder
from tests.storage.common import uring_refusal


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a flush costs nothing."""
    with memory_folder() as path:
        yield path


@pytest.fixture(params=["uring", "posix"])
def path(request: pytest.FixtureRequest) -> str:
    """The paths that reach a file system, in turn."""
    if request.param == "uring" and (reason := uring_refusal()):
        pytest.skip(f"[kernel] io_uring: {reason}")
    return str(request.param)
