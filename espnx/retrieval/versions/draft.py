"""The next version of a store, before it is published: parts that are there, parts that were
written, and records that go."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from ...storage.documents.ids import DocumentId
from ...storage.files import make_directory, write_file
from ...storage.levels import groups_to_merge
from ..store.manifest import DeletedEntry, Manifest
from ..store.part import GROUP_RECORDS, PART_NAME, PartEntry
from ..store.store import StoreTexts, Version, store_salt
from . import generations
from .merging import write_merged
from .part_writer import PartPlace
from .publish import publish

DELETED_NAME = "deleted.bin"


def place_of_base(path: str, store_id: str, generation: int) -> tuple[PartPlace, str]:
    """The place of the file of a base that holds everything but its records: in the store's own
    directory."""
    directory = generations.name(generation)
    inside = os.path.join(directory, PART_NAME)
    return PartPlace(
        store_id, store_salt(store_id, generation), generation, directory, inside, 0
    ), os.path.join(path, inside)


class Draft:
    """See the module. Nothing of the version that is there is touched; what is written goes to
    directories of its own.

    Attributes:
        parts: of the next version, ascending by record number.
        generation: of the next version; grows with every part that is written.
        added: documents that the new parts hold. replaced: records that this draft deletes.
        written_bytes: of the new parts' files.
    """

    def __init__(self, version: Version):
        self.version, self._engine, self._path = version, version.engine, version.path
        self.parts = list(version.parts)
        self.generation = version.manifest.generation
        self.added = self.replaced = self.merged = self.written_bytes = 0
        self._bitmap = (
            np.zeros(-(-version.manifest.end_number // 8), np.uint8)
            if version.deleted is None
            else version.deleted.copy()
        )

    def _is_alive(self, number: int) -> bool:
        return (
            number >= 8 * len(self._bitmap)
            or not int(self._bitmap[number >> 3]) >> (number & 7) & 1
        )

    def numbers(self, ids: list[DocumentId]) -> np.ndarray:
        """int64 [m]: the record of each id, -1 where the next version has none."""
        return StoreTexts(self.parts, self._is_alive).numbers(ids)

    def delete(self, numbers: np.ndarray) -> None:
        """Records that are alive, each once."""
        if len(numbers):
            grown = np.zeros(max(len(self._bitmap), int(numbers.max()) // 8 + 1), dtype=np.uint8)
            grown[: len(self._bitmap)] = self._bitmap
            np.bitwise_or.at(grown, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))
            self._bitmap = grown
            self.replaced += len(numbers)

    def place(self, first_number: int | None = None) -> tuple[PartPlace, str]:
        """The place of a new part, after all others or at `first_number`; and the path to write its
        file to."""
        self.generation = generations.following(self._path, self.generation)
        if first_number is None:
            end = self.parts[-1].end_number if self.parts else 0
            first_number = -(-end // GROUP_RECORDS) * GROUP_RECORDS
        roots = self.version.manifest.directories
        chosen = [roots[self.generation % len(roots)]] if roots else []
        directory = generations.name(self.generation)
        if not chosen:
            make_directory(os.path.join(self._path, directory))
        path = os.path.join(
            generations.data_directories(
                self._path, chosen, self.version.manifest.store_id, self.generation
            )[0],
            PART_NAME,
        )
        place = PartPlace(
            self.version.manifest.store_id,
            self.version.salt,
            self.generation,
            directory,
            path,
            first_number,
        )
        return place, os.path.join(self._path, path)

    def append(self, entry: PartEntry, limit_bytes: int) -> None:
        """Takes a new part in, and merges new ones where there are too many."""
        self.parts.append(self.version.part(entry))
        self.added += entry.count
        self.written_bytes += entry.size_bytes
        self._merge_from(max(1, len(self.version.parts)), limit_bytes)

    def settle(self, limit_bytes: int) -> None:
        """Merges parts of the version that is there with the new ones, where there are too many of
        both."""
        self._merge_from(1, limit_bytes)

    def _merge_from(self, begin: int, limit_bytes: int) -> None:
        for group in reversed(groups_to_merge([part.count for part in self.parts[begin:]])):
            self._merge(begin + group.start, begin + group.stop, limit_bytes)

    def _merge(self, start: int, stop: int, limit_bytes: int) -> None:
        """Makes one part of those from `start` to before `stop`. Its records are numbered from that
        of the first on."""
        parts, end = self.parts[start:stop], self.parts[stop - 1].end_number
        place, path = self.place(parts[0].first_number)
        entry = write_merged(
            self._engine, self.version, parts, self._bitmap, place, path, limit_bytes
        )
        self.parts[start:stop] = [] if entry is None else [self.version.part(entry)]
        self.merged += len(parts)
        self.written_bytes += 0 if entry is None else entry.size_bytes
        self._bitmap[place.first_number // 8 : -(-end // 8)] = 0  # its records are all alive
        for part in parts:
            if part not in self.version.parts:
                generations.discard_part(self._path, part.entry.path)

    def publish(self) -> Manifest:
        """Makes this the store's version, in one rename. Raises what `publish` does."""
        before = self.version.manifest
        if self.generation == before.generation:
            self.generation = generations.following(self._path, self.generation)
        n_deleted = int(np.unpackbits(self._bitmap).sum())
        manifest = replace(
            before,
            generation=self.generation,
            parts=tuple(part.entry for part in self.parts),
            deleted=self._deleted(n_deleted),
            count=sum(part.count for part in self.parts) - n_deleted,
            tokens=sum(part.entry.tokens for part in self.parts),
        )
        for root in (self._path, *before.directories):
            self._engine.sync_directory(root)
        publish(self._engine, self._path, manifest, before)
        return manifest

    def _deleted(self, n_deleted: int) -> DeletedEntry | None:
        """What the manifest says of deleted records: the bitmap that is there as far as it still
        holds, or a new one."""
        if not n_deleted:
            return None
        end, known = int(np.flatnonzero(self._bitmap)[-1] + 1) * 8, self.version.manifest.deleted
        if known is not None and self.version.deleted is not None:
            records = min(end, known.records)
            if np.array_equal(
                _bits(self._bitmap, end),
                np.r_[_bits(self.version.deleted, records), np.zeros(end - records, bool)],
            ):
                return replace(known, records=records)
        directory = generations.name(self.generation)
        path = os.path.join(directory, DELETED_NAME)
        make_directory(os.path.join(self._path, directory))
        size, crc = write_file(
            self._engine, os.path.join(self._path, path), self._bitmap[: end // 8].tobytes()
        )
        self._engine.sync_directory(os.path.join(self._path, directory))
        return DeletedEntry(
            path=path, size_bytes=size, crc32c=crc, records=min(end, self.parts[-1].end_number)
        )


def _bits(bitmap: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(bitmap, bitorder="little", count=count).astype(bool)
