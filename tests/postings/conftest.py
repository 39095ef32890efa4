"""A small corpus, and its postings."""

from __future__ import annotations

from pathlib import Path

import pytest

from espnx.postings import Postings
from tests.postings.common import corpus


@pytest.fixture(scope="session")
def documents() -> list[list[str]]:
    return corpus(1200)


@pytest.fixture(scope="session")
def queries() -> list[list[str]]:
    return corpus(40, seed=1, longest=9)


@pytest.fixture(scope="session")
def postings_path(documents: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("postings") / "small.bm25"
    Postings.build(path, terms=documents)
    return path
