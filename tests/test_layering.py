"""Imports point one way, the lists of third-party packages hold, and the light entry points import
no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from espnx.cli.registry import COMMANDS
from tests.layers import circles, module_graph, modules, own_graph, room_graph, violations

ROOT = Path(__file__).resolve().parent.parent
HELPS = ("--help", "index --help", *(f"{key} --help" for key in COMMANDS))
FILES_MAX = 15  # of a room, beside its front page
HEAVY = ("torch", "numpy", "faiss", "triton", "safetensors", "transformers", "rich")


def test_imports_point_down() -> None:
    found = [
        problem
        for path, module, is_package in modules()
        for problem in violations(path.read_text(), module, is_package=is_package)
    ]
    assert not found, "\n".join(found)


def test_no_module_imports_one_that_imports_it() -> None:
    found = circles(own_graph())
    assert not found, "\n".join(map(str, found))


def test_no_room_imports_one_that_imports_it() -> None:
    packages = {module for _, module, is_package in modules() if is_package}
    found = circles(room_graph(own_graph(), packages))
    assert not found, "\n".join(map(str, found))


def test_circles_are_found() -> None:
    """Through relative imports, inside functions, over a third module; between rooms where no
    module closes a circle."""
    files = {
        "espnx.a.b": ("from .c import x", False),
        "espnx.a.c": ("def f():\n    from ..d import e", False),
        "espnx.d": ("", True),
        "espnx.d.e": ("import espnx.a.b\nimport os", False),
        "espnx.a": ("from .b import y", True),
    }
    assert circles(module_graph(files)) == [["espnx.a.b", "espnx.a.c", "espnx.d.e"]]
    files["espnx.d.e"] = ("import espnx.a.f", False)
    files["espnx.a.f"] = ("import espnx", False)
    graph = module_graph(files)
    assert circles(graph) == []
    assert circles(room_graph(graph, {"espnx", "espnx.a", "espnx.d"})) == [
        ["espnx.a.*", "espnx.d.*"]
    ]


def test_the_walk_sees_the_package() -> None:
    names = {module for _, module, _ in modules()}
    assert {"espnx.errors", "espnx.cli.main", "espnx.kernels"} <= names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("espnx.errors", "import torch"),
        ("espnx.errors", "from espnx.storage import open_engine"),
        ("espnx.storage.native", "from espnx import ops"),
        ("espnx.storage.native", "def f():\n    import espnx.ops.crc32c"),
        ("espnx.storage.native", "from ..retrieval import encoder"),
        ("espnx.storage.native", "import cupy"),
        ("espnx.storage.native", "from espnx.kernels import crc32c"),
        ("espnx.storage.native", "from espnx import Index"),
        ("espnx.ops.maxsim.api", "import espnx.storage"),
        ("espnx.ops.maxsim.api", "from ...storage.engine import Plan"),
        ("espnx.device.rows.ssd", "from espnx.kv import cache"),
        ("espnx.retrieval.build.builder", "import espnx.kv.layout"),
        ("espnx.retrieval.build.builder", "from espnx import _C"),
        ("espnx.retrieval.build.builder", "import tokenizers"),
        ("espnx.kv.rows", "from espnx.retrieval import store"),
        ("espnx.kv.rows", "import faiss"),
        ("espnx.kv.cache", "from ..device.ssd_rows import SsdRowDevice"),
        ("espnx.kv.kept.state", "from ...device.gpu.rows import GpuRowDevice"),
        ("espnx.encoders.minilm", "from espnx.cli import main"),
        ("espnx.cli.commands.machine.doctor", "import faiss"),
        ("espnx.benchmarks.io", "import espnx.cli.output"),
        ("espnx.retrieval.build.builder", "from espnx.benchmarks.harness import registry"),
        ("espnx.retrieval.build.builder", "import benchmarks.harness.registry"),
        ("espnx.kernels.maxsim", "import torch"),
        ("espnx.retrieval.build.builder", "import faiss"),
        ("espnx.retrieval.first_stage.ivf.stage", "import faiss"),
        ("espnx.retrieval.build.builder", "from ...ops.quantise import load_faiss"),
        ("espnx.retrieval.search.index", "from ..build.documents import as_document"),
        ("espnx.retrieval.build.builder", "def f():\n    from espnx.retrieval import search"),
        ("espnx.kernels.maxsim", "from espnx.errors import EspnxError"),
        ("espnx.kernels.maxsim", "import os"),
        ("espnx.retrieval.store.tier", "from ...storage.native import load_native"),
        ("espnx.surprise.room", "import os"),
        ("espnx.__main__", "import torch"),
    ],
)
def test_the_checker_reports(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "espnx.storage.native",
            (
                "import os\nimport torch\nfrom espnx.errors import ReadError\n"
                "from . import engine\n"
                "from espnx import _C"
            ),
        ),
        ("espnx.ops.quantise", "import faiss"),
        ("espnx.device.records.ssd", "from ..storage.native import NativeEngine, load_native"),
        ("espnx.retrieval.first_stage.ivf.arrays", "from ...ops.quantise import load_faiss"),
        ("espnx.storage.gds.engine", "import cupy\nfrom cuda.bindings import cufile"),
        (
            "espnx.ops.maxsim.api",
            "from espnx.kernels import maxsim\nfrom .reference import maxsim_reference",
        ),
        (
            "espnx.retrieval.build.builder",
            (
                "import safetensors\nfrom espnx import storage\n"
                "from espnx.ops.maxsim import maxsim\n"
                "from ..sizes import parse_size"
            ),
        ),
        (
            "espnx.retrieval.build.builder",
            "from .documents import Document\nfrom ..store import store",
        ),
        (
            "espnx.kv.cache",
            "from ..device.interface import RowDevice\nfrom ..device.registry import devices_in",
        ),
        (
            "espnx.cli.commands.bench",
            (
                "import espnx\nfrom espnx import retrieval\n"
                "from espnx.benchmarks.harness import registry"
            ),
        ),
        (
            "espnx.kernels.maxsim",
            "from __future__ import annotations\nimport triton\nimport triton.language as tl",
        ),
        ("espnx.__main__", "from espnx.cli.main import main"),
    ],
)
def test_the_checker_is_silent(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_in_a_package_front() -> None:
    assert violations("from ..storage import engine", "espnx.ops", is_package=True)
    assert not violations("from .api import maxsim", "espnx.ops", is_package=True)


LIGHT = [
    "import espnx",
    *(f"from espnx.cli.main import main; main({words.split()})" for words in HELPS),
]
#: Each in a child of an interpreter that has imported nothing, and a line about it.
EACH_ALONE = f"""
import contextlib, io, json, os, sys, traceback

