"""CRC32C of weights that lie in files, of the very bytes that they have in memory: a model has the
same ones wherever its weights are.

A sum is remembered as long as the files are the same ones, unchanged: device, inode, size, and the
times that the file system notes.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch

from ..ops.crc32c import crc32c, crc32c_ranges
from ..storage.engine import Plan
from ..storage.files import regroup
from .layers import Weight, put
from .stream import WeightFiles

SAMPLES = 4096  # values of a tensor: what was trained on has moved in all of them
_PIECE_BYTES = 1 << 20  # of a tensor on a GPU: the pieces are summed at the same time
_GAP_BYTES = 16 << 10
#: A file that changed so recently may change again without another time stamp: file systems count
#: in steps of up to two seconds.
_SETTLED_NS = 2_000_000_000

_known: dict[Hashable, int] = {}


def sum_of(data: torch.Tensor) -> int:
    """The sum of a tensor's bytes in memory: the CRC32C of the sums of its pieces, which on a GPU
    are made there."""
    flat = data.contiguous().reshape(-1).view(torch.uint8)
    begins = torch.arange(0, flat.numel(), _PIECE_BYTES)
    sizes = (flat.numel() - begins).clamp_max(_PIECE_BYTES)
    return _joined((crc32c_ranges(flat, begins, sizes) if flat.numel() else begins).tolist())


def sampled(data: torch.Tensor) -> torch.Tensor:
    """About `SAMPLES` values of a tensor at even distances."""
    return data.reshape(-1)[:: max(1, data.numel() // SAMPLES)]


def stored_sum(files: WeightFiles, weight: Weight, *, is_whole: bool) -> int:
    """`sum_of` a weight that is streamed, or, unless `is_whole`, of what `sampled` takes of it.
    Reads it at most once while its files stay as they are. Raises ReadError, ShortReadError,
    TruncatedFileError, DeadlineExceededError, EngineClosedError."""
    key = _key(files, weight, is_whole)
    found = _known.get(key)
    if found is not None:
        return found
    found = _whole_sum(files, weight) if is_whole else sum_of(_samples(files, weight))
    if key == _key(files, weight, is_whole) and _is_settled(files, weight):
        _known[key] = found
    return found


def _key(files: WeightFiles, weight: Weight, is_whole: bool) -> Hashable:
    places = [
        (files.identity(each.source.path), each.source.offset_bytes, each.source.dtype, each.begin)
        for each in weight.pieces
    ]
    return is_whole, weight.dtype, weight.shape, tuple(places)


def _is_settled(files: WeightFiles, weight: Weight) -> bool:
    changed = max(files.identity(piece.source.path).changed_ns for piece in weight.pieces)
    return time.time_ns() - changed > _SETTLED_NS


def _joined(sums: Sequence[int]) -> int:
    return crc32c(np.array(sums, dtype="<i8").tobytes())


def _whole_sum(files: WeightFiles, weight: Weight) -> int:
    def windows() -> Iterator[np.ndarray]:
        for piece in sorted(weight.pieces, key=lambda each: each.begin):
            for _, data in files.windows(piece.source):
                values = torch.empty(
                    data.numel() // piece.source.dtype.itemsize, dtype=weight.dtype
                )
                put(values, 0, data, piece.source.dtype)
                yield values.view(torch.uint8).numpy()

    return _joined([crc32c(block) for block in regroup(windows(), _PIECE_BYTES)])


def _samples(files: WeightFiles, weight: Weight) -> torch.Tensor:
    """What `sampled` takes, each value read by itself."""
    count = weight.size_bytes // weight.dtype.itemsize
    at = torch.arange(count)[:: max(1, count // SAMPLES)]
    found = []
    for piece in sorted(weight.pieces, key=lambda each: each.begin):
        source, size = piece.source, piece.source.dtype.itemsize
        own = at[(at >= piece.begin) & (at < piece.begin + source.size_bytes // size)]
        if not len(own):
            continue
        offsets = source.offset_bytes + (own - piece.begin) * size
        future = files.engine.read(
            Plan.of(files.file(source.path), offsets, torch.full_like(offsets, size)),
            gap_bytes=_GAP_BYTES,
        )
        memory = future.wait()
        values = (
            memory[future.position_bytes[:, None] + torch.arange(size)]
            .reshape(-1)
            .view(source.dtype)
        )
        found.append(values.to(weight.dtype))
    return torch.cat(found) if found else torch.empty(0, dtype=weight.dtype)
