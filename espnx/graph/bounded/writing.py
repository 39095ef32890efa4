"""Writes the graph whose edges were merged: pages of nodes, codes and codebooks, a block at a
time."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ...storage import NativeEngine
from ...storage.files import crc32c
from ..codes.codebook import Codebook
from ..codes.coding import VectorCoding
from ..format import (
    CODEBOOK,
    CODES,
    DISK_CODEBOOK,
    ENTRIES,
    NODES,
    ROWS,
    GraphFacts,
    GraphShare,
    in_directory,
)
from ..layout import PageLayout
from ..write import GraphFiles, Progress, code_pages, pages_of, publish
from .codes import CodeReader
from .merge import EdgesFile, Piece
from .parts import BuiltParts
from .work import read_array

_PAGE_BLOCK_BYTES = 2 << 20


@dataclass(frozen=True, eq=False)
class MergedGraph:
    """What is written.

    Attributes:
        built: vectors and codes of its nodes.
        node_of: uint32 [n], by row.
        entries: nodes at which searches begin, int64, growing.
        book: of the codes. coding: of vectors in nodes.
        options: that it was built with, for its manifest.
    """

    built: BuiltParts
    node_of: np.ndarray
    edges: EdgesFile
    entries: np.ndarray
    book: Codebook
    coding: VectorCoding
    metric: str
    options: Mapping[str, Any]


def write_graph(
    engine: NativeEngine,
    path: str,
    graph: MergedGraph,
    cache_bytes: int,
    progress: Progress,
    *,
    generation: int,
    share: GraphShare | None,
) -> GraphFacts:
    """Publishes a graph in a directory that nobody else writes to.

    Args:
        cache_bytes: of codes that may be held.
        progress: is told of pages.
        generation, share: of the files.

    Raises:
        WriteError, DiskFullError, ReadError: of the directory.
    """
    layout, entries = graph.built.layout, graph.entries
    salt, disk_book = secrets.randbits(64), graph.coding.book
    codes = CodeReader(engine, graph.edges.path.parent / "codes", layout, cache_bytes)
    sum_of_codes = _write_codes(graph.built, codes.path)
    codes.open()
    codes.load(entries)
    entry_codes = codes.get(entries)
    whole = {
        CODEBOOK: graph.book.packed(),
        ENTRIES: np.concatenate(
            [entries.astype("<u4").view(np.uint8).ravel(), entry_codes.ravel()]
        ),
    }
    if disk_book is not None:
        whole[DISK_CODEBOOK] = disk_book.packed()
    sums = {
        name: crc32c(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        for name, values in whole.items()
    }
    contents: dict[str, Iterable[np.ndarray]] = {
        NODES: _pages(graph, codes, salt, progress),
        ROWS: [graph.node_of],
    }
    contents |= {name: [values] for name, values in whole.items()}
    if layout.codes_in != "inline":
        contents[CODES] = _code_blocks(layout, codes.path, salt)
    if layout.codes_in == "memory":
        sums[CODES] = sum_of_codes
    facts = GraphFacts(
        path,
        in_directory(path, generation, layout, len(entries), graph.book, disk_book),
        layout,
        graph.metric,
        salt,
        graph.book,
        entries,
        entry_codes,
        sums,
        graph.options,
        disk_codebook=disk_book,
        generation=generation,
        share=share,
    )
    try:
        return publish(engine, path, GraphFiles(facts, contents))
    finally:
        codes.close()


def _write_codes(built: BuiltParts, path: Path) -> int:
    """Writes the codes of all nodes, and returns their checksum."""
    found = 0
    with path.open("wb") as file:
        for piece in built.pieces:
            for block in piece.blocks():
                part = built.codes(block).reshape(-1)
                found = crc32c(part, found)
                file.write(part.data)
    return found


def _code_blocks(layout: PageLayout, path: Path, salt: int) -> Iterator[np.ndarray]:
    rows = (
        max(1, _PAGE_BLOCK_BYTES // (layout.codes_per_page * layout.code_bytes))
        * layout.codes_per_page
    )
    for first in range(0, layout.n, rows):
        part = read_array(path, np.uint8, layout.code_bytes, first, min(rows, layout.n - first))
        yield (
            code_pages(part, layout, salt, first // layout.codes_per_page)
            if layout.paged_codes
            else part
        )


def _pages(
    graph: MergedGraph, codes: CodeReader, salt: int, progress: Progress
) -> Iterator[np.ndarray]:
    layout = graph.built.layout
    for nodes, first in _nodes(graph, codes):
        yield pages_of(nodes, layout, first // layout.nodes_per_page, salt)
        progress("pages", min(first + len(nodes), layout.n), layout.n)


def _nodes(graph: MergedGraph, codes: CodeReader) -> Iterator[tuple[np.ndarray, int]]:
    """(nodes of whole pages, number of the first)"""
    layout, edges = graph.built.layout, graph.edges
    at_once = max(1, _PAGE_BLOCK_BYTES // layout.page_bytes) * layout.nodes_per_page
    ready = np.zeros(at_once, layout.node_dtype)
    filled = first = 0
    pieces = (each.blocks(codes.rows_at_once) for each in graph.built.pieces)
    for piece in chain.from_iterable(pieces):
        if layout.inline_pq:
            codes.load(
                edges.neighbours_of(piece.first_node, piece.end - piece.begin, layout.inline_pq)
            )
        begin = piece.begin
        while begin < piece.end:
            end = min(piece.end, begin + at_once - filled)
            block = Piece(piece.part, begin, end, piece.first_node + begin - piece.begin)
            _fill(ready[filled : filled + end - begin], block, graph, codes)
            filled, begin = filled + end - begin, end
            if filled == at_once:
                yield ready, first
                ready, filled, first = np.zeros(at_once, layout.node_dtype), 0, first + at_once
    if filled:
        yield ready[: -(-filled // layout.nodes_per_page) * layout.nodes_per_page], first


def _fill(nodes: np.ndarray, block: Piece, graph: MergedGraph, codes: CodeReader) -> None:
    built, edges = graph.built, graph.edges
    layout = built.layout
    counts = edges.counts[block.first_node : block.first_node + len(nodes)]
    near = edges.rows(block.first_node, len(nodes))
    there = np.arange(layout.max_degree) < counts[:, None]
    nodes["vector"] = graph.coding.encode(built.vectors(block))
    nodes["row"], nodes["n_neighbours"] = built.rows(block), counts
    nodes["neighbours"] = np.where(there, near, 0)
    if inline := layout.inline_pq:
        nodes["codes"][there[:, :inline]] = codes.get(near[:, :inline][there[:, :inline]])
