"""Writes a graph that is known whole into its directory: pages, and the files beside them. The
specification is docs/graph-format.md."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import errors
from ..ops.crc32c import crc32c_ranges
from ..storage import NativeEngine
from ..storage.files import StreamWriter, crc32c, names_in
from ..storage.lock import DirectoryLock
from ..storage.manifest import NAME, write_manifest
from ..storage.replacing import StoreKind, VersionedFiles, check_target, writing_to
from ..storage.work import WORK, check_work, is_own_work, job_of, remove_work
from .codes.codebook import Codebook
from .codes.coding import VectorCoding
from .format import (
    CENTROIDS,
    CHANGES,
    CLUSTERS,
    CODEBOOK,
    CODES,
    DISK_CODEBOOK,
    ENTRIES,
    MAGIC,
    NODES,
    ROWS,
    VERSION,
    GraphFacts,
    GraphShare,
    in_directory,
)
from .layout import CODE_PAGE_BYTES, HEADER, PageLayout, code_salt
from .pages.directory import read_graph_manifest
from .pages.homes import homes_of, keep_pages, remove_homes, sync_homes
from .parts import home_of

if TYPE_CHECKING:
    from .._C import Vamana

#: (what is being done, how much is done, of how much)
Progress = Callable[[str, int, int], None]

# Of pages that are filled at a time: such a block stays in the cache while it is gathered, summed
# and copied.
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """All of a graph, in memory, by row of the input.

    Attributes:
        layout: of its pages.
        metric: of `espnx.graph.METRICS`.
        rows: [n, dim], the vectors as they are stored, of `PageLayout.row_dtype`; or what codes in
            their place are of.
        codes: uint8 [n, code_bytes].
        codebook: of the codes.
        neighbours: uint32 [n, max_degree]: rows; what stands behind a row's last neighbour is no
            matter.
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
        facts: for the manifest. contents: of each file, by name, in pieces; each is made when it is
            asked for, once.
        pages: of clusters: of each file of pages, as `GraphFacts.page_files`; none: these are
            there.
    """

    facts: GraphFacts
    contents: Mapping[str, Iterable[np.ndarray]]
    pages: Sequence[Iterable[np.ndarray]] = ()


def graph_files(
    graph: WholeGraph,
    row_of: np.ndarray,
    where: str,
    progress: Progress,
    labels: np.ndarray | None = None,
    generation: int = 1,
    share: GraphShare | None = None,
) -> GraphFiles:
    """A graph as its files.

    Args:
        row_of: int64 [n]: the row that node i is of; nodes are numbered page by page.
        where: its directory, or for messages.
        labels: int64 [n], 0 to n - 1, each once: as what searches return each row; None: its
            number.
        generation: of the files in a directory. share: of a collection.
    """
    layout = graph.layout
    node_of = np.empty(layout.n, np.uint32)
    node_of[row_of] = np.arange(layout.n, dtype=np.uint32)
    salt = secrets.randbits(64)
    entries, entry_codes = node_of[graph.entries], graph.codes[graph.entries]
    whole = {
        CODEBOOK: graph.codebook.packed(),
        ENTRIES: np.concatenate([entries.view(np.uint8).ravel(), entry_codes.ravel()]),
    }
    if layout.codes_in == "memory":
        whole[CODES] = graph.codes[row_of]
    if graph.disk_codebook is not None:
        whole[DISK_CODEBOOK] = graph.disk_codebook.packed()
    if labels is None:
        labels = np.arange(layout.n)
    node_of_label = np.empty(layout.n, np.uint32)
    node_of_label[labels] = node_of
    pages = node_pages(graph, row_of, node_of, labels, salt, progress)
    contents: dict[str, Iterable[np.ndarray]] = {NODES: pages, ROWS: [node_of_label]}
    contents |= {name: [values] for name, values in whole.items()}
    if layout.paged_codes:
        contents[CODES] = [code_pages(graph.codes[row_of], layout, salt)]
    regions = in_directory(
        where, generation, layout, len(entries), graph.codebook, graph.disk_codebook
    )
    facts = GraphFacts(
        where,
        regions,
        layout,
        graph.metric,
        salt,
        graph.codebook,
        entries.astype(np.int64),
        entry_codes,
        {
            name: crc32c(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
            for name, values in whole.items()
        },
        graph.options,
        disk_codebook=graph.disk_codebook,
        generation=generation,
        share=share,
    )
    return GraphFiles(facts, contents)


def write_graph(
    engine: NativeEngine,
    path: str,
    graph: WholeGraph,
    row_of: np.ndarray,
    progress: Progress,
    generation: int,
    share: GraphShare | None = None,
) -> GraphFacts:
    """Writes all files of a graph, the manifest last.

    Args:
        path: a directory that nobody else writes to.
        row_of, generation, share: see `graph_files`.

    Raises WriteError, DiskFullError; there is no graph then, or the one before.
    """
    progress("pages", 0, graph.layout.n)
    return publish(
        engine, path, graph_files(graph, row_of, path, progress, generation=generation, share=share)
    )


def publish(
    engine: NativeEngine,
    path: str,
    files: GraphFiles,
    measured: Callable[[GraphFacts], GraphFacts] | None = None,
) -> GraphFacts:
    """Writes the files of a graph, the manifest last; then those of the graph before are removed.

    Args:
        measured: what the manifest is to say, once all other files are there.

    Raises WriteError, DiskFullError; there is no graph then, or the one before.
    """
    regions = files.facts.page_files if files.pages else []
    for region, pieces in zip(regions, files.pages, strict=True):
        write_pieces(engine, region.path, pieces)
    for name, pieces in files.contents.items():
        write_pieces(engine, files.facts.path(name), pieces)
    if files.facts.directories:
        sync_homes({os.path.dirname(each.path) for each in files.facts.page_files})
    facts = files.facts if measured is None else measured(files.facts)
    write_manifest(engine, path, MAGIC, facts.version, facts.manifest())
    keep_version(facts)
    return facts


def write_pieces(engine: NativeEngine, path: str, pieces: Iterable[np.ndarray]) -> None:
    """Writes a file, which is on the device then. Raises WriteError, DiskFullError."""
    with StreamWriter(engine, path) as writer:
        for piece in pieces:
            writer.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
        writer.sync()


def keep_version(facts: GraphFacts) -> None:
    """Removes all files of a graph that this version of it has not. Raises WriteError."""
    pages = [each.path for each in facts.page_files]
    shared = [] if facts.directories else [os.path.basename(each) for each in pages]
    _FILES.keep(facts.where, facts.generation, shared)
    keep_pages([home_of(each, facts.salt) for each in facts.directories], pages)


def forget_graph(path: str) -> None:
    """Removes all files of a graph whose manifest is gone. Raises WriteError."""
    remove_work(path)
    _FILES.keep(path, None)


def _foreign(path: str) -> set[str]:
    others = {name for name in names_in(path) if not _FILES.is_own(name)} - {f"{NAME}.new"}
    return others - {WORK} if is_own_work(path) else others


_FILES = VersionedFiles(
    (NODES, ROWS, CODES, CODEBOOK, DISK_CODEBOOK, ENTRIES, CENTROIDS, CLUSTERS, CHANGES)
)
KIND = StoreKind(MAGIC, VERSION, "a graph", _foreign)


@contextlib.contextmanager
def writing_graph(
    engine: NativeEngine, path: str | os.PathLike[str], *, replace: bool, keep_work: bool = False
) -> Iterator[int]:
    """A directory that a graph is written to, by this process alone: the generation of its files.

    Args:
        replace: a graph that is there.
        keep_work: not to remove the work folder of a build in bounded memory, which may go on.

    Raises as `espnx.storage.replacing.writing_to`.
    """
    if not replace:
        _tidy(engine, path)
    with writing_to(path, KIND, replace=replace) as is_replacement:
        check_work(path)
        if not keep_work:
            remove_work(path)
        before = homes_of(engine, os.fspath(path)) if is_replacement else set()
        yield _FILES.begin(engine, path, KIND, is_replacement=is_replacement)
        remove_homes(before - homes_of(engine, os.fspath(path)))


@contextlib.contextmanager
def writing_version(engine: NativeEngine, facts: GraphFacts) -> Iterator[int]:
    """The generation of the files of a graph's next version, which its writer, who holds the lock,
    publishes inside. After an error nothing is left of them.

    Raises WriteError, DiskFullError.
    """
    check_work(facts.where)
    remove_work(facts.where)
    keep_version(facts)
    try:
        yield _FILES.begin(engine, facts.where, KIND, is_replacement=True)
    except BaseException:
        remove_work(facts.where)
        with contextlib.suppress(errors.EspnxError, OSError):
            if read_graph_manifest(engine, facts.where)["generation"] == facts.generation:
                keep_version(facts)
        raise


def _tidy(engine: NativeEngine, path: str | os.PathLike[str]) -> None:
    """Removes the work of a build that ended right after its graph was whole; not of one that is to
    replace this graph."""
    with contextlib.suppress(errors.EspnxError):
        if os.path.lexists(os.path.join(path, WORK)) and check_target(path, KIND, replace=True):
            with DirectoryLock(path):
                published, working = (
                    read_graph_manifest(engine, os.fspath(path))["generation"],
                    job_of(path).get("generation"),
                )
                if not isinstance(working, int) or working <= published:
                    remove_work(path)


def connect_and_choose_entries(
    graph: Vamana, n: int, n_entries: int, seed: int
) -> tuple[int, np.ndarray]:
    """Makes every node one that a walk can come to.

    Returns:
        How many nodes were given edges for that; the medoid and at most `n_entries` - 1 other
        nodes, int64, from each of which every other node can be come to.
    """
    if n == 0:
        return 0, np.empty(0, np.int64)
    repaired = graph.connect(torch.tensor([graph.medoid]))
    chosen = np.random.default_rng(seed).permutation(n)[: n_entries - 1]
    # Every other node is reached from the medoid, so from a node that leads there.
    leads = graph.leading_to(graph.medoid).numpy()
    chosen = chosen[leads[chosen] != 0]
    return repaired, np.unique(np.append(chosen, graph.medoid))


def node_pages(
    graph: WholeGraph,
    row_of: np.ndarray,
    node_of: np.ndarray,
    labels: np.ndarray,
    salt: int,
    progress: Progress,
) -> Iterator[np.ndarray]:
    """uint8: the pages of a graph, some at a time. `row_of`, `labels`: see `graph_files`;
    `node_of`: the numbers of the rows' nodes, uint32 [n]."""
    layout, coding = graph.layout, VectorCoding(graph.layout.format, graph.disk_codebook)
    at_once = max(1, _BLOCK_BYTES // layout.page_bytes)
    for first in range(0, layout.n_pages, at_once):
        count = min(at_once, layout.n_pages - first)
        chosen = row_of[first * layout.nodes_per_page : (first + count) * layout.nodes_per_page]
        nodes = np.zeros(count * layout.nodes_per_page, layout.node_dtype)
        here = nodes[: len(chosen)]
        here["vector"] = coding.encode(graph.rows[chosen])
        here["row"], here["row_high"] = labels[chosen] & 0xFFFFFFFF, labels[chosen] >> 32
        here["n_neighbours"] = graph.counts[chosen]
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
    return _with_headers(
        nodes.view(np.uint8).reshape(count, layout.nodes_per_page * layout.node_bytes),
        layout.page_bytes,
        first,
        salt,
    )


def code_pages(codes: np.ndarray, layout: PageLayout, salt: int, first: int = 0) -> np.ndarray:
    """uint8: pages of the codes of successive nodes, of which the first begins page `first`."""
    count = -(-len(codes) // layout.codes_per_page)
    whole = np.zeros((count * layout.codes_per_page, layout.code_bytes), np.uint8)
    whole[: len(codes)] = codes
    return _with_headers(
        whole.reshape(count, layout.codes_per_page * layout.code_bytes),
        CODE_PAGE_BYTES,
        first,
        code_salt(salt),
    )


def _with_headers(content: np.ndarray, page_bytes: int, first: int, salt: int) -> np.ndarray:
    """uint8: pages of these bytes, [m, at most what fits], and zeros; the first is page `first`."""
    count = len(content)
    pages = np.zeros((count, page_bytes), np.uint8)
    header = np.zeros(count, HEADER)
    header["page"], header["salt"] = np.arange(first, first + count), salt
    pages[:, HEADER.itemsize : HEADER.itemsize + content.shape[1]] = content
    pages[:, : HEADER.itemsize] = header.view(np.uint8).reshape(count, HEADER.itemsize)
    begin = torch.arange(count) * page_bytes + 4
    sums = crc32c_ranges(
        torch.from_numpy(pages.reshape(-1)), begin, torch.full_like(begin, page_bytes - 4)
    ).numpy()
    pages[:, :4] = sums.astype("<u4").view(np.uint8).reshape(count, 4)
    return pages.reshape(-1)
