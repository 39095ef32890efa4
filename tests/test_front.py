"""What `import espnx` offers: the same names to a type checker, to `dir` and to whoever uses them;
a misspelt one is an error for all."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx.importers.convert import import_index
from espnx.retrieval.build.options import STAGE_KEYWORDS, BuildOptions
from espnx.retrieval.build.training import TRAINED_OPTIONS
from espnx.retrieval.search.options import SearchKeywords, SearchOptions
from espnx.storage import NativeEngine
from espnx.storage.gds.engine import GdsEngine

ROOT = Path(__file__).resolve().parents[1]


def _front() -> tuple[dict[str, str], list[ast.stmt]]:
    """(module of each name that a type checker is told of, the statements that a type checker
    skips)."""
    told: dict[str, str] = {}
    skipped: list[ast.stmt] = []
    for node in ast.parse(Path(espnx.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom):
                    told |= {
                        alias.name: f"espnx.{each.module or alias.name}" for alias in each.names
                    }
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING":
            skipped += node.body
    return told, skipped


def test_every_name_is_what_a_type_checker_is_told() -> None:
    told, skipped = _front()
    assert {*told, "open", "errors", "__version__"} == set(espnx.__all__) == set(dir(espnx))
    for name, module in told.items():
        if name == "device":  # a room with a front of its own
            assert espnx.device is importlib.import_module("espnx.device")
            continue
        assert getattr(espnx, name) is getattr(importlib.import_module(module), name)
    assert espnx.open is espnx.Index
    assert [node.name for node in skipped if isinstance(node, ast.FunctionDef)] == ["__getattr__"]


def test_a_misspelt_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'buidl'"):
        espnx.buidl  # type: ignore[attr-defined]


def test_the_docs_list_every_option_of_a_cache() -> None:
    options = {name for name in inspect.signature(espnx.KVCache).parameters if name != "config"}
    section = (
        (ROOT / "docs/kv-cache.md").read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    )
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == options


def _options(call: object) -> dict[str, object]:
    """The keyword-only parameters of a function, with their defaults."""
    parameters = inspect.signature(call).parameters.values()  # type: ignore[arg-type]
    assert not [each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD], (
        "options that no editor shows"
    )
    return {
        each.name: each.default
        for each in parameters
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_every_option_of_a_build_is_spelled() -> None:
    fields = {field.name for field in dataclasses.fields(BuildOptions)} - {"unused"} | set(
        STAGE_KEYWORDS
    )
    built, trained, imported = (_options(call) for call in (espnx.build, espnx.train, import_index))
    assert fields <= set(built)
    assert {*TRAINED_OPTIONS, "memory"} == fields & set(trained)
    assert fields - {"format", "pca", "cls_weight"} == fields & set(imported), (
        "an index brings its format, its dimensions, and no CLS"
    )
    assert all(
        each[name] is None for each in (built, trained, imported) for name in fields & set(each)
    )


def test_every_option_of_an_engine_is_spelled() -> None:
    taken = {
        name for each in (NativeEngine, GdsEngine) for name in inspect.signature(each).parameters
    } - {"path"}
    assert set(_options(espnx.open_engine)) == taken - {
        "poison",
        "rules",
        "seed",
        "bindings",
        "memory",
    }, "all but those of tests"


def test_every_option_of_a_search_is_spelled() -> None:
    options = _options(espnx.Index.search)
    assert set(SearchKeywords.__annotations__) == set(options)
    assert {**options, "k": 10} == {
        field.name: field.default for field in dataclasses.fields(SearchOptions)
    }
    of_hits = ("explain", "on_candidates")
    assert _options(espnx.Index.evaluate) == {
        name: value for name, value in options.items() if name not in of_hits
    }


@pytest.mark.parametrize("options", [{"arena_bytes": 1 << 20}, {"device": "cuda"}])
def test_an_option_of_another_path_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(espnx.errors.InvalidInputError, match="of path posix"):
        espnx.open_engine("posix", **options)
    with pytest.raises(espnx.errors.InvalidInputError, match="queue_depth of path gds"):
        espnx.open_engine("gds", queue_depth=3)
