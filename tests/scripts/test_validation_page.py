"""The page of predictions is what its results file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.validation_page import PAGE, PLOT, RESULTS, draw, page


def test_the_page_is_rendered_from_the_file() -> None:
    document = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == page(document), "run python scripts/validation_page.py"


def test_what_it_shows() -> None:
    """Each number and each reason."""
    document = json.loads(RESULTS.read_text())
    text = page(document)
    for row in document["validation"]:
        assert f"`{row['id']}`" in text
        if "value" in row:
            assert f"| {row['value']:.2f} | {row['low']:.2f} | {row['high']:.2f} |" in text
        else:
            assert row["not_predicted"] in text
    assert "**missed**" in text


def test_the_plot(tmp_path: Path) -> None:
    """What is drawn is what lies beside the page."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra [bench])")
    draw(json.loads(RESULTS.read_text()), tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    for name in ("smartssd-16", "smartssd-4", "flexgen-4ssd"):
        assert f">{name}</text>" in drawn
        assert f">{name}</text>" in PLOT.read_text()
    assert f"../plots/{PLOT.name}" in PAGE.read_text()
