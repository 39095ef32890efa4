"""Builders of graphs in children that tests kill at any moment: the jobs of tests/forks.py."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import espnx.graph
from espnx.graph.bounded import budget, builder
from tests.forks import load, serve

BUILD = sys.modules["espnx.graph.build"]  # by its name the package knows the function


def in_parts(source: str, path: str) -> None:
    """With room for 3000 of 12,000 vectors in a part, whatever this process holds."""
    budget.member_bytes = lambda layout, options: 1000
    builder.resident_bytes = BUILD.resident_bytes = lambda: 0  # type: ignore[attr-defined]
    espnx.graph.build(
        source, path, max_degree=24, list_size=40, memory=(48 << 20) + 20 * 12_000 + 1000 * 3000
    )


def run(job: dict[str, Any]) -> int:
    if job["what"] == "in parts":
        in_parts(job["source"], job["path"])
    elif job["what"] == "clusters":
        espnx.graph.build(
            job["source"], job["path"], clusters=6, max_degree=16, list_size=40, threads=1
        )
    else:
        vectors = np.random.default_rng(0).standard_normal((20_000, 32)).astype(np.float32)
        espnx.graph.build(vectors, job["path"], max_degree=24, list_size=40)
    return 0


if __name__ == "__main__":
    load("espnx.graph", "espnx.storage")
    serve(run)