for statement in json.load(sys.stdin):
    if os.fork() == 0:
        found = [statement, ""]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(statement)
        except SystemExit as stop:
            found[1] = f"exit code {{stop.code}}" if stop.code else ""
        except BaseException:
            found[1] = traceback.format_exc()
        heavy = [name for name in {HEAVY!r} if name in sys.modules]
        print(json.dumps([*found, heavy]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[str, list[str]]]:
    """What went wrong in each of LIGHT, and what it has imported of HEAVY."""
    done = subprocess.run(
        [sys.executable, "-c", EACH_ALONE],
        cwd=ROOT,
        input=json.dumps(LIGHT),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return {
        statement: (error, heavy)
        for statement, error, heavy in map(json.loads, done.stdout.splitlines())
    }


@pytest.mark.parametrize("statement", LIGHT)
def test_light_entry_points_import_nothing_heavy(
    statement: str, alone: dict[str, tuple[str, list[str]]]
) -> None:
    assert alone[statement] == ("", [])


@pytest.mark.parametrize("top", ["benchmarks", "csrc", "espnx", "kernels"])
def test_rooms_are_small(top: str) -> None:
    """A folder whose files no longer fit on a screen is several."""
    files = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / top).rglob("*.*")
        if path.suffix in (".py", ".cpp", ".hpp") and path.name != "__init__.py"
    )
    assert files
    assert not {room: count for room, count in files.items() if count > FILES_MAX}
