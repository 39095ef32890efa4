"""What a server makes of a collection's queries: how long they take and how many it answers, what
bounds them, and where a query's time goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import InvalidInputError, OutOfMemoryError
from ..queues import After, Outcome, walk
from .search import Shape, Ways, walk_of
from .server import Server, check_fits

SEED = 1
#: Queries of each stream that are accounted, and before and behind those.
WINDOW, BEFORE, BEHIND = 4, 2, 1
LIST_MAX, STREAMS_MAX = 10_000, 4096
#: Of a simulation, each of which takes some 150 bytes; the window is shorter where there are more.
COMMANDS_MAX = 6_000_000


@dataclass(frozen=True)
class Answer:
    """Attributes:
    system, workload: by name.
    list_size, streams: of a search, and queries that are under way.
    queries_per_s: in the window.
    mean_s, p50_s, p95_s: from a query's beginning to its answer.
    bound: "streams", "cores" or "drives", whatever allows the fewest queries.
    bounds_per_s: queries a second that each of them would allow without any waiting.
    busy: share of the time in which cores and drives are, the mean of each.
    vertices, reads, codes: of a query.
    core_s: of one core, of a query.
    is_extrapolated: its graphs are larger than those on which the law of walks was fitted.
    stored_bytes: of the index.
    window_s, n_queries: that were accounted.
    residual: the rate of the second half of those queries over that of the first, less 1.
    """

    system: str
    workload: str
    list_size: int
    streams: int
    queries_per_s: float
    mean_s: float
    p50_s: float
    p95_s: float
    bound: str
    bounds_per_s: dict[str, float]
    busy: dict[str, float]
    vertices: float
    reads: float
    codes: float
    core_s: float
    is_extrapolated: bool
    stored_bytes: float
    window_s: float
    n_queries: int
    residual: float


def answer(
    server: Server,
    list_size: int,
    streams: int | None = None,
    *,
    window: int = WINDOW,
    seed: int = SEED,
) -> Answer:
    """Simulates so many queries of each stream, or as many as can be (None: as many streams as the
    collection says).

    Raises:
        InvalidInputError: no such numbers; an index that does not fit the drives.
        OutOfMemoryError: more commands than can be simulated.
    """
    n_streams = server.count("collection.streams") if streams is None else streams
    for name, value, most in (
        ("a list", list_size, LIST_MAX),
        ("streams of queries", n_streams, STREAMS_MAX),
    ):
        if not 1 <= value <= most:
            raise InvalidInputError(name, got=value, expected=f"1 to {most}")
    check_fits(server)
    asked = Queries(server, list_size, n_streams, window, seed)
    done = asked.walked()
    return _answer(server, asked, done)


class Queries:
    """Queries as commands: for each its beginning, its searches one behind the other, its end; the
    first of all streams, then their second.

    Attributes:
        walk: of one search.
        window: queries of each stream that are accounted.
        ways: over the server.
        n: of queries.
        begins, ends: commands of each, int64 [n].
        reads: from each drive by all of a query's searches, int64 [n, drives].
    """

    def __init__(
        self, server: Server, list_size: int, streams: int, window: int, seed: int
    ) -> None:
        self.server, self.list_size, self.streams = server, list_size, streams
        self.walk = walk_of(server, list_size)
        self.probed = server.count("collection.probed")
        beam = server.count("server.beam")
        self.shape = Shape.of(self.walk, beam, min(beam, server.count("server.expanded")))
        n_drives = server.count("server.drives.count")
        self.own = self.shape.commands(n_drives)
        self.per_query = 2 + self.probed * self.own
        self.window = min(window, COMMANDS_MAX // (streams * self.per_query) - BEFORE - BEHIND)
        if self.window < 1:
            least = streams * self.per_query * (BEFORE + 1 + BEHIND)
            raise OutOfMemoryError(
                f"a simulation of {least:,} commands, where {COMMANDS_MAX:,} are the most",
                fix="a shorter list, or fewer streams",
            )
        self.n = streams * (BEFORE + self.window + BEHIND)
        self.ways = Ways(server, streams * self.probed)
        self.begins = np.arange(self.n) * self.per_query
        self.ends = self.begins + self.per_query - 1
        self.route, self.reads = self._routes(np.random.default_rng(seed))

    @property
    def core_s(self) -> float:
        """Seconds of a core that a query takes, the mean."""
        own, found = self.ways.times, self.walk
        vertex_s = own.vertex + found.codes * own.code + found.pages * own.read
        return own.query + self.probed * (own.tables + found.vertices * vertex_s)

    @property
    def alone_s(self) -> float:
        """What a query takes at least, if nobody waits: one of its searches, whose reads of a round
        all go to drives of their own."""
        own, server = self.ways.times, self.server
        rounds = float(np.count_nonzero(self.shape.beams))
        rounds += len(self.shape.vertices) * min(1.0, self.walk.pages)
        search_s = (self.core_s - own.query) / self.probed
        search_s += rounds * (server.get("server.read") + own.drive)
        return float(2 * server.get("network.latency") + own.query + search_s)

    def _routes(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The route of each command, and `reads`; pages lie on any drive, all alike."""
        ways, shape, searches = self.ways, self.shape, self.n * self.probed
        shares = np.full(ways.drives, 1 / ways.drives)
        works = (searches, len(shape.vertices))
        mean = shape.vertices * self.walk.pages
        pages = np.floor(mean + rng.random(works)).astype(np.int64)
        codes = rng.multinomial(pages, shares)
        starts = np.flatnonzero(shape.beams)
        vertices = rng.multinomial(np.tile(shape.beams[starts], (searches, 1)), shares)
        of_search = np.full((searches, self.own), ways.tables)
        first = 1 + np.arange(works[1]) * (ways.drives + 1)
        first += np.cumsum(shape.beams > 0) * ways.drives  # behind the reads of vertices
        places = np.arange(ways.drives)
        of_search[:, first[:, None] + places] = ways.reads(codes)
        of_search[:, (first[starts] - ways.drives)[:, None] + places] = ways.reads(vertices)
        of_search[:, first + ways.drives] = ways.work(
            np.tile(shape.vertices, (searches, 1)), pages, self.walk.codes
        )
        route = np.empty((self.n, self.per_query), dtype=np.int64)
        route[:, 0], route[:, -1] = ways.begin, ways.end
        # streams begin one after another, within the time of a query, so as not to go in step
        starts_s = np.arange(self.streams) / self.streams * self.alone_s
        route[: self.streams, 0] = ways.late(starts_s.tolist())
        route[:, 1:-1] = of_search.reshape(self.n, -1)
        reads = codes.sum(axis=1) + vertices.sum(axis=1)
        return route.ravel(), reads.reshape(self.n, self.probed, -1).sum(axis=1)

    def after(self) -> After:
        """Whom each command waits for: a stream's next query for its last, searches for their
        query, its end for them all."""
        first, others = self.shape.after(self.ways.drives)
        counts = np.empty((self.n, self.per_query), dtype=np.int64)
        own = np.diff(first)
        own[0] = 1  # the tables, for the query
        counts[:, 1:-1] = np.tile(own, self.probed)
        counts[:, 0] = np.arange(self.n) >= self.streams
        counts[:, -1] = self.probed
        places = 1 + self.own * np.arange(self.probed)  # of searches within a query
        within = np.empty((self.probed, 1 + len(others)), dtype=np.int64)
        within[:, 0] = 0
        within[:, 1:] = others + places[:, None]
        of_query = np.concatenate([within.ravel(), places + self.own - 1])
        of_all = of_query + self.begins[:, None]
        with_last = np.concatenate([self.ends[:, None] - self.streams * self.per_query, of_all], 1)
        flat = np.concatenate([of_all[: self.streams].ravel(), with_last[self.streams :].ravel()])
        return After(np.concatenate([[0], np.cumsum(counts.ravel())]), flat)

    def walked(self) -> Outcome:
        """Their window is accounted."""
        n_before = self.streams * BEFORE
        return walk(
            self.ways.parts,
            self.ways.routes,
            self.route,
            np.arange(len(self.route)),
            after=self.after(),
            n_before=n_before * self.per_query,
            n_until=(n_before + self.streams * self.window) * self.per_query,
        )


