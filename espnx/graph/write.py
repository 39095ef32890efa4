"""Writes a graph that is known whole into its directory: pages, and the files beside them. The specification is docs/graph-format.md."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import errors
from ..ops.crc32c import crc32c_ranges
from ..storage import NativeEngine
from ..storage.files import StreamWriter, crc32c, names_in, write_error
from ..storage.manifest import NAME, read_manifest, write_manifest
from ..storage.work import WORK, check_work, remove_work
from .codebook import Codebook
from .coding import VectorCoding
from .format import CODEBOOK, CODES, DISK_CODEBOOK, ENTRIES, MAGIC, NODES, ROWS, VERSION, GraphFacts, RecallPoint, in_directory
from .index import THREADS_MAX, GraphIndex
from .layout import CODE_PAGE_BYTES, HEADER, PageLayout, code_salt

if TYPE_CHECKING:
    from .._C import Vamana

#: (what is being done, how much is done, of how much)
Progress = Callable[[str, int, int], None]
#: All vectors that a graph is built of, [m, dim] at a time, and their rows, int64 [m]; begins anew each time it is called.
Blocks = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]

# Of pages that are filled at a time: such a block stays in the cache while it is gathered, summed and copied.
_BLOCK_BYTES = 8 << 20
# Beside 200 queries, of which each has a distance to each row.
RECALL_BLOCK_ROWS = 8192
_CURVE_QUERIES, _CURVE_K = 200, 10
_CURVE_LISTS = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320)


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """All of a graph, in memory, by row of the input.

    Attributes:
        layout: of its pages.
        metric: of `espnx.graph.METRICS`.
        rows: [n, dim], the vectors as they are stored, of `PageLayout.row_dtype`; or what codes in their place are of.
        codes: uint8 [n, code_bytes].
        codebook: of the codes.
        neighbours: uint32 [n, max_degree]: rows; what stands behind a row's last neighbour is no matter.
        counts: int64 [n]: how many neighbours there are.
        entries: int64 [m]: rows at which searches begin.
        options: of the build, for people; they are written into the manifest.
        disk_codebook: of the codes in place of vectors, where nodes are to have such.
    """

    layout: PageLayout
    metric: str
    rows: np.ndarray
    codes: np.ndarray
    codebook: Codebook
    neighbours: np.ndarray
    counts: np.ndarray
    entries: np.ndarray
    options: Mapping[str, Any]
    disk_codebook: Codebook | None = None


@dataclass(frozen=True, eq=False)
class GraphFiles:
    """What a graph's files are to hold.

    Attributes:
        facts: for the manifest. contents: of each file, by name, in pieces; each is made when it is asked for, once.
    """

    facts: GraphFacts
    contents: Mapping[str, Iterable[np.ndarray]]


def graph_files(
    graph: WholeGraph, row_of: np.ndarray, where: str, progress: Progress, labels: np.ndarray | None = None
) -> GraphFiles:  # fmt: skip
    """A graph as its files.

    Args:
        row_of: int64 [n]: the row that node i is of; nodes are numbered page by page.
        where: its directory, or for messages.
        labels: int64 [n], 0 to n - 1, each once: as what searches return each row; None: its number.
    """
    layout = graph.layout
    node_of = np.empty(layout.n, np.uint32)
    node_of[row_of] = np.arange(layout.n, dtype=np.uint32)
    salt = secrets.randbits(64)
    entries, entry_codes = node_of[graph.entries], graph.codes[graph.entries]
    whole = {CODEBOOK: graph.codebook.packed(), ENTRIES: np.concatenate([entries.view(np.uint8).ravel(), entry_codes.ravel()])}
    if layout.codes_in == "memory":
        whole[CODES] = graph.codes[row_of]
    if graph.disk_codebook is not None:
        whole[DISK_CODEBOOK] = graph.disk_codebook.packed()
    if labels is None:
        labels = np.arange(layout.n)
    node_of_label = np.empty(layout.n, np.uint32)
    node_of_label[labels] = node_of
    pages = _node_pages(graph, row_of, node_of, labels, salt, progress)
    contents: dict[str, Iterable[np.ndarray]] = {NODES: pages, ROWS: [node_of_label]}
    contents |= {name: [values] for name, values in whole.items()}
    if layout.paged_codes:
        contents[CODES] = [code_pages(graph.codes[row_of], layout, salt)]
    regions = in_directory(where, layout, len(entries), graph.codebook, graph.disk_codebook)
    facts = GraphFacts(
        where, regions, layout, graph.metric, salt, graph.codebook, entries.astype(np.int64), entry_codes,
        {name: crc32c(np.ascontiguousarray(values).reshape(-1).view(np.uint8)) for name, values in whole.items()}, graph.options,
        disk_codebook=graph.disk_codebook,
    )  # fmt: skip
    return GraphFiles(facts, contents)


def write_graph(engine: NativeEngine, path: str, graph: WholeGraph, row_of: np.ndarray, progress: Progress) -> GraphFacts:
    """Writes all files of a graph, the manifest last.

    Args:
        path: a directory with no graph in it, that nobody else writes to.
        row_of: see `graph_files`.

    Raises WriteError, DiskFullError; there is no graph then.
    """
    progress("pages", 0, graph.layout.n)
    return publish(engine, path, graph_files(graph, row_of, path, progress))


def publish(engine: NativeEngine, path: str, files: GraphFiles) -> GraphFacts:
    """Writes the files of a graph, the manifest last. Raises WriteError, DiskFullError; there is no graph then."""
    for name, pieces in files.contents.items():
        with StreamWriter(engine, os.path.join(path, name)) as writer:
            for piece in pieces:
                writer.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            writer.sync()
    write_manifest(engine, path, MAGIC, VERSION, files.facts.manifest())
    return files.facts


def add_recall(
    engine: NativeEngine, facts: GraphFacts, blocks: Blocks, *, threads: int, seed: int, progress: Progress, of_codes: bool = False
) -> GraphFacts:
    """Measures what searches of a written graph find, for lists of several sizes, and writes it into its manifest; where its nodes have
    codes in place of vectors, also what a search that measures all of these finds.

    Args:
        blocks: the graph's vectors, see `GraphIndex.exact`.
        seed: of the choice of the vectors that are searched for: some of the graph itself, each but itself.
        of_codes: whether these vectors are what the codes stand for, and nobody knows others: then nothing limits recall.

    Raises WriteError, DiskFullError, and what a search raises; the graph stays as it was.
    """
    if not facts.layout.n:
        return facts
    progress("recall", 0, 1)
    facts = _with_recall(facts, blocks, threads, seed, has_ceiling=facts.disk_codebook is not None and not of_codes)
    write_manifest(engine, facts.where, MAGIC, VERSION, facts.manifest())
    progress("recall", 1, 1)
    return facts


def row_blocks(rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For `add_recall`, of vectors in memory."""
    for first in range(0, len(rows), RECALL_BLOCK_ROWS):
        part = rows[first : first + RECALL_BLOCK_ROWS]
        yield np.arange(first, first + len(part)), part


