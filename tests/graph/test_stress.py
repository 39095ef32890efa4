"""A graph that several threads build and search while reads fail, in C++ with a sanitizer:
tests/cpp/graph_stress.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpp.sanitized import CSRC, ENGINE, SANITIZERS, build, run
from tests.sweeps import at_length

SOURCES = [
    *ENGINE,
    *sorted((CSRC / "graph").rglob("*.cpp")),
    *sorted((CSRC / "cpu" / "distances").glob("*.cpp")),
]


@at_length("rounds", 4, 12)
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_several_threads(
    sanitizer: str, request: pytest.FixtureRequest, tmp_path: Path, rounds: int
) -> None:
    program = build(
        "graph_stress", SOURCES, sanitizer, request.config.cache.mkdir(f"sanitized-{sanitizer}")
    )
    run(program, "1", str(rounds), tmp_path)
