"""Kept caches: an `SsdCache` that another process opens again and continues exactly (the written
specification is docs/kv-format.md).

Stored rows are immutable, and space that a published state names is not used again before the next
state is published. So saving means writing what is not rows (tables, checksums, rows in memory,
token ids) into a new file and renaming a manifest: whoever opens the cache after a crash finds the
last state that was saved, whole.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from ... import errors
from ...device.interface import SegmentPlace
from ...device.row_layout import format_of
from ...ops.crc32c import crc32c
from ...storage.files import read_file, replace_file
from ...storage.manifest import write_manifest
from ...storage.parse import check_plain_file
from ...weights.safetensors_files import read_tensors
from ..cache import SsdCache
from ..rows import LayerRows, StoredRun
from ..striping import StripedSegment
from .format import (
    FIX,
    MAGIC,
    SEGMENT_FIELDS,
    STATE_FILES,
    VERSION,
    KeptRows,
    KeptState,
    KeptTables,
    check_places,
    check_rest,
    read_kept,
    take_tables,
)

ROWS_NAME = "rows.bin"


def save(
    cache: SsdCache, directory: str, fingerprint: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Publishes the state of a cache whose data files have names.

    Args:
        directory: of the manifest: the first of the cache's directories.
        fingerprint: of the model; who opens the cache must have the same.
        tensors: more to keep (token ids).

    Raises:
        WriteError, DiskFullError: the state before stays the published one.
    """
    # A pass that failed between two layers (in the model, not here) has reached some of them and
    # not others.
    pairs = [
        [rows.count for rows in pair if rows is not None]
        for pair in zip(cache.rows.x, cache.rows.kv, strict=True)
    ]
    cache.crop(min((min(counts, default=0) for counts in pairs), default=0))
    for device in cache.striped.devices:
        device.sync()
    kept, layers = dict(tensors), list[dict[str, Any]]()
    for kind, every in (("x", cache.rows.x), ("kv", cache.rows.kv)):
        for number, rows in enumerate(every):
            if rows is not None:
                layers.append(
                    _describe(cache, rows, f"{kind}.{number}", kept)
                    | {"kind": kind, "layer": number}
                )
    payload = save_tensors({name: tensor.contiguous() for name, tensor in kept.items()})
    state = f"state-{crc32c(payload):08x}.safetensors"
    fields = {
        "fingerprint": fingerprint,
        "x_rows": cache.rows.x_rows,
        "layers": layers,
        "devices": cache.striped.count,
        "state": {"file": state, "size_bytes": len(payload), "crc32c": crc32c(payload)},
        "n_layers": len(cache.rows.kv),
    }
    segments = [
        [each.segment for each in _segments(cache, number)]
        for number in range(len(cache.striped.devices))
    ]
    with cache.places.engine() as engine:
        replace_file(engine, os.path.join(directory, state), payload)
        for device, new in zip(cache.striped.devices, segments, strict=True):
            # an error from here on may come before the state changes or after it
            device.space.pin(new, also=True)
        write_manifest(engine, directory, MAGIC, VERSION, fields)
    for device, new in zip(cache.striped.devices, segments, strict=True):
        device.space.pin(new)
    for name in os.listdir(directory):
        if STATE_FILES.fullmatch(name) and name != state:
            with contextlib.suppress(OSError):  # then the next save removes it
                os.unlink(os.path.join(directory, name))


def _segments(cache: SsdCache, number: int) -> list[StripedSegment]:
    """The segments on a device that the cache looks at, each once."""
    every = (
        each
        for rows in cache.rows.every
        for run in rows.runs
        for parts in run.parts
        for each in parts
    )
    return list(
        {
            id(each): each for each in every if each.device == number and each.segment.size_bytes
        }.values()
    )


