"""How much a query asks: hops and vectors of a walk by a fitted law, lists by what the words of a
query touch."""

from __future__ import annotations

import functools
import math

import numpy as np

from ..queues import Part, Step, walk
from .service import Service

#: efSearch by passages (RAGX section 5.1); between them it grows by the same power.
EF = {500_000: 375, 5_000_000: 750, 50_000_000: 1500, 500_000_000: 3000}
#: Of an IVF's clusters, of which there are as many as vectors in each (RAGX section 5.2.6's title
#: has them as what it compares with).
PROBED = 0.001
#: Hops of a window, and its seed.
HOPS, SEED = 60, 3


def ef_of(passages: float) -> float:
    """Between and beyond those of `EF`: twice for ten times as many passages."""
    least = min(EF)
    return EF[least] * (passages / least) ** math.log10(2)


def distances_of(service: Service, vectors: float, ef: float) -> float:
    """Vectors that a walk compares; never more than there are."""
    law = {name: service.get(f"walk.{name}") for name in ("vectors", "ef", "distances")}
    grown = (vectors / law["vectors"]) ** service.get("walk.more_vectors")
    grown *= (ef / law["ef"]) ** service.get("walk.more_ef")
    return min(vectors, law["distances"] * grown)


def hops_of(service: Service, ef: float) -> float:
    """Vertices that are expanded, one after another."""
    return ef + service.get("walk.descent")


def hop_read_s(
    dies: int, reads: float, cell_read_s: float, read_bytes: float, rate: float
) -> float:
    """The mean time in which the vectors of a hop come from flash: each from any of the dies,
    which keeps its page until the bus has taken it; the next hop begins when all are there.

    Args:
        reads: of a hop, the mean.
        rate: of the bus, bytes/s.
    """
    # a time is a number of cell reads, so that what differs in them alone is walked once
    return cell_read_s * _hop_cells(dies, round(reads, 2), read_bytes / rate / cell_read_s)


@functools.lru_cache(maxsize=4096)
def _hop_cells(dies: int, reads: float, bus_per_read: float) -> float:
    rng = np.random.default_rng(SEED)
    counts = np.floor(reads + rng.random(HOPS)).astype(int)
    parts = [*(Part(latency_s=1.0) for _ in range(dies)), Part(latency_s=bus_per_read)]
    routes = [(Step(die, until=1), Step(dies)) for die in range(dies)]
    after: list[tuple[int, ...]] = []
    before: tuple[int, ...] = ()
    for count in counts:
        first = len(after)
        after += [before] * count
        if count:
            before = tuple(range(first, first + count))
    route = rng.integers(0, dies, len(after))
    done = walk(parts, routes, route, np.arange(len(after)), after=after)
    return (done.end_s - done.begin_s) / HOPS
