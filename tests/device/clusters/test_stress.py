"""A stream of clusters that several threads ask and another clears, in C++ with a sanitizer:
tests/cpp/cluster_stream_stress.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpp.sanitized import CSRC, ENGINE, SANITIZERS, build, run
from tests.sweeps import at_length, some

SOURCES = [
    *ENGINE,
    CSRC / "device" / "cluster_stream.cpp",
    *sorted((CSRC / "cpu" / "distances").glob("*.cpp")),
]


@at_length("rounds", 12, 40)
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", some(SANITIZERS[::-1], 2))
def test_several_threads(
    sanitizer: str, request: pytest.FixtureRequest, tmp_path: Path, rounds: int
) -> None:
    program = build(
        "cluster_stream_stress",
        SOURCES,
        sanitizer,
        request.config.cache.mkdir(f"sanitized-{sanitizer}"),
    )
    run(program, "1", str(rounds), tmp_path)
