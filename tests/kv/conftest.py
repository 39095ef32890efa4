"""Caches of models that are small."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def on_one_thread(one_thread: None) -> None:
    """See `one_thread` in tests/conftest.py."""
