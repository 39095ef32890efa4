"""Engines on every path that reaches a file system, and a store on several disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from espnx.retrieval.build import builder
from tests.retrieval.common import build, corpus
from tests.storage.common import uring_refusal


@pytest.fixture(params=["uring", "posix"])
def path(request: pytest.FixtureRequest) -> str:
    """The paths that reach a file system, in turn."""
    if request.param == "uring" and (reason := uring_refusal()):
        pytest.skip(f"[kernel] io_uring: {reason}")
    return str(request.param)


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """A store whose records lie in two directories beside its own."""
    monkeypatch.setattr(builder, "segment_bytes", lambda total_bytes, devices: total_bytes // 4)
    directories = [tmp_path / "one", tmp_path / "two"]
    build(tmp_path / "s", corpus(300), directories=directories, coarse="int8")
    return tmp_path / "s", directories
