"""Writes the live records of a store as one part in list order. Lists, codes, vectors and texts are copied, never made anew.

Lists that hold nothing any more are left out, and the number to scan is measured again: both would be of the documents that are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import errors
from ..storage import NativeEngine
from ..storage.native import load_native
from ..storage.stream import StreamWriter, make_directory
from . import generations
from .budget import MemoryBudget
from .build import Progress, segment_bytes
from .encoding import Fill
from .first_stage import IvfFirstStage, load_faiss
from .probing import CANDIDATES, RECALL, distinct_sample, measure
from .publish import Written
from .record import HEADER_BYTES
from .segments import SegmentWriter, pieces
from .store import FIRST_STAGE_NAME, TEXTS_NAME, EmbeddingStore, store_salt
from .texts import TextWriter
from .tier import Tier


def write_compacted(
    engine: NativeEngine, store: EmbeddingStore, generation: int, directories: list[str], memory: int | str | None, progress: Progress
) -> tuple[Written, dict[str, Any]]:
    """Everything of the new part but its metadata, and what the manifest is to say of its lists. Holds the lists and 16 bytes a document,
    and a few MB of records at a time."""
    work_bytes = MemoryBudget(memory).left()
    directory = os.path.join(store.path, generations.name(generation))
    make_directory(directory)
    tiers = {"full": store.full} | ({"compact": store.compact} if store.compact is not None else {})
    roots = generations.data_directories(store.path, directories, store.manifest["store_id"], generation)
    _check_disk(store, roots, tiers)
    index, order = _live_lists(store)
    with StreamWriter(engine, os.path.join(directory, FIRST_STAGE_NAME)) as writer:
        faiss = load_faiss()
        faiss.write_index(index, faiss.PyCallbackIOWriter(writer.write))
        writer.sync()
    salt = store_salt(store.manifest["store_id"], generation)
    limits = {"full": segment_bytes(store.full.size_bytes, len(directories)), "compact": 1 << 62}
    writers = {
        name: SegmentWriter(
            engine, store.path, roots, tier.schema, store.manifest["store_id"], generation, limits[name], [], salt=salt,
            name="segment" if name == "full" else name,
        )
        for name, tier in tiers.items()
    }  # fmt: skip
    texts = TextWriter(os.path.join(directory, TEXTS_NAME), salt)
    limit_bytes = min(32 << 20, max(1 << 20, work_bytes // 8))
    try:
        for run in pieces(iter([order]), lambda n: store.full.schema.sizes(store.n_tokens[n]), limit_bytes, writers["full"].room):
            _copy(store, run, tiers, writers, texts)
            progress("write", writers["full"].count, store.count)
            if writers["full"].full():
                for each in writers.values():
                    each.finish_segment()
        for each in writers.values():
            each.finish_segment()
        texts.commit()
    except BaseException:
        for each in writers.values():
            each.abandon()
        raise
    finally:
        texts.close()
    kept = ("projection", "full.", "compact.")
    extra = {name: tensor for name, tensor in store.parts[0].meta.items() if name.startswith(kept)}
    sample = distinct_sample(index.ntotal, index.d, lambda chosen: _vectors(index, chosen))
    nprobe, steps = measure(IvfFirstStage(index), sample, min(CANDIDATES, index.ntotal), RECALL)
    lists = {"nlist": index.nlist, "nprobe": nprobe, "steps": steps}
    return Written(generation, 0, writers, (writer.size_bytes, writer.crc32c), extra), lists


def _check_disk(store: EmbeddingStore, roots: list[str], tiers: dict[str, Tier]) -> None:
    need = sum(tier.size_bytes for tier in tiers.values()) // len(roots)
    for root in (os.path.join(store.path, root) for root in roots):
        free = load_native().free_bytes(root)
        if free < need and os.statvfs(root).f_blocks:
            raise errors.DiskFullError("the compacted records will not fit", needed_bytes=need, free_bytes=free, path=root)


def _live_lists(store: EmbeddingStore) -> tuple[Any, np.ndarray]:
    """The store's index with the live entries of each list, renumbered, and the old record numbers in the new order."""
    faiss = load_faiss()
    old = store.load_index()
    order: list[np.ndarray] = []
    entries: list[tuple[int, np.ndarray]] = []
    for number, ids, codes in _entries(faiss, old):
        alive = np.ones(len(ids), dtype=bool)
        if store.deleted is not None:
            alive = (store.deleted[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 == 0
        kept = np.flatnonzero(alive)
        kept = kept[np.argsort(ids[kept], kind="stable")]
        if len(kept):
            order.append(ids[kept])
            entries.append((number, np.ascontiguousarray(codes[kept])))
    return _with_lists(old, entries), np.concatenate(order) if order else np.empty(0, np.int64)


def _with_lists(old: Any, entries: list[tuple[int, np.ndarray]]) -> Any:
    """A copy of an index that has these lists alone: (number of the list, codes of its records). Records are numbered in this order."""
    faiss = load_faiss()
    new, kept = faiss.clone_index(old), [number for number, _ in entries]
    new.reset()
    if len(kept) < old.nlist:
        centroids = old.quantizer.reconstruct_n(0, old.nlist)[kept]
        new.quantizer.reset()
        new.quantizer.add(centroids)
        new.nlist = len(kept)
        lists = faiss.ArrayInvertedLists(new.nlist, new.code_size)
        lists.this.disown()  # the index frees them
        new.replace_invlists(lists, True)
    for number, (_, codes) in enumerate(entries):
        ids = np.arange(new.ntotal, new.ntotal + len(codes), dtype=np.int64)
        new.invlists.add_entries(number, len(codes), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
        new.ntotal += len(codes)
    return new


def _vectors(index: Any, chosen: np.ndarray) -> np.ndarray:
    """First-stage vectors of records (in the order of lists), as their codes have them: float32 [m, dim]."""
    ends = np.cumsum([index.invlists.list_size(number) for number in range(index.nlist)])
    vectors = np.empty((len(chosen), index.d), dtype=np.float32)
    for row, number in zip(vectors, chosen.tolist(), strict=True):
        in_list = int(np.searchsorted(ends, number, side="right"))
        offset = number - int(ends[in_list - 1] if in_list else 0)
        index.reconstruct_from_offset(in_list, offset, load_faiss().swig_ptr(row))
    return vectors


def _entries(faiss: Any, index: Any) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(list, record numbers int64 [m], codes uint8 [m, code size]) of each list that is not empty."""
    lists = index.invlists
    for number in range(index.nlist):
        size = lists.list_size(number)
        if size:
            ids = faiss.rev_swig_ptr(lists.get_ids(number), size).copy()
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * index.code_size).reshape(size, -1).copy()
            yield number, ids, codes


def _copy(store: EmbeddingStore, run: np.ndarray, tiers: dict[str, Tier], writers: dict[str, SegmentWriter], texts: TextWriter) -> None:
    first = writers["full"].count
    texts.add([(first + i, identifier, text) for i, (identifier, text) in enumerate(store.texts.get(run.tolist()))])
    for name, tier in tiers.items():
        writers[name].append(store.n_tokens[run], _raw(tier, run))


def _raw(tier: Tier, run: np.ndarray) -> Fill:
    """Reads records now; returns the function that copies their vectors into a block."""
    future = tier.read(run, gap_bytes=64 << 10)
    memory, positions = future.wait(), future.position_bytes
    tier.check(memory, positions, run)
    source, schema = memory.numpy(), tier.schema
    used = schema.fixed_bytes - HEADER_BYTES + tier.n_tokens[run].astype(np.int64) * schema.row_bytes

    def fill(block: np.ndarray, offsets: np.ndarray) -> None:
        for begin, at, size in zip((positions + HEADER_BYTES).tolist(), (offsets + HEADER_BYTES).tolist(), used.tolist(), strict=True):
            block[at : at + size] = source[begin : begin + size]

    return fill
