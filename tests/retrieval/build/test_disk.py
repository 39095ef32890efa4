"""Disks that are really full, read-only, or without O_DIRECT: small file systems of the kernel's
own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import espnx
from espnx import errors
from espnx.retrieval.build import builder as module
from espnx.retrieval.versions import publish
from tests.retrieval.common import build, check_store, corpus, queries
from tests.storage.machine import MIB, command, file_system, fill, mounted

DOCUMENTS = corpus(1000, tokens=(40, 120))  # 1.3 MB of records


#: What is free when the build begins, and where it must then fail.
ROOM = {
    "no room at all": 0,
    "for a little": 40 * 1024,
    "for some vectors": 700 * 1024,
    "for the spool alone": 6 * MIB,
}


@pytest.mark.sampled(1)
@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
@pytest.mark.parametrize("room", ROOM)
def test_a_full_disk(tmp_path: Path, kind: str, room: str) -> None:
    """Bytes needed and free are told, nothing is published, and once there is room the same call
    goes on."""
    with file_system(kind, tmp_path, 40 * MIB) as where:
        ballast = fill(where, ROOM[room])
        path = where / "s"
        with pytest.raises(errors.DiskFullError) as caught:
            build(path, DOCUMENTS)
        error = caught.value
        assert error.path is not None
        assert str(where) in error.path
        assert error.needed_bytes > error.free_bytes >= 0 or room != "for the spool alone"
        assert 0 < error.needed_bytes < 100 * MIB
        assert error.free_bytes <= ROOM[room]
        assert not (path / "MANIFEST.json").exists()
        with pytest.raises(errors.StoreNotFoundError):
            espnx.open(path)
        ballast.unlink()
        report = build(path, DOCUMENTS)
        assert report.resumed_documents == (1000 if room == "for the spool alone" else 0)
        check_store(path, DOCUMENTS)


@pytest.mark.root
@pytest.mark.parametrize("place", ["assign", "tune", "fills", "finish_part", "write_manifest"])
def test_a_disk_that_fills_up_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_segments: Callable[[int, int], None],
    place: str,
) -> None:
    """Somebody else takes the room while the build runs over a published store: that one stays
    whole."""
    small_segments(100_000, 10_000)
    with file_system("tmpfs", tmp_path, 40 * MIB) as where:
        path = where / "s"
        build(path, DOCUMENTS[:100])
        owner = next(each for each in (module.arrange, publish, module) if hasattr(each, place))
        original = getattr(owner, place)
        calls = 0

        def take(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if place != "fills" or calls == 40:
                fill(where, 0)
            return original(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, place, take)
            with pytest.raises(errors.DiskFullError) as caught:
                build(path, DOCUMENTS, replace=True)
        assert str(path) in str(caught.value)
        check_store(path, DOCUMENTS[:100])
        (where / "ballast").unlink()
        assert build(path, DOCUMENTS, replace=True).resumed_documents == 1000
        check_store(path, DOCUMENTS)


@pytest.mark.root
def test_too_small_for_the_records(tmp_path: Path) -> None:
    """Said before the long part of the build, of the directory that lacks the room."""
    with mounted("tmpfs", "espnx", tmp_path / "small", "size=4m") as small:
        with pytest.raises(errors.DiskFullError, match="will not fit") as caught:
            build(tmp_path / "s", DOCUMENTS, directories=[tmp_path / "large", small])
        assert caught.value.path is not None
        assert caught.value.path.startswith(str(small))
        assert 4 * MIB < caught.value.needed_bytes < 20 * MIB
        assert 0 < caught.value.free_bytes <= 4 * MIB
        command("mount", "-o", "remount,size=40m", small)
        assert (
            build(
                tmp_path / "s", DOCUMENTS, directories=[tmp_path / "large", small]
            ).resumed_documents
            == 1000
        )
        check_store(tmp_path / "s", DOCUMENTS)


@pytest.mark.root
def test_a_read_only_file_system(tmp_path: Path) -> None:
    """Nothing can be built there; what is there can be searched and verified."""
    with mounted("tmpfs", "espnx", tmp_path / "ro", "size=40m") as where:
        build(where / "s", DOCUMENTS[:50])
        command("mount", "-o", "remount,ro", where)
        for path, options in ((where / "new", {}), (where / "s", {"replace": True})):
            with pytest.raises(errors.WriteError) as caught:
                build(path, DOCUMENTS[:60], **options)
            assert caught.value.path is not None
            assert caught.value.path.startswith(str(path))
        check_store(where / "s", DOCUMENTS[:50])


def test_a_directory_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("[user] root may write everywhere")
    tmp_path.chmod(0o555)
    with pytest.raises(errors.WriteError):
        build(tmp_path / "s", DOCUMENTS[:5])
    tmp_path.chmod(0o755)


@pytest.mark.root
def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    """It works, and says that the page cache was not bypassed."""
    with mounted("ramfs", "espnx", tmp_path / "ram") as where:
        build(where / "s", DOCUMENTS[:100])
        check_store(where / "s", DOCUMENTS[:100])
        for engine in ("auto", "posix"):
            with espnx.open(where / "s", engine=engine) as index:
                assert index.store.effective_path.endswith(" (buffered)")
                assert index.search(queries(1)[0]).effective_path == index.store.effective_path


def test_direct_io_is_what_a_disk_gets(tmp_path: Path) -> None:
    build(tmp_path / "s", DOCUMENTS[:20])
    with espnx.open(tmp_path / "s") as index:
        assert "buffered" not in index.search(queries(1)[0]).effective_path
