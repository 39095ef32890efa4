"""Engines that close themselves, on every path that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from espnx.storage import FaultRule, NativeEngine
from tests.storage.common import OpenEngine, uring_refusal


@pytest.fixture(params=["uring", "posix", "memory"])
def path(request: pytest.FixtureRequest) -> str:
    """Every native path in turn."""
    if request.param == "uring" and (reason := uring_refusal()):
        pytest.skip(f"[kernel] io_uring: {reason}")
    return str(request.param)


@pytest.fixture(params=["uring", "posix"])
def disk_path(request: pytest.FixtureRequest) -> str:
    """The paths that reach a file system."""
    if request.param == "uring" and (reason := uring_refusal()):
        pytest.skip(f"[kernel] io_uring: {reason}")
    return str(request.param)


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Opens engines whose unwritten memory holds the filler, and closes them at the end of the
    test."""
    opened: list[NativeEngine] = []

    def make(
        path: str = "auto", rules: list[FaultRule] | None = None, **options: Any
    ) -> NativeEngine:
        engine = NativeEngine(path, rules=rules or (), poison=True, **options)
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close(grace_s=0.01)
