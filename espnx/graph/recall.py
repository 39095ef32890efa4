"""What searches of a graph find, measured when it is built: for lists of several sizes, of all
vectors and of those that filters allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..storage import NativeEngine
from ..storage.manifest import write_manifest
from .filters import RowFilter
from .format import MAGIC, FilteredRecall, GraphFacts, RecallPoint
from .layout import rows_of
from .neighbours import nearer, nearest_of
from .pages.checked import open_pages, read_pages
from .search.asked import checked_queries
from .search.effort import REGION_PAGES, WALK_PAGES, lists_of_region
from .search.probing import Probing
from .search.version import THREADS_MAX, GraphVersion, ReadOptions
from .write import Progress

#: All vectors that a graph is built of, [m, dim] at a time, and their rows, int64 [m]; begins anew
#: each time it is called.
Blocks = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]

_MEASURING_S = 3600.0
# Beside 200 queries, of which each has a distance to each row.
RECALL_BLOCK_ROWS = 8192
_K = 10
_WALKS = 8  # of a thread: each keeps what it has met
_QUERIES = 200
_LISTS = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320)
# Of fewer vectors, and of fewer allowed rows, a search measures all that are allowed.
_FILTERED_MIN, _ALLOWED_MIN = 4096, 64
_SHARES = (0.9, 0.5, 0.2, 0.05, 0.01, 0.001)
_NEAR_QUERIES = 100
_REGIONS, _REGION_QUERIES = 8, 16
# Vectors by which it is decided how far a region goes.
_SAMPLE, _SAMPLE_BYTES, _SAMPLE_PARTS = 4096, 4 << 20, 16
# Of vectors, while it is looked which filters allow them: a build in bounded memory has room for
# that.
_AT_ONCE_BYTES = 1 << 20
_FILTERED_LISTS = (10, 20, 40, 80, 160, 320, 640)
# What a shorter list finds far from the query is another share for each region.
_FAR_LIST_MIN = 20
# Longer lists than one that finds so much are not measured; one that finds so little for a share is
# not tried for smaller ones.
_ENOUGH, _HOPELESS = 0.99, 0.8
_ALL = 0.999
# Of clusters: a longer list that finds no more than so much more is the last through so many; and
# estimates of entry points that take as long as a page.
_GAIN_MIN, _ESTIMATES_PER_PAGE = 0.002, 512
_USUAL = 0.95


def add_recall(
    engine: NativeEngine,
    facts: GraphFacts,
    blocks: Blocks,
    *,
    threads: int,
    seed: int,
    progress: Progress,
    of_codes: bool = False,
) -> GraphFacts:
    """Measures what searches of a written graph find, for lists of several sizes, and writes it
    into its manifest; where its nodes have codes in place of vectors, also what a search that
    measures all of these finds.

    Args:
        blocks: the graph's vectors, as they are stored: rows, int64 [m], and vectors,
            [m, dim].
        seed: of the choice of the vectors that are searched for: some of the graph itself. From
            each search its own vector is kept, as if the graph had not been built of it: a walk
            that goes by a query's own node finds in its edges what it looks for, and more than a
            new query does.
        of_codes: whether these vectors are what the codes stand for, and nobody knows others: then
            nothing limits recall.

    Raises WriteError, DiskFullError, and what a search raises; the graph stays as it was.
    """
    if not facts.layout.n:
        return facts
    facts = with_recall(
        facts, blocks, threads=threads, seed=seed, progress=progress, of_codes=of_codes
    )
    write_manifest(engine, facts.where, MAGIC, facts.version, facts.manifest())
    return facts


def with_recall(
    facts: GraphFacts,
    blocks: Blocks,
    *,
    threads: int,
    seed: int,
    progress: Progress,
    of_codes: bool = False,
) -> GraphFacts:
    """The same for a graph whose files are written, and, it may be, not its manifest: what that is
    to say. Arguments and errors: see `add_recall`."""
    if not facts.layout.n:
        return facts
    progress("recall", 0, 2)
    # Of the page cache, for the pages were just written: their reads are counted, not timed.
    options = ReadOptions.of(threads=min(threads, THREADS_MAX), walks=_WALKS, direct=False)
    index = GraphVersion(replace(facts, pins={}), options)
    with closing(index.native):
        facts = _with_recall(
            index, facts, blocks, seed, has_ceiling=facts.disk_codebook is not None and not of_codes
        )
        progress("recall", 1, 2)
        if facts.layout.n >= _FILTERED_MIN and facts.recall:
            facts = replace(facts, filtered=_Filtered(index, facts, blocks, seed).measured())
    progress("recall", 2, 2)
    return replace(facts, unmeasured=0)


def stored_blocks(
    engine: NativeEngine, facts: GraphFacts
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields vectors of a graph's pages as `add_recall` takes them. Raises as a search."""
    layout, parts, files = facts.layout, facts.parts, open_pages(engine, facts)
    at_once = max(1, RECALL_BLOCK_ROWS // layout.nodes_per_page)
    seen = np.zeros(facts.n_rows if facts.copies > 1 else 0, bool)
    for first in range(0, parts.n_pages, at_once):
        pages = np.arange(first, min(first + at_once, parts.n_pages))
        nodes = read_pages(engine, files, facts, pages, _MEASURING_S)
        places = pages[:, None] * layout.nodes_per_page + np.arange(layout.nodes_per_page)
        nodes = nodes[parts.is_node(places)]
        if facts.copies > 1:  # each row once
            nodes = nodes[np.sort(np.unique(rows_of(nodes), return_index=True)[1])]
            nodes = nodes[~seen[rows_of(nodes)]]
            seen[rows_of(nodes)] = True
        yield rows_of(nodes), facts.coding.decode(nodes["vector"])


def _ids_of(index: GraphVersion) -> np.ndarray:
    """int64 [n], growing: rows that have a node."""
    facts = index.facts
    if not facts.has_gaps:
        return np.arange(facts.layout.n)
    return np.flatnonzero(index.filters.existing(_MEASURING_S))


def row_blocks(rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields vectors in memory as `add_recall` takes them."""
    for first in range(0, len(rows), RECALL_BLOCK_ROWS):
        part = rows[first : first + RECALL_BLOCK_ROWS]
        yield np.arange(first, first + len(part)), part


def _with_recall(
    index: GraphVersion, facts: GraphFacts, blocks: Blocks, seed: int, *, has_ceiling: bool
) -> GraphFacts:
    """What searches find for vectors of the graph, each as if the graph were without it, beside an
    exact search."""
    n, k = facts.layout.n, min(_K, facts.layout.n - 1)
    if k < 1:
        return facts
    chosen = np.sort(_ids_of(index)[np.random.default_rng(seed + 1).permutation(n)[:_QUERIES]])
    queries = (
        _rows_of(blocks(), chosen, facts.layout.dim)
        if has_ceiling
        else index.reader.vectors(chosen, _MEASURING_S)
    )
    wide = checked_queries(facts, queries)[1]
    exact = _others(nearest_of(facts.metric, wide, k + 1, blocks())[1], chosen, k)
    ceiling = None
    if has_ceiling:
        coding = facts.coding
        decoded = ((rows, coding.decode(coding.encode(vectors))) for rows, vectors in blocks())
        by_codes = nearest_of(facts.metric, wide, k + 1, decoded)[1]
        ceiling = _share_found(_others(by_codes, chosen, k), exact)
    if facts.clusters is not None:
        entries_of = len(facts.entries) / len(facts.clusters.nodes)
        return replace(facts, recall=_probed(index, entries_of, chosen, queries, exact))
    points: list[RecallPoint] = []
    for list_size in _LISTS:
        found, _ = index.walk_without(chosen, queries, k, (list_size, list_size))
        points.append(
            RecallPoint(
                max(k, list_size), _share_found(found.ids, exact), float(found.pages.mean())
            )
        )
        if points[-1].recall > _ALL:
            break
    return replace(facts, recall=points, recall_ceiling=ceiling)


def _probed(
    index: GraphVersion,
    entries_of: float,
    chosen: np.ndarray,
    queries: np.ndarray,
    exact: list[set[int]],
) -> list[RecallPoint]:
    """Measures lists of several sizes, each through several numbers of clusters; of those that
    find no less the cheapest is kept. `entries_of`: entry points of a cluster, the mean."""
    k = max(len(each) for each in exact)
    least = k * index.facts.copies  # what walks keep in any case
    lists = sorted({max(each, least) for each in _LISTS})
    points: list[RecallPoint] = []
    for margin in index.probe_margins(queries):
        best = 0.0
        for list_size in lists:
            found, _ = index.walk_without(
                chosen, queries, k, (list_size, list_size), probing=Probing(margin=margin)
            )
            recall = _share_found(found.ids, exact)
            pages = float(found.pages.mean())
            clusters = 1.0 if found.clusters is None else float(found.clusters.mean())
            points.append(RecallPoint(list_size, recall, pages, margin, clusters))
            if recall > _ALL or recall - best < _GAIN_MIN:
                break  # what is missing lies in other clusters
            best = recall
        if points[-1].recall > _ALL:
            break

    def cost(point: RecallPoint) -> float:
        return point.pages + (point.clusters or 0) * entries_of / _ESTIMATES_PER_PAGE

    kept: list[RecallPoint] = []
    for point in sorted(points, key=lambda each: (-each.recall, cost(each))):
        if not kept or cost(point) < cost(kept[-1]):
            kept.append(point)
    return kept[::-1]


@dataclass(eq=False)
class _Trial:
    """Searches with one filter.

    Attributes:
        share: of the rows that it allows, about. is_region: those nearest to a vector; else any.
        rows: int64 [q]: of the vectors that are searched for. queries: the same, [q, dim].
        allows: of some rows and their vectors.
        bits: uint8, a bit for each row that is allowed. best: distances and rows of what is to be
            found, as far as it is known.
    """

    share: float
    is_region: bool
    rows: np.ndarray
    queries: np.ndarray
    allows: Callable[[np.ndarray, np.ndarray], np.ndarray]
    bits: np.ndarray
    best: tuple[np.ndarray, np.ndarray]


class _Filtered:
    """Measures searches with filters of several shares: of random rows, so that a query lies among
    what is allowed; and of those that are nearest to some vector, searched for vectors that are not
    among them."""

    def __init__(self, index: GraphVersion, facts: GraphFacts, blocks: Blocks, seed: int):
        self._index, self._facts, self._blocks, self._seed = index, facts, blocks, seed
        # as searches with filters do, at least
        usual = next((each for each in facts.recall if each.recall >= _USUAL), facts.recall[-1])
        self._probing = None if usual.probe_margin is None else Probing(margin=usual.probe_margin)
        self._shares = [share for share in _SHARES if share * facts.layout.n >= _ALLOWED_MIN]

    def measured(self) -> list[FilteredRecall]:
        trials = self._trials()
        at_once = max(1, _AT_ONCE_BYTES // (4 * self._facts.layout.dim))
        for rows, vectors in self._blocks():
            for first in range(0, len(rows), at_once):
                part = slice(first, first + at_once)
                for trial in trials:
                    self._look_at(trial, rows[part], vectors[part])
        found: list[FilteredRecall] = []
        first = 0
        for share in self._shares:
            kinds = [
                [each for each in trials if each.share == share and each.is_region == is_region]
                for is_region in (False, True)
            ]
            near = self._points(kinds[0], _FILTERED_LISTS[first:])
            usual = next((each.list_size for each in near if each.recall >= _USUAL), None)
            if usual is None:
                break  # measuring all is cheaper, and will be of fewer rows
            far = [each for each in _FILTERED_LISTS if each >= max(usual, _FAR_LIST_MIN)]
            found.append(FilteredRecall(share, near, self._points(kinds[1], far, usual)))
            first += sum(each.recall < _HOPELESS for each in near)
        return found

    def _points(
        self, trials: Sequence[_Trial], lists: Sequence[int], list_size: int | None = None
    ) -> list[RecallPoint]:
        """Measures lists that grow, as long as a search reads less than measuring all would.
        `list_size`: that a query near what is allowed needs; None: all are."""
        filters = [
            RowFilter(torch.from_numpy(each.bits), int(np.unpackbits(each.bits).sum()))
            for each in trials
        ]
        points: list[RecallPoint] = []
        least = _K * self._facts.copies  # what walks keep in any case
        for length in lists if trials else ():
            kept = (length, length) if list_size is None else lists_of_region(list_size, length)
            recalls, pages = [], []
            for trial, allowed in zip(trials, filters, strict=True):
                found, all_pages = self._index.walk_without(
                    trial.rows, trial.queries, _K, kept, allowed, self._probing
                )
                recalls.append(_share_found(found.ids, _others(trial.best[1], trial.rows, _K)))
                pages.append(float((found.pages + found.code_pages).mean()))
                if pages[-1] * (WALK_PAGES if list_size is None else REGION_PAGES) > all_pages:
                    return points
            # a filter is one, and not the mean of several
            points.append(RecallPoint(max(least, length), min(recalls), float(np.mean(pages))))
            if points[-1].recall > _ENOUGH:
                break
        return points

    def _trials(self) -> list[_Trial]:
        n, dim = self._facts.layout.n, self._facts.layout.dim
        random = np.random.default_rng(self._seed + 2)
        count = max(_NEAR_QUERIES, min(_SAMPLE, _SAMPLE_BYTES // (4 * dim)))
        rows = np.sort(_ids_of(self._index)[random.permutation(n)[:count]])
        sample = _rows_of(self._blocks(), rows, dim)
        made = []
        chosen = random.permutation(len(rows))[:_NEAR_QUERIES]
        for share in self._shares:
            made.append(
                self._trial(
                    share, False, rows[chosen], sample[chosen], _of_random(share, self._seed)
                )
            )
        for centre in random.permutation(len(rows))[:_REGIONS]:
            far = np.concatenate(
                [
                    np.square(part - sample[centre]).sum(axis=1)
                    for part in np.array_split(sample, _SAMPLE_PARTS)
                ]
            )
            for share in self._shares:
                limit = np.partition(
                    far, place := min(len(far) - 1, max(1, round(share * len(far))))
                )[place]
                outside = random.permutation(np.flatnonzero(far > limit))[:_REGION_QUERIES]
                if len(outside):  # of vectors that are all alike, a region is everything
                    made.append(
                        self._trial(
                            share,
                            True,
                            rows[outside],
                            sample[outside],
                            _of_region(sample[centre], limit),
                        )
                    )
        return made

    def _trial(
        self, share: float, is_region: bool, rows: np.ndarray, queries: np.ndarray, allows: Callable
    ) -> _Trial:
        layout = self._facts.layout
        asked = (
            queries.astype(layout.row_dtype) if layout.row_format in ("uint8", "int8") else queries
        )
        none = np.empty((len(rows), 0), np.float32), np.empty((len(rows), 0), np.int64)
        bits = np.zeros(-(-self._facts.n_rows // 8), np.uint8)
        return _Trial(share, is_region, rows, asked, allows, bits, none)

    def _look_at(self, trial: _Trial, rows: np.ndarray, vectors: np.ndarray) -> None:
        chosen = trial.allows(rows, vectors)
        allowed = rows[chosen]
        np.bitwise_or.at(trial.bits, allowed >> 3, (1 << (allowed & 7)).astype(np.uint8))
        facts = self._index.facts
        wide = checked_queries(facts, trial.queries)[1]
        trial.best = nearer(facts.metric, wide, _K + 1, trial.best, allowed, vectors[chosen])


def _of_random(share: float, seed: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def allows(rows: np.ndarray, _: np.ndarray) -> np.ndarray:
        mixed = rows.astype(np.uint64) + np.uint64(
            (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
        )
        # SplitMix64: of each row by itself, in whatever order they come
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(factor)
        found: np.ndarray = (mixed >> np.uint64(32)) < np.uint64(share * 2**32)
        return found

    return allows


def _of_region(centre: np.ndarray, limit: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def allows(_: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.square(vectors.astype(np.float32) - centre).sum(axis=1) <= limit
        return found

    return allows


def _rows_of(
    blocks: Iterable[tuple[np.ndarray, np.ndarray]], wanted: np.ndarray, dim: int
) -> np.ndarray:
    """float32 [m, dim]: some vectors, of rows that grow."""
    found = np.empty((len(wanted), dim), np.float32)
    for rows, vectors in blocks:
        place = np.minimum(np.searchsorted(wanted, rows), len(wanted) - 1)
        is_wanted = wanted[place] == rows
        found[place[is_wanted]] = vectors[is_wanted]
    return found


def _others(nearest: np.ndarray, rows: np.ndarray, k: int) -> list[set[int]]:
    """The k nearest of each of some rows but itself, of the k + 1 nearest."""
    return [
        set([each for each in ids if each != row][:k])
        for ids, row in zip(nearest.tolist(), rows.tolist(), strict=True)
    ]


def _share_found(found: np.ndarray | list[set[int]], exact: list[set[int]]) -> float:
    """The share that was found of what is nearest to each query."""
    pairs = [(set(ours), true) for ours, true in zip(found, exact, strict=True)]
    return sum(len(ours & true) for ours, true in pairs) / max(
        1, sum(len(true) for _, true in pairs)
    )
