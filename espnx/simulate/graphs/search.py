"""A search of one cluster's graph as commands, and a query of many of them: who waits for whom.

A search begins with tables of distances to the middles of codes. It reads the nearest vertices that
it knows, a beam of them at a time; for some of them it reads the pages of their neighbours' codes,
and a core compares those; then come the next, until it has expanded as many as its list is long,
and some on the way there (AiSAQ-S: nothing inline). The searches of a query are under way at once;
it ends with the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..queues import Part, Step
from .server import PAGE, Server

#: Of codes of a byte: how many middles each has.
MIDDLES = 256
#: A part's bytes are seconds: what a command takes there is its own.
SECONDS = 1.0


@dataclass(frozen=True)
class Walk:
    """What one search does.

    Attributes:
        vertices: that it expands.
        codes: new neighbours of one, whose codes are compared.
        pages: of those codes that are read.
    """

    vertices: int
    codes: float
    pages: float


def walk_of(server: Server, list_size: int) -> Walk:
    """What the law of walks says, with no more codes than a vertex has neighbours, and no more
    vertices than there are vectors."""
    vectors = server.get("collection.vectors")
    grown = (vectors / server.get("walk.vectors")) ** server.get("walk.more_vectors")
    grown *= (list_size / server.get("walk.ef")) ** server.get("walk.more_ef")
    distances = min(vectors, server.get("walk.distances") * grown)
    vertices = min(round(vectors), list_size + round(server.get("walk.descent")))
    codes = min(distances / vertices, server.get("collection.degree"))
    return Walk(vertices, codes, codes * server.get("server.missed"))


@dataclass(frozen=True)
class Times:
    """Seconds of a core, or of a drive.

    Attributes:
        query: beside its searches, with the middles of all clusters.
        tables: of one search.
        read, code, vertex: of each.
        drive: between two reads that a drive gives.
    """

    query: float
    tables: float
    read: float
    code: float
    vertex: float
    drive: float


def times_of(server: Server) -> Times:
    dimensions, per_s = server.get("collection.dimensions"), server.get("server.compute")
    middles = 2 * server.get("collection.segments") * dimensions / per_s
    # one table for the codes that lead, one for those that rank
    tables = 2 * (2 * MIDDLES * dimensions) / per_s
    lookup_s, read_s = server.get("server.lookup"), server.get("server.read_call")
    per_read_s = max(
        1 / server.get("device.flash.random_reads"),
        PAGE / server.get("device.flash.read_bandwidth"),
    )
    return Times(
        server.get("server.call") + middles,
        tables,
        read_s,
        lookup_s * server.get("collection.code"),
        read_s + lookup_s * server.get("collection.node_code"),
        per_read_s,
    )


@dataclass(frozen=True)
class Shape:
    """Commands of one search in their order: reads, one for each drive, and a core's work.

    Attributes:
        vertices: that are expanded with one core's work; [work].
        beams: vertices that are read before it, 0 where they were read before; [work].
    """

    vertices: np.ndarray
    beams: np.ndarray

    @staticmethod
    def of(walk: Walk, beam: int, expanded: int) -> Shape:
        vertices, beams = [], []
        for first in range(0, walk.vertices, beam):
            read = min(beam, walk.vertices - first)
            own = [min(expanded, read - at) for at in range(0, read, expanded)]
            vertices += own
            beams += [read] + [0] * (len(own) - 1)
        return Shape(np.array(vertices), np.array(beams))

    def commands(self, drives: int) -> int:
        """The tables; for each work reads of codes and itself; reads of vertices."""
        return 1 + len(self.vertices) * (drives + 1) + int(np.count_nonzero(self.beams)) * drives

    def after(self, drives: int) -> tuple[np.ndarray, np.ndarray]:
        """(first, others) as `espnx.simulate.queues.After` has them, within one search; the tables
        wait for nobody here."""
        waits: list[Sequence[int]] = [()]
        last: tuple[int, ...] = (0,)
        number = 1
        for beam in self.beams:
            for _ in range(1 + bool(beam)):
                waits += [last] * drives
                last = tuple(range(number, number + drives))
                number += drives
            waits.append(last)
            last, number = (number,), number + 1
        first = np.concatenate([[0], np.cumsum([len(each) for each in waits])])
        return first, np.array([other for others in waits for other in others], dtype=np.int64)


class Ways:
    """Parts of a server, and the routes over them by what a command does.

    Attributes:
        times: of its work.
        drives: of them.
        parts, routes: as `espnx.simulate.queues.walk` takes them.
        begin, tables, end: routes of a query's beginning, of a search's, and of its end.
    """

    CORES, NETWORK, FLASH, NOTHING, START, DRIVE = range(6)  # parts; more drives behind the first

    def __init__(self, server: Server, searches: int) -> None:
        """`searches`: that are under way at most."""
        self.times, self.drives = times_of(server), server.count("server.drives.count")
        many = searches * self.drives + 1
        self.parts = [
            Part(server.count("server.cores"), 0.0, SECONDS),
            Part(many, server.get("network.latency")),
            Part(many, server.get("server.read")),
            Part(many),
            Part(many, 0.0, SECONDS),
            *(Part(1, 0.0, SECONDS) for _ in range(self.drives)),
        ]
        self.routes = [
            [Step(self.NETWORK), Step(self.CORES, self.times.query)],
            [Step(self.CORES, self.times.tables)],
            [Step(self.NETWORK)],
        ]
        self.begin, self.tables, self.end = range(3)

    def late(self, starts_s: Sequence[float]) -> list[int]:
        """Routes of queries that begin so late."""
        first = len(self.routes)
        self.routes += [[Step(self.START, each), *self.routes[self.begin]] for each in starts_s]
        return list(range(first, len(self.routes)))

    def reads(self, counts: np.ndarray) -> np.ndarray:
        """Routes of so many reads from each drive, int64 [..., drives]; what reads nothing from one
        does not wait for it."""
        most, first = int(counts.max(initial=0)), len(self.routes)
        for drive in range(self.drives):
            self.routes.append([Step(self.NOTHING)])
            self.routes += [
                [Step(self.DRIVE + drive, each * self.times.drive), Step(self.FLASH)]
                for each in range(1, most + 1)
            ]
        return first + np.arange(self.drives) * (most + 1) + counts

    def work(self, vertices: np.ndarray, pages: np.ndarray, codes: float) -> np.ndarray:
        """Routes of a core that takes so many pages and compares codes, for each of some vertices;
        int64 of the same shape."""
        pairs, number = np.unique(
            np.stack([vertices.ravel(), pages.ravel()]), axis=1, return_inverse=True
        )
        first, own = len(self.routes), self.times
        self.routes += [
            [Step(self.CORES, n * (own.vertex + codes * own.code) + read * own.read)]
            for n, read in pairs.T.tolist()
        ]
        return first + number.reshape(pages.shape)
