"""Writes the live records of a store as one part in list order. Lists, codes, vectors and texts are copied, never made anew."""

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
from .first_stage import load_faiss
from .publish import Written
from .record import HEADER_BYTES
from .segments import SegmentWriter, pieces
from .store import FIRST_STAGE_NAME, TEXTS_NAME, EmbeddingStore, store_salt
from .texts import TextWriter
from .tier import Tier


def write_compacted(
    engine: NativeEngine, store: EmbeddingStore, generation: int, directories: list[str], memory: int | str, progress: Progress
) -> Written:
    """Everything of the new part but its metadata. Holds the lists and 16 bytes a document, and a few MB of records at a time."""
    work_bytes = MemoryBudget(memory).left()
    state = {"store_id": store.manifest["store_id"], "generation": generation}
    directory = os.path.join(store.path, generations.name(generation))
    make_directory(directory)
    tiers = {"full": store.full} | ({"compact": store.compact} if store.compact is not None else {})
    roots = generations.data_directories(store.path, directories, state)
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
    return Written(generation, 0, writers, (writer.size_bytes, writer.crc32c), extra)


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
    new = faiss.clone_index(old)
    new.reset()
    order: list[np.ndarray] = []
    count = 0
    for number, ids, codes in _entries(faiss, old):
        alive = np.ones(len(ids), dtype=bool)
        if store.deleted is not None:
            alive = (store.deleted[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 == 0
        kept = np.flatnonzero(alive)
        kept = kept[np.argsort(ids[kept], kind="stable")]
        renumbered = np.arange(count, count + len(kept), dtype=np.int64)
        part = np.ascontiguousarray(codes[kept])
        if len(kept):
            new.invlists.add_entries(number, len(kept), faiss.swig_ptr(renumbered), faiss.swig_ptr(part))
        order.append(ids[kept])
        count += len(kept)
    new.ntotal = count
    return new, np.concatenate(order) if order else np.empty(0, np.int64)


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
