"""Fields of files from elsewhere: what is not of the type and in the range asked for is a
FormatError that names file and field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espnx import errors
from espnx.storage import NativeEngine
from espnx.storage.manifest import read_manifest, write_manifest
from espnx.storage.parse import Fields, check_plain_file, parse_object

READERS: dict[str, tuple[Callable[[Fields], Any], list[Any], list[Any]]] = {
    "whole": (
        lambda f: f.whole("x", 1, 9),
        [1, 9],
        [0, 10, -1, True, 1.0, "1", None, [], {}, 2**63, 10**400],
    ),
    "real": (
        lambda f: f.real("x"),
        [0, 1, -2.5],
        [True, "1", None, float("nan"), float("inf"), 10**400, []],
    ),
    "flag": (lambda f: f.flag("x"), [True, False], [0, 1, None, "true"]),
    "text": (
        lambda f: f.text("x", most=5),
        ["", "a", "äöü", "🙂"],
        ["123456", "a\0", "\udc80", 1, None, []],
    ),
    "texts": (lambda f: f.texts("x", count=2), [[], ["a", "b"]], [["a"] * 3, "ab", [1], None]),
    "choice": (lambda f: f.choice("x", ["a", "b"]), ["a"], ["c", "", 1, None, ["a"]]),
    "hexadecimal": (
        lambda f: f.hexadecimal("x", 4),
        ["0aF1".lower()],
        ["0aF1", "0a1", "0a1\n", "０a12", 4, None],
    ),
    "file_name": (
        lambda f: f.file_name("x"),
        ["rows.bin", "_a-1"],
        ["", ".", "..", "a/b", "/a", ".a", "a\0", "a\n", "-a", 1, "a" * 256],
    ),
    "wholes": (
        lambda f: f.wholes("x", 0, 5, count=2),
        [[], [0, 5]],
        [[0] * 3, [6], [True], "00", 3, None],
    ),
    "inner": (lambda f: list(f.inner("x")), [{}, {"a": 1}], [[], 1, "a", None]),
    "each": (lambda f: len(f.each("x", count=2)), [[], [{}, {}]], [[{}] * 3, [1], {}, None]),
}


@pytest.mark.parametrize("name", READERS)
def test_fields(name: str) -> None:
    read, good, bad = READERS[name]
    for value in good:
        read(Fields({"x": value}, "a/file"))
    for value in [*bad, "x" * 10**6 if name != "text" else 0]:
        with pytest.raises(errors.FormatError, match=r"field parts\.x") as caught:
            read(Fields({"x": value}, "a/file", where="parts."))
        assert caught.value.path == "a/file"
        assert len(str(caught.value)) < 400
    with pytest.raises(errors.FormatError):
        read(Fields({}, "a/file"))


@pytest.mark.parametrize(
    "text",
    [b"", b"[", b"[]", b"1", b"null", b"\xff", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"],
)
def test_what_is_no_object(text: bytes) -> None:
    with pytest.raises(errors.FormatError):
        parse_object(text, "a/file")


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert check_plain_file(tmp_path / "file") == 3
    for name in ("link", "pipe", "."):
        with pytest.raises(errors.FormatError, match="not a plain file"):
            check_plain_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        check_plain_file(tmp_path / "none")


def test_a_manifest_that_is_no_file(tmp_path: Path, engine_posix: NativeEngine) -> None:
    """A pipe would make whoever opens it wait for a writer."""
    os.mkfifo(tmp_path / "MANIFEST.json")
    with pytest.raises(errors.FormatError, match="a special file"):
        read_manifest(engine_posix, tmp_path, "m", 1)
    with pytest.raises(errors.StoreNotFoundError):
        read_manifest(engine_posix, tmp_path / "MANIFEST.json", "m", 1)
    with pytest.raises(errors.StoreNotFoundError):
        read_manifest(engine_posix, "a" * 5000, "m", 1)


def test_a_manifest_with_a_number_of_many_digits(
    tmp_path: Path, engine_posix: NativeEngine
) -> None:
    write_manifest(engine_posix, tmp_path, "m", 1, {"a": 1})
    assert read_manifest(engine_posix, tmp_path, "m", 1)["a"] == 1
    text = json.dumps({"magic": "m"}).replace('"m"', "1" * 5000)
    (tmp_path / "MANIFEST.json").write_text(text)
    with pytest.raises(errors.FormatError, match="damaged manifest"):
        read_manifest(engine_posix, tmp_path, "m", 1)


@pytest.fixture
def engine_posix() -> Any:
    with NativeEngine(pool_bytes=1 << 20) as engine:
        yield engine
