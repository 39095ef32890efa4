"""Pages of a graph, of nodes and of codes: read, checked, and never believed. The written
specification is docs/graph-format.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ... import errors
from ...ops.crc32c import crc32c_ranges
from ...storage import FileHandle, NativeEngine, Plan
from ...storage.files import read_region
from ..format import CODES, GraphFacts
from ..layout import CODE_PAGE_BYTES, HEADER, code_salt, rows_of
from .directory import read_whole

_REBUILD = "restore the graph from a copy, or build it again"


def open_pages(engine: NativeEngine, facts: GraphFacts) -> list[FileHandle | None]:
    """A graph's files of pages, as `GraphFacts.page_files`; None: in a directory that is lost."""
    return [
        engine.open(facts.pinned(each.path)) if each.path else None for each in facts.page_files
    ]


def read_pages(
    engine: NativeEngine,
    files: Sequence[FileHandle | None],
    facts: GraphFacts,
    pages: np.ndarray,
    deadline_s: float,
) -> np.ndarray:
    """Nodes of some pages, of `open_pages`; see `parse_pages`. Raises as `GraphIndex.search`, and
    FileMissingError for pages in a directory that is lost."""
    layout = facts.layout
    facts.check_there(pages)
    which, inside = facts.parts.in_files(pages)
    handles = [files[each] for each in which.tolist()]
    begins = np.array([each.offset_bytes for each in facts.page_files], np.int64)[which]
    future = engine.read(
        Plan.of(
            [each for each in handles if each is not None],
            (begins + inside * layout.page_bytes).tolist(),
            [layout.page_bytes] * len(pages),
        ),
        deadline_s=deadline_s,
    )
    future.wait()
    return parse_pages(facts, pages, future.memory, future.position_bytes.numpy())


def read_codes(engine: NativeEngine, facts: GraphFacts) -> np.ndarray:
    """uint8 [n, code_bytes], by node, of a graph whose codes are not inline. Raises as
    `read_graph`."""
    layout = facts.layout
    if not layout.paged_codes:
        data = read_whole(engine, facts.regions, CODES, facts.sums)
        return np.frombuffer(data, np.uint8).reshape(layout.n, layout.code_bytes)
    region = replace(facts.regions[CODES], path=facts.open_path(CODES))
    memory = torch.from_numpy(read_region(engine, region))
    pages = np.arange(layout.codes_bytes // CODE_PAGE_BYTES)
    return parse_code_pages(facts, pages, memory, pages * CODE_PAGE_BYTES).reshape(
        -1, layout.code_bytes
    )[: layout.n]


def parse_code_pages(
    facts: GraphFacts, pages: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray
) -> np.ndarray:
    """uint8 [m, codes_per_page, code_bytes] of pages of codes that were read. See `parse_pages`."""
    layout = facts.layout
    salts = np.full(len(pages), code_salt(facts.salt), np.uint64)
    region = facts.regions[CODES]

    def place_of(page: int) -> tuple[str, int]:
        return region.path, region.offset_bytes + page * CODE_PAGE_BYTES

    found = _checked_pages(place_of, CODE_PAGE_BYTES, salts, pages, pages, memory, position_bytes)
    codes = found[:, HEADER.itemsize : HEADER.itemsize + layout.codes_per_page * layout.code_bytes]
    return codes.reshape(len(pages), layout.codes_per_page, layout.code_bytes)


def _checked_pages(
    place_of: Callable[[int], tuple[str, int]],
    page_bytes: int,
    salts: np.ndarray,
    pages: np.ndarray,
    numbers: np.ndarray,
    memory: torch.Tensor,
    position_bytes: np.ndarray,
) -> np.ndarray:
    """uint8 [m, page_bytes], whose headers are right: of each the salt, and its number.
    `place_of`: the file of a page, and the byte at which it begins there."""
    begin = torch.from_numpy(np.ascontiguousarray(position_bytes, dtype=np.int64))
    if not len(begin):
        return np.empty((0, page_bytes), np.uint8)
    found = sliding_window_view(memory.numpy(), page_bytes)[begin.numpy()]
    header = np.ascontiguousarray(found[:, : HEADER.itemsize]).view(HEADER).ravel()
    sums = crc32c_ranges(memory, begin + 4, torch.full_like(begin, page_bytes - 4)).numpy()
    for i in np.flatnonzero(sums != header["crc32c"])[:1]:
        path, offset_bytes = place_of(int(pages[i]))
        raise errors.ChecksumError(
            f"page {pages[i]} of a graph is damaged",
            path=path,
            offset_bytes=offset_bytes,
            got=f"CRC32C {sums[i]:08x}",
            expected=f"{header['crc32c'][i]:08x}",
            fix=_REBUILD,
        )
    for i in np.flatnonzero((header["salt"] != salts) | (header["page"] != numbers))[:1]:
        raise errors.StaleDataError(
            f"page {pages[i]} of a graph",
            path=place_of(int(pages[i]))[0],
            got=f"page {header['page'][i]}, salt {header['salt'][i]:016x}",
            expected=f"page {numbers[i]}, salt {salts[i]:016x}",
            fix=_REBUILD,
        )
    return found


def parse_pages(
    facts: GraphFacts, pages: np.ndarray, memory: torch.Tensor, position_bytes: np.ndarray
) -> np.ndarray:
    """Nodes of some pages.

    Args:
        pages: int64 [m]: their numbers.
        memory: uint8, what was read.
        position_bytes: int64 [m]: where each begins in it.

    Returns:
        `PageLayout.node_dtype` [m, nodes_per_page]; places of the last page that have no node are
        zeros.

    Raises:
        ChecksumError: damaged. StaleDataError: of another graph, or another page of this one.
            FormatError: a node that cannot be.
    """
    layout, parts = facts.layout, facts.parts
    part = parts.of_pages(pages)
    found = _checked_pages(
        facts.place_of_page,
        layout.page_bytes,
        parts.salts[part],
        pages,
        pages - parts.first_page[part],
        memory,
        position_bytes,
    )
    nodes = np.ascontiguousarray(
        found[:, HEADER.itemsize : HEADER.itemsize + layout.nodes_per_page * layout.node_bytes]
    )
    nodes = nodes.view(layout.node_dtype).reshape(len(pages), layout.nodes_per_page)
    wrong = (
        (nodes["n_neighbours"] > layout.max_degree)
        | (rows_of(nodes) >= facts.n_rows)
        | (nodes["neighbours"] >= parts.nodes[part, None, None]).any(axis=-1)
    )
    if wrong.any():
        page = int(pages[np.nonzero(wrong)[0][0]])
        raise errors.FormatError(
            f"a node of page {page} of a graph",
            path=facts.place_of_page(page)[0],
            got="numbers out of range",
            fix=_REBUILD,
        )
    return nodes
