"""A directory where a flush costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.retrieval.common import memory_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path