def clear_leftovers(engine: NativeEngine, path: str | os.PathLike[str], *, keep_work: bool = False) -> None:
    """Of an interrupted build. Raises InvalidInputError where a graph, or anything else, is there, a `work` of the user's own, too.

    Args:
        keep_work: not the work folder of a build in bounded memory, which may go on.
    """
    there = names_in(path) - {"LOCK"}
    if NAME in there:
        with contextlib.suppress(errors.EspnxError):
            read_manifest(engine, path, MAGIC, VERSION)  # of a graph
            remove_work(path)  # of a build that ended right after it was done
        raise errors.InvalidInputError(f"directory {os.fspath(path)}", got="a graph, or another store", expected="a new directory")
    check_work(path)
    files = {NODES, ROWS, CODES, CODEBOOK, DISK_CODEBOOK, ENTRIES, f"{NAME}.new"}
    if foreign := sorted(there - files - {WORK}):
        raise errors.InvalidInputError(
            f"directory {os.fspath(path)}", got=foreign[:3], expected="an empty directory, or what an interrupted build has left"
        )
    if not keep_work:
        remove_work(path)
    for where in (os.path.join(path, name) for name in there & files):
        try:
            os.unlink(where)
        except OSError as error:
            raise write_error("cannot remove what an interrupted build has left", where, error) from error


def connect_and_choose_entries(graph: Vamana, n: int, n_entries: int, seed: int) -> tuple[int, np.ndarray]:
    """Makes every node one that a walk can come to.

    Returns:
        How many nodes were given edges for that; the medoid and at most `n_entries` - 1 other nodes, int64, from each of which every other
        node can be come to.
    """
    if n == 0:
        return 0, np.empty(0, np.int64)
    repaired = graph.connect(torch.tensor([graph.medoid]))
    chosen = np.random.default_rng(seed).permutation(n)[: n_entries - 1]
    # Every other node is reached from the medoid, so from a node that leads there.
    leads = graph.leading_to(graph.medoid).numpy()
    chosen = chosen[leads[chosen] != 0]
    return repaired, np.unique(np.append(chosen, graph.medoid))


