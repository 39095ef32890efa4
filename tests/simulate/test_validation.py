"""What is predicted, with its range; the page shows the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.validation import Prediction, Validation, validate

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "validation.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulate.md"
SIZES = ("4k", "8k", "12k", "16k")
IDS = {f"cosmos.async_over_{other}_{size}" for other in ("sync", "conv") for size in SIZES} | {
    f"cosmos.qps_{name}_async_over_{other}"
    for name in ("sift100m", "spacev100m")
    for other in ("conv", "sync")
}


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate()


def predictions(found: Validation) -> list[Prediction]:
    return [row for row in found.rows if isinstance(row, Prediction)]


def test_every_id_has_a_row(found: Validation) -> None:
    assert [row.id for row in found.rows if row.id not in IDS] == []
    assert len({row.id for row in found.rows}) == len(IDS)
    for row in predictions(found):
        assert row.low <= row.value <= row.high
        assert row.mechanism
        assert row.basis


def test_every_id_is_moved_by_a_mechanism(found: Validation) -> None:
    """One that nothing moves would be an answer that was put in."""
    for row in predictions(found):
        assert max(abs(other / row.value - 1) for other in row.moved.values()) > 0.02, row.id
    moved = {row.id: row.moved["set-up 10 % longer"] / row.value for row in predictions(found)}
    assert moved["cosmos.async_over_sync_16k"] > 1.02
    assert moved["cosmos.async_over_conv_16k"] == pytest.approx(1, abs=0.01)


def test_the_page_shows_it(found: Validation) -> None:
    rows = [
        f"| `{row.id.removeprefix('cosmos.')}` | {row.value:.2f} "
        f"| {row.low:.2f} to {row.high:.2f} |"
        for row in predictions(found)
    ]
    [shown] = re.findall(
        r"<!-- validation -->\n(.*?)<!-- /validation -->", PAGE.read_text(), re.DOTALL
    )
    assert shown.strip().splitlines()[2:] == rows


def test_the_results_file_has_it(found: Validation) -> None:
    """Of `espnx simulate --validation --json benchmarks/results/validation.json`."""
    kept = {each["id"]: each for each in json.loads(RESULTS.read_text())["validation"]}
    for row in predictions(found):
        own = kept[row.id]
        for name in ("value", "low", "high"):
            assert getattr(row, name) == pytest.approx(own[name], rel=1e-9), row.id
        assert row.moved == pytest.approx(own["moved"], rel=1e-9)
        assert (row.mechanism, row.basis) == (own["mechanism"], own["basis"])


def test_a_range_takes_draws() -> None:
    with pytest.raises(InvalidInputError, match="draws; got 1"):
        validate(1)
