"""What is predicted of RAGX, with its ranges; the page and the results file show the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.figures import middles
from espnx.simulate.predictions import Prediction
from espnx.simulate.retrieval.answer import answer
from espnx.simulate.retrieval.fitted import ON, RETRIEVERS, SHARES, fit
from espnx.simulate.retrieval.service import FITTED, MECHANISMS, load_preset_service
from espnx.simulate.retrieval.validation import (
    Case,
    Validation,
    all_ranges,
    middle_values,
    validate,
)

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "validation.json"
PAGE = ROOT / "docs" / "simulate.md"
SIZES = ("0.5M", "5M", "50M", "500M")
IDS = (
    {f"ragx.x_{size}" for size in SIZES}
    | {f"ragx.over_{name}_50M" for name in ("cpu_dram", "disag_nvme", "disag_dram", "gpu_dram")}
    | {f"ragx.nvme_share_{where}_{size}" for where in ("cpu", "ragx") for size in SIZES}
    | {
        f"ragx.{name}"
        for name in (
            "gtr_5M",
            "bm25_8drives_50M",
            "gtr_8drives_50M",
            "batch8_5M",
            "batch256_5M",
            "llama_1xA100",
            "over_ivf_nvme_min",
            "over_ivf_nvme_max",
            "search_energy_gain_avg",
        )
    }
)


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate()


@pytest.fixture(scope="module")
def rows(found: Validation) -> dict[str, Prediction]:
    return {row.id: row for row in found.rows}


def test_every_id_has_a_row(rows: dict[str, Prediction]) -> None:
    assert set(rows) == IDS
    for row in rows.values():
        assert row.low <= row.value <= row.high
        assert row.mechanism
        assert row.basis


def test_every_id_is_moved_by_a_mechanism(rows: dict[str, Prediction]) -> None:
    """One that nothing moves would be an answer that was put in."""
    for row in rows.values():
        assert max(abs(other / row.value - 1) for other in row.moved.values()) > 0.02, row.id
        assert {f"without {each}" for each in MECHANISMS} < set(row.moved)
        assert {f"{each} 10 % up" for each in FITTED} < set(row.moved)
    x = rows["ragx.x_50M"]
    assert x.moved["without reads one by one"] < 0.8 * x.value
    assert x.moved["without generation"] > 2 * x.value
    assert rows["ragx.nvme_share_cpu_5M"].moved["without reads"] == 0


def test_the_fit_makes_the_shares() -> None:
    values, fitted = middle_values()
    assert set(fitted) == set(FITTED)
    for passages, share in SHARES.items():
        answers = [
            answer(load_preset_service(ON, name).given(values), passages) for name in RETRIEVERS
        ]
        search_s = sum(each.search_share * each.serial_s for each in answers)
        whole_s = sum(each.serial_s for each in answers)
        assert search_s / whole_s == pytest.approx(share.middle, rel=1e-9)
    with pytest.raises(InvalidInputError, match="the time of a vector and of a posting"):
        fit(middles(all_ranges()), {5_000_000: 0.58, 50_000_000: 0.24})


def test_other_values_make_other_machines() -> None:
    """No table holds an answer."""
    values, _ = middle_values()
    slower = {**values, "cpu-nvme.read": 2 * values["cpu-nvme.read"]}
    base, other = Case(values), Case(slower)
    one, two = (each.ask("cpu-nvme", "gtr", "5M").phases_s["reads"] for each in (base, other))
    assert two == pytest.approx(2 * one, rel=0.01)
    assert other.over("cpu-nvme", "gtr", "5M") > 1.4 * base.over("cpu-nvme", "gtr", "5M")


def test_the_page_shows_it(rows: dict[str, Prediction]) -> None:
    expected = [
        f"| `{row.id.removeprefix('ragx.')}` | {row.value:.2f} | {row.low:.2f} to {row.high:.2f} |"
        for row in rows.values()
    ]
    [shown] = re.findall(r"<!-- ragx -->\n(.*?)<!-- /ragx -->", PAGE.read_text(), re.DOTALL)
    assert shown.strip().splitlines()[2:] == expected


def test_the_results_file_has_it(found: Validation) -> None:
    """Of `espnx simulate --validation --json benchmarks/results/validation.json`."""
    document = json.loads(RESULTS.read_text())
    kept = {each["id"]: each for each in document["validation"]}
    for row in found.rows:
        own = kept[row.id]
        for name in ("value", "low", "high"):
            assert getattr(row, name) == pytest.approx(own[name], rel=1e-9), row.id
        assert row.moved == pytest.approx(own["moved"], rel=1e-9)
        assert (row.mechanism, row.basis) == (own["mechanism"], own["basis"])
    for mine, its in zip(found.checks, document["checks"], strict=True):
        assert mine["id"] == its["id"]
        for name in ("measured", "predicted"):
            assert mine[name] == pytest.approx(its[name], rel=1e-9)


def test_a_range_takes_draws() -> None:
    with pytest.raises(InvalidInputError, match="draws; got 1"):
        validate(1)
