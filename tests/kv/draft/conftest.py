"""What the tests of compiled drafts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from espnx.ops._native import load_extension


@pytest.fixture(params=[0, 1, 2])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each instruction set that this processor has."""
    if load_extension().set_cpu_level(-1) < request.param:
        pytest.skip("this CPU lacks the instructions")
    load_extension().set_cpu_level(request.param)
    yield request.param
    load_extension().set_cpu_level(-1)
