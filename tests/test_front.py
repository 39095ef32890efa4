"""What `import espnx` offers: the same names to a type checker, to `dir` and to whoever uses them; a misspelt one is an error for all."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import espnx
from espnx.retrieval.build.options import BuildKeywords, BuildOptions
from espnx.storage import EngineOptions, NativeEngine
from espnx.storage.gds.engine import GdsEngine

ROOT = Path(__file__).resolve().parents[1]


def _front() -> tuple[dict[str, str], list[ast.stmt]]:
    """(module of each name that a type checker is told of, the statements that a type checker skips)."""
    told: dict[str, str] = {}
    skipped: list[ast.stmt] = []
    for node in ast.parse(Path(espnx.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom):
                    told |= {alias.name: f"espnx.{each.module}" for alias in each.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING":
            skipped += node.body
    return told, skipped


def test_every_name_is_what_a_type_checker_is_told() -> None:
    told, skipped = _front()
    assert {*told, "open", "errors", "__version__"} == set(espnx.__all__) == set(dir(espnx))
    for name, module in told.items():
        assert getattr(espnx, name) is getattr(importlib.import_module(module), name)
    assert espnx.open is espnx.Index
    assert [node.name for node in skipped if isinstance(node, ast.FunctionDef)] == ["__getattr__"]


def test_a_misspelt_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'buidl'"):
        espnx.buidl  # type: ignore[attr-defined]


def test_a_type_checker_sees_misspelt_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    wrong = {
        "espnx.buidl('s', [])": 'Module has no attribute "buidl"',
        "espnx.KVCache(config, 'kv', spill_intervall=3)": 'Unexpected keyword argument "spill_intervall"',
        "espnx.open_engine('uring', queue_dept=3)": 'Unexpected keyword argument "queue_dept"',
        "espnx.build('s', [], nlists=3)": 'Unexpected keyword argument "nlists"',
    }
    source = tmp_path / "use.py"
    source.write_text("from typing import Any\n\nimport espnx\n\nconfig: Any = None\n" + "".join(f"{line}\n" for line in wrong))
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".cache" / "mypy"), "--no-error-summary", str(source)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    errors = [line for line in found.splitlines() if " error: " in line]
    assert len(errors) == len(wrong), found
    assert all(error in line for line, error in zip(errors, wrong.values(), strict=True)), found


def test_the_docs_list_every_option_of_a_cache() -> None:
    options = {name for name in inspect.signature(espnx.KVCache).parameters if name != "config"}
    section = (ROOT / "docs/kv-cache.md").read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == options


@pytest.mark.parametrize(
    ("keywords", "classes"), [(BuildKeywords, [BuildOptions]), (EngineOptions, [NativeEngine, GdsEngine])], ids=["build", "open_engine"]
)
def test_keyword_arguments_that_are_passed_on_are_all_of_them(keywords: type, classes: list[type]) -> None:
    taken = {name for each in classes for name in inspect.signature(each).parameters} - {"path"}
    assert set(keywords.__annotations__) == taken
