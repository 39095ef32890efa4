"""Kernels of MaxSim in ``csrc/cuda``: ``maxsim.cu``, ``maxsim_fp32.cu``, ``maxsim_residual.cu``
and, of long rows, ``maxsim_slices.cu``. Which rows and queries they take, and their launch."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from .. import device_code
from .formats import token_format
from .residual import ResidualFormat

QUERY_TOKENS_MAX = 32
ALIGNMENT_BYTES = 16  # of documents, and of the query
WARPS = 8  # of a block, of which a multiprocessor has one; fewer where it has no room for rings
_WARPS_MIN = 4  # with fewer too little would be on its way
_MULTIPROCESSORS = 132  # of an H100 or H200, where there is no device to ask
_PARTS_HELD, _PART_BYTES = 2, 8 * 32  # of the query, in registers; of 16 values of 8 tokens
_TILE_ROWS = 16
# Weights of residual rows by half a byte of codes, for every lane; tiles whose centroids are there.
_TABLE_BYTES, _CENTROID_TILES = 16 * 128, 2
_BASE_BYTES = 1024  # shared memory begins at a multiple of it, the table at one of its own size


class Ring(NamedTuple):
    """What a warp has of shared memory: stages, each of so many tiles of 16 rows."""

    tiles: int
    stages: int


#: By format and values of a row; as in the sources.
RINGS = {
    ("fp32", 64): Ring(1, 5),
    ("fp32", 96): Ring(1, 4),
    ("fp32", 128): Ring(1, 3),
    **{
        (fmt, d): Ring(*ring)
        for fmt in ("fp16", "bf16")
        for d, ring in (
            *((32, (2, 4)), (48, (2, 4)), (64, (1, 6)), (80, (1, 4))),
            *((96, (1, 4)), (112, (1, 4)), (128, (1, 4))),
        )
    },
    ("int8", 32): Ring(8, 4),
    ("int8", 48): Ring(8, 3),
    ("int8", 64): Ring(4, 4),
    ("int8", 80): Ring(2, 5),
    ("int8", 96): Ring(2, 5),
    ("int8", 112): Ring(2, 4),
    ("int8", 128): Ring(2, 4),
    ("bit1", 128): Ring(4, 4),
    **{(f"residual{nbits}", d): Ring(1, 4) for nbits in (1, 2) for d in (64, 96, 128)},
    ("residual4", 64): Ring(1, 4),
    ("residual4", 96): Ring(1, 4),
    ("residual4", 128): Ring(1, 3),
}


#: Formats of long rows, and up to how many values they have.
SLICED_FORMATS, SLICED_DIM_MAX = ("fp16", "bf16", "int8"), 1024
SLICED = "maxsim_slices"
_SLICED_TILE_ROWS = 32
#: Up to how many values of a row: those that a warp has, and warps of a block. A multiprocessor's
#: registers hold eight such warps.
_SLICES = ((256, 64, 4), (384, 96, 4), (512, 128, 4), (768, 96, 8), (SLICED_DIM_MAX, 128, 8))
#: Of int8 rows, whose rings are half as long: fewer warps have less to exchange.
_SLICES_OF_INT8 = ((192, 96, 2), (256, 128, 2), *_SLICES[1:])
_RESIDENT_WARPS = 8
#: Stages of a ring, and tiles whose products warps exchange: of one there is a barrier more.
_DEPTHS = ((4, 2), (3, 2), (3, 1), (2, 2), (2, 1))
_DEPTHS_OF_FLAT = ((4, 1), (3, 1), (2, 1))  # whose copies take that barrier anyway
#: Of a multiprocessor of an H100 or H200, and of each of its blocks and once more the system's.
_SHARED_BYTES, _SYSTEM_BYTES = 228 * 1024, 1024
#: As in the source: a warp's share of a tile's products, what is noted of tiles, and the largest
#: products of a document by four warps.
_SHARE_BYTES, _NOTE_BYTES, _LARGEST_BYTES = 8 * 32 * 16, 8 * 16, 2 * 32 * 4


class Sliced(NamedTuple):
    """A launch of the kernels for long rows.

    Attributes:
        kernel: its name in the source.
        slice_dims: of every row, that each of a block's ``warps`` has.
        stages: tiles of rows that a block has in shared memory.
        buffers: tiles whose products it exchanges there.
        shared_bytes: of a block.
        resident: blocks that a multiprocessor holds.
    """

    kernel: str
    slice_dims: int
    warps: int
    stages: int
    buffers: int
    shared_bytes: int
    resident: int


@functools.cache
def sliced(fmt: str, d: int, shared_bytes: int = _SHARED_BYTES) -> Sliced | None:
    """How long rows are scored; None: by no kernel of these.

    fp16 rows of 192 to 384 values, a multiple of 64, are Triton's: it has room to load them ahead,
    and reached .87 of what an H200 allows (docs/measured/kernels.md).

    Args:
        shared_bytes: shared memory of a multiprocessor.
    """
    if fmt not in SLICED_FORMATS or not 128 < d <= SLICED_DIM_MAX or d % 8:
        return None
    if fmt == "fp16" and d <= 384 and d % 64 == 0:
        return None
    slices = _SLICES_OF_INT8 if fmt == "int8" else _SLICES
    _, slice_dims, warps = next(each for each in slices if d <= each[0])
    row_bytes = token_format(fmt).token_row_bytes(d)
    stage_bytes = _SLICED_TILE_ROWS * (row_bytes if fmt == "int8" else 2 * warps * slice_dims)
    third_bytes = (
        (fmt == "bf16") * warps * (slice_dims // 16) * (QUERY_TOKENS_MAX // 8) * _PART_BYTES
    )
    known_bytes = third_bytes + _NOTE_BYTES + (2 if warps == 8 else 1) * _LARGEST_BYTES
    depths = _DEPTHS_OF_FLAT if fmt == "int8" else _DEPTHS
    sizes = {
        depth: depth[0] * stage_bytes + depth[1] * warps * _SHARE_BYTES + known_bytes
        for depth in depths
    }
    fitting = {
        depth: (shared_bytes - _SYSTEM_BYTES) // (size + _SYSTEM_BYTES)
        for depth, size in sizes.items()
    }
    resident = min(_RESIDENT_WARPS // warps, max(fitting.values()))
    if resident == 0:
        return None
    depth = next(each for each in depths if fitting[each] >= resident)
    name = f"espnx_maxsim_{fmt}_slices_{slice_dims}"
    return Sliced(name, slice_dims, warps, *depth, sizes[depth], resident)


def name_of(fmt: str, d: int) -> str:
    return f"espnx_maxsim_{fmt}_{d}"


def source_of(fmt: str) -> str:
    """The file of csrc/cuda that has kernels for a format's rows."""
    if isinstance(token_format(fmt), ResidualFormat):
        return "maxsim_residual"
    return "maxsim_fp32" if fmt == "fp32" else "maxsim"


