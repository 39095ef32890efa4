"""Systems side by side, query by query: verified first, then in shuffled order, compared by the
median of paired ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espnx.errors import InvalidInputError

from ..harness.doubts import without_doubtful
from ..harness.registry import Say
from ..harness.result import Row
from .fleet import Fleet, System
from .point import Point
from .rows import simple_row

WARM_UPS = 4
#: The chooser tries each of its strategies a few times before it settles.
AUTO_WARM_UPS = 30
VERIFIED = 5
VERIFIED_K = 100
#: A throttle grants in slices of 0.1 s: a search that follows another at once has what is left.
SETTLE_S = 0.2

Answer = dict[str, Any]
After = Callable[[Sequence[int], dict[str, Answer]], dict[str, dict[str, float]]]
Key = tuple[int, int]  # pass, query or batch


@dataclass
class Measured:
    """Answers of one system, by (pass, number of the batch)."""

    system: System
    facts: dict[str, Any]
    answers: dict[Key, Answer] = field(default_factory=dict)
    cache: str = "cold"
    problem: str | None = None
    extra: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def split_queries(count: int) -> tuple[list[int], list[int]]:
    """Numbers of the measured queries, and of those that warm up and verify."""
    return list(range(count)), list(range(count, count + 40))


def batches_of(
    queries: Sequence[int], size: int, turns: int | None, rng: random.Random
) -> list[list[int]]:
    """The whole batches that there are; or `turns` of them, going round, in another order each
    time. No batch has a query twice.

    Raises InvalidInputError where a batch is larger.
    """
    if size > len(queries):
        raise InvalidInputError(
            "queries of a batch",
            got=size,
            expected=f"at most {len(queries)}, the number of measured queries",
        )
    if turns is None:
        turns = len(queries) // size
    batches: list[list[int]] = []
    order = list(queries)
    while len(batches) < turns:
        batches += [order[first : first + size] for first in range(0, len(order) - size + 1, size)]
        order = rng.sample(order, len(order))
    return batches[:turns]


def ask(
    fleet: Fleet, system: System, point: Point, queries: Sequence[int], **changes: Any
) -> Answer:
    return fleet.worker_of(system).ask(
        "search", queries=list(queries), options={**point.options, **system.options, **changes}
    )


def warm_up(fleet: Fleet, systems: Iterable[System], point: Point, queries: Sequence[int]) -> None:
    """Searches that do not count, with queries that are not measured."""
    for system in systems:
        turns = (
            AUTO_WARM_UPS
            if system.options.get("prefetch_step") == "auto" and point.batch == 1
            else WARM_UPS
        )
        for turn in range(turns if point.batch == 1 else 1):
            ask(
                fleet,
                system,
                point,
                [queries[(turn + i) % len(queries)] for i in range(point.batch)],
            )


def verify(
    fleet: Fleet, systems: Iterable[System], point: Point, queries: Sequence[int], reference: Fleet
) -> dict[str, str]:
    """What is wrong, by system. The reference is plain PyTorch on all records in memory."""
    wrong: dict[str, str] = {}
    k = min(VERIFIED_K, point.candidates)
    expected = [
        reference.process("memory").ask(
            "reference", query=query, options={**point.options, "k": point.candidates}
        )
        for query in queries
    ]
    for system in systems:
        answers = [ask(fleet, system, point, [query], k=k)["hits"][0] for query in queries]
        wanted = list(expected)
        if point.batch > 1:
            answers += ask(fleet, system, point, queries, k=k)["hits"]
            wanted += expected
        for answer, one in zip(answers, wanted, strict=True):
            if system.is_lossy:
                exact = answer[: system.options.get("cascade", k)]
                problem = lossy_problem(exact, one["hits"], one["tolerance"])
            else:
                problem = ranking_problem(answer, one["hits"][:k], one["tolerance"])
            if problem:
                wrong[system.name] = problem
    return wrong


def lossy_problem(
    found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], tolerance: float
) -> str | None:
    """What is wrong with documents scored exactly, of which some may be missing: a score, or their
    order."""
    scores = {int(number): score for number, score in expected}
    for number, score in found:
        if int(number) not in scores or abs(score - scores[int(number)]) > tolerance:
            return f"record {number:g} scores {score}, not {scores.get(int(number))}"
    values = [score for _, score in found]
    return (
        None
        if values == sorted(values, reverse=True)
        and len(values) == len({number for number, _ in found})
        else "out of order"
    )


def ranking_problem(
    found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], tolerance: float
) -> str | None:
    """What is wrong with a ranking: other documents, other scores, or another order than the
    tolerance allows."""
    if len(found) != len(expected):
        return f"{len(found)} hits where {len(expected)} belong"
    if len({number for number, _ in found}) != len(found):
        return "a document occurs twice"
    scores = {int(number): score for number, score in expected}
    last = expected[-1][1] if expected else 0.0
    for rank, ((number, score), (_, wanted)) in enumerate(zip(found, expected, strict=True)):
        true = scores.get(int(number))
        # one that is level with the last may stand in for it
        if true is None and abs(score - last) > 2 * tolerance:
            return f"record {number:g} at rank {rank + 1} does not belong there"
        if true is not None and abs(score - true) > tolerance:
            return f"record {number:g} scores {score}, not {true}"
        if abs(score - wanted) > 2 * tolerance:
            return f"rank {rank + 1} has score {score}, not {wanted}"
    return None


def measure(
    point: Point,
    fleet: Fleet,
    cached: Sequence[System],
    queries: Sequence[int],
    warm: Sequence[int],
    seed: int,
    say: Say,
    after: After | None = None,
    turns: int | None = None,
) -> dict[str, Measured]:
    """Every batch of the queries by every system: those of the fleet, and in passes of their own
    those that use the page cache.

    Args:
        after: called with (batch, answers by system) after each turn of the first pass; what it
            returns, {system: {name: number}}, joins the system's `extra`.
        turns: number of batches; None: as many as the queries fill.
    """
    # Records that espnx reads by O_DIRECT are never in the page cache.
    found = {
        s.name: Measured(s, fleet.facts(s), cache="warm" if s.kind == "memory" else "cold")
        for s in fleet.systems
    }
    _note_problems(found, verify(fleet, fleet.systems, point, warm[:VERIFIED], fleet), say)
    warm_up(fleet, [s for s in fleet.systems if found[s.name].problem is None], point, warm)
    rng = random.Random(seed)
    batches = batches_of(queries, point.batch, turns, rng)
    for number, extra in enumerate(cached or [None]):
        if extra is None:
            _one_pass(
                number,
                point,
                [(fleet, s) for s in fleet.systems],
                found,
                batches,
                rng,
                after if number == 0 else None,
            )
            continue
        with Fleet(point.prepared, [extra], point.limit_bytes, point.threads) as alone:
            found[extra.name] = Measured(extra, alone.facts(extra), cache=alone.cache)
            if alone.cache == "warm" and point.limit_bytes is not None:
                say(
                    f"{extra.name} begins with parts of the store in memory: another process holds "
                    "them, or they could not be dropped"
                )
            _note_problems(found, verify(alone, [extra], point, warm[:VERIFIED], fleet), say)
            everyone = [(fleet, s) for s in fleet.systems] + [(alone, extra)]
            _one_pass(number, point, everyone, found, batches, rng, after if number == 0 else None)
    return found


def _note_problems(found: dict[str, Measured], wrong: dict[str, str], say: Say) -> None:
    for name, problem in wrong.items():
        found[name].problem = problem
        say(f"WRONG RESULT of {name}: {problem}. It is not measured.")


def _one_pass(
    number: int,
    point: Point,
    everyone: list[tuple[Fleet, System]],
    found: dict[str, Measured],
    batches: list[list[int]],
    rng: random.Random,
    after: After | None,
) -> None:
    active = [(fleet, system) for fleet, system in everyone if found[system.name].problem is None]
    for turn, batch in enumerate(batches):
        rng.shuffle(active)
        answers = {}
        for fleet, system in active:
            time.sleep(SETTLE_S if point.throttle else 0)
            answers[system.name] = found[system.name].answers[number, turn] = ask(
                fleet, system, point, batch
            )
        if after is not None:
            for name, numbers in after(batch, answers).items():
                for key, value in numbers.items():
                    found[name].extra[key].append(value)


def paired(ours: Measured, baseline: Measured) -> list[float]:
    """The baseline's time over ours, for every turn in which both ran."""
    turns = [key for key in ours.answers if key in baseline.answers]
    return [baseline.answers[key]["seconds"] / ours.answers[key]["seconds"] for key in turns]


