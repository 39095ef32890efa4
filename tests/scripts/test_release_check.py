"""What `make release-check` takes from the tree before it installs anything: the version, and the
lines of README."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from espnx import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    before = list(sys.path)
    try:
        return runpy.run_path(str(ROOT / "scripts" / "release_check.py"))
    finally:
        sys.path[:] = before


def test_this_tree_says_one_version(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    script["check_release"]()
    assert capsys.readouterr().out.startswith(f"{__version__}: ")


def test_the_lines_that_a_user_types(script: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text()
    lines = script["lines_of_install"](readme, editable=False)
    assert lines == ['pip install ".[all]"', "espnx weights minilm", "espnx doctor --path ."]
    assert script["lines_of_install"](readme, editable=True) == [
        'pip install -e ".[all]"',
        *lines[1:],
    ]
    kinds = [(kind, bool(shown)) for kind, _, shown in script["BLOCK"].findall(readme)]
    assert kinds == [("python", True), ("python", True), ("bash", False), ("bash", False)]
