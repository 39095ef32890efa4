"""What a cache over several directories says of their paths: all of them, not the first one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from espnx.integrations.transformers.cache import KVCache
from espnx.storage import FileHandle, NativeEngine
from tests.integrations.transformers.tiny import enabled, generate, prompt


class Buffered(NativeEngine):
    """On a file system without O_DIRECT."""

    def __init__(self) -> None:
        super().__init__("posix")
        self.fallback_reason = "no io_uring here"

    def open(self, path: Any, mode: str = "r", *, direct: bool | None = None) -> FileHandle:
        return super().open(path, mode, direct=False)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_paths_of_all_directories(tmp_path: Path, order: tuple[int, int]) -> None:
    with NativeEngine("posix") as direct, Buffered() as buffered:
        engines = [(direct, buffered)[i] for i in order]
        with KVCache(
            enabled("llama").config, [tmp_path / "a", tmp_path / "b"], engine=lambda: engines.pop(0)
        ) as cache:
            generate(enabled("llama"), prompt([20, 20]), cache, max_new_tokens=2)
            stats = cache.stats()
        (tmp_path / "probe").touch()
        path = direct.open(tmp_path / "probe").effective
    if path == "posix (buffered)":
        assert stats["effective_path"] == path
    else:
        assert stats["effective_path"] in (
            "mixed: posix 1, posix (buffered) 1",
            "mixed: posix (buffered) 1, posix 1",
        )
    assert stats["fallback_reason"] == "no io_uring here"
