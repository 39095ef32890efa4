"""Writes what was added to a graph of clusters and deleted from it into pages: those of the
clusters that have changed go into a new file, the others stay where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...storage import NativeEngine, Plan
from ...storage.files import crc32c
from ..codes.codebook import Codebook
from ..filters import places_at
from ..format import CENTROIDS, CLUSTERS, CODEBOOK, ENTRIES, ROWS, GraphFacts, in_directory
from ..global_index.rows import row_places
from ..parts import NO_COPY, Clusters, PageFile
from ..search.version import GraphVersion
from ..updates.pending import Pending
from ..write import GraphFiles, Progress, publish, write_pieces
from .measuring import measured_if
from .nodes import DEADLINE_S
from .pieces import ClusterPieces, Piece

#: Files of pages in a directory, at most.
FILES_MOST = 8
# Of a file less of which is needed, all that is needed goes into the new one.
_NEEDED_LEAST = 0.5


def merge_clusters(
    engine: NativeEngine,
    pages: GraphVersion,
    pending: Pending,
    folder: Path,
    memory_bytes: int,
    generation: int,
    measure: str,
    progress: Progress,
) -> GraphFacts:
    """Publishes the next version of a graph of clusters. `folder`: for files meanwhile. Raises as
    `GraphWriter.merge`."""
    return _Clusters(engine, pages, pending, folder, memory_bytes, progress).publish(
        generation, measure
    )


class _Clusters:
    def __init__(
        self,
        engine: NativeEngine,
        pages: GraphVersion,
        pending: Pending,
        folder: Path,
        memory_bytes: int,
        progress: Progress,
    ):
        facts = pages.facts
        if facts.clusters is None:
            raise ValueError("a graph without clusters")
        self._engine, self._facts, self._pending = engine, facts, pending
        self._old, self._parts, self._layout = facts.clusters, facts.parts, facts.layout
        self._progress = progress
        self._pieces = ClusterPieces(engine, pages, pending, facts.clusters, folder, memory_bytes)

    def publish(self, generation: int, measure: str) -> GraphFacts:
        """Everything, in order."""
        book = self._pieces.book()
        pieces = self._pieces.make(book)
        page_files = self._placed(pieces, generation)
        return publish(
            self._engine,
            self._facts.where,
            self._written(pieces, page_files, generation, book),
            lambda facts: measured_if(self._engine, facts, measure, self._progress),
        )

    def _placed(self, pieces: list[Piece], generation: int) -> list[PageFile]:
        """The files of pages; of each cluster, where it goes is set."""
        per_page = self._layout.nodes_per_page
        pages = np.array([-(-each.n // per_page) for each in pieces])
        stays = np.array([each.make is None for each in pieces])
        files = np.array(
            [self._old.files[each.old] if each.make is None else -1 for each in pieces]
        )
        kept = chosen_files(self._old.page_files, pages, files)
        found = [self._old.page_files[each] for each in kept]
        number_of = {old: new for new, old in enumerate(kept)}
        for piece, stay, old in zip(pieces, stays.tolist(), files.tolist(), strict=True):
            if stay and old in number_of:
                piece.file = number_of[old]
                piece.file_page = int(self._old.file_pages[piece.old])
                continue
            if stay:
                piece.make = lambda made: self._pieces.kept(made.old)
            piece.file = -1
        for directory in sorted({each.directory for each in pieces if each.file < 0}):
            at = 0
            for piece, count in zip(pieces, pages.tolist(), strict=True):
                if piece.file < 0 and piece.directory == directory:
                    piece.file, piece.file_page = len(found), at
                    at += count
            found.append(PageFile(directory, generation, at))
        return found

    def _written(
        self, pieces: list[Piece], page_files: list[PageFile], generation: int, book: Codebook
    ) -> GraphFiles:
        """Writes the new files of pages; the others are still to be written."""
        facts, layout = self._facts, replace(self._layout, n=self._pieces.n)
        paths = [
            each.path
            for each in replace(
                facts, clusters=replace(self._old, page_files=page_files)
            ).page_files
        ]
        done, total = 0, sum(each.n for each in pieces if each.make is not None)
        for number, file in enumerate(page_files):
            if file.generation == generation:
                here = [each for each in pieces if each.file == number]
                write_pieces(self._engine, paths[number], self._pages(here, done, total))
                done += sum(each.n for each in here)
        entries = [self._entries_of(each) for each in pieces]
        numbers = np.concatenate([each[0] for each in entries]).astype(np.int64)
        codes = np.concatenate([each[1] for each in entries])
        clusters = Clusters(
            np.stack([each.centroid for each in pieces]).astype(np.float32),
            np.array([each.n for each in pieces], np.int64),
            np.array([len(each[0]) for each in entries], np.int64),
            2 if sum(each.n for each in pieces) > self._pieces.n else 1,
            np.array([each.file for each in pieces], np.int64),
            np.array([each.file_page for each in pieces], np.int64),
            np.array([each.salt for each in pieces], np.uint64),
            page_files,
        )
        whole = {
            CODEBOOK: book.packed(),
            ENTRIES: np.concatenate([numbers.astype("<u4").view(np.uint8), codes.ravel()]),
            CLUSTERS: clusters.table(),
            CENTROIDS: clusters.centroids,
        }
        id_end = self._pending.id_end
        now = replace(
            facts,
            regions=in_directory(
                facts.where, generation, layout, len(numbers), book, None, clusters, id_end
            ),
            layout=layout,
            clusters=clusters,
            codebook=book,
            entries=numbers,
            entry_codes=codes,
            sums={
                name: crc32c(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
                for name, values in whole.items()
            },
            generation=generation,
            id_end=id_end,
            unmeasured=facts.unmeasured + len(self._pieces.ids) + len(self._pending.dead),
            built_recall=facts.built_recall or facts.recall,
            pins={},
        )
        contents: dict[str, Iterable[np.ndarray]] = {ROWS: self._places(pieces, now)}
        contents |= {name: [values] for name, values in whole.items()}
        return GraphFiles(now, contents)

    def _pages(self, pieces: list[Piece], done: int, total: int) -> Iterator[np.ndarray]:
        for piece in pieces:
            if piece.make is not None:
                yield from piece.make(piece)
            done += piece.n
            self._progress("clusters", done, total)

    def _entries_of(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """(nodes at which searches of a cluster begin; their codes)"""
        if piece.entries is not None and piece.entry_codes is not None:
            return piece.entries, piece.entry_codes
        begin, end = self._parts.entries_begin[piece.old : piece.old + 2].tolist()
        return self._facts.entries[begin:end], self._facts.entry_codes[begin:end]

    def _places(self, pieces: list[Piece], now: GraphFacts) -> Iterator[np.ndarray]:
        """The file of rows: of clusters that stay as they are, from the one before."""
        old, per_page = self._parts, self._layout.nodes_per_page
        first = now.parts.first_page[:-1] * per_page
        moved = np.full(len(old.nodes), -1, np.int64)
        members = []
        for piece, place in zip(pieces, first.tolist(), strict=True):
            if piece.entries is None:
                moved[piece.old] = place
            elif piece.n:
                members.append(self._pieces.members_of(piece, place))
        file = self._engine.open(self._facts.open_path(ROWS))
        size = self._facts.place_bytes

        def known(begin: int, end: int) -> np.ndarray:
            count = max(0, min(end, self._facts.n_rows) - begin)
            found = np.full((end - begin, self._facts.copies), NO_COPY, np.uint64)
            if not count:
                return found
            plan = Plan.of(file, [self._facts.begin_bytes(ROWS) + size * begin], [size * count])
            future = self._engine.read(plan, deadline_s=DEADLINE_S)
            future.wait()
            at = int(future.position_bytes[0]) + size * np.arange(count)
            places = places_at(self._facts, future.memory.numpy(), at)
            there = places >= 0
            part = old.of_pages(places[there] // per_page)
            new = moved[part] + places[there] - old.first_page[part] * per_page
            stays = moved[part] >= 0
            found[:count][there] = np.where(stays, new.astype(np.uint64), np.uint64(NO_COPY))
            return found

        yield from row_places(self._pending.id_end, now.copies, members, known)
        self._engine.close_file(file)


def chosen_files(page_files: Sequence[PageFile], pages: np.ndarray, files: np.ndarray) -> list[int]:
    """Numbers of files that stay; clusters in others are copied into new ones.

    Args:
        page_files: that there are.
        pages: int64 [m]: of clusters. files: int64 [m]: which of the files each is in; -1: it is
            written anew.
    """
    stays = files >= 0
    needed = np.bincount(files[stays], pages[stays], len(page_files))
    kept = [
        number
        for number, each in enumerate(page_files)
        if needed[number] > 0 and needed[number] >= _NEEDED_LEAST * each.pages
    ]
    for directory in {each.directory for each in page_files}:
        there = [each for each in kept if page_files[each].directory == directory]
        there.sort(key=lambda each: (needed[each], each))
        for each in there[: max(0, len(there) - (FILES_MOST - 1))]:
            kept.remove(each)
    return kept
