"""Whose a folder `work` is: a build's own is found again and removed, a user's own never is."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from espnx import errors
from espnx.storage.work import WORK, WorkFolder, check_work, is_own_work, remove_work


def contents(path: Path) -> dict[str, bytes | None]:
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() else None
        for each in path.rglob("*")
    }


def fill(path: Path, files: list[str]) -> None:
    for name in files:
        where = path / name
        if name.endswith("/"):
            where.mkdir(parents=True)
        else:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(name)


OWN = [
    ["work/"],
    ["work/job.json"],
    ["work/job.json.new"],
    ["work/job.json", "work/step/file", "work/other.new/file"],
]
FOREIGN = [
    ["work/chapter.txt"],
    ["work/thesis/chapter.txt"],
    ["work/thesis/job.json"],
    ["work/job.json/"],
    ["work/job.json", "work/notes.txt"],
    ["work"],
]


@pytest.mark.parametrize("files", OWN)
def test_what_a_build_has_left_is_its_own(tmp_path: Path, files: list[str]) -> None:
    fill(tmp_path, files)
    assert is_own_work(tmp_path)
    check_work(tmp_path)
    remove_work(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("files", FOREIGN)
def test_a_folder_of_a_user_is_never_removed(tmp_path: Path, files: list[str]) -> None:
    fill(tmp_path, files)
    before = contents(tmp_path)
    assert not is_own_work(tmp_path)
    remove_work(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="work"):
        check_work(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="work"):
        WorkFolder(tmp_path, {"a": 1})
    assert contents(tmp_path) == before


def test_a_link_is_no_work_folder(tmp_path: Path) -> None:
    fill(tmp_path, ["elsewhere/job.json", "x/"])
    (tmp_path / "x" / WORK).symlink_to(tmp_path / "elsewhere")
    assert not is_own_work(tmp_path / "x")
    with pytest.raises(errors.InvalidInputError):
        check_work(tmp_path / "x")


def test_none_is_nobodys(tmp_path: Path) -> None:
    assert not is_own_work(tmp_path)
    check_work(tmp_path)
    remove_work(tmp_path)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_interrupted_while_it_is_removed_it_stays_a_builds_own(tmp_path: Path, after: int) -> None:
    work = WorkFolder(tmp_path, {"a": 1})
    for name in ("x", "y"):
        with work.step(name) as folder:
            (folder / "file").write_text("whole")
    real, calls = shutil.rmtree, []

    def cut(path: Path, ignore_errors: bool = False) -> None:
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(path)
        real(path, ignore_errors=ignore_errors)

    with patch("espnx.storage.work.shutil.rmtree", cut), pytest.raises(KeyboardInterrupt):
        work.remove()
    assert is_own_work(tmp_path)
    WorkFolder(tmp_path, {"a": 2}).remove()
    assert not list(tmp_path.iterdir())
