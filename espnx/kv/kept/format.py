"""What a kept cache's files say, read into types: every number is checked against the others, and
against the sizes of the files, before memory is taken for it (the written specification is
docs/kv-format.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from ... import errors
from ...device.interface import SegmentPlace
from ...device.row_layout import DTYPES, PAGE_BYTES, RowLayout
from ...storage import NativeEngine
from ...storage.manifest import NAME as MANIFEST
from ...storage.manifest import read_manifest
from ...storage.parse import Fields

MAGIC, VERSION = "espnx-kv", 1
FIX = "remove the cache (`espnx cache rm`); it is made again from its prompt"
STATE_NAME = re.compile(r"state-[0-9a-f]{8}\.safetensors")
STATE_FILES = re.compile(rf"{STATE_NAME.pattern}(\.new)?")  # one that was being written, too
SEGMENT_FIELDS = 8  # run, sequence, device, place, first head, head step, heads, rows
_LAYERS_MAX, _HEADS_MAX, _WIDTH_MAX, _SEQUENCES_MAX, _DEVICES_MAX = (
    1 << 16,
    1 << 16,
    1 << 20,
    1 << 24,
    1 << 12,
)
_STATE_BYTES_MAX = 1 << 36


@dataclass(frozen=True)
class KeptRows:
    """The rows of one kind of a layer.

    Attributes:
        kind: ``x`` or ``kv``. layer: its number.
        layout: of blocks. heads: KV heads (X: 1). dtype: of rows in memory.
        count: tokens of each sequence. stored: of them, from the first on, in runs. first: position
            of the first row in memory.
    """

    kind: str
    layer: int
    layout: RowLayout
    heads: int
    dtype: torch.dtype
    count: int
    stored: int
    first: int
    sequences: int

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.layer}"


@dataclass(frozen=True)
class KeptState:
    """A kept cache, as its manifest says. `file`, `size_bytes`, `crc32c`: of the state file."""

    fingerprint: Mapping[str, Any]
    n_layers: int
    devices: int
    x_rows: int
    rows: Sequence[KeptRows]
    file: str
    size_bytes: int
    crc32c: int

    @property
    def tokens(self) -> int:
        """Tokens of each sequence."""
        return max((rows.count for rows in self.rows), default=0)

    @property
    def sequences(self) -> int:
        return sum(rows.sequences for rows in self.rows if rows.layer == self.rows[0].layer)


def read_kept(engine: NativeEngine, directory: str) -> KeptState:
    """Raises StoreNotFoundError: nothing was saved; FormatError."""
    manifest = read_manifest(engine, directory, MAGIC, VERSION)
    fields = Fields(manifest, os.path.join(directory, MANIFEST), fix=FIX)
    fields.inner("fingerprint")
    n_layers = fields.whole("n_layers", 1, _LAYERS_MAX)
    rows = [_rows(each, n_layers) for each in fields.each("layers", count=2 * n_layers)]
    x_rows = fields.whole("x_rows", 0, _SEQUENCES_MAX)
    _check_layers(fields, rows, n_layers, x_rows)
    state = fields.inner("state")
    name = state.file_name("file")
    if STATE_NAME.fullmatch(name) is None:
        state.refuse("file", "state- and eight digits")
    return KeptState(
        manifest["fingerprint"],
        n_layers,
        fields.whole("devices", 1, _DEVICES_MAX),
        x_rows,
        rows,
        name,
        state.whole("size_bytes", 8, _STATE_BYTES_MAX),
        state.whole("crc32c", most=2**32 - 1),
    )


def _rows(fields: Fields, n_layers: int) -> KeptRows:
    kind, layer = fields.choice("kind", ("x", "kv")), fields.whole("layer", 0, n_layers - 1)
    d, dv, is_shared = (
        fields.whole("d", 8, _WIDTH_MAX),
        fields.whole("dv", 8, _WIDTH_MAX),
        fields.flag("is_shared"),
    )
    if is_shared != (kind == "x"):
        fields.refuse("is_shared", f"{kind == 'x'} for {kind} rows")
    dtypes = [name for name in DTYPES if name != "int8"]
    form, dtype = (
        fields.choice("format", dtypes if is_shared else DTYPES),
        fields.choice("dtype", dtypes),
    )
    if is_shared and form != dtype:
        fields.refuse("format", f"{dtype}, as in memory")
    try:
        layout = RowLayout(form, d, dv, is_shared)
    except errors.InvalidInputError as error:
        fields.refuse("d", error.expected)
    count = fields.whole("count")
    stored = fields.whole("stored", 0, count)
    return KeptRows(
        kind,
        layer,
        layout,
        fields.whole("heads", 1, 1 if is_shared else _HEADS_MAX),
        DTYPES[dtype],
        count,
        stored,
        fields.whole("first", 0, stored),
        fields.whole("sequences", 0, _SEQUENCES_MAX),
    )


def _check_layers(fields: Fields, rows: Sequence[KeptRows], n_layers: int, x_rows: int) -> None:
    """All layers hold the same tokens of the same sequences."""
    if len({each.name for each in rows}) != len(rows):
        fields.refuse("layers", "one entry for each layer and kind of rows")
    batch = {each.kind: each.sequences for each in rows}
    if any((each.count, each.sequences) != (rows[0].count, batch[each.kind]) for each in rows):
        fields.refuse("layers", "the same tokens and sequences in every layer")
    if rows and rows[0].count and len(rows) != n_layers * len(batch):
        fields.refuse("layers", f"rows of all {n_layers} layers")
    if (
        rows
        and rows[0].count
        and batch.get("x", 0) != (x_rows if "kv" in batch else min(x_rows, batch["x"]))
    ):
        fields.refuse("x_rows", f"{batch.get('x', 0)}, the sequences that keep X")


@dataclass(frozen=True)
class KeptTables:
    """The tables of one layer's rows.

    Attributes:
        runs: int64 [runs, 2]: position of the first token, rows that count.
        segments: int64 [segments, 8].
        sums: uint32: of each segment's blocks, one segment after the other.
        k, v: rows in memory; of X they are the same.
    """

    runs: torch.Tensor
    segments: torch.Tensor
    sums: np.ndarray
    k: torch.Tensor
    v: torch.Tensor


def take_tables(
    tensors: dict[str, torch.Tensor], rows: KeptRows, data: Sequence[tuple[str, int]], path: str
) -> KeptTables:
    """Takes a layer's tensors out of those of a state file.

    Args:
        data: path and size in bytes of each data file.
        path: of the state file, for messages.

    Raises FormatError where one is missing or does not fit; TruncatedFileError where a segment lies
    behind the end of a data file.
    """
    shape = (rows.sequences, rows.heads, rows.count - rows.first)
    runs = _take(tensors, f"{rows.name}.runs", torch.int64, (None, 2), path)
    segments = _take(tensors, f"{rows.name}.segments", torch.int64, (None, SEGMENT_FIELDS), path)
    sums = _take(tensors, f"{rows.name}.sums", torch.int32, (None,), path)
    k = _take(tensors, f"{rows.name}.k", rows.dtype, (*shape, rows.layout.d), path)
    v = (
        k
        if rows.layout.is_shared
        else _take(tensors, f"{rows.name}.v", rows.dtype, (*shape, rows.layout.dv), path)
    )
    _check_runs(rows, runs.tolist(), path)
    _check_segments(rows, runs.tolist(), segments.tolist(), len(sums), data, path)
    return KeptTables(runs, segments, sums.view(torch.uint32).numpy(), k, v)


def check_places(segments: Sequence[tuple[str, SegmentPlace]]) -> None:
    """Checks segments, each with its data file. Raises FormatError where two of them claim one
    place."""
    end: dict[str, int] = {}
    for path, place in sorted(segments, key=lambda each: (each[0], each[1].offset_bytes)):
        if place.offset_bytes < end.get(path, 0):
            raise errors.FormatError(
                "two pieces claim one place",
                path=path,
                offset_bytes=place.offset_bytes,
                size_bytes=place.size_bytes,
                fix=FIX,
            )
        end[path] = place.offset_bytes + place.size_bytes


def _take(
    tensors: dict[str, torch.Tensor],
    name: str,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    path: str,
) -> torch.Tensor:
    tensor = tensors.pop(name, None)
    got = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
    if tensor is None or tensor.dtype != dtype or tensor.dim() != len(shape):
        raise errors.FormatError(
            f"tensor {name} of a kept cache",
            path=path,
            got=got,
            expected=f"{dtype} {shape}",
            fix=FIX,
        )
    if any(wanted not in (None, found) for found, wanted in zip(tensor.shape, shape, strict=True)):
        raise errors.FormatError(
            f"tensor {name} of a kept cache",
            path=path,
            got=got,
            expected=f"{dtype} {shape}",
            fix=FIX,
        )
    return tensor


def _refuse(rows: KeptRows, table: str, path: str, got: object, expected: object) -> NoReturn:
    raise errors.FormatError(
        f"table {rows.name}.{table} of a kept cache", path=path, got=got, expected=expected, fix=FIX
    )


def _check_runs(rows: KeptRows, runs: list[list[int]], path: str) -> None:
    at = 0
    for first, count in runs:
        if first != at or count < 1 or count > rows.stored - at:
            _refuse(
                rows,
                "runs",
                path,
                [first, count],
                f"a run from position {at} on, inside {rows.stored} tokens",
            )
        at += count
    if at != rows.stored:
        _refuse(rows, "runs", path, f"{at} tokens", f"{rows.stored} tokens")


def _check_segments(
    rows: KeptRows,
    runs: list[list[int]],
    segments: list[list[int]],
    n_sums: int,
    data: Sequence[tuple[str, int]],
    path: str,
) -> None:
    """Every head of every sequence lies in one segment of each run, inside a data file."""
    if len(segments) < len(runs) * rows.sequences:
        _refuse(
            rows,
            "segments",
            path,
            f"{len(segments)} segments",
            f"one for each of {rows.sequences} sequences in {len(runs)} runs",
        )
    blocks, held = 0, dict[tuple[int, int], int]()  # heads as bits
    shared = dict[tuple[int, int], tuple[int, ...]]()
    for segment in segments:
        run, sequence, device, place, first, step, heads, n_rows = segment
        if not (
            0 <= run < len(runs) and 0 <= sequence < rows.sequences and 0 <= device < len(data)
        ):
            _refuse(
                rows,
                "segments",
                path,
                segment,
                f"{len(runs)} runs, {rows.sequences} sequences, {len(data)} directories",
            )
        if not (
            first >= 0
            and 1 <= step <= _HEADS_MAX
            and heads >= 1
            and first + (heads - 1) * step < rows.heads
        ):
            _refuse(rows, "segments", path, segment, f"some of {rows.heads} heads")
        if not (runs[run][1] <= n_rows and place >= 0 and place % PAGE_BYTES == 0):
            _refuse(
                rows,
                "segments",
                path,
                segment,
                f"at least {runs[run][1]} rows, at a multiple of {PAGE_BYTES}",
            )
        size = heads * rows.layout.blocks(n_rows)
        blocks += size
        if place + size * rows.layout.block_bytes > data[device][1]:
            raise errors.TruncatedFileError(
                "the rows of a kept cache end too soon",
                path=data[device][0],
                got=f"{data[device][1]} bytes",
                expected=f"at least {place + size * rows.layout.block_bytes} bytes",
                fix=FIX,
            )
        facts = (run, first, step, heads, n_rows)
        if shared.setdefault((device, place), facts) != facts:
            _refuse(rows, "segments", path, segment, "one segment at a place, whoever shares it")
        mine = sum(1 << head for head in range(first, first + heads * step, step))
        if held.setdefault((run, sequence), 0) & mine:
            _refuse(rows, "segments", path, segment, "each head once")
        held[run, sequence] |= mine
    if len(held) != len(runs) * rows.sequences or any(
        each != (1 << rows.heads) - 1 for each in held.values()
    ):
        _refuse(
            rows,
            "segments",
            path,
            f"{len(held)} pairs",
            f"all {rows.heads} heads of every sequence in every run",
        )
    if blocks != n_sums:
        _refuse(rows, "sums", path, f"{n_sums} checksums", f"{blocks}, one for each block")


def check_rest(tensors: Mapping[str, torch.Tensor], sequences: int, tokens: int, path: str) -> None:
    """What a state file holds beside the layers' tensors. Raises FormatError."""
    left = dict(tensors)
    for name, dtype in (("tokens", torch.int64), ("hidden", torch.uint8)):
        if name in left:
            _take(left, name, dtype, (sequences, tokens), path)
    names = [name for name in ("rotations.cos", "rotations.sin") if name in left]
    found = [left.pop(name) for name in names]
    is_right = all(
        each.dim() == 3
        and each.dtype.is_floating_point
        and each.shape == found[0].shape
        and each.shape[0] in (1, sequences)
        and each.shape[1] >= tokens
        for each in found
    )
    if len(found) == 1 or not is_right or left:
        got = ", ".join(
            [
                *left,
                *(f"{name} {list(each.shape)}" for name, each in zip(names, found, strict=True)),
            ]
        )
        raise errors.FormatError(
            "tensors of a kept cache",
            path=path,
            got=got[:200],
            expected="tokens, padding, rotations",
            fix=FIX,
        )
