"""Wrong rankings are refused, ratios are paired, the bound is what its parts say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from espnx.benchmarks.corpora.stores import Prepared
from espnx.benchmarks.retrieval.bound import BoundMeter, batch_threshold, bound_s
from espnx.benchmarks.retrieval.fleet import System
from espnx.benchmarks.retrieval.measure import (
    batches_of,
    lossy_problem,
    measure,
    ranking_problem,
    rows_of,
)
from espnx.benchmarks.retrieval.point import (
    MEMORY,
    Point,
    baseline_system,
    cascade_systems,
    espnx_systems,
)
from espnx.errors import InvalidInputError

RIGHT = [(7, 3.0), (2, 2.0), (5, 1.0)]
POINT = Point(Prepared("B", Path("store"), Path("queries"), 100), None, 8, 3, None, 1, None)
ESPNX, FIXED = espnx_systems(["auto", "0.3"])


class ScriptedFleet:
    """Systems whose n-th search takes `seconds[name][n]` and finds `hits[name]`."""

    def __init__(
        self,
        seconds: dict[str, list[float]],
        hits: dict[str, Any] | None = None,
        systems: Sequence[System] = (MEMORY, ESPNX),
    ):
        self.systems, self._seconds, self._hits = list(systems), seconds, hits or {}
        self.searches: dict[str, list[list[int]]] = {system.name: [] for system in systems}

    def worker_of(self, system: System) -> ScriptedWorker:
        return ScriptedWorker(self, system.name)

    def process(self, name: str) -> ScriptedWorker:
        return ScriptedWorker(self, name)

    def facts(self, system: System) -> dict[str, Any]:
        return {
            "effective_path": "uring",
            "rss_growth_bytes": 1,
            "resident_bytes": {"metadata": 2, "coarse": 0},
        }


class ScriptedWorker:
    def __init__(self, fleet: ScriptedFleet, name: str):
        self._fleet, self._name = fleet, name

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "reference":
            return {"hits": RIGHT, "tolerance": 0.01}
        if do == "pieces":
            replay = {"seconds": 0.004, "bytes_moved": 8000}
            return {
                "delta_s": 0.001,
                "rest_s": 0.006,
                "prefetch": replay,
                "misses": {"seconds": 0.0, "bytes_moved": 0},
            }
        fleet, queries = self._fleet, arguments["queries"]
        measured = [query for query in queries if query < 100]
        turn = len(fleet.searches[self._name])
        if measured:
            fleet.searches[self._name].append(queries)
        seconds = fleet._seconds[self._name][turn % len(fleet._seconds[self._name])]
        hits = fleet._hits.get(self._name, RIGHT)[: arguments["options"]["k"]]
        return {
            "seconds": seconds,
            "cpu_s": 0.0,
            "bytes_asked": 10,
            "bytes_moved": 20,
            "hits": [hits] * len(queries),
            "metrics": {"hit_rate": 0.5},
            "steps": [],
        }


def run(fleet: ScriptedFleet, queries: Sequence[int] = (0, 1, 2), **options: Any) -> list[Any]:
    said: list[str] = []
    found = measure(POINT, fleet, [], queries, range(100, 140), 1, said.append, **options)  # type: ignore[arg-type]
    return [*rows_of("table", POINT, found), said]


def test_ratios_are_medians_of_pairs() -> None:
    memory, ours, said = run(ScriptedFleet({"memory": [1.0, 2.0, 9.0], "espnx": [2.0, 2.0, 3.0]}))
    assert said == []
    # of 0.5, 1 and 3; of the medians it would be the same 1, of the means 1.7
    assert ours.ratio == {"memory": pytest.approx(1.0)}
    assert memory.ratio == {}
    assert (ours.n, ours.median_s, ours.correct, ours.cache) == (3, 2.0, True, "cold")
    assert (memory.cache, ours.metrics["hit_rate"], ours.metrics["resident_metadata_bytes"]) == (
        "warm",
        0.5,
        2.0,
    )


@pytest.mark.parametrize(
    "hits",
    [
        [(7, 3.0), (2, 2.0)],
        [(7, 3.0), (2, 2.0), (6, 0.5)],
        [(7, 3.1), (2, 2.0), (5, 1.0)],
        [(2, 2.0), (7, 3.0), (5, 1.0)],
        [(7, 3.0), (7, 3.0), (5, 1.0)],
    ],
)
def test_a_wrong_system_is_not_measured(hits: Any) -> None:
    fleet = ScriptedFleet({"memory": [1.0], "espnx": [0.1]}, {"espnx": hits})
    memory, ours, said = run(fleet)
    assert "WRONG RESULT of espnx" in said[0]
    assert (ours.correct, ours.n, ours.median_s, ours.ratio) == (False, 0, None, {})
    assert (memory.correct, memory.n) == (True, 3)
    assert fleet.searches["espnx"] == []


def test_equal_scores_may_swap_and_stand_in_for_each_other() -> None:
    expected = [(1, 3.0), (2, 2.0), (3, 2.0)]
    assert ranking_problem([(1, 3.0), (3, 2.0), (2, 2.0)], expected, 1e-4) is None
    assert ranking_problem([(1, 3.0), (2, 2.0), (9, 2.00015)], expected, 1e-4) is None
    assert ranking_problem([(1, 3.0), (2, 2.0), (9, 2.5)], expected, 1e-4) is not None


def test_a_lossy_ranking_may_leave_out_but_not_misjudge() -> None:
    assert lossy_problem([(7, 3.0), (5, 1.0)], RIGHT, 0.01) is None
    assert lossy_problem([(7, 3.0), (5, 1.1)], RIGHT, 0.01) is not None
    assert lossy_problem([(5, 1.0), (7, 3.0)], RIGHT, 0.01) == "out of order"
    assert lossy_problem([(8, 3.0)], RIGHT, 0.01) is not None


def test_a_cascade_is_judged_by_its_exact_part() -> None:
    cascade = cascade_systems([2])[0]
    seconds = {"memory": [1.0], cascade.name: [1.0]}
    *_, row, said = run(
        ScriptedFleet(seconds, {cascade.name: [(7, 3.0), (5, 1.0), (2, 0.3)]}, [MEMORY, cascade])
    )
    assert (row.correct, said) == (True, [])
    *_, row, said = run(
        ScriptedFleet(seconds, {cascade.name: [(7, 3.0), (5, 0.3)]}, [MEMORY, cascade])
    )
    assert not row.correct


def test_batches_hold_no_query_twice_and_go_round() -> None:
    rng = random.Random(0)
    assert batches_of(range(5), 2, None, rng) == [[0, 1], [2, 3]]
    many = batches_of(range(5), 2, 7, rng)
    assert len(many) == 7
    assert all(len(set(batch)) == 2 for batch in many)
    assert len({query for batch in many for query in batch}) == 5
    assert [len(batch) for batch in batches_of(range(3), 3, 2, rng)] == [3, 3]
    with pytest.raises(InvalidInputError, match="queries of a batch"):
        batches_of(range(3), 4, None, rng)


@pytest.mark.parametrize(
    ("rest", "maxsim", "prefetch", "misses", "expected"),
    [
        (0.006, 0.002, 0.004, 0.001, 0.010),  # computing hides the prefetch
        (0.001, 0.002, 0.004, 0.001, 0.006),  # the prefetch hides computing
        (0.000, 0.002, 0.004, 0.000, 0.005),  # no prefetch: all reads begin after the first stage
    ],
)
def test_the_bound(
    rest: float, maxsim: float, prefetch: float, misses: float, expected: float
) -> None:
    pieces = {
        "delta_s": 0.001,
        "rest_s": rest,
        "prefetch": {"seconds": prefetch},
        "misses": {"seconds": misses},
    }
    assert bound_s(pieces, maxsim) == pytest.approx(expected)


def test_the_time_over_the_bound() -> None:
    """Of the searched query, with the steps that the search took; its bound is 1 + max(3 + 2, 4) +
    1 ms."""
    pieces = {
        "delta_s": 0.001,
        "rest_s": 0.003,
        "numbers": [7],
        "prefetch": {"seconds": 0.004, "bytes_moved": 50},
        "misses": {"seconds": 0.001},
    }
    espnx, memory = mock.Mock(), mock.Mock()
    espnx.ask.return_value, memory.ask.return_value = pieces, {"seconds": 0.002}
    fleet = mock.Mock(systems=[ESPNX], worker_of=lambda system: espnx, process=lambda name: memory)
    found = BoundMeter(fleet, POINT)([5], {ESPNX.name: {"seconds": 0.0105, "steps": [3]}})[
        ESPNX.name
    ]
    assert (found["bound_s"], found["over_bound"]) == (pytest.approx(0.007), pytest.approx(1.5))
    espnx.ask.assert_called_once_with("pieces", query=5, options=POINT.options, steps=[3])
    memory.ask.assert_called_once_with("maxsim", query=5, numbers=[7])


def test_equation_4() -> None:
    """12 queries fit where budget x bandwidth is 12 times the bytes of a query (ESPN, section
    5.4)."""
    row = batch_threshold(ScriptedFleet({}), ESPNX, POINT, [0, 1], 0.1)  # type: ignore[arg-type]
    assert row.kind == "modelled"
    assert row.metrics["query_batch_threshold"] == pytest.approx(8000 / 0.004 * 0.006 / 8000)
    assert (row.n, row.median_s) == (0, None)


def test_systems_are_named_by_what_they_do() -> None:
    assert [system.name for system in espnx_systems(["0", "0.3", "0.05+0.1", "auto"])] == [
        "no-prefetch",
        "espnx-30%",
        "espnx-5+10%",
        "espnx",
    ]
    # the chooser must not learn from searches whose steps were given
    assert FIXED.process_name != ESPNX.process_name
    assert baseline_system("mmap-8").opening == {"gather_threads": 8}
    assert baseline_system("mmap").name == "mmap-1"
    for wrong in ("mmap-0", "mmap-x", "ssd"):
        with pytest.raises(InvalidInputError):
            baseline_system(wrong)
    for wrong in ("1.5", "x", "0.1+"):
        with pytest.raises(InvalidInputError):
            espnx_systems([wrong])
