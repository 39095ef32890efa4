"""Kept caches: an `SsdCache` that another process opens again and continues exactly (the written specification is docs/kv-format.md).

Stored rows are immutable, and space that a published state names is not used again before the next state is published. So saving means
writing what is not rows (tables, checksums, rows in memory, token ids) into a new file and renaming a manifest: whoever opens the cache
after a crash finds the last state that was saved, whole.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from .. import errors
from ..device.interface import Segment
from ..device.layout import format_of
from ..ops.crc32c import crc32c
from ..storage.manifest import write_manifest
from ..storage.parse import check_plain_file
from ..storage.stream import read_file, replace_file, write_error
from ..storage.weights_files import read_tensors
from .cache import SsdCache
from .kept_format import (
    FIX,
    MAGIC,
    SEGMENT_FIELDS,
    STATE_FILES,
    VERSION,
    KeptRows,
    KeptState,
    KeptTables,
    check_rest,
    read_kept,
    take_tables,
)  # fmt: skip
from .rows import LayerRows, Run

ROWS_NAME = "rows.bin"


def save(cache: SsdCache, directory: str, fingerprint: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Publishes the state of a cache whose data files have names.

    Args:
        directory: of the manifest: the first of the cache's directories.
        fingerprint: of the model; who opens the cache must have the same.
        tensors: more to keep (token ids).

    Raises:
        WriteError, DiskFullError: the state before stays the published one.
    """
    # A pass that failed between two layers (in the model, not here) has reached some of them and not others.
    pairs = [[rows.count for rows in pair if rows is not None] for pair in zip(cache.x, cache.kv, strict=True)]
    cache.crop(min((min(counts, default=0) for counts in pairs), default=0))
    for device in cache.spread.devices:
        device.sync()
    kept, layers = dict(tensors), list[dict[str, Any]]()
    for kind, every in (("x", cache.x), ("kv", cache.kv)):
        for number, rows in enumerate(every):
            if rows is not None:
                layers.append(_describe(rows, f"{kind}.{number}", kept) | {"kind": kind, "layer": number})
    engine = cache.spread.devices[0].engine
    payload = save_tensors({name: tensor.contiguous() for name, tensor in kept.items()})
    state = f"state-{crc32c(payload):08x}.safetensors"
    replace_file(engine, os.path.join(directory, state), payload)
    fields = {
        "fingerprint": fingerprint, "x_rows": cache.x_rows, "layers": layers, "devices": len(cache.spread.devices),
        "state": {"file": state, "size_bytes": len(payload), "crc32c": crc32c(payload)}, "n_layers": len(cache.kv),
    }  # fmt: skip
    places = [{segment.place: segment.size_bytes for segment in _segments(cache, number)} for number in range(len(cache.spread.devices))]
    for device, new in zip(cache.spread.devices, places, strict=True):
        device.pin(device.pinned | new)  # an error from here on may come before the state changes or after it
    write_manifest(engine, directory, MAGIC, VERSION, fields)
    for device, new in zip(cache.spread.devices, places, strict=True):
        device.pin(new)
    for name in os.listdir(directory):
        if STATE_FILES.fullmatch(name) and name != state:
            with contextlib.suppress(OSError):  # then the next save removes it
                os.unlink(os.path.join(directory, name))


def _segments(cache: SsdCache, number: int) -> list[Segment]:
    """On a device, those that the cache looks at."""
    return [
        segment
        for rows in cache.every
        for run in rows.runs
        for parts in run.parts
        for device, segment in parts
        if device == number and segment.size_bytes
    ]