def _describe(
    cache: SsdCache, rows: LayerRows, name: str, kept: dict[str, torch.Tensor]
) -> dict[str, Any]:
    table, sums = list[list[int]](), list[np.ndarray]()
    for number, run in enumerate(rows.runs):
        for sequence, parts in enumerate(run.parts):
            for each in parts:
                place, heads = cache.striped.place(each), each.segment.heads
                table.append(
                    [
                        number,
                        sequence,
                        each.device,
                        place.offset_bytes,
                        heads.start,
                        heads.step,
                        len(heads),
                        place.n_rows,
                    ]
                )
                sums.append(place.checksums.reshape(-1))
    k, v, first = rows.in_memory()
    kept[f"{name}.segments"] = torch.tensor(table, dtype=torch.int64).reshape(-1, SEGMENT_FIELDS)
    kept[f"{name}.sums"] = torch.from_numpy(
        np.concatenate(sums) if sums else np.empty(0, np.uint32)
    ).view(torch.int32)
    kept[f"{name}.runs"] = torch.tensor(
        [[run.first_position, run.n_rows] for run in rows.runs], dtype=torch.int64
    ).reshape(-1, 2)
    kept[f"{name}.k"] = k
    if v is not k:
        kept[f"{name}.v"] = v
    layout = rows.layout
    return {
        "format": layout.format,
        "d": layout.d,
        "dv": layout.dv,
        "is_shared": layout.is_shared,
        "heads": rows.n_heads,
        "dtype": format_of(k.dtype),
        "count": rows.count,
        "stored": rows.stored,
        "first": first,
        "sequences": rows.sequences,
    }


def load(cache: SsdCache, directory: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Fills an empty cache, whose devices have the data files open, from the published state.

    Returns:
        (the fingerprint it was saved with, the tensors that `save` was given).

    Raises:
        StoreNotFoundError: nothing was saved.
        FormatError, ChecksumError, TruncatedFileError: damaged, or of another number of layers or
            devices.
    """
    with cache.places.engine() as engine:
        kept = read_kept(engine, directory)
        path = os.path.join(directory, kept.file)
        for name, got, expected in (
            ("layers", kept.n_layers, len(cache.rows.kv)),
            ("directories", kept.devices, cache.striped.count),
        ):
            if got != expected:
                raise errors.ForeignFileError(
                    f"a cache with another number of {name}",
                    path=directory,
                    got=got,
                    expected=expected,
                )
        tensors = _read_state(engine, path, kept)
    data = [
        (each, os.path.getsize(each) if os.path.exists(each) else 0)
        for each in cache.places.data_files
    ]
    for rows in kept.rows:
        tables = take_tables(tensors, rows, data, path)
        (cache.rows.x if rows.kind == "x" else cache.rows.kv)[rows.layer] = _restore(
            cache, rows, tables
        )
    check_rest(tensors, kept.sequences, kept.tokens, path)
    cache.rows.x_rows = kept.x_rows
    segments = [each for number in range(cache.striped.count) for each in _segments(cache, number)]
    check_places([(data[each.device][0], cache.striped.place(each)) for each in segments])
    cache.striped.restore(segments)
    return dict(kept.fingerprint), tensors


def _read_state(engine: Any, path: str, kept: KeptState) -> dict[str, torch.Tensor]:
    try:
        size_bytes = check_plain_file(path)
    except FileNotFoundError as error:
        raise errors.FormatError(
            "the state of a kept cache is missing",
            path=path,
            expected=f"{kept.size_bytes} bytes",
            fix=FIX,
        ) from error
    payload = read_file(engine, path) if size_bytes == kept.size_bytes else b""
    if size_bytes != kept.size_bytes or crc32c(payload) != kept.crc32c:
        raise errors.ChecksumError(
            "the state of a kept cache is damaged",
            path=path,
            got=f"{size_bytes} bytes",
            expected=f"{kept.size_bytes} bytes",
            fix=FIX,
        )
    return read_tensors(payload, path)


def _restore(cache: SsdCache, kept: KeptRows, tables: KeptTables) -> LayerRows:
    rows = cache.make_rows(kept.layout, kept.heads, kept.dtype)
    runs = [
        StoredRun(first, n, [[] for _ in range(kept.sequences)])
        for first, n in tables.runs.tolist()
    ]
    begin, known = 0, dict[tuple[int, int], StripedSegment]()
    for number, sequence, device, place, first, step, heads, n_rows in tables.segments.tolist():
        size = heads * kept.layout.blocks(n_rows)
        if (device, place) in known:  # beams share it
            known[device, place].references += 1
        else:
            own = range(first, first + heads * step, step)
            sums = tables.sums[begin : begin + size].reshape(heads, -1)
            known[device, place] = StripedSegment(
                device, SegmentPlace(kept.layout, own, n_rows, place, sums)
            )
        runs[number].parts[sequence].append(known[device, place])
        begin += size
    rows.restore(runs, kept.count, kept.stored, kept.first, tables.k, tables.v)
    return rows
