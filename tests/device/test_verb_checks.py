"""The checks of records, clusters, graphs, walks and posting lists: they find devices that are
wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espnx import errors
from espnx.device.conformance import cluster_checks, graph_checks, record_checks
from espnx.device.kinds import PartKind
from espnx.device.plain import SsdDevice
from espnx.graph.neighbours import Neighbours
from espnx.integrations import posting_checks, walk_checks


class _Around:
    """Something of which one call is another."""

    def __init__(self, inner: Any, **calls: Any):
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name, getattr(self._inner, name))


def altered(part: str, asks: str, finish: Callable[[Any, Any], Any]) -> type[SsdDevice]:
    """An SSD whose tickets of one verb finish with something else."""

    def opened(self: SsdDevice, *args: Any, **options: Any) -> Any:
        inner = getattr(super(Altered, self), part)(*args, **options)

        def ask(*args: Any, **options: Any) -> Any:
            ticket = getattr(kept[0] if kept else inner, asks)(*args, **options)
            return _Around(ticket, finish=lambda: finish(ticket, ticket.finish()))

        kept: list[Any] = []
        if part != "open_records":
            return _Around(inner, **{asks: ask})

        def keep(layout: Any) -> Any:
            kept.append(inner.keep_records(layout))
            return _Around(kept[0], maxsim=ask)

        return _Around(inner, keep_records=keep)

    class Altered(SsdDevice):
        pass

    setattr(Altered, part, opened)
    return Altered


def altered_walks(change: Callable[[Neighbours], Neighbours]) -> type[SsdDevice]:
    """An SSD whose walks over graphs find something else."""

    class Altered(SsdDevice):
        def open_part(self, kind: PartKind, *what: Any, **options: Any) -> Any:
            inner = super().open_part(kind, *what, **options)

            def ask(*args: Any, **options: Any) -> Any:
                ticket = inner.walk(*args, **options)
                return _Around(ticket, finish=lambda: change(ticket.finish()))

            return _Around(inner, walk=ask)

    return Altered


def one_in_100(values: np.ndarray, change: Callable[[np.ndarray], Any]) -> np.ndarray:
    found = values.copy()
    found[len(found) // 2 :: 100] = change(found[len(found) // 2 :: 100])
    return found


def one_further(reply: np.ndarray) -> np.ndarray:
    reply["distance"] += 1
    return reply


WRONG = {
    "scores of records": (
        record_checks,
        altered(
            "open_records", "maxsim", lambda _, found: one_in_100(found, lambda s: s * 1.001 + 1e-3)
        ),
    ),
    "records in another order": (
        record_checks,
        altered("open_records", "maxsim", lambda _, found: found[::-1]),
    ),
    "distances": (
        cluster_checks,
        altered("open_clusters", "distances", lambda _, found: one_in_100(found, one_further)),
    ),
    "clusters in another order": (
        cluster_checks,
        altered("open_clusters", "distances", lambda _, found: found[::-1]),
    ),
    "nodes": (
        graph_checks,
        altered("open_graph", "search", lambda _, found: (np.roll(found[0], 1), found[1])),
    ),
    "one node less": (
        graph_checks,
        altered("open_graph", "search", lambda _, found: (found[0][:-1], found[1][:-1])),
    ),
    "rows of a graph": (
        walk_checks,
        altered_walks(lambda found: replace(found, ids=np.roll(found.ids, 1, axis=1))),
    ),
    "distances of a graph": (
        walk_checks,
        altered_walks(lambda found: replace(found, distances=found.distances + np.float32(1))),
    ),
    "records of lists": (
        posting_checks,
        altered("open_postings", "scan", lambda _, found: np.roll(found, 1)),
    ),
    "one record less": (
        posting_checks,
        altered("open_postings", "scan", lambda _, found: found[:-1]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(folder: Path, name: str) -> None:
    checks, device = WRONG[name]
    with pytest.raises(errors.NotConformingError):
        checks.CHECKS[0](device(folder))


def test_damage_that_nobody_notices_is_found(folder: Path) -> None:
    """A device that reads past its engine cannot be tried; one that swallows an error is found."""

    class PastTheEngine(SsdDevice):
        def open_graph(self, graph: Any, *, engine: Any = "auto") -> Any:
            return super().open_graph(graph)

    found = graph_checks.FAULT_CHECKS["reads that fail"](PastTheEngine(folder))
    assert found is not None
    assert found.outcome == "not made"
    calm = altered("open_clusters", "distances", lambda *_: np.empty(0))
    with pytest.raises(errors.EspnxError):
        cluster_checks.FAULT_CHECKS["reads that fail"](calm(folder))
