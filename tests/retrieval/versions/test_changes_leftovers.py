"""What a change leaves behind: nothing where it failed or had nothing to do, nothing of a killed
one's files in the next version, and a word where only the last flush failed. Every directory given
for data stays known."""

from __future__ import annotations

import errno
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.retrieval.build.changes import adding
from espnx.retrieval.build.changes import compact as compacting
from espnx.retrieval.versions import draft, generations
from espnx.storage import NativeEngine, ownership
from tests.retrieval.common import leftovers, section_places
from tests.retrieval.versions.test_changes import DOCUMENTS, assert_tidy, build, check, refused

CHANGES: dict[str, Callable[..., object]] = {
    "add": lambda path, **options: espnx.add(path, DOCUMENTS[40:50], **options),
    "delete": lambda path, **options: espnx.delete(path, ["doc-3"], **options),
    "compact": lambda path, **options: espnx.compact(path, **options),
}
AFTER = {
    "add": DOCUMENTS[:50],
    "delete": [*DOCUMENTS[:3], *DOCUMENTS[4:40]],
    "compact": DOCUMENTS[:40],
}
each_change = pytest.mark.parametrize("name", CHANGES)


def fail(*args: Any, **options: Any) -> Any:
    raise errors.WriteError("made to fail", path="nowhere")


def live(path: Path) -> Any:
    return json.loads((path / "MANIFEST.json").read_text())


def test_nothing_to_add(folder: Path) -> None:
    path = folder / "s"
    build(path, DOCUMENTS[:40])
    manifest = (path / "MANIFEST.json").read_bytes()
    for nothing in ([], iter(())):
        report = espnx.add(path, nothing)
        assert (report.documents, report.tokens, report.record_bytes, report.generation) == (
            0,
            0,
            0,
            1,
        )
        assert (path / "MANIFEST.json").read_bytes() == manifest
        check(path, DOCUMENTS[:40])
    assert espnx.add(path, DOCUMENTS[40:42]).generation == 2
    check(path, DOCUMENTS[:42])


PLACES = {
    "add": (adding, "finish_part"),
    "delete": (draft, "publish"),
    "compact": (compacting, "finish_part"),
}


@each_change
def test_a_failure_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither in the store nor where its data files are."""
    path, place = folder / "s", folder / "x"
    build(path, DOCUMENTS[:40], directories=[place])
    before = sorted(place.rglob("*"))
    (path / "MANIFEST.json.new").write_bytes(b"of a killed writer")
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[name], fail)
        with pytest.raises(errors.WriteError, match="made to fail"):
            CHANGES[name](path)
    assert_tidy(path)
    assert sorted(place.rglob("*")) == before
    CHANGES[name](path)
    check(path, AFTER[name])


@each_change
@pytest.mark.parametrize("removable", [True, False])
def test_a_killed_ones_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, removable: bool
) -> None:
    """They are removed first; where that fails, the next version has a directory of its own."""
    path = folder / "s"
    build(path, DOCUMENTS[:40])
    shutil.copytree(path / "gen-000001", path / "gen-000002")
    (path / "building").mkdir()
    with monkeypatch.context() as patch:
        if not removable:
            patch.setattr(ownership, "remove_directory", lambda *args: None)
        CHANGES[name](path)
    assert live(path)["generation"] == (2 if removable else 3)
    directory = path / generations.name(live(path)["generation"])
    deleted = {Path(live(path)["deleted"]["path"]).name} if name == "delete" else set()
    own = {"part.bin", "segment-00000.bin"} if name == "compact" else {"part.bin"}
    assert {file.name for file in directory.iterdir()} == (deleted or own)
    espnx.add(path, DOCUMENTS[60:61])
    check(path, [*AFTER[name], DOCUMENTS[60]])


class Unflushed(NativeEngine):
    """Cannot flush a directory once a manifest was renamed into place."""

    published = False

    def rename(self, source: Any, target: Any) -> None:
        super().rename(source, target)
        self.published |= str(target).endswith("MANIFEST.json")

    def sync_directory(self, path: Any) -> None:
        if self.published:
            raise errors.WriteError("cannot flush", path=path, errno=errno.EIO)
        super().sync_directory(path)


@each_change
def test_published_but_not_flushed(folder: Path, name: str) -> None:
    """The error says that the change is done; both versions' files stay until a flush worked."""
    path = folder / "s"
    build(path, DOCUMENTS[:40])
    before = leftovers(path)
    with (
        Unflushed() as engine,
        pytest.raises(
            errors.WriteError, match="it is published, but not known to survive"
        ) as caught,
    ):
        CHANGES[name](path, engine=engine)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(path))
    with Unflushed() as engine, pytest.raises(errors.WriteError, match="cannot flush"):
        engine.published = True  # it still cannot
        espnx.delete(path, ["doc-5"], engine=engine)
    assert before <= leftovers(path)
    if name == "add":
        with pytest.raises(errors.InvalidInputError, match="'doc-40' is in the store"):
            CHANGES[name](path)
    espnx.compact(path)
    check(path, AFTER[name])


