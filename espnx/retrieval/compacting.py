"""Writes the live records of a store as one part in list order. Lists, codes, vectors and texts are copied, never made anew.

Lists that hold nothing any more are left out, and the number to scan is measured again: both would be of the documents that are gone.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .. import errors
from ..storage.native import load_native
from ..storage.stream import make_directory
from . import generations
from .budget import MemoryBudget
from .build import Progress, segment_bytes
from .contents import Contents, contents_of, parse_contents
from .copying import Live, Source
from .draft import place_of_base
from .first_stage import IvfFirstStage, load_faiss
from .lists import CENTROIDS, Filling, empty_index, runs_of
from .part import PartEntry
from .part_file import FileWriter
from .part_writer import PartContents, finish_part
from .probing import CANDIDATES, RECALL, distinct_sample, measure
from .publish import publish
from .segments import SegmentWriter, pieces
from .store import Version


def write_compacted(version: Version, budget: MemoryBudget, progress: Progress) -> Contents:
    """Writes and publishes the next version: all that is alive as a base. Holds the codes twice, 60 bytes a document, and a few MB of
    records at a time; a few of the store's files are open at a time, however many it has."""
    contents = contents_of(version.manifest)
    contents["generation"] = contents["base_generation"] = generations.following(version.path, version.contents.generation)
    contents["deleted"], contents["parts"] = None, []
    contents["records"]["tokens"] = 0
    if version.count:
        entry, lists = _write_base(version, contents["generation"], budget, progress)
        contents["first_stage"] |= lists
        contents["parts"], contents["records"]["tokens"] = [entry.fields()], entry.tokens
    else:
        contents["first_stage"] |= {"nlist": 0, "nprobe": 0, "steps": {}}
    for root in (version.path, *version.manifest["directories"]):
        version.engine.sync_directory(root)
    publish(version.engine, version.path, contents, version.manifest)
    return parse_contents(contents, version.path)


def _write_base(version: Version, generation: int, budget: MemoryBudget, progress: Progress) -> tuple[PartEntry, dict[str, Any]]:
    """Its entry, and what the manifest is to say of its lists."""
    directories = version.manifest["directories"]
    place, path = place_of_base(version.path, version.contents.store_id, generation)
    make_directory(os.path.dirname(path))
    roots = generations.data_directories(version.path, directories, place.store_id, generation)
    _check_disk(version, roots)
    limit_bytes = budget.record_bytes()
    live = Live.of(version.parts, np.empty(0, np.uint8) if version.deleted is None else version.deleted)
    with Source(version, version.parts) as source:
        limits = {"full": segment_bytes(source.tiers["full"].size_bytes, len(directories)), "compact": 1 << 62}
        writers = {
            name: SegmentWriter(
                version.engine, version.path, roots, tier.schema, place.store_id, generation, limits[name], [], salt=place.salt,
                name="segment" if name == "full" else name,
            )
            for name, tier in source.tiers.items()
        }  # fmt: skip
        _copy_records(live, source, writers, limit_bytes, progress)
        kept, sizes = runs_of(live.lists)
        codes = source.codes(live.numbers)
        model = {**version.model, CENTROIDS: version.model[CENTROIDS][kept]}
        lists = (np.arange(len(kept), dtype=np.int32), sizes)
        contents = PartContents(source.rows(live.numbers), lists, [codes], model)
        file = FileWriter(version.engine, path)
        layouts = {name: writer.layout for name, writer in writers.items()}
        entry = finish_part(file, place, layouts, contents, {name: writer.segments for name, writer in writers.items()})
    stage = version.manifest["first_stage"]
    index = empty_index(model, stage["code"], stage["dim"])
    Filling(index, sizes).add(*lists, [codes.reshape(-1)], 0)
    del codes
    sample = distinct_sample(index.ntotal, index.d, lambda chosen: _vectors(index, sizes, chosen))
    nprobe, steps = measure(IvfFirstStage(index), sample, min(CANDIDATES, index.ntotal), RECALL)
    return entry, {"nlist": index.nlist, "nprobe": nprobe, "steps": steps}


def _copy_records(live: Live, source: Source, writers: dict[str, SegmentWriter], limit_bytes: int, progress: Progress) -> None:
    full = writers["full"]
    try:
        for run in pieces(iter([live.numbers]), lambda n: full.layout.schema.sizes(source.n_tokens[n]), limit_bytes, full.room):
            for name, writer in writers.items():
                writer.append(source.n_tokens[run], source.records(name, run))
            progress("write", full.count, len(live.numbers))
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
        free = load_native().free_bytes(root)
        if free < need and os.statvfs(root).f_blocks:
            raise errors.DiskFullError("the compacted records will not fit", needed_bytes=need, free_bytes=free, path=root)


def _vectors(index: Any, sizes: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """First-stage vectors of records (in the order of lists), as their codes have them: float32 [m, dim]."""
    ends = np.cumsum(sizes)
    vectors = np.empty((len(chosen), index.d), dtype=np.float32)
    for row, number in zip(vectors, chosen.tolist(), strict=True):
        in_list = int(np.searchsorted(ends, number, side="right"))
        offset = number - int(ends[in_list - 1] if in_list else 0)
        index.reconstruct_from_offset(in_list, offset, load_faiss().swig_ptr(row))
    return vectors
