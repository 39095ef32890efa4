"""How fast a search could be: the bound of a pipeline that overlaps everything which may be
overlapped, from its parts run one by one.

A search must scan the first lists (t_delta), then can scan the rest and score while it reads ahead,
then must read what it missed:

    bound = t_delta + max(rest of the first stage + MaxSim, replay of the prefetch's reads) + replay
    of the misses' reads

The parts are measured beside the search they belong to (the same query, the same records, moments
later): a disk whose speed changes from minute to minute changes both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..harness.result import Row
from .fleet import Fleet, System
from .point import Point
from .rows import simple_row


def bound_s(pieces: dict[str, Any], maxsim_s: float) -> float:
    """Seconds, from the answers of the worker's `pieces` and `maxsim`."""
    overlapped = max(pieces["rest_s"] + maxsim_s, pieces["prefetch"]["seconds"])
    return float(pieces["delta_s"] + overlapped + pieces["misses"]["seconds"])


class BoundMeter:
    """Measures the bound of every espnx search of a turn. Called by `retrieval_measure.measure`;
    needs ``memory`` in the fleet."""

    def __init__(self, fleet: Fleet, point: Point):
        self._fleet, self._point = fleet, point

    def __call__(
        self, batch: Sequence[int], answers: dict[str, Any]
    ) -> dict[str, dict[str, float]]:
        found = {}
        for system in self._fleet.systems:
            if system.kind == "espnx" and len(batch) == 1 and system.name in answers:
                found[system.name] = self._of(system, batch[0], answers[system.name])
        return found

    def _of(self, system: System, query: int, answer: dict[str, Any]) -> dict[str, float]:
        # Of the process that did the search: the same files, engine and memory limit.
        pieces = self._fleet.worker_of(system).ask(
            "pieces", query=query, options=self._point.options, steps=answer["steps"]
        )
        maxsim_s = self._fleet.process("memory").ask(
            "maxsim", query=query, numbers=pieces["numbers"]
        )["seconds"]
        bound = bound_s(pieces, maxsim_s)
        return {
            "bound_s": bound,
            "over_bound": answer["seconds"] / bound,
            "bound_delta_s": pieces["delta_s"],
            "bound_rest_s": pieces["rest_s"],
            "bound_maxsim_s": maxsim_s,
            "replay_prefetch_s": pieces["prefetch"]["seconds"],
            "replay_misses_s": pieces["misses"]["seconds"],
            "replay_prefetch_bytes": float(pieces["prefetch"]["bytes_moved"]),
        }


def batch_threshold(
    fleet: Fleet, system: System, point: Point, queries: Sequence[int], step: float
) -> Row:
    """The batch from which on the disk sets the time, predicted (ESPN, eq. 4): bandwidth x prefetch
    budget / bytes of a query.

    All three from `queries`, one by one: the budget is the first stage's time after the step,
    bandwidth and bytes are those of the prefetch's reads, replayed.
    """
    parts = [
        fleet.worker_of(system).ask("pieces", query=query, options=point.options, steps=[step])
        for query in queries
    ]
    budget_s = statistics.median(part["rest_s"] for part in parts)
    size_bytes = statistics.median(part["prefetch"]["bytes_moved"] for part in parts)
    bytes_per_s = statistics.median(
        part["prefetch"]["bytes_moved"] / part["prefetch"]["seconds"] for part in parts
    )
    metrics = {
        "query_batch_threshold": bytes_per_s * budget_s / size_bytes,
        "prefetch_budget_s": budget_s,
        "bytes_per_s": bytes_per_s,
        "bytes_per_query": size_bytes,
        "prefetch_step": step,
    }
    return simple_row(
        point.params("batches"),
        "espn-eq4",
        [],
        metrics,
        kind="modelled",
        path=str(fleet.facts(system)["effective_path"]),
    )