def test_a_build_published_but_not_flushed(folder: Path) -> None:
    with Unflushed() as engine, pytest.raises(errors.WriteError, match="it is published"):
        build(folder / "s", DOCUMENTS[:40], engine=engine)
    espnx.delete(folder / "s", ["doc-3"])
    check(folder / "s", AFTER["delete"])


def test_damaged_lists_of_a_later_part(folder: Path) -> None:
    """The files of the parts before it are closed before the engine is: a generator finalised later
    would say so, to nobody."""
    path = folder / "s"
    build(path, DOCUMENTS[:40])
    espnx.add(path, DOCUMENTS[40:50])
    lists = path / "gen-000002" / "part.bin"
    whole, place = lists.read_bytes(), section_places(lists)["stage.codes"]
    lists.write_bytes(
        whole[: place.offset_bytes]
        + bytes([whole[place.offset_bytes] ^ 1])
        + whole[place.offset_bytes + 1 :]
    )
    with pytest.raises(errors.ChecksumError) as caught:
        espnx.open(path)
    assert caught.value.path == str(lists)
    del caught
    gc.collect()


@pytest.mark.parametrize(
    "ids",
    [
        [None],
        [b"x"],
        5,
        ["\udc80"],
        [[1]],
        [True],
        [1.0],
        None,
        b"doc-0",
        [2**63],
        [-(2**63) - 1],
        [10**5000],
    ],
)
def test_what_is_no_id(folder: Path, ids: Any) -> None:
    build(folder / "s", [espnx.Document(1, "one", DOCUMENTS[0].vectors), *DOCUMENTS[1:5]])
    with pytest.raises(errors.InvalidInputError, match="id"):
        espnx.delete(folder / "s", ids)
    assert live(folder / "s")["records"]["count"] == 5


def test_no_id_beside_one(folder: Path) -> None:
    build(folder / "s", DOCUMENTS[:5])
    refused(folder / "s", lambda: espnx.delete(folder / "s", ["doc-1", None]), "document id")  # type: ignore[list-item]


def test_a_directory_that_was_not_needed(folder: Path) -> None:
    """It stays the store's: what grows later goes there too; nothing empty lies about."""
    path, places = folder / "s", [folder / "x", folder / "y"]

    def used() -> set[Path]:
        segments = [
            each
            for part in live(path)["parts"]
            for tier in part["segments"].values()
            for each in tier
        ]
        named = {Path(segment["path"]).parent for segment in segments}
        assert {made for place in places for made in place.glob("*/gen-*")} == named
        assert all(list(place.glob("*/OWNER.json")) for place in places)
        return {directory.parent.parent for directory in named}

    build(path, DOCUMENTS[:40], directories=places)
    assert used() == {places[0]}
    espnx.add(path, DOCUMENTS[40:140])
    espnx.add(path, DOCUMENTS[140:])
    assert used() == set(places)
    espnx.compact(path)
    assert used() == {places[0]}
    espnx.delete(path, ["doc-0"])
    assert live(path)["directories"] == [str(place) for place in places]
    check(path, DOCUMENTS[1:])


@each_change
@pytest.mark.parametrize("manifest", [None, b"{}"])
def test_a_strangers_directory(folder: Path, name: str, manifest: bytes | None) -> None:
    """Nothing is written there, no lock either."""
    if manifest is not None:
        (folder / "MANIFEST.json").write_bytes(manifest)
    (folder / "theirs").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(errors.StoreNotFoundError if manifest is None else errors.FormatError):
        CHANGES[name](folder)
    assert sorted(folder.iterdir()) == before
