"""Engines on every path that reaches a file system."""

from __future__ import annotations

import pytest

from tests.storage.common import uring_refusal


@pytest.fixture(params=["uring", "posix"])
def path(request: pytest.FixtureRequest) -> str:
    """The paths that reach a file system, in turn."""
    if request.param == "uring" and (reason := uring_refusal()):
        pytest.skip(f"[kernel] io_uring: {reason}")
    return str(request.param)
