"""Building in a directory that is somebody else's: refused, and not a file of it is touched. What a
killed build left is no stranger's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from tests.retrieval.common import build, check_store, corpus

DOCUMENTS = corpus(20)
STRANGERS: list[list[str]] = [
    ["building/plan.dwg", "gen-docs/index.html"],
    ["building/plan.dwg"],
    ["building/STATE.json", "building/plan.dwg"],
    ["building/records.bin", "thesis.tex"],
    ["building/records.bin", "gen-docs/index.html"],
    ["building/records.bin", "gen-1/x"],
    ["building"],
    ["gen-000001/x"],
]


@pytest.mark.parametrize("files", STRANGERS, ids=" ".join)
@pytest.mark.parametrize(
    "options", [{}, {"restart": True}, {"restart": True, "replace": True}], ids=repr
)
def test_left_alone(folder: Path, files: list[str], options: dict[str, Any]) -> None:
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    with pytest.raises(errors.InvalidInputError, match="not empty and no store"):
        build(folder, DOCUMENTS, **options)
    assert all((folder / name).read_text() == "mine" for name in files)


def test_beside_a_manifest_that_is_no_stores(folder: Path) -> None:
    (folder / "building").mkdir()
    (folder / "building" / "plan.dwg").write_text("mine")
    (folder / "MANIFEST.json").write_text('{"magic": "espnx-embedding-store", ')
    with pytest.raises(errors.InvalidInputError, match=r"got building/plan\.dwg"):
        build(folder, DOCUMENTS, replace=True, restart=True)
    assert (folder / "building" / "plan.dwg").read_text() == "mine"


@pytest.mark.parametrize(
    "files",
    [[], ["STATE.json.new"], ["records.bin", "texts.sqlite", "texts.sqlite-journal"]],
    ids=repr,
)
def test_killed_before_its_first_state(folder: Path, files: list[str]) -> None:
    (folder / "s" / "building").mkdir(parents=True)
    (folder / "s" / "gen-000001").mkdir()
    (folder / "s" / "MANIFEST.json.new").write_text("half")
    for name in files:
        (folder / "s" / "building" / name).write_text("half")
    build(folder / "s", DOCUMENTS)
    check_store(folder / "s", DOCUMENTS)


def test_data_directories_inside_the_stores_own(folder: Path) -> None:
    inside = [folder / "s" / "a", folder / "s" / "b"]
    for directory in inside:
        directory.mkdir(parents=True)
    with pytest.raises(errors.InvalidInputError, match="not empty"):
        build(folder / "s", DOCUMENTS, directories=inside)
    for directory in inside:
        directory.rmdir()

    def stops(phase: str, done: int, total: int | None) -> None:
        if phase == "arrange":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder / "s", DOCUMENTS, directories=inside, progress=stops)
    for directory in inside:
        directory.mkdir(parents=True, exist_ok=True)
    build(folder / "s", DOCUMENTS, directories=inside)
    check_store(folder / "s", DOCUMENTS)


def test_other_names_survive_in_a_store(folder: Path) -> None:
    build(folder / "s", DOCUMENTS)
    (folder / "s" / "gen-docs").mkdir()
    (folder / "s" / "gen-12").mkdir()
    espnx.delete(folder / "s", ["doc-1"])
    espnx.compact(folder / "s")
    build(folder / "s", DOCUMENTS, replace=True, restart=True)
    assert (folder / "s" / "gen-docs").is_dir()
    assert (folder / "s" / "gen-12").is_dir()
    check_store(folder / "s", DOCUMENTS)
