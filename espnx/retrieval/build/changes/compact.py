"""Writes the live records of a store as one part, in the order that the first stage wants. Vectors,
entries of the first stage and texts are copied, never made anew.

What the first stage measured is measured again: it would be of the documents that are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .... import errors
from ....storage.files import make_directory
from ....storage.native import free_bytes
from ...first_stage.interface import Entries, FirstStage
from ...first_stage.several import and_another, entries_of_another
from ...store.manifest import Manifest
from ...store.part import Part, PartEntry
from ...store.part_file import FileWriter
from ...store.store import STAGE_PREFIX, Version, stage_model
from ...versions import generations
from ...versions.copying import Source, live_numbers, merged_order
from ...versions.draft import place_of_base
from ...versions.part_writer import PartContents, finish_part
from ...versions.publish import publish
from ...versions.segments import NO_LIMIT, SegmentWriter, pieces
from ..budget import MemoryBudget
from ..builder import Progress, segment_bytes

_TEXTS_AT_ONCE = 512


class _LiveDocuments:
    """See `Documents`: what a new first stage takes up of a store. Numbered in the order of the
    records to come; without vectors."""

    def __init__(self, version: Version, order: np.ndarray, scratch: str):
        self._texts, self._order, self.scratch = version.texts, order, scratch

    def __len__(self) -> int:
        return len(self._order)

    def texts(self, order: np.ndarray | None = None) -> Iterator[str]:
        numbers = self._order if order is None else self._order[order]
        for first in range(0, len(numbers), _TEXTS_AT_ONCE):
            yield from (
                text
                for _, text in self._texts.get(numbers[first : first + _TEXTS_AT_ONCE].tolist())
            )

    def vectors(self, rows: int) -> Iterator[np.ndarray]:
        raise errors.StateError(
            "vectors of stored documents",
            got="a first stage that wants them",
            expected="one that takes texts",
        )

    def vector_sample(self, numbers: np.ndarray) -> np.ndarray:
        raise errors.StateError(
            "vectors of stored documents",
            got="a first stage that wants them",
            expected="one that takes texts",
        )


def write_compacted(
    version: Version, budget: MemoryBudget, progress: Progress, also: FirstStage | None = None
) -> Manifest:
    """Writes and publishes the next version: all that is alive as a base. Holds what the first
    stage needs to merge its entries, 60 bytes a document, and a few MB of records at a time; a few
    of the store's files are open at a time, however many it has. `also`: a first stage of texts
    that the store is to have, and does not have."""
    before = version.manifest
    generation = generations.following(version.path, before.generation)
    stage, parts = version.first_stage.fresh(), tuple[PartEntry, ...]()
    if also is not None:
        stage = and_another(stage, also)
    if version.count:
        entry, stage = _write_base(version, generation, budget, progress, also)
        parts = (entry,)
    manifest = replace(
        before,
        generation=generation,
        base_generation=generation,
        deleted=None,
        parts=parts,
        tokens=sum(part.tokens for part in parts),
        first_stage=stage,
    )
    for root in (version.path, *before.directories):
        version.engine.sync_directory(root)
    publish(version.engine, version.path, manifest, before)
    return manifest


def _write_base(
    version: Version,
    generation: int,
    budget: MemoryBudget,
    progress: Progress,
    also: FirstStage | None,
) -> tuple[PartEntry, FirstStage]:
    """Its entry, and the first stage of all that is alive."""
    directories = version.manifest.directories
    place, path = place_of_base(version.path, version.manifest.store_id, generation)
    make_directory(os.path.dirname(path))
    roots = generations.data_directories(version.path, directories, place.store_id, generation)
    _check_disk(version, roots)
    limit_bytes = budget.record_bytes()
    deleted = np.empty(0, np.uint8) if version.deleted is None else version.deleted
    stage, entries = version.first_stage.compact(version.parts, deleted)
    order = merged_order(entries, live_numbers(version.parts, deleted))
    if also is not None:
        made = also.add(
            _LiveDocuments(version, order, os.path.dirname(path)), np.arange(len(order))
        )
        entries = entries_of_another(stage, Entries([order], entries.sections), also, made)
        stage = and_another(stage, also)
    with Source(version, version.parts) as source:
        limits = {
            "full": segment_bytes(source.tiers["full"].size_bytes, len(directories)),
            "coarse": NO_LIMIT,
        }
        writers = {
            name: SegmentWriter(
                version.engine,
                version.path,
                roots,
                tier.schema,
                place.store_id,
                generation,
                limits[name],
                [],
                salt=place.salt,
                name="segment" if name == "full" else name,
            )
            for name, tier in source.tiers.items()
        }
        _copy_records(order, source, writers, limit_bytes, progress)
        others = {
            name: array
            for name, array in version.model.items()
            if not name.startswith(STAGE_PREFIX)
        }
        contents = PartContents(
            source.rows(order), entries.sections, stage.in_place, {**others, **stage_model(stage)}
        )
        file = FileWriter(version.engine, path)
        layouts = {name: writer.layout for name, writer in writers.items()}
        entry = finish_part(
            file,
            place,
            layouts,
            contents,
            {name: writer.segments for name, writer in writers.items()},
        )
    del entries, contents, order  # the new entries are read back, not held twice
    loaded = stage.load(
        [Part(version.path, version.engine, entry, store_id=place.store_id, salt=place.salt)]
    )
    try:
        return entry, stage.tune(loaded, None)
    finally:
        loaded.close()


def _copy_records(
    order: np.ndarray,
    source: Source,
    writers: dict[str, SegmentWriter],
    limit_bytes: int,
    progress: Progress,
) -> None:
    full = writers["full"]
    try:
        for run in pieces(
            iter([order]),
            lambda n: full.layout.schema.sizes(source.n_tokens[n]),
            limit_bytes,
            full.room,
        ):
            for name, writer in writers.items():
                writer.append(source.n_tokens[run], source.records(name, run))
            progress("write", full.count, len(order))
            if full.full():
                for writer in writers.values():
                    writer.finish_segment()
        for writer in writers.values():
            writer.finish_segment()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


def _check_disk(version: Version, roots: list[str]) -> None:
    need = version.data_bytes // len(roots)
    for root in (os.path.join(version.path, root) for root in roots):
        free = free_bytes(root)
        if free < need and os.statvfs(root).f_blocks:
            raise errors.DiskFullError(
                "the compacted records will not fit", needed_bytes=need, free_bytes=free, path=root
            )
