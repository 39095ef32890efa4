"""Deleting ids that are not there: refused, unless the caller said that it does not matter."""

from __future__ import annotations

from pathlib import Path

import pytest

import espnx
from espnx import errors
from espnx.cli.main import main
from tests.retrieval.common import build, corpus


def test_missing_ids(folder: Path) -> None:
    build(folder / "s", corpus(20))
    with pytest.raises(errors.InvalidInputError, match="no such document"):
        espnx.delete(folder / "s", ["doc-1", "nobody"])
    with espnx.open(folder / "s") as index:
        assert len(index) == 20
        assert (
            espnx.delete(folder / "s", ["doc-1", "nobody", 7, "doc-2", "doc-1"], missing_ok=True)
            == 2
        )
        assert index.reload() is True
        assert (len(index), "doc-1" in index, "doc-3" in index) == (18, False, True)
        for ids in (["doc-1"], ["nobody"], []):
            assert espnx.delete(folder / "s", ids, missing_ok=True) == 0
        assert index.reload() is False, "a version in which nothing changed"
    with pytest.raises(errors.InvalidInputError):
        espnx.delete(folder / "s", [None], missing_ok=True)  # type: ignore[list-item]


def test_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(folder / "s", corpus(20))
    assert main(["index", "delete", str(folder / "s"), "doc-1", "nobody"]) == 2
    assert main(["index", "delete", str(folder / "s"), "doc-1", "nobody", "--missing-ok"]) == 0
    assert "1 documents deleted" in capsys.readouterr().out
