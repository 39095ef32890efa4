"""Attention without Python, under the address sanitizer: tests/cpp/attention_check.cpp."""

from __future__ import annotations

import pytest

from tests.cpp.sanitized import CSRC, build, run

SOURCES = [*sorted(CSRC.glob("cpu/attention/*.cpp")), CSRC / "cpu" / "cpu_level.cpp"]


def test_random_problems_at_every_level(pytestconfig: pytest.Config) -> None:
    folder = pytestconfig.cache.mkdir("sanitized-address,undefined")
    assert run(build("attention_check", SOURCES, "address,undefined", folder), "20") == "done\n"
