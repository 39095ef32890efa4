"""The style of the whole tree, as tests: sizes, banned calls, loose ends, and the linters where
they are installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cpp.includes import own_files, standard_headers, text_hash
from tests.cpp.sanitized import precompiled_header
from tests.layers import modules, own_graph
from tests.style_rules import (
    FILE_LINES_MAX,
    FUNCTION_LINES_MAX,
    HELD_LINES_MAX,
    LINE_MAX,
    PRIVATE_METHODS_MAX,
    SHELL_LINE_MAX,
    SMALL_LINES,
    cpp_complaints,
    cpp_functions,
    is_small_part,
    python_complaints,
    source_complaints,
    text_complaints,
)

ROOT = Path(__file__).resolve().parent.parent
CPP = {".cpp", ".hpp", ".h", ".cu", ".cuh"}
SOURCE = CPP | {".py", ".sh"}
PROSE = {".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".in", ""}
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    ".cache",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
}
SKIPPED_AT_THE_ROOT = {"build", "dist"}
PYTHON_IN_CPP = "csrc/bindings/"


def tracked_files() -> list[Path]:
    """What git tracks or would track; every file below the root where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = (
        subprocess.run(command, cwd=ROOT, capture_output=True).stdout
        if shutil.which("git")
        else b""
    )
    if listing:
        found = [ROOT / os.fsdecode(name) for name in listing.split(b"\0") if name]
    else:
        below = ((path, path.relative_to(ROOT).parts) for path in ROOT.rglob("*"))
        found = [
            path
            for path, parts in below
            if not SKIPPED_FOLDERS & set(parts) and parts[0] not in SKIPPED_AT_THE_ROOT
        ]
    # Links (espnx/kernels) are judged where they point.
    return sorted(
        path
        for path in found
        if path.is_file() and not any(part.is_symlink() for part in (path, *path.parents))
    )


FILES = tracked_files()


def complaints(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix not in SOURCE | PROSE or name == "LICENSE":
        return
    text = path.read_text(encoding="utf-8")
    line_max = SHELL_LINE_MAX if path.suffix == ".sh" else LINE_MAX
    found = list(text_complaints(text, line_max=line_max if path.suffix in SOURCE else None))
    if path.suffix in SOURCE:
        found += source_complaints(text)
    if path.suffix == ".py":
        package = name.startswith(("espnx/", "kernels/"))
        found += python_complaints(
            text,
            package=package,
            may_print=not package or name.startswith("espnx/cli/"),
            is_test=name.startswith("tests/"),
        )
    if path.suffix in CPP:
        has_header = path.suffix == ".cpp" and path.with_suffix(".hpp").exists()
        found += cpp_complaints(
            text, may_use_python=name.startswith(PYTHON_IN_CPP), has_header=has_header
        )
    for line, problem in found:
        yield f"{name}:{line}: {problem}"


def test_every_file_keeps_the_rules() -> None:
    found = [complaint for path in FILES for complaint in complaints(path)]
    assert not found, "\n" + "\n".join(found)


def test_the_files_are_seen() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in FILES}
    assert {
        "espnx/errors.py",
        "kernels/__init__.py",
        "scripts/setup.sh",
        "setup.py",
        "tests/test_style.py",
    } <= names


