"""Only what a store made itself is removed: not what a hostile manifest names, not the data that a
copy shares with the original."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.storage.manifest import _digest
from tests.retrieval.common import build, check_store, corpus

DOCUMENTS = corpus(40)
CHANGES: dict[str, Callable[[Path], Any]] = {
    "add": lambda path: espnx.add(path, corpus(45)[40:]),
    "delete": lambda path: espnx.delete(path, ["doc-3"]),
    "compact": espnx.compact,
    "replace": lambda path: build(path, DOCUMENTS[:10], replace=True),
    "restart": lambda path: build(path, DOCUMENTS[:10], replace=True, restart=True),
}
each_change = pytest.mark.parametrize("name", CHANGES)


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file of a directory, byte for byte."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else ""
        for path in folder.rglob("*")
    }


def change_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that its author made: with a checksum that is right."""
    file = path / "MANIFEST.json"
    fields = json.loads(file.read_bytes())
    del fields["checksum"]
    change(fields)
    fields["checksum"] = _digest(fields)
    file.write_text(json.dumps(fields))


def segments(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        segment
        for part in fields["parts"]
        for tier in part["segments"].values()
        for segment in tier
    ]


@pytest.fixture
def decoy(folder: Path) -> Path:
    """Somebody's directory, with names like ours in it."""
    place = folder / "decoy"
    for name in ("gen-000001", "espnx-000000000000/gen-000001", "building"):
        (place / name).mkdir(parents=True)
        for file in ("segment-00000.bin", "thesis.tex", "STATE.json", "records.bin"):
            (place / name / file).write_text("mine")
    return place


def names_it(decoy: Path) -> dict[str, Callable[[dict[str, Any]], None]]:
    """What a hostile author may write into a manifest."""

    def absolute(fields: dict[str, Any]) -> None:
        segments(fields)[0]["path"] = str(decoy / "gen-000001" / "segment-00000.bin")

    def declared(fields: dict[str, Any]) -> None:
        absolute(fields)
        fields["directories"] = [str(decoy)]

    def like_ours(fields: dict[str, Any]) -> None:
        fields["directories"], fields["store_id"] = [str(decoy)], "0" * 32
        segments(fields)[0]["path"] = str(
            decoy / "espnx-000000000000" / "gen-000001" / "segment-00000.bin"
        )

    def above(fields: dict[str, Any]) -> None:
        segments(fields)[0]["path"] = "../decoy/gen-000001/segment-00000.bin"

    def winding(fields: dict[str, Any]) -> None:
        fields["directories"] = [str(decoy)]
        segments(fields)[0]["path"] = (
            f"{decoy}/espnx-{fields['store_id'][:12]}/../gen-000001/segment-00000.bin"
        )

    def part(fields: dict[str, Any]) -> None:
        fields["parts"][0]["directory"] = "../decoy/gen-000001"

    def deleted(fields: dict[str, Any]) -> None:
        fields["deleted"] = {
            "path": "../decoy/gen-000001/segment-00000.bin",
            "crc32c": 0,
            "size_bytes": 4,
            "records": 1,
        }

    def only_declared(fields: dict[str, Any]) -> None:
        fields["directories"] = [str(decoy)]

    return {
        each.__name__: each
        for each in (absolute, declared, like_ours, above, winding, part, deleted, only_declared)
    }


@pytest.mark.parametrize("kind", names_it(Path()))
def test_a_manifest_that_names_other_directories(folder: Path, decoy: Path, kind: str) -> None:
    build(folder / "made", DOCUMENTS)
    before = contents(decoy)
    for name, change in CHANGES.items():
        shutil.copytree(folder / "made", folder / "s")
        change_manifest(folder / "s", names_it(decoy)[kind])
        try:
            change(folder / "s")
        except (errors.FormatError, errors.SharedDataError, errors.TruncatedFileError):
            assert name not in ("replace", "restart") or kind == "like_ours"
        else:
            assert name in ("replace", "restart"), "a change of such a store"
        assert contents(decoy) == before
        shutil.rmtree(folder / "s")


@each_change
def test_links_lead_nowhere(folder: Path, decoy: Path, name: str) -> None:
    """An archive may hold links: in place of directories that are removed, and of files that are
    written."""
    before = contents(decoy)
    for link, target in [
        ("gen-000007", decoy / "gen-000001"),
        ("building", decoy / "building"),
        ("LOCK", decoy / "building" / "thesis.tex"),
        ("MANIFEST.json.new", decoy / "building" / "thesis.tex"),
        ("gen-000002", decoy / "gen-000001"),
    ]:
        build(folder / "s", DOCUMENTS)
        (folder / "s" / link).unlink(missing_ok=True)
        (folder / "s" / link).symlink_to(target)
        try:
            CHANGES[name](folder / "s")
        except (errors.WriteError, errors.InvalidInputError, errors.FormatError):
            assert link in ("LOCK", "building")
        assert contents(decoy) == before, link
        shutil.rmtree(folder / "s")