def _node_pages(
    graph: WholeGraph, row_of: np.ndarray, node_of: np.ndarray, labels: np.ndarray, salt: int, progress: Progress
) -> Iterator[np.ndarray]:  # fmt: skip
    layout, coding = graph.layout, VectorCoding(graph.layout.format, graph.disk_codebook)
    at_once = max(1, _BLOCK_BYTES // layout.page_bytes)
    for first in range(0, layout.n_pages, at_once):
        count = min(at_once, layout.n_pages - first)
        chosen = row_of[first * layout.nodes_per_page : (first + count) * layout.nodes_per_page]
        nodes = np.zeros(count * layout.nodes_per_page, layout.node_dtype)
        here = nodes[: len(chosen)]
        here["vector"] = coding.encode(graph.rows[chosen])
        here["row"], here["n_neighbours"] = labels[chosen], graph.counts[chosen]
        there = np.arange(layout.max_degree) < graph.counts[chosen, None]
        near = np.where(there, graph.neighbours[chosen], 0)
        here["neighbours"] = np.where(there, node_of[near], 0)
        if inline := layout.inline_pq:
            here["codes"] = np.where(there[:, :inline, None], graph.codes[near[:, :inline]], 0)
        yield pages_of(nodes, layout, first, salt)
        progress("pages", first * layout.nodes_per_page + len(chosen), layout.n)


def pages_of(nodes: np.ndarray, layout: PageLayout, first: int, salt: int) -> np.ndarray:
    """uint8: whole pages of these nodes, the first of them page `first`."""
    count = len(nodes) // layout.nodes_per_page
    return _with_headers(nodes.view(np.uint8).reshape(count, layout.nodes_per_page * layout.node_bytes), layout.page_bytes, first, salt)


def code_pages(codes: np.ndarray, layout: PageLayout, salt: int, first: int = 0) -> np.ndarray:
    """uint8: pages of the codes of successive nodes, of which the first begins page `first`."""
    count = -(-len(codes) // layout.codes_per_page)
    whole = np.zeros((count * layout.codes_per_page, layout.code_bytes), np.uint8)
    whole[: len(codes)] = codes
    return _with_headers(whole.reshape(count, layout.codes_per_page * layout.code_bytes), CODE_PAGE_BYTES, first, code_salt(salt))


def _with_headers(content: np.ndarray, page_bytes: int, first: int, salt: int) -> np.ndarray:
    """uint8: pages of these bytes, [m, at most what fits], and zeros; the first is page `first`."""
    count = len(content)
    pages = np.zeros((count, page_bytes), np.uint8)
    header = np.zeros(count, HEADER)
    header["page"], header["salt"] = np.arange(first, first + count), salt
    pages[:, HEADER.itemsize : HEADER.itemsize + content.shape[1]] = content
    pages[:, : HEADER.itemsize] = header.view(np.uint8).reshape(count, HEADER.itemsize)
    begin = torch.arange(count) * page_bytes + 4
    sums = crc32c_ranges(torch.from_numpy(pages.reshape(-1)), begin, torch.full_like(begin, page_bytes - 4)).numpy()
    pages[:, :4] = sums.astype("<u4").view(np.uint8).reshape(count, 4)
    return pages.reshape(-1)


def _with_recall(facts: GraphFacts, blocks: Blocks, threads: int, seed: int, *, has_ceiling: bool) -> GraphFacts:
    """What is known of searches for vectors of the graph itself, each but itself, beside an exact search."""
    n, k = facts.layout.n, min(_CURVE_K + 1, facts.layout.n)
    if k < 2:
        return facts
    chosen = np.sort(np.random.default_rng(seed + 1).permutation(n)[:_CURVE_QUERIES])
    with GraphIndex(facts.where, threads=min(threads, THREADS_MAX)) as index:
        queries = _rows_of(blocks(), chosen, facts.layout.dim) if has_ceiling else index.vectors(chosen)
        exact = index.exact(queries, k, blocks())
        ceiling = None
        if has_ceiling:
            coding = facts.coding
            decoded = ((rows, coding.decode(coding.encode(vectors))) for rows, vectors in blocks())
            ceiling = _share_found(index.exact(queries, k, decoded), exact, chosen)
        points: list[RecallPoint] = []
        for list_size in _CURVE_LISTS:
            found = index.search(queries, k, list_size=max(k, list_size), beamwidth=1)
            points.append(RecallPoint(max(k, list_size), _share_found(found.ids, exact, chosen), float(found.pages.mean())))
            if points[-1].recall > 0.999:
                break
    return replace(facts, recall=points, recall_ceiling=ceiling)


def _rows_of(blocks: Iterable[tuple[np.ndarray, np.ndarray]], wanted: np.ndarray, dim: int) -> np.ndarray:
    """float32 [m, dim]: some vectors, of rows that grow."""
    found = np.empty((len(wanted), dim), np.float32)
    for rows, vectors in blocks:
        place = np.minimum(np.searchsorted(wanted, rows), len(wanted) - 1)
        is_wanted = wanted[place] == rows
        found[place[is_wanted]] = vectors[is_wanted]
    return found


def _share_found(found: np.ndarray, exact: np.ndarray, queries: np.ndarray) -> float:
    """Of the nearest of some rows, each but itself: the share that was found."""
    pairs = [(set(ours.tolist()), set(true.tolist()) - {row}) for ours, true, row in zip(found, exact, queries.tolist(), strict=True)]
    return sum(len(ours & true) for ours, true in pairs) / max(1, sum(len(true) for _, true in pairs))