def test_small_files_are_ideas_of_their_own() -> None:
    importers = Counter(target for targets in own_graph().values() for target in targets)
    found = [
        f"{module}: fewer than {SMALL_LINES} lines, one importer: merge it, or say why it is a "
        "file of its own"
        for path, module, is_package in modules()
        if not is_package and is_small_part(module, path.read_text(), importers[module])
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("espnx/kv/cache.py", "SsdCache"),
        ("espnx/integrations/transformers/cache.py", "KVCache"),
        ("espnx/retrieval/search/index.py", "Index"),
        ("espnx/device/rows/file.py", "RowFileDevice"),
        ("espnx/graph/merging/writer.py", "GraphWriter"),
    ],
)
def test_what_everything_hangs_on_stays_small(path: str, name: str) -> None:
    """Whatever is new wants to lie where all of it comes together. It gets an object of its own
    there, with what is always true of it."""
    (found,) = (
        node
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    private = [
        each.name
        for each in found.body
        if isinstance(each, ast.FunctionDef) and re.match(r"_[a-z]", each.name)
    ]
    assert (found.end_lineno or 0) - found.lineno < HELD_LINES_MAX
    assert len(private) <= PRIVATE_METHODS_MAX, private


@pytest.mark.parametrize(
    ("text", "importers", "is_part"),
    [
        ('"""Doc."""\n', 1, True),
        ('"""Doc."""\n', 2, False),
        ('"""Doc. A file of its own: two ideas."""\n', 1, False),
        ('"""Doc."""\n' * SMALL_LINES, 1, False),
    ],
)
def test_small_parts_are_seen(text: str, importers: int, is_part: bool) -> None:
    assert is_small_part("espnx.x", text, importers) is is_part


def test_ruff() -> None:
    run_linter("ruff", [sys.executable, "-m", "ruff", "check", "--quiet", "."])


#: mypy with garbage looked for a twentieth as often as it asks, which is half of its time where
#: nothing is cached; it takes 0.8 GB in place of 0.5.
MYPY = """
import gc
from mypy.__main__ import console_entry

set_threshold = gc.set_threshold
gc.set_threshold = lambda young, *others: set_threshold(20 * young, *others)
console_entry()
"""


def test_mypy() -> None:
    run_linter("mypy", [sys.executable, "-c", MYPY])


def test_a_type_checker_sees_misspelt_names(tmp_path: Path) -> None:
    """After the test above: in a cache that is empty each would read the whole package."""
    pytest.importorskip("mypy")
    wrong = {
        "espnx.buidl('s', [])": 'Module has no attribute "buidl"',
        "espnx.KVCache(config, 'kv', spill_intervall=3)": (
            'Unexpected keyword argument "spill_intervall"'
        ),
        "espnx.open_engine('uring', queue_dept=3)": 'Unexpected keyword argument "queue_dept"',
        "espnx.build('s', [], nlists=3)": 'Unexpected keyword argument "nlists"',
        "espnx.open('s').evaluate({}, {}, nprob=3)": 'Unexpected keyword argument "nprob"',
        "espnx.open('s', encoder=3)": 'Argument "encoder" to "Index" has incompatible type "int"',
    }
    source = tmp_path / "use.py"
    source.write_text(
        "from typing import Any\n\nimport espnx\n\nconfig: Any = None\n"
        + "".join(f"{line}\n" for line in wrong)
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--cache-dir",
        str(ROOT / ".cache" / "mypy"),
        "--no-error-summary",
        str(source),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    errors = [line for line in found.splitlines() if " error: " in line]
    assert len(errors) == len(wrong), found
    assert all(error in line for line, error in zip(errors, wrong.values(), strict=True)), found


def test_clang_format() -> None:
    sources = [str(path) for path in FILES if path.suffix in CPP]
    binary = shutil.which("clang-format", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("clang-format is not installed beside this Python (pip install espnx[dev])")
    run_linter("clang_format", [binary, "--dry-run", "--Werror", *sources])


def test_own_cpp_compiles_without_a_warning(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Warnings in our own files are errors here. What compiled once, here or for the extension, is
    not compiled again until it, a header that it includes or the compiler is another."""
    compiler = os.environ.get("CXX", "g++")
    sources = [
        path for path in FILES if path.suffix == ".cpp" and path.is_relative_to(ROOT / "csrc")
    ]
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    assert sources

    flags = [
        "-std=c++17",
        "-fsyntax-only",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(ROOT / "csrc"),
    ]
    if importlib.util.find_spec("pybind11"):
        flags += [
            "-isystem",
            importlib.import_module("pybind11").get_include(),
            "-isystem",
            sysconfig.get_path("include"),
        ]
    else:
        sources = [path for path in sources if not path.is_relative_to(ROOT / PYTHON_IN_CPP)]
    cache = pytestconfig.cache.mkdir("clean-cpp")
    stamps = {path: cache / text_hash(path, compiler) for path in sources}
    known = {note.read_text() for note in ROOT.glob("build/temp.*/csrc/**/*.clean")}
    new = [path for path in sources if not stamps[path].exists() and stamps[path].name not in known]
    command = [compiler, *(flag for flag in flags if flag != "-fsyntax-only")]
    # read once: of most files, they take longer than what is ours
    pybind = "#include <pybind11/pybind11.h>\n#include <pybind11/stl.h>\n"
    first = {
        is_binding: precompiled_header(command, standard_headers() + pybind * is_binding, tmp_path)
        for is_binding in {path.is_relative_to(ROOT / PYTHON_IN_CPP) for path in new}
    }

    def check(path: Path) -> str:
        header = first[path.is_relative_to(ROOT / PYTHON_IN_CPP)]
        done = subprocess.run(
            [compiler, *flags, "-include", str(header), str(path)], capture_output=True, text=True
        )
        if done.returncode == 0 and not done.stderr:
            stamps[path].touch()
        return done.stderr

    with ThreadPoolExecutor(2) as pool:
        found = [message for message in pool.map(check, new) if message]
    assert not found, "\n".join(found)


def test_headers_are_those_that_the_compiler_reads() -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    # relative: a rule writes spaces of a path in its own way
    for source in ("tests/cpp/engine_stress.cpp", "csrc/graph/search.cpp"):
        rule = subprocess.run(
            [compiler, "-std=c++17", "-MM", "-I", "csrc", source],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        read = {
            (ROOT / word).resolve()
            for word in rule.stdout.split(":", 1)[1].replace("\\\n", " ").split()
        }
        assert set(own_files(ROOT / source)) == read


def run_linter(module: str, command: list[str]) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (pip install espnx[dev])")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, "\n" + "\n".join((done.stdout + done.stderr).splitlines()[:60])


@pytest.mark.parametrize(
    "bad",
    [
        "import os",
        '"""Doc."""\nimport pickle',
        '"""Doc."""\nfrom pickle import loads',
        '"""Doc."""\nimport torch\ntorch.load("x")',
        '"""Doc."""\nprint("x")',
        '"""Doc."""\nassert 1',
        '"""Doc."""\ntry:\n    f()\nexcept:\n    raise',
        '"""Doc."""\ntry:\n    f()\nexcept Exception:\n    pass',
        (
            '"""Doc."""\ndef f():\n    try:\n        f()\n    except (ValueError, Exception):\n'
            "        return None"
        ),
        '"""Doc."""\ndef f():\n' + "    x = 1\n" * (FUNCTION_LINES_MAX + 1),
    ],
)
def test_python_rules_report(bad: str) -> None:
    assert len(list(python_complaints(bad, package=True, may_print=False))) == 1


def test_python_rules_are_silent() -> None:
    good = (
        '"""Doc."""\ntry:\n    f()\nexcept Exception as error:\n    report(error)\ntry:\n    f()\n'
        "except OSError:\n    pass\n"
    )
    assert not list(python_complaints(good, package=True, may_print=False))


@pytest.mark.parametrize(
    "bad",
    [
        "Doc.\n\n    rows      where each begins ids       their blocks\n    fences    of each",
        "Doc.\n\n    python scripts/a.py first python\n    scripts/b.py    second",
        "Doc.\n\n    python scripts/a.py first python scripts/b.py second",
    ],
)
def test_docstring_rules_report(bad: str) -> None:
    assert len(list(python_complaints(f'"""{bad}\n"""\n', package=True, may_print=False))) == 1


@pytest.mark.parametrize("is_test", [False, True])
def test_fragments_are_reported(is_test: bool) -> None:
    fragment = '"""Doc."""\ndef n_rows():\n    """Of each sequence."""\n'
    found = python_complaints(fragment, package=True, may_print=False, is_test=is_test)
    assert bool(list(found)) is not is_test


def test_docstring_rules_are_silent() -> None:
    good = (
        "rows      where each begins\n    ids       their blocks, of which there may be many, so\n"
        "              this goes on\n\n    >>> import espnx      # doctest: +SKIP"
    )
    text = f'"""Doc.\n\n    {good}\n"""\n'
    assert not list(python_complaints(text, package=True, may_print=False))


@pytest.mark.parametrize(
    "bad",
    [
        "x" * (LINE_MAX + 1),
        "see /wo" + "rk/place",
        "# TO" + "DO: later",
        "x ",
        "cd /ro" + "ot/x",
        "waits for" + " ever",
        "an option that the path has" + " not, or",
    ],
)
def test_text_rules_report(bad: str) -> None:
    assert len(list(text_complaints(bad))) == 1


@pytest.mark.parametrize(
    "bad",
    ["# -----------", "  ########################", "// ==========", "\n" * (FILE_LINES_MAX + 1)],
)
def test_source_rules_report(bad: str) -> None:
    assert len(list(source_complaints(bad))) == 1


def test_text_rules_are_silent() -> None:
    assert not list(
        text_complaints(
            "x" * LINE_MAX
            + "\n# TO"
            + "DO(docs/limits.md#tail): later\n./wo"
            + "rk/x and https://host/wo"
            + "rk/"
        )
    )


LONG_BODY = "  x += 1;\n" * FUNCTION_LINES_MAX


@pytest.mark.parametrize(
    ("bad", "count"),
    [
        ('// Doc.\n#include "torch/extension.h"\n', 1),
        ("// Doc.\n#include <pybind11/stl.h>\n", 1),
        ("// Doc.\n#include <Python.h>\n", 1),
        ("int x;\n", 1),
        (f"// Doc.\nnamespace espnx {{\nint f(int x) {{\n{LONG_BODY}}}\n}}\n", 1),
        (f"// Doc.\nnamespace {{\nstruct S {{\n  S() : a(0) {{\n{LONG_BODY}}}\n}};\n}}\n", 1),
    ],
)
def test_cpp_rules_report(bad: str, count: int) -> None:
    assert len(list(cpp_complaints(bad, may_use_python=False))) == count


def test_cpp_functions_are_found() -> None:
    text = (
        "// {\nnamespace a {\nstruct S {\n  int f() const { return '}'; }\n};\nenum E { X };\n"
        "int table[] = {1, 2};\n"
        'void g(struct T* t)\n{\n  auto h = [](int y) { return "{"; };\n  if (x) {\n  }\n}\n}\n'
    )
    assert [(name, last - first + 1) for name, first, last in cpp_functions(text)] == [
        ("f", 1),
        ("g", 5),
    ]