def shared_bytes(fmt: str, d: int, warps: int) -> int:
    """A block has its warps' rings, 16 bytes about each stage, and what registers do not hold of
    the query; of residual rows a table of weights, and centroids in fp32."""
    tiles, stages = RINGS[fmt, d]
    if source_of(fmt) == "maxsim_residual":
        ring_bytes = stages * (_TILE_ROWS * token_format(fmt).token_row_bytes(d) + 16)
        return (
            _TABLE_BYTES + _BASE_BYTES + warps * (_CENTROID_TILES * _TILE_ROWS * 4 * d + ring_bytes)
        )
    # rows of floats lie multiples of 128 bytes apart, others as they come
    row_bytes = token_format(fmt).token_row_bytes(d)
    pitch = row_bytes if fmt in ("int8", "bit1") else -(-row_bytes // 128) * 128
    parts = (3 if fmt == "bf16" else 2) - _PARTS_HELD
    pieces = d // 16 * (QUERY_TOKENS_MAX // 8)
    return warps * stages * (_TILE_ROWS * tiles * pitch + 16) + parts * pieces * _PART_BYTES


def warps_of(fmt: str, d: int, multiprocessor_bytes: int = _SHARED_BYTES) -> int:
    """Warps of a block for which a multiprocessor with so much shared memory has room; 0: too
    few."""
    others_bytes = shared_bytes(fmt, d, 0) + _SYSTEM_BYTES
    ring_bytes = shared_bytes(fmt, d, 1) - shared_bytes(fmt, d, 0)
    warps = min(WARPS, (multiprocessor_bytes - others_bytes) // ring_bytes)
    return warps if warps >= min(WARPS, _WARPS_MIN) else 0


def is_compiled(fmt: str, d: int, n_query_tokens: int, device: torch.device) -> bool:
    """Whether a kernel can be launched for such rows and queries."""
    if n_query_tokens > QUERY_TOKENS_MAX:
        return False
    room_bytes = _shared_bytes_of(device)
    if (fmt, d) in RINGS:
        warps = warps_of(fmt, d, room_bytes)
        given = source_of(fmt), name_of(fmt, d), device, shared_bytes(fmt, d, warps)
        return warps > 0 and device_code.is_there(*given)
    plan = sliced(fmt, d, room_bytes)
    return plan is not None and device_code.is_there(SLICED, plan.kernel, device, plan.shared_bytes)


def _shared_bytes_of(device: torch.device) -> int:
    """Shared memory of a multiprocessor."""
    if device.type != "cuda":
        return _SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def blocks_max(device: torch.device) -> int:
    """One on each multiprocessor of the device; warps take documents in turns."""
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    scores: torch.Tensor,
    fmt: str,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Fills ``scores`` ``[..., n]``: all on one device, contiguous and checked, with documents and
    query tokens, and documents at multiples of 16 bytes; ``tables``: centroids and weights of
    residual formats."""
    n_query_tokens, d = query.shape[-2:]
    n_queries = query.shape[0] if query.dim() == 3 else 1
    n = offset_bytes.numel()
    query = _aligned(query)
    further: tuple[device_code.Argument, ...] = ()
    blocks = blocks_max(query.device)
    room_bytes = _shared_bytes_of(query.device)
    if plan := sliced(fmt, d, room_bytes):
        source, kernel, warps, size = SLICED, plan.kernel, plan.warps, plan.shared_bytes
        blocks *= plan.resident
        further = tuple(ctypes.c_uint32(each) for each in (d, plan.stages, plan.buffers))
    else:
        source, kernel, warps = source_of(fmt), name_of(fmt, d), warps_of(fmt, d, room_bytes)
        size = shared_bytes(fmt, d, warps)
        if source == "maxsim_residual":
            further = (_aligned(tables[0]), tables[1], ctypes.c_uint32(len(tables[0])))
    device_code.launch(
        source,
        kernel,
        n_queries * min(n, max(blocks // n_queries, 1)),
        32 * warps,
        (
            query,
            buffer,
            offset_bytes,
            n_tokens,
            scores,
            # how many documents of each query are taken; the kernel leaves zeros
            torch.zeros(n_queries, dtype=torch.int32, device=query.device),
            ctypes.c_int64(n),
            ctypes.c_uint32(n_queries),
            ctypes.c_uint32(n_query_tokens),
            *further,
        ),
        query.device,
        size,
    )


def _aligned(values: torch.Tensor) -> torch.Tensor:
    return values.clone() if values.data_ptr() % ALIGNMENT_BYTES else values
