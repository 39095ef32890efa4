"""Pairs, ratios, groups of variants, and what happens to wrong results."""

from __future__ import annotations

import pytest

from espnx.benchmarks.harness.result import Row
from espnx.benchmarks.harness.runner import Sample, compare, interquartile_range, paired_ratios
from espnx.errors import InvalidInputError
from tests.benchmarks.common import ScriptedSystem


def run(
    ours: list[ScriptedSystem], baselines: list[ScriptedSystem], pairs: int = 3, seed: int = 1
) -> dict[str, Row]:
    rows = compare("io", {"x": 1}, ours, baselines, pairs=pairs, seed=seed, say=lambda text: None)
    return {row.system: row for row in rows}


def test_a_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    """Pairs 3/1, 4/4, 5/10 have ratios 3, 1, 0.5: median 1; the medians 4 and 4 would give 1 too,
    so the middle pair is skewed."""
    rows = run(
        [ScriptedSystem("a", [1.0, 5.0, 10.0])], [ScriptedSystem("b", [3.0, 4.0, 5.0], group="b")]
    )
    assert rows["a"].ratio == {"b": 0.8}
    assert rows["a"].metrics["ratio_iqr_b"] == pytest.approx((3.0 + 0.8) / 2 - (0.8 + 0.5) / 2)
    assert rows["b"].ratio == {}


def test_a_slow_baseline_gives_more_than_one() -> None:
    rows = run([ScriptedSystem("a", [1.0] * 3)], [ScriptedSystem("b", [2.0] * 3, group="b")])
    assert rows["a"].ratio["b"] == 2.0


def test_a_baseline_that_moves_less_is_compared_per_byte() -> None:
    rows = run(
        [ScriptedSystem("a", [1.0] * 3)],
        [ScriptedSystem("b", [1.0] * 3, group="b", bytes_asked=100)],
    )
    assert rows["a"].ratio["b"] == pytest.approx(10)
    assert (rows["a"].bytes_asked, rows["b"].bytes_asked) == (1000, 100)


def test_times_of_a_row() -> None:
    rows = run([ScriptedSystem("a", [float(i) for i in range(1, 102)])], [], pairs=101)
    row = rows["a"]
    assert (row.n, row.median_s, row.p99_s, row.iqr_s) == (101, 51.0, 100.0, 50.0)
    assert row.metrics["requests"] == 50.0
    assert (row.kind, row.cache, row.correct, row.params) == ("measured", "cold", True, {"x": 1})


def test_pairs_of_unequal_number_are_refused() -> None:
    sample = Sample(1.0, 1, 1)
    with pytest.raises(ValueError):
        paired_ratios([sample], [sample, sample])


def test_interquartile_range() -> None:
    assert interquartile_range([1, 2, 3, 4, 5]) == 2.0
    assert interquartile_range([7]) == 0.0


def test_every_system_runs_once_in_every_pair_in_changing_order() -> None:
    log: list[str] = []
    systems = [ScriptedSystem(name, [1.0] * 20, group=name, log=log) for name in "abc"]
    run(systems[:1], systems[1:], pairs=20)
    rounds = [log[i : i + 3] for i in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 3
    again: list[str] = []
    run(
        [ScriptedSystem("a", [1.0] * 20, log=again)],
        [ScriptedSystem(n, [1.0] * 20, group=n, log=again) for n in "bc"],
        pairs=20,
    )
    assert again == log  # the same seed, the same order


def test_a_system_that_fails_verification_is_not_measured() -> None:
    wrong, right = (
        ScriptedSystem("a", [1.0] * 3, problem="byte 7 differs"),
        ScriptedSystem("b", [2.0] * 3, group="b"),
    )
    rows = run([wrong], [right])
    assert not wrong.log
    assert rows["a"] == Row(
        "io",
        {"x": 1},
        "a",
        "measured",
        "uring",
        "uring",
        "warm",
        0,
        None,
        None,
        None,
        0,
        0,
        False,
        {},
        {},
    )
    assert rows["b"].correct
    assert rows["b"].n == 3


def test_a_wrong_baseline_gives_no_ratio() -> None:
    rows = run(
        [ScriptedSystem("a", [1.0] * 3)], [ScriptedSystem("b", [2.0] * 3, group="b", problem="no")]
    )
    assert rows["a"].ratio == {}
    assert rows["a"].correct
    assert not rows["b"].correct


def test_a_wrong_checksum_in_a_run_drops_the_times() -> None:
    wrong = ScriptedSystem("a", [1.0] * 3, wrong_at=1)
    rows = run([wrong], [ScriptedSystem("b", [2.0] * 3, group="b")])
    assert len(wrong.log) == 2
    assert not rows["a"].correct
    assert (rows["a"].n, rows["a"].median_s, rows["a"].ratio) == (0, None, {})
    assert rows["b"].n == 3


def test_the_best_variant_stands_for_its_group() -> None:
    baselines = [
        ScriptedSystem("fio-x", [3.0, 9.0, 9.0], group="fio"),
        ScriptedSystem("fio-y", [4.0, 4.0, 5.0], group="fio"),
    ]
    rows = run(
        [ScriptedSystem("a", [1.0, 2.0, 2.0])],
        [*baselines, ScriptedSystem("m", [8.0] * 3, group="m")],
    )
    assert set(rows) == {"a", "fio", "fio-x", "m"}
    assert rows["fio"].median_s == 4.0
    assert rows["a"].ratio == {"fio": 2.5, "fio-x": 4.5, "m": 4.0}


def test_a_wrong_variant_never_stands_for_its_group() -> None:
    baselines = [
        ScriptedSystem("fio-x", [1.0] * 3, group="fio", problem="no"),
        ScriptedSystem("fio-y", [4.0] * 3, group="fio"),
    ]
    rows = run([ScriptedSystem("a", [2.0] * 3)], baselines)
    assert rows["a"].ratio == {"fio": 2.0}
    assert rows["fio"].correct
    assert not rows["fio-x"].correct


def test_one_warm_run_makes_the_row_warm() -> None:
    assert run([ScriptedSystem("a", [1.0] * 3, cache="warm")], [])["a"].cache == "warm"


def test_no_pairs_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        run([ScriptedSystem("a", [])], [], pairs=0)