def rows_of(show: str, point: Point, found: dict[str, Measured]) -> list[Row]:
    """One row a system; those of espnx have ratios to all others."""
    return [_row(show, point, measured, found) for measured in found.values()]


def _row(show: str, point: Point, measured: Measured, everyone: dict[str, Measured]) -> Row:
    system = measured.system
    answers = list(measured.answers.values()) if measured.problem is None else []
    seconds = [answer["seconds"] for answer in answers]
    metrics: dict[str, float] = {}
    if answers:
        metrics = {
            name: statistics.median(answer["metrics"][name] for answer in answers)
            for name in answers[0]["metrics"]
        }
        metrics |= {name: statistics.median(values) for name, values in measured.extra.items()}
        metrics["seconds_per_query"] = statistics.median(seconds) / point.batch
        metrics["mean_s"] = statistics.fmean(seconds)
        metrics["p50_s"], metrics["p95_s"] = (
            float(np.percentile(seconds, share)) for share in (50, 95)
        )
        metrics["cpu_s"] = statistics.median(answer["cpu_s"] for answer in answers)
    metrics["rss_growth_bytes"] = float(measured.facts["rss_growth_bytes"])
    metrics |= {
        f"resident_{name}_bytes": float(size)
        for name, size in measured.facts["resident_bytes"].items()
        if size
    }
    others = {
        name: other
        for name, other in everyone.items()
        if other is not measured and other.problem is None
    }
    return simple_row(
        point.params(show),
        system.name,
        seconds,
        metrics,
        path=measured.facts["effective_path"],
        requested_path="auto" if system.kind == "espnx" else system.kind,
        cache=measured.cache,
        bytes_asked=statistics.median(answer["bytes_asked"] for answer in answers)
        if answers
        else 0,
        bytes_moved=statistics.median(answer["bytes_moved"] for answer in answers)
        if answers
        else 0,
        correct=measured.problem is None,
        ratio={name: paired(measured, other) for name, other in others.items()}
        if system.kind == "espnx" and answers
        else None,
    )


def report(rows: list[Row], say: Say) -> list[Row]:
    """Says what was measured; returns the rows."""
    for row in without_doubtful(rows):
        if row.median_s is not None:
            ratios = ", ".join(f"{value:.2f}x {name}" for name, value in row.ratio.items())
            say(
                f"    {row.system}: {1e3 * row.median_s:.2f} ms"
                + (f" ({ratios})" if ratios else "")
            )
    return rows