def _describe(rows: LayerRows, name: str, kept: dict[str, torch.Tensor]) -> dict[str, Any]:
    table, sums = list[list[int]](), list[np.ndarray]()
    for number, run in enumerate(rows.runs):
        for sequence, parts in enumerate(run.parts):
            for device, segment in parts:
                heads = segment.heads
                table.append([number, sequence, device, segment.place, heads.start, heads.step, len(heads), segment.n_rows])
                sums.append(segment.sums.reshape(-1))
    k, v, first = rows.in_memory()
    kept[f"{name}.segments"] = torch.tensor(table, dtype=torch.int64).reshape(-1, SEGMENT_FIELDS)
    kept[f"{name}.sums"] = torch.from_numpy(np.concatenate(sums) if sums else np.empty(0, np.uint32)).view(torch.int32)
    kept[f"{name}.runs"] = torch.tensor([[run.first_position, run.n_rows] for run in rows.runs], dtype=torch.int64).reshape(-1, 2)
    kept[f"{name}.k"] = k
    if v is not k:
        kept[f"{name}.v"] = v
    layout = rows.layout
    return {
        "format": layout.format, "d": layout.d, "dv": layout.dv, "is_shared": layout.is_shared, "heads": rows.n_heads,
        "dtype": format_of(k.dtype), "count": rows.count, "stored": rows.stored, "first": first, "sequences": rows.sequences,
    }  # fmt: skip


def load(cache: SsdCache, directory: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Fills an empty cache, whose devices have the data files open, from the published state.

    Returns:
        (the fingerprint it was saved with, the tensors that `save` was given).

    Raises:
        StoreNotFoundError: nothing was saved.
        FormatError, ChecksumError, TruncatedFileError: damaged, or of another number of layers or devices.
    """
    engine = cache.spread.devices[0].engine
    kept = read_kept(engine, directory)
    for name, got, expected in (
        ("layers", kept.n_layers, len(cache.kv)),
        ("directories", kept.devices, len(cache.spread.devices)),
    ):
        if got != expected:
            raise errors.ForeignFileError(f"a cache with another number of {name}", path=directory, got=got, expected=expected)
    path = os.path.join(directory, kept.file)
    tensors = _read_state(engine, path, kept)
    data = [(device.path, os.path.getsize(device.path)) for device in cache.spread.devices]
    for rows in kept.rows:
        tables = take_tables(tensors, rows, data, path)
        (cache.x if rows.kind == "x" else cache.kv)[rows.layer] = _restore(cache, rows, tables)
    check_rest(tensors, kept.sequences, kept.tokens, path)
    cache.x_rows = kept.x_rows
    for number, device in enumerate(cache.spread.devices):
        places = {segment.place: segment.size_bytes for segment in _segments(cache, number)}
        for place, size_bytes in places.items():
            device.extents.claim(place, size_bytes)
        device.pin(places)
        _cut(device.path, device.extents.size_bytes)
    return dict(kept.fingerprint), tensors


def _cut(path: str, size_bytes: int) -> None:
    """Takes away what a process that was killed wrote behind the last state that it saved. Raises WriteError."""
    if os.path.getsize(path) > size_bytes:
        try:
            os.truncate(path, size_bytes)
        except OSError as error:
            raise write_error("cannot cut the rows of a kept cache", path, error) from error


def _read_state(engine: Any, path: str, kept: KeptState) -> dict[str, torch.Tensor]:
    try:
        size_bytes = check_plain_file(path)
    except FileNotFoundError as error:
        raise errors.FormatError("the state of a kept cache is missing", path=path, expected=f"{kept.size_bytes} bytes", fix=FIX) from error
    payload = read_file(engine, path) if size_bytes == kept.size_bytes else b""
    if size_bytes != kept.size_bytes or crc32c(payload) != kept.crc32c:
        raise errors.ChecksumError(
            "the state of a kept cache is damaged", path=path, got=f"{size_bytes} bytes", expected=f"{kept.size_bytes} bytes", fix=FIX
        )
    return read_tensors(payload, path)


def _restore(cache: SsdCache, kept: KeptRows, tables: KeptTables) -> LayerRows:
    rows = cache.make_rows(kept.layout, kept.heads, kept.dtype)
    runs = [Run(first, n, [[] for _ in range(kept.sequences)]) for first, n in tables.runs.tolist()]
    begin, known = 0, dict[tuple[int, int], Segment]()
    for number, sequence, device, place, first, step, heads, n_rows in tables.segments.tolist():
        size = heads * kept.layout.blocks(n_rows)
        if (device, place) in known:  # beams share it
            known[device, place].references += 1
        else:
            own = range(first, first + heads * step, step)
            known[device, place] = Segment(kept.layout, own, n_rows, place, tables.sums, begin)
        runs[number].parts[sequence].append((device, known[device, place]))
        begin += size
    rows.restore(runs, kept.count, kept.stored, kept.first, tables.k, tables.v)
    return rows
