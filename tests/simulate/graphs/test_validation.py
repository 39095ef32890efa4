"""What is shown beside AiSAQ's publication: the results file and the page have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.figures import middles
from espnx.simulate.graphs.answer import answer
from espnx.simulate.graphs.validation import LIST_SIZES, _row, show, specs
from espnx.simulate.predictions import DRAWS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "validation.json"


def test_the_results_file_has_it() -> None:
    """Of `espnx simulate --validation --json benchmarks/results/validation.json`: the shortest list
    with its range, the others' values."""
    kept = json.loads(RESULTS.read_text())["aisaq"]
    assert kept["scored"] is False
    assert (kept["published"]["p95_s"], kept["published"]["queries_per_s"]) == (0.057, 200)
    assert [row["list_size"] for row in kept["rows"]] == list(LIST_SIZES)
    found = show(DRAWS, LIST_SIZES[:1], ())
    for name in ("p95_s", "queries_per_s"):
        assert getattr(found.rows[0], name) == pytest.approx(kept["rows"][0][name], rel=1e-9)
    assert set(found.figures) == set(kept["figures"])
    for name, each in found.figures.items():
        own = kept["figures"][name]
        assert (each.low, each.high, each.middle) == (own["low"], own["high"], own["value"]), name
    for row in kept["rows"][1:4:2]:
        again = answer(specs().given(middles(specs().ranges)), row["list_size"])
        assert again.p95_s == pytest.approx(row["p95_s"]["value"], rel=1e-9)
        assert again.queries_per_s == pytest.approx(row["queries_per_s"]["value"], rel=1e-9)


def test_a_range_is_of_draws() -> None:
    """All alike where nothing is drawn."""
    values = middles(specs().ranges)
    row = _row(10, values, [values] * 3)
    assert row.p95_s["low"] == row.p95_s["high"] == pytest.approx(row.p95_s["value"], rel=0.05)
    with pytest.raises(InvalidInputError, match="draws; got 1"):
        show(1)
