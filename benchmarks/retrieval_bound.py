"""How fast a search could be: the bound of a pipeline that overlaps everything which may be overlapped, from its parts run one by one.

A search must scan the first lists (t_delta), then can scan the rest and score while it reads ahead, then must read what it missed:

    bound = t_delta + max(rest of the first stage + MaxSim, replay of the prefetch's reads) + replay of the misses' reads

The parts are measured beside the search they belong to (the same query, the same records, moments later): a disk whose speed changes
from minute to minute changes both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .retrieval_fleet import Fleet, System
from .retrieval_point import Point


def bound_s(pieces: dict[str, Any], maxsim_s: float) -> float:
    """Seconds, from the answers of the worker's `pieces` and `maxsim`."""
    overlapped = max(pieces["rest_s"] + maxsim_s, pieces["prefetch"]["seconds"])
    return float(pieces["delta_s"] + overlapped + pieces["misses"]["seconds"])


class BoundMeter:
    """Measures the bound of every espnx search of a turn. Called by `retrieval_measure.measure`; needs ``memory`` in the fleet."""

    def __init__(self, fleet: Fleet, point: Point):
        self._fleet, self._point = fleet, point

    def __call__(self, batch: Sequence[int], answers: dict[str, Any]) -> dict[str, dict[str, float]]:
        found = {}
        for system in self._fleet.systems:
            if system.kind == "espnx" and len(batch) == 1 and system.name in answers:
                found[system.name] = self._of(system, batch[0], answers[system.name])
        return found

    def _of(self, system: System, query: int, answer: dict[str, Any]) -> dict[str, float]:
        # Of the process that did the search: the same files, engine and memory limit.
        pieces = self._fleet.of(system).ask("pieces", query=query, options=self._point.options, steps=answer["steps"])
        maxsim_s = self._fleet.process("memory").ask("maxsim", query=query, numbers=pieces["numbers"])["seconds"]
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