def _answer(server: Server, asked: Queries, done: Outcome) -> Answer:
    window_s = done.end_s - done.begin_s
    ended_s = done.ended_s[asked.ends]
    inside = (ended_s > done.begin_s) & (ended_s <= done.end_s)
    took_s = (ended_s - done.begun_s[asked.begins])[inside]
    n = len(took_s)
    ways, found = asked.ways, asked.walk
    core_s, reads = asked.core_s, float(asked.reads.sum(axis=1).mean())
    n_cores = ways.parts[ways.CORES].places
    bounds = {
        "streams": asked.streams / asked.alone_s,
        "cores": n_cores / core_s,
        "drives": ways.drives / (reads * ways.times.drive),
    }
    drives = done.accounts[ways.DRIVE :]
    median_s, late_s = np.percentile(took_s, [50, 95])
    return Answer(
        server.server.name,
        server.collection.name,
        asked.list_size,
        asked.streams,
        n / window_s,
        float(took_s.mean()),
        float(median_s),
        float(late_s),
        min(bounds, key=lambda name: bounds[name]),
        bounds,
        {
            "cores": done.accounts[ways.CORES].served_s / window_s / n_cores,
            "drives": sum(each.served_s for each in drives) / window_s / ways.drives,
        },
        float(asked.probed * found.vertices),
        reads,
        asked.probed * found.vertices * found.codes,
        core_s,
        server.get("collection.vectors") > server.get("walk.walked"),
        server.stored_bytes,
        window_s,
        n,
        _residual(np.sort(ended_s[inside])),
    )


def _residual(ends_s: np.ndarray) -> float:
    """The rate of the later half of queries that end then over that of the earlier, less 1; 0 of
    too few."""
    n = len(ends_s) - 1
    if n < 2:
        return 0.0
    half = n // 2
    first_s, second_s = ends_s[half] - ends_s[0], ends_s[-1] - ends_s[half]
    return float((n - half) / second_s * (first_s / half) - 1) if second_s > 0 else 0.0
