"""One index of a judged collection, and what is measured of it: see case.py. A file of its own: the
command line reads case.py, and needs none of what measuring imports."""

from __future__ import annotations

import os
from collections.abc import Sequence

import espnx

from ..harness.registry import Say
from ..harness.result import Row
from .candidates import measure_candidates
from .collection import read_collection, toy_collection
from .overlap import Clocked, measure_overlap
from .rankings import measure_rankings
from .stages import measure_stages

STAGES = ("ivf", "bm25", "splade", "graph", "clusters")


def measure(
    path: str,
    collection: str | None,
    encoder: str,
    sparse_encoder: str,
    show: str,
    stages: Sequence[str],
    pairs: int,
    say: Say,
) -> list[Row]:
    """`stages`: that are compared, of one vector a document. Raises what the library raises."""
    given = toy_collection() if collection is None else read_collection(collection)
    store = os.path.join(path, f"hybrid-{given.name}")
    dense = espnx.load_encoder(encoder)
    if not os.path.exists(os.path.join(store, "MANIFEST.json")):
        say(f"building {store}: every text is encoded twice")
        espnx.build(
            store, given.documents, dense, first_stages=STAGES, sparse_encoder=sparse_encoder
        )
    if show == "overlap":
        clocked = Clocked(dense), Clocked(espnx.load_sparse_encoder(sparse_encoder))
        with espnx.open(store, clocked[0], sparse_encoder=clocked[1]) as index:
            return measure_overlap(index, list(clocked), given, pairs, say)
    with espnx.open(store, dense) as index:
        if show == "candidates":
            return measure_candidates(index, dense, given, stages, pairs, say)
        if show == "stages":
            return measure_stages(index, dense, given, stages, pairs, say)
        return measure_rankings(index, given, pairs, say)
