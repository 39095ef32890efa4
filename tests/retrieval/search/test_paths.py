"""The path of every data file stands in every result: no file takes a slow one in silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import espnx
from espnx.storage import FileHandle, NativeEngine
from tests.retrieval.common import build, corpus, queries


@pytest.fixture
def spread(folder: Path, small_segments: Callable[[int, int], None]) -> Path:
    """Records and coarse records on two devices."""
    small_segments(4 * 4096, 4096)
    build(
        folder / "s",
        corpus(300, tokens=(10, 20)),
        coarse="bit1",
        directories=[str(folder / "a"), str(folder / "b")],
    )
    return folder


def test_all_files_alike(spread: Path) -> None:
    for engine in ("posix", "memory"):
        with espnx.open(spread / "s", engine=engine) as index:
            result = index.search(queries(1)[0])
            assert (
                result.effective_path.removesuffix(" (buffered)"),
                result.effective_path.count("mixed"),
            ) == (engine, 0)
            assert bool(result.fallback_reason) == result.effective_path.endswith("(buffered)")


def test_one_device_takes_no_direct_reads(spread: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = NativeEngine.open

    def open_some(
        self: NativeEngine, path: str, mode: str = "r", *, direct: bool | None = None
    ) -> FileHandle:
        return whole(
            self, path, mode, direct=False if str(path).startswith(f"{spread}/b/") else direct
        )

    monkeypatch.setattr(NativeEngine, "open", open_some)
    with espnx.open(spread / "s", engine="posix") as index:
        for result in (index.search(queries(1)[0]), *index.search(queries(5), k=1)):
            assert re.fullmatch(
                r"mixed: posix( \(buffered\))? \d, posix( \(buffered\))? \d", result.effective_path
            ), result.effective_path
            assert "posix (buffered)" in result.effective_path
            assert result.fallback_reason.startswith(f"no direct I/O in {spread}/b/")
        assert result.effective_path in result.summary()
        assert result.fallback_reason in result.summary()
