"""What is predicted of HILOS, with its ranges; the page shows the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.decoding.machine import MECHANISMS
from espnx.simulate.decoding.validation import Case, all_ranges, validate
from espnx.simulate.figures import middles
from espnx.simulate.predictions import Prediction

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "validation.json"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "simulate.md"
IDS = {
    f"hilos.{name}"
    for name in (
        "ans_only_over_flex_ssd_max",
        "wb_over_ans_max",
        "xcache_over_ans_max",
        "all_over_flex_ssd_max",
        "all_over_flex_ssd_where_dram_fails_min",
        "all_over_flex_ssd_where_dram_fails_max",
        "4dev_over_flex_dram_min",
        "4dev_over_flex_dram_max",
        "16dev_over_flex_dram_min",
        "16dev_over_flex_dram_max",
        "16ssd_no_fpga_over_flex_ssd_min",
        "16ssd_no_fpga_over_flex_ssd_max",
        "gqa_moe_over_baselines_min",
        "gqa_moe_over_baselines_max",
        "long_output_speedup_max",
        "endurance_gain_min",
        "endurance_gain_max",
        "energy_saving_max",
    )
}


@pytest.fixture(scope="module")
def rows() -> dict[str, Prediction]:
    """With every range and mechanism, which takes half a minute: tests of them are a sweep."""
    return {row.id: row for row in validate()}


@pytest.fixture(scope="module")
def kept() -> dict[str, dict[str, Any]]:
    """Of `espnx simulate --validation --json benchmarks/results/validation.json`."""
    return {each["id"]: each for each in json.loads(RESULTS.read_text())["validation"]}


def test_the_results_file_has_what_is_predicted(kept: dict[str, dict[str, Any]]) -> None:
    """Without ranges and mechanisms."""
    predicted = Case(middles(all_ranges())).values_of_ids()
    assert set(predicted) == IDS
    for name, value in predicted.items():
        assert kept[name]["value"] == pytest.approx(value, rel=1e-9), name


@pytest.mark.sweep
def test_every_id_has_a_row(rows: dict[str, Prediction]) -> None:
    assert set(rows) == IDS
    for row in rows.values():
        assert row.low <= row.value * (1 + 1e-9)
        assert row.value <= row.high * (1 + 1e-9)
        assert row.mechanism
        assert row.basis


@pytest.mark.sweep
def test_every_id_is_moved_by_a_mechanism(rows: dict[str, Prediction]) -> None:
    """One that nothing moves would be an answer that was put in. Two are 1 whatever is switched
    off: where X is larger than K and V none of it is kept, and just as many bytes are written; and
    where the CPU has most to do, more drives behind the same program do nothing."""
    ones = {"hilos.endurance_gain_min", "hilos.16ssd_no_fpga_over_flex_ssd_min"}
    for name in IDS - ones:
        row = rows[name]
        assert max(abs(other / row.value - 1) for other in row.moved.values()) > 0.02, name
    for name in ones:
        assert rows[name].value == pytest.approx(1, abs=0.01)
    # what is not there moves nothing
    assert rows["hilos.wb_over_ans_max"].moved["without copy threads"] == pytest.approx(
        rows["hilos.wb_over_ans_max"].value
    )
    assert rows["hilos.wb_over_ans_max"].moved["without lone writes"] == pytest.approx(1, abs=0.01)
    copies = rows["hilos.16ssd_no_fpga_over_flex_ssd_max"]
    assert copies.moved["without copy threads"] > 1.05 * copies.value
    assert rows["hilos.endurance_gain_max"].moved["without x-cache"] == 1


@pytest.mark.sweep
def test_what_can_be_switched_off(rows: dict[str, Prediction]) -> None:
    for row in rows.values():
        assert {f"without {each}" for each in MECHANISMS} < set(row.moved)
        assert "hilos.flash_share 10 % up" in row.moved
        assert "flexgen.copy_bandwidth 10 % up" in row.moved


def test_other_values_make_other_machines() -> None:
    """No table holds an answer."""
    values = middles(all_ranges())
    value = Case(values, models=("opt-30b",)).values_of_ids()
    slower = {**values, "hilos.flash_share": values["hilos.flash_share"] / 2}
    other = Case(slower, models=("opt-30b",)).values_of_ids()
    name = "hilos.ans_only_over_flex_ssd_max"
    assert other[name] == pytest.approx(value[name] / 2, rel=0.1)


def test_the_page_shows_the_results_file(kept: dict[str, dict[str, Any]]) -> None:
    expected = [
        f"| `{name.removeprefix('hilos.')}` | {row['value']:.2f} "
        f"| {row['low']:.2f} to {row['high']:.2f} | {row['moved']['opt models alone']:.2f} |"
        for name, row in kept.items()
        if name in IDS
    ]
    [shown] = re.findall(r"<!-- hilos -->\n(.*?)<!-- /hilos -->", PAGE.read_text(), re.DOTALL)
    assert shown.strip().splitlines()[2:] == expected


@pytest.mark.sweep
def test_the_results_file_has_it(
    rows: dict[str, Prediction], kept: dict[str, dict[str, Any]]
) -> None:
    for row in rows.values():
        own = kept[row.id]
        for name in ("value", "low", "high"):
            assert getattr(row, name) == pytest.approx(own[name], rel=1e-9), row.id
        assert row.moved == pytest.approx(own["moved"], rel=1e-9)
        assert (row.mechanism, row.basis) == (own["mechanism"], own["basis"])


def test_a_range_takes_draws() -> None:
    with pytest.raises(InvalidInputError, match="draws; got 1"):
        validate(1)
