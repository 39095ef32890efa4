"""Processes that keep caches and can be killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.forks import Forks


@pytest.fixture(scope="session")
def processes(open_forks: Callable[[str], Forks]) -> Forks:
    """Generation with caches on disk, in processes that can be killed."""
    return open_forks("tests.integrations.transformers.forks")
