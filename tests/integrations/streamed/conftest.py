"""Models on disk and their tokens, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of models.py on disk. Read only."""
    from tests.integrations.streamed.models import CONFIGS, save

    where = tmp_path_factory.mktemp("models")
    return {key: path for name in CONFIGS for key, path in save(where, name).items()}


@pytest.fixture(scope="module")
def expected(one_thread: None, folders: dict[str, Path]) -> dict[str, Any]:
    """The same, resident, and their tokens."""
    from tests.integrations.streamed.models import CONFIGS, resident

    return {name: resident(folders[name]) for name in CONFIGS}
