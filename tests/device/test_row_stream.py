"""Streams of rows that one thread consumes and another clears, in C++ with a sanitizer:
tests/cpp/row_stream_stress.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpp.sanitized import CSRC, ENGINE, SANITIZERS, build, run
from tests.sweeps import at_length, some


@at_length("rounds", 20, 60)
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", some(SANITIZERS, 2))
def test_cleared_by_another_thread(
    sanitizer: str, request: pytest.FixtureRequest, tmp_path: Path, rounds: int
) -> None:
    folder = request.config.cache.mkdir(f"sanitized-{sanitizer}")
    program = build(
        "row_stream_stress",
        [
            *ENGINE,
            *(CSRC / "device" / name for name in ("row_stream.cpp", "row_plan.cpp")),
            CSRC / "device" / "draft" / "page_naming.cpp",
        ],
        sanitizer,
        folder,
    )
    run(program, "1", str(rounds), tmp_path)