def test_a_state_that_names_other_directories(
    folder: Path, decoy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an interrupted build that came with an archive."""

    def stops(phase: str, done: int, total: int | None) -> None:
        if phase == "arrange":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder / "made", DOCUMENTS[:10], directories=[decoy], progress=stops)
    before = contents(decoy)
    shutil.copytree(folder / "made", folder / "s")
    with pytest.warns(UserWarning, match="another directory"):
        build(folder / "s", DOCUMENTS)
    assert contents(decoy) == before


@each_change
def test_a_copy_that_shares_data(folder: Path, name: str) -> None:
    """It can be searched, and says what it is; whatever is asked of it, the original stays
    whole."""
    build(folder / "s", DOCUMENTS, directories=[folder / "x", folder / "y"])
    shutil.copytree(folder / "s", folder / "copy")
    before = contents(folder / "x") | contents(folder / "y")
    with pytest.warns(UserWarning, match="shares data with another store"):
        check_store(folder / "copy", DOCUMENTS)
    with pytest.raises(errors.SharedDataError, match="index detach"):
        CHANGES[name](folder / "copy")
    assert contents(folder / "x") | contents(folder / "y") == before
    with espnx.open(folder / "s") as index:
        assert index.store.shared_homes == []
    CHANGES[name](folder / "s")


@each_change
def test_a_store_that_was_renamed(folder: Path, name: str) -> None:
    """It is the same store, also when its file system has another number since."""
    build(folder / "old", DOCUMENTS, directories=[folder / "x"])
    (folder / "old").rename(folder / "s")
    check_store(folder / "s", DOCUMENTS)
    CHANGES[name](folder / "s")
    mark = next((folder / "x").glob("*/OWNER.json"), None)
    assert mark is None or json.loads(mark.read_text())["owner"]["path"] == str(folder / "s")
    if mark is not None:
        fields = json.loads(mark.read_text())
        fields["owner"]["device"] += 1
        mark.write_text(json.dumps(fields))
        espnx.delete(folder / "s", ["doc-1"])


@pytest.mark.parametrize("mark", ["", "{}", "[", '{"name": 1, "owner": {}}', None])
def test_a_mark_that_says_nothing(folder: Path, mark: str | None) -> None:
    build(folder / "s", DOCUMENTS, directories=[folder / "x"])
    (path,) = (folder / "x").glob("*/OWNER.json")
    path.unlink()
    if mark is not None:
        path.write_text(mark)
    before = contents(folder / "x")
    for change in CHANGES.values():
        with pytest.raises(errors.SharedDataError):
            change(folder / "s")
    assert contents(folder / "x") == before
    with pytest.warns(UserWarning, match="shares data"):
        check_store(folder / "s", DOCUMENTS)
    espnx.detach(folder / "s", adopt=True)
    espnx.compact(folder / "s")
    check_store(folder / "s", DOCUMENTS)


@pytest.mark.parametrize("into", [[], ["y", "z"]], ids=["the store", "directories"])
@pytest.mark.parametrize("damaged", [False, True])
def test_detach(folder: Path, into: list[str], damaged: bool) -> None:
    """A copy gets data of its own; the original keeps its, byte for byte."""
    build(folder / "s", DOCUMENTS, directories=[folder / "x", folder / "y"])
    espnx.add(folder / "s", corpus(50)[40:])
    espnx.delete(folder / "s", ["doc-3"])
    left = [document for document in corpus(50) if document.id != "doc-3"]
    shutil.copytree(folder / "s", folder / "copy")
    data = next((folder / "x").rglob("segment-*.bin"))
    whole = data.read_bytes()
    if damaged:
        data.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    before, copy = contents(folder / "x") | contents(folder / "y"), contents(folder / "copy")
    if damaged:
        with pytest.raises(errors.ChecksumError):
            espnx.detach(folder / "copy", directories=[folder / name for name in into])
        assert contents(folder / "copy").keys() - copy.keys() <= {"LOCK"}
        assert contents(folder / "copy")["MANIFEST.json"] == copy["MANIFEST.json"]
        return
    report = espnx.detach(folder / "copy", directories=[folder / name for name in into])
    assert (report.files, report.directories) == (2, [str(folder / name) for name in into])
    after = contents(folder / "x") | contents(folder / "y")
    assert {name: after[name] for name in before} == before
    for change in (
        lambda: espnx.add(folder / "copy", corpus(60)[50:]),
        lambda: espnx.compact(folder / "copy"),
    ):
        change()
        after = contents(folder / "x") | contents(folder / "y")
        assert {name: after[name] for name in before} == before
    check_store(folder / "copy", left + corpus(60)[50:])
    check_store(folder / "s", left)
    espnx.compact(folder / "s")
    check_store(folder / "copy", left + corpus(60)[50:])
    build(folder / "s", DOCUMENTS[:5], replace=True)
    check_store(folder / "copy", left + corpus(60)[50:])
    assert espnx.detach(folder / "s").files == 0


def test_a_backup_without_other_directories(folder: Path) -> None:
    """All of its data lie in itself: it is restored by copying, and changed at once."""
    build(folder / "s", DOCUMENTS)
    shutil.copytree(folder / "s", folder / "restored")
    shutil.rmtree(folder / "s")
    espnx.delete(folder / "restored", ["doc-3"])
    espnx.compact(folder / "restored")
    check_store(folder / "restored", [document for document in DOCUMENTS if document.id != "doc-3"])


def test_somebodys_files_in_our_directories(folder: Path) -> None:
    build(folder / "s", DOCUMENTS, directories=[folder / "x"])
    (home,) = (folder / "x").iterdir()
    for place in (folder / "s" / "gen-000001", home / "gen-000001", home):
        (place / "thesis.tex").write_text("mine")
        (place / "figures").mkdir()
        (place / "figures" / "segment-00000.bin").write_text("mine")
    build(folder / "s", DOCUMENTS[:10], replace=True)
    for place in (folder / "s" / "gen-000001", home / "gen-000001", home):
        assert (place / "thesis.tex").read_text() == "mine"
        assert (place / "figures" / "segment-00000.bin").read_text() == "mine"
        assert not (place / "segment-00000.bin").exists()
    check_store(folder / "s", DOCUMENTS[:10])
