"""Which sources a copy is of: git says it in a clone, a record in an installation; and a clone
without anything compiled in it takes the compiled part of an installation of the same sources, and
of no others."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import espnx
from espnx import origin
from espnx.compiled import load_compiled

PACKAGE = Path(espnx.__file__).parent
ROOT = PACKAGE.parent
#: What a package needs to look for its compiled part.
PYTHON = ("__init__.py", "_version.py", "compiled.py", "errors.py", "origin.py")
ASK = (
    "from espnx.compiled import load_compiled; module = load_compiled(); print(module.__file__, "
    "module.cpu_level() >= 0)"
)


def git(folder: Path, *words: str) -> None:
    names = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """With sources, and nothing compiled."""
    folder = tmp_path / "clone"
    (folder / "espnx").mkdir(parents=True)
    (folder / "csrc" / "io").mkdir(parents=True)
    (folder / "csrc" / "io" / "a.cpp").write_text("int a;")
    for name in PYTHON:
        shutil.copy2(PACKAGE / name, folder / "espnx" / name)
    return folder


@pytest.fixture
def installed(clone: Path, tmp_path: Path) -> Path:
    """What was built of it, as site-packages have it."""
    package = tmp_path / "site" / "espnx"
    shutil.copytree(clone / "espnx", package)
    os.symlink(
        str(load_compiled().__file__), package / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    )
    origin.write_record(package, origin.make_record(clone))
    return package.parent


def ask(where: Path, site: Path) -> tuple[int, str]:
    """A Python that is started there, with that installation."""
    code = f"import sys; sys.path[1:1] = [{str(site)!r}]; {ASK}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_clone_takes_the_compiled_part_of_its_installation(
    clone: Path, installed: Path, tmp_path: Path
) -> None:
    for where in (clone, tmp_path):  # the clone's package, then the installed one
        code, said = ask(where, installed)
        assert code == 0, said
        assert said.split()[1] == "True"
    (clone / "csrc" / "README.md").write_text("not compiled")
    assert ask(clone, installed)[0] == 0


@pytest.mark.parametrize("change", ["int b;", None])
def test_a_clone_refuses_an_installation_of_other_sources(
    clone: Path, installed: Path, change: str | None
) -> None:
    """Changed since, or of a build that wrote nothing down."""
    if change:
        (clone / "csrc" / "io" / "a.cpp").write_text(change)
    else:
        (installed / "espnx" / origin.RECORD).unlink()
    code, said = ask(clone, installed)
    assert code == 1
    assert "MissingDependencyError" in said
    assert "built from other sources" in said
    assert "pip install ." in said


def test_nothing_is_compiled(clone: Path, tmp_path: Path) -> None:
    code, said = ask(clone, tmp_path / "nowhere")
    assert code == 1
    assert "make setup" in said


def test_a_clone_asks_git(clone: Path) -> None:
    assert origin.git_state(clone) == {}
    git(clone, "init")
    assert origin.git_state(clone) == {"commit": None, "dirty": False}
    git(clone, "add", ".")
    git(clone, "commit", "-m", "a")
    state = origin.git_state(clone)
    assert len(state["commit"]) == 40
    assert not state["dirty"]
    (clone / "csrc" / "io" / "a.cpp").write_text("int b;")
    assert origin.git_state(clone)["dirty"]


def test_a_source_archive_brings_the_record_of_its_clone(clone: Path) -> None:
    origin.write_record(clone / "espnx", {"commit": "c" * 40, "dirty": False, "sources": "old"})
    record = origin.make_record(clone)
    assert record == {"commit": "c" * 40, "dirty": False, "sources": origin.sources_digest(clone)}


def test_names_and_places_of_sources_count(clone: Path) -> None:
    before = origin.sources_digest(clone)
    (clone / "csrc" / "io" / "a.cpp").rename(clone / "csrc" / "a.cpp")
    assert origin.sources_digest(clone) != before
    assert origin.sources_digest(clone / "espnx") is None


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / origin.RECORD).write_text(text)
    assert origin.read_record(tmp_path) == {}
