"""espnx.kernels imports from the clone, from an editable install and from a wheel; the wheel holds real files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = next(iter(sorted((ROOT / "espnx").glob("_C*.so"))), None)
BUILD_INPUTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "kernels", "benchmarks", "espnx", "csrc")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a command in a bare-ish environment (no PYTHONPATH of ours) and returns what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, with the extension that is already compiled here."""
    assert EXTENSION is not None, "the extension is not built: run `make setup`"
    copy = tmp_path_factory.mktemp("tree with a space") / "espnx tree"
    copy.mkdir()
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, copy / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", copy / "dist", "."]
    run(*build, cwd=copy, ESPNX_REUSE_EXTENSION="1")
    (built,) = (copy / "dist").glob("espnx-*.whl")
    return built


def test_wheel_holds_the_kernels_and_the_extension_as_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        kernels = {f"espnx/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
        assert kernels <= names
        for name in kernels:
            assert archive.read(name) == (ROOT / "kernels" / Path(name).name).read_bytes()
        assert EXTENSION is not None
        assert any(name.startswith("espnx/benchmarks/") for name in names)
        assert {"espnx/py.typed", "espnx/errors.py", f"espnx/{EXTENSION.name}"} <= names
        assert not [name for name in names if name.startswith(("tests/", "kernels/", "benchmarks/", "csrc/"))]


def test_wheel_has_every_module_of_the_package(wheel: Path) -> None:
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "espnx").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        assert ours <= set(archive.namelist())


def test_installed_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", target, wheel, cwd=elsewhere)
    code = "import espnx, espnx.kernels, importlib.util as u; print(espnx.__file__, espnx.kernels.__file__, u.find_spec('espnx._C').origin)"
    places = run(sys.executable, "-c", code, cwd=elsewhere, PYTHONPATH=str(target)).split()
    assert [Path(place).is_relative_to(target) for place in places] == [True, True, True]
    assert not (target / "espnx" / "kernels").is_symlink()
    help_text = run(sys.executable, "-m", "espnx", "--help", cwd=elsewhere, PYTHONPATH=str(target))
    assert "doctor" in help_text


def test_imports_from_the_root_of_a_clone_without_installation(tmp_path: Path) -> None:
    """``-S -I`` leaves no site-packages: nothing but the tree itself can answer. ``-B`` writes no caches into it."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import espnx, espnx.kernels; print(espnx.kernels.__file__)"
    place = run(sys.executable, "-I", "-S", "-B", "-c", code, cwd=tmp_path).strip()
    assert Path(place).resolve() == ROOT / "kernels" / "__init__.py"


def test_imports_through_the_installed_distribution(tmp_path: Path) -> None:
    """`make setup` installs in editable form: an import from anywhere finds this tree, and the entry point is there."""
    code = (
        "import espnx.kernels, importlib.metadata as m; print(espnx.kernels.__file__);"
        "print([e.value for e in m.entry_points(group='console_scripts') if e.name == 'espnx'])"
    )
    place, entry = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert Path(place).resolve() == ROOT / "kernels" / "__init__.py"
    assert entry == "['espnx.cli.main:main']"


def test_dependencies_of_the_base_are_four() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(";")[0].split(">")[0].split("=")[0].strip() for requirement in project["dependencies"]}
    assert names == {"torch", "numpy", "safetensors", "triton"}
    assert set(project["optional-dependencies"]) >= {"retrieval", "gds", "demo", "bench", "dev"}


def test_every_direct_dependency_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]
    names = {requirement.split(";")[0].split(">")[0].split("=")[0].split("[")[0].strip() for requirement in wanted} - {"espnx"}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and line[0] != "#"}
    assert names <= pinned, names - pinned


def test_what_the_gds_extra_brings_is_imported() -> None:
    """Nobody downloads a package for nothing."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(path.read_text() for path in (ROOT / "espnx" / "storage" / "gds").glob("*.py"))
    for requirement in extras["gds"]:
        module = requirement.split(">")[0].removesuffix("-cu13").replace("-", ".")
        assert f"import {module}" in text or f"from {module} import" in text or f'"{module}' in text, requirement
