"""Builders of graphs in children that tests kill at any moment: the jobs of tests/forks.py."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import espnx.graph
from espnx.graph import recall
from espnx.graph.bounded import budget, builder
from tests.forks import serve

BUILD = sys.modules["espnx.graph.build"]  # by its name the package knows the function


def in_parts(source: str, path: str) -> None:
    """With room for 3000 of 12,000 vectors in a part, whatever this process holds."""
    budget.member_bytes = lambda layout, options: 1000
    builder.resident_bytes = BUILD.resident_bytes = lambda: 0  # type: ignore[attr-defined]
    espnx.graph.build(
        source, path, max_degree=24, list_size=40, memory=(48 << 20) + 20 * 12_000 + 1000 * 3000
    )


def change(step: int) -> tuple[range, range, int]:
    """(ids that a step adds; of these, those that it deletes; one of the first that it deletes)"""
    first = 1000 + 20 * step
    return range(first, first + 20), range(first, first + 10), step


def vectors_of(ids: range) -> np.ndarray:
    """The vectors that have these ids."""
    return np.stack([np.random.default_rng(each).standard_normal(8) for each in ids])


def changes(path: str, note: str, first: int) -> None:
    """Adds, deletes and merges without an end, and notes after each call how many have returned;
    of a step that an earlier run had begun, what is left of it."""
    with espnx.graph.open_writer(path) as graph, open(note, "wb", buffering=0) as file:
        for call in range(first, 3 * 200):
            step, kind = divmod(call, 3)
            added, gone, old = change(step)
            if kind == 0:
                graph.add(vectors_of(added), ids=added)
            elif kind == 1:
                graph.delete([*gone, old])
            elif step % 3 == 2:
                graph.merge()
            file.write(call.to_bytes(4, "little"))


def run(job: dict[str, Any]) -> int:
    if job["what"] == "in parts":
        in_parts(job["source"], job["path"])
    elif job["what"] == "changes":
        changes(job["path"], job["note"], job["first"])
    elif job["what"] == "clusters":
        espnx.graph.build(
            job["source"], job["path"], clusters=6, max_degree=16, list_size=40, threads=1
        )
    else:
        vectors = np.random.default_rng(0).standard_normal((20_000, 32)).astype(np.float32)
        espnx.graph.build(vectors, job["path"], max_degree=24, list_size=40)
    return 0


PACKAGES = ("espnx.graph", "espnx.storage")


def jobs() -> None:
    recall._FILTERED_MIN = 1 << 30  # nobody asks what filters find, which takes as long as a build
    serve(run)
