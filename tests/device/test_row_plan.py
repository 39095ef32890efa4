"""How rows are cut into reads, in C++ without Python: tests/cpp/row_plan_check.cpp, built here with
plain g++ and the sanitizers it has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cpp.sanitized import CSRC, build
from tests.sweeps import at_length

SOURCES = [CSRC / "device" / "row_plan.cpp", CSRC / "io" / "buffer.cpp"]


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest) -> Path:
    def built(sanitizer: str) -> Path:
        folder = request.config.cache.mkdir(f"sanitized-{sanitizer or 'none'}")
        return build("row_plan_check", SOURCES, sanitizer, folder)

    try:
        return built("address,undefined")
    except pytest.skip.Exception:  # a compiler without sanitizers
        return built("")


@at_length("seeds", 1, 4)
def test_every_row_once(program: Path, seeds: int) -> None:
    for seed in range(seeds):
        done = subprocess.run(
            [program, str(seed), "400"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
