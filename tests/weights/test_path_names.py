"""What is said of the paths of several files: never the first one's alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from espnx.storage import FileHandle, NativeEngine
from espnx.storage.engine import paths_of, reasons_of
from espnx.weights.speed import read_speed_of
from espnx.weights.stream import WeightFiles


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([], ""),
        (["uring"], "uring"),
        (["posix (buffered)"] * 3, "posix (buffered)"),
        (["uring", "uring (buffered)", "uring", "uring"], "mixed: uring 3, uring (buffered) 1"),
        (["posix", "uring", "gds"], "mixed: posix 1, uring 1, gds 1"),
    ],
)
def test_paths(paths: list[str], text: str) -> None:
    assert paths_of(iter(paths)) == text


def test_reasons() -> None:
    assert reasons_of(iter(["", ""])) == ""
    assert (
        reasons_of(["", "no io_uring", "not registered", "no io_uring"])
        == "no io_uring; not registered"
    )


class SomeBuffered(NativeEngine):
    """Opens files whose name ends in ``-b`` through the page cache, as a file system without
    O_DIRECT does."""

    def open(self, path: object, mode: str = "r", *, direct: bool | None = None) -> FileHandle:  # type: ignore[override]
        return super().open(str(path), mode, direct=False if str(path).endswith("-b") else direct)


def make_files(folder: Path) -> list[str]:
    names = [str(folder / name) for name in ("one", "two-b", "three")]
    for name in names:
        Path(name).write_bytes(bytes(8192))
    return names


def test_weights(tmp_path: Path) -> None:
    with SomeBuffered("posix") as engine:
        files = WeightFiles(engine)
        assert files.effective_path == "posix"
        direct, buffered, other = (files.file(name).effective for name in make_files(tmp_path))
        assert (direct, buffered) == (other, "posix (buffered)")
        assert files.effective_path == (
            f"mixed: {direct} 2, {buffered} 1" if direct != buffered else buffered
        )


def test_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espnx.weights.speed.NativeEngine", SomeBuffered)
    speed = read_speed_of(make_files(tmp_path))
    with NativeEngine() as engine:
        direct = engine.open(tmp_path / "one").effective
    assert speed.bytes_asked == 3 * 8192
    assert speed.effective_path == (
        direct if "buffered" in direct else f"mixed: {direct} 2, {direct} (buffered) 1"
    )
