"""The clock of links under many threads, in C++ with a sanitizer:
tests/cpp/link_clock_stress.cpp."""

from __future__ import annotations

import pytest

from tests.cpp.sanitized import CSRC, SANITIZERS, build, run
from tests.sweeps import at_length, some


@at_length("seeds", 1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", some(SANITIZERS, 2))
def test_threads_on_one_clock(sanitizer: str, request: pytest.FixtureRequest, seeds: int) -> None:
    folder = request.config.cache.mkdir(f"sanitized-{sanitizer}")
    program = build("link_clock_stress", [CSRC / "device" / "link_clock.cpp"], sanitizer, folder)
    for seed in range(seeds):
        run(program, str(seed), "150")
