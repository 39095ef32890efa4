"""The page about the demo's model takes its numbers and its plot from the record of the
training."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.report import plots, training
from espnx.benchmarks.report.render import render_all
from espnx.errors import FormatError

RECORD: dict[str, Any] = {
    "command": "python scripts/train_demo_model.py --minutes 7",
    "settings": {
        "threads": 2,
        "layers": 8,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 2,
        "vocabulary": 4096,
        "context": 2048,
        "recall_samples": 64,
    },
    "corpus": {
        "documents": 58894,
        "held_out_documents": 1184,
        "characters": 27860848,
        "tokens": 8473942,
        "held_out_tokens": 166955,
    },
    "results": {
        "parameters": 6691072,
        "model_bytes": 13386048,
        "steps": 2000,
        "tokens": 16384000,
        "minutes": 50.02,
        "tokens_per_second": 5459.0,
        "train_loss": 2.5014,
        "validation_loss": 2.7126,
        "validation_perplexity": 15.067,
        "last_quarter_loss": 2.6,
        "last_quarter_loss_half_context": 2.625,
        "recall_exact_match": {"128": 0.984375, "1900": 0.5},
    },
    "curve": [
        {
            "step": 1,
            "tokens": 8192,
            "minutes": 0.02,
            "context": 256,
            "train_loss": 8.3,
            "answer_tokens_right": None,
        },
        {
            "step": 20,
            "tokens": 163840,
            "minutes": 0.5,
            "context": 256,
            "train_loss": 6.1,
            "answer_tokens_right": 0.1,
        },
        {
            "step": 40,
            "tokens": 327680,
            "minutes": 1.0,
            "context": 2048,
            "train_loss": None,
            "answer_tokens_right": 0.5,
        },
    ],
}
PAGE = "# Model\n\n<!-- training -->\nstale\n<!-- /training -->\n\nafter\n"


def tree(root: Path, record: Any = RECORD) -> Path:
    (root / "espnx/models/demo").mkdir(parents=True)
    (root / training.RECORD).write_text(record if isinstance(record, str) else json.dumps(record))
    (root / "docs").mkdir()
    (root / "docs/model.md").write_text(PAGE)
    return root


def test_the_block_is_filled_from_the_record(tmp_path: Path) -> None:
    root = tree(tmp_path)
    page = root / "docs/model.md"
    assert render_all(root, [], write=False) == [page]
    assert page.read_text() == PAGE
    assert render_all(root, [], write=True) == [page]
    text = page.read_text()
    for part in (
        "6,691,072 in bfloat16, 13.4 MB",
        "context 2,048",
        "58,894 docstrings",
        "2.713 (perplexity 15.1)",
        "98.4% at 128, 50.0% at 1900",
    ):
        assert part in text
    assert "stale" not in text
    assert text.endswith("<!-- /training -->\n\nafter\n")
    assert render_all(root, [], write=True) == []


def test_without_a_model_the_block_is_empty(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / training.RECORD).unlink()
    render_all(root, [], write=True)
    assert (root / "docs/model.md").read_text() == PAGE.replace("stale\n", "")


@pytest.mark.parametrize(
    "record", ["{", "[]", {**RECORD, "results": {}}, {**RECORD, "settings": None}]
)
def test_a_broken_record_is_refused(tmp_path: Path, record: Any) -> None:
    with pytest.raises(FormatError, match=r"training\.json"):
        render_all(tree(tmp_path, record), [], write=True)


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed (extra [bench])",
)
def test_the_plot(tmp_path: Path) -> None:
    root = tree(tmp_path)
    [path] = plots.draw_all(root, {})
    assert path == root / "docs/plots/demo-model-loss.svg"
    first = path.read_bytes()
    assert plots.draw_all(root, {}) == [path]
    assert path.read_bytes() == first
    assert training.loss_curve({**RECORD, "curve": []}) is None
