"""The engine without Python under the thread and the address sanitizer:
tests/cpp/engine_stress.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpp.sanitized import ENGINE, SANITIZERS, build, run
from tests.sweeps import at_length

PATHS = ["uring", "pressure", "posix", "memory", "hostile"]
#: Functions that the program puts itself in front of.
WRAPPED = ["_ZN5espnx2io16make_posix_queueEj", "syscall"]


@pytest.fixture(scope="module", params=SANITIZERS)
def stress(request: pytest.FixtureRequest) -> Path:
    folder = request.config.cache.mkdir(f"sanitized-{request.param}")
    return build("engine_stress", ENGINE, request.param, folder, WRAPPED)


@pytest.mark.sampled(1)
@at_length("rounds", 5, 15)
@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_stress(stress: Path, path: str, tmp_path: Path, rounds: int) -> None:
    run(stress, path, "1", str(rounds), tmp_path)
