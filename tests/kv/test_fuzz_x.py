"""Random programs (see test_fuzz.py) where some or all sequences keep the input of the projections
instead of K and V."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv.test_fuzz import check_programs


@pytest.mark.parametrize("kind", ["x fp32", "x half"])
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.sweep) for first in (9, 18, 27))]
)
def test_programs(folder: Path, kind: str, first: int) -> None:
    check_programs(kind, range(first, first + 9), folder)
