"""Imports point one way, the lists of third-party packages hold, and the light entry points import no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from espnx.cli.registry import COMMANDS
from tests.layers import violations

ROOT = Path(__file__).resolve().parent.parent
HELPS = ("--help", "index --help", *(f"{key} --help" for key in COMMANDS))
HEAVY = ("torch", "numpy", "faiss", "triton", "safetensors", "transformers", "rich")


def modules() -> list[tuple[Path, str, bool]]:
    """Every Python file of espnx, kernels and benchmarks with its module name and whether it is a package's ``__init__``."""
    found = []
    for folder, prefix in (("espnx", "espnx"), ("kernels", "espnx.kernels"), ("benchmarks", "espnx.benchmarks")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "espnx" and parts[0] in ("kernels", "benchmarks"):  # links to folders that are walked themselves
                continue
            is_package = parts[-1] == "__init__"
            found.append((path, ".".join([prefix, *(parts[:-1] if is_package else parts)]), is_package))
    return found


def test_imports_point_down() -> None:
    found = [problem for path, module, is_package in modules() for problem in violations(path.read_text(), module, is_package=is_package)]
    assert not found, "\n".join(found)


def test_the_walk_sees_the_package() -> None:
    names = {module for _, module, _ in modules()}
    assert {"espnx.errors", "espnx.cli.main", "espnx.kernels"} <= names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("espnx.errors", "import torch"),
        ("espnx.errors", "from espnx.storage import open_engine"),
        ("espnx.storage.plan", "from espnx import ops"),
        ("espnx.storage.plan", "def f():\n    import espnx.ops.crc32c"),
        ("espnx.storage.plan", "from ..retrieval import store"),
        ("espnx.storage.plan", "import cupy"),
        ("espnx.storage.plan", "from espnx.kernels import crc32c"),
        ("espnx.storage.plan", "from espnx import Index"),
        ("espnx.ops.maxsim.api", "import espnx.storage"),
        ("espnx.ops.maxsim.api", "from ...storage.plan import Plan"),
        ("espnx.device.ssd", "from espnx.kv import cache"),
        ("espnx.retrieval.build", "import espnx.kv.layout"),
        ("espnx.retrieval.build", "from espnx import _C"),
        ("espnx.retrieval.build", "import tokenizers"),
        ("espnx.kv.layout", "from espnx.retrieval import store"),
        ("espnx.kv.layout", "import faiss"),
        ("espnx.integrations.minilm", "from espnx.cli import main"),
        ("espnx.cli.doctor", "import faiss"),
        ("espnx.benchmarks.io", "import espnx.cli.output"),
        ("espnx.retrieval.build", "from espnx.benchmarks import registry"),
        ("espnx.retrieval.build", "import benchmarks.registry"),
        ("espnx.kernels.maxsim", "import torch"),
        ("espnx.kernels.maxsim", "from espnx.errors import EspnxError"),
        ("espnx.kernels.maxsim", "import os"),
        ("espnx.surprise.room", "import os"),
        ("espnx.__main__", "import torch"),
    ],
)
def test_the_checker_reports(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("espnx.storage.plan", "import os\nimport torch\nfrom espnx.errors import ReadError\nfrom . import engine\nfrom espnx import _C"),
        ("espnx.storage.gds", "import cupy\nfrom cuda.bindings import cufile"),
        ("espnx.ops.maxsim.api", "from espnx.kernels import maxsim\nfrom .reference import maxsim_reference"),
        (
            "espnx.retrieval.build",
            "import faiss\nfrom espnx import storage\nfrom espnx.ops.maxsim import maxsim\nfrom ..sizes import parse_size",
        ),
        ("espnx.cli.bench", "import espnx\nfrom espnx import retrieval\nfrom espnx.benchmarks import registry"),
        ("espnx.kernels.maxsim", "from __future__ import annotations\nimport triton\nimport triton.language as tl"),
        ("espnx.__main__", "from espnx.cli.main import main"),
    ],
)
def test_the_checker_is_silent(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_in_a_package_front() -> None:
    assert violations("from ..storage import plan", "espnx.ops", is_package=True)
    assert not violations("from .api import maxsim", "espnx.ops", is_package=True)


@pytest.mark.parametrize(
    "statement",
    [
        "import espnx",
        *(f"from espnx.cli.main import main; main({words.split()})" for words in HELPS),
    ],
)
def test_light_entry_points_import_nothing_heavy(statement: str) -> None:
    """A fresh interpreter, so that no other test has imported torch before."""
    code = (
        "import sys\ntry:\n    exec(sys.argv[1])\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, statement], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"
