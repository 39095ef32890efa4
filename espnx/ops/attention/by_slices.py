"""``csrc/cuda/attention.cu``: which rows and queries it has a kernel for, how its blocks lie on a
multiprocessor, and its launch."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import NamedTuple

import torch

from .. import device_code

FORMATS = ("fp16", "bf16")
QUERIES_MAX = 16  # of a block
ALIGNMENT_BYTES = 16  # of blocks, and of the query
DIM_MIN, DIM_MAX = 129, 1024  # of the longer rows; shorter ones have other kernels
TILE_ROWS = 32
#: Warps that a multiprocessor's registers hold, by how many values of a row each has.
_RESIDENT_WARPS = {64: 16, 96: 12, 128: 8}
_STAGES = (4, 3, 2)
#: Of a multiprocessor of an H100 or H200, and of each of its blocks and once more the system's.
_SHARED_BYTES, _SYSTEM_BYTES = 228 * 1024, 1024
#: As in the source: bytes of a query's scores of a tile, of its weights of one part, and of its
#: sums and what is known of it; of flags and the block's work; of 16 values of 8 queries' part that
#: registers do not hold.
_SCORE_BYTES, _WEIGHT_BYTES, _STATE_BYTES, _FLAG_BYTES = 36 * 4, 80, 32 * 4 + 32, 96
_PART_BYTES = 8 * 32
_PARTS_HELD = 2


class Plan(NamedTuple):
    """A launch.

    Attributes:
        kernel: its name in the source.
        queries: of a block.
        warps: of a block, each of which has ``slice_dims`` values of every row.
        stages: tiles of rows that a block has in shared memory.
        shared_bytes: of a block.
        resident: blocks that a multiprocessor holds.
    """

    kernel: str
    queries: int
    slice_dims: int
    warps: int
    stages: int
    shared_bytes: int
    resident: int


@functools.cache
def plan(
    n_queries: int, d: int, dv: int, fmt: str, shared_bytes: int = _SHARED_BYTES
) -> Plan | None:
    """How rows of these lengths are attended to, ``dv = 0``: rows that are K and V at once; None:
    by no kernel of these.

    Args:
        shared_bytes: shared memory of a multiprocessor.
    """
    widest = max(d, dv)
    if fmt not in FORMATS or not DIM_MIN <= widest <= DIM_MAX:
        return None
    queries, slice_dims = 8 if n_queries <= 8 else QUERIES_MAX, _slice_dims(widest, n_queries)
    warps = -(-widest // slice_dims)
    sizes = {n: _shared_bytes(n, queries, d, dv, fmt, slice_dims) for n in _STAGES}
    fitting = {n: (shared_bytes - _SYSTEM_BYTES) // (sizes[n] + _SYSTEM_BYTES) for n in _STAGES}
    resident = min(_RESIDENT_WARPS[slice_dims] // warps, fitting[min(_STAGES)])
    if resident == 0:
        return None
    stages = next(n for n in _STAGES if fitting[n] >= resident)
    name = f"espnx_attention_{fmt}_{queries}_{slice_dims}"
    return Plan(name, queries, slice_dims, warps, stages, sizes[stages], resident)


def _slice_dims(widest: int, n_queries: int) -> int:
    """Values of a row that a warp has: few of them, so that many warps hide each other's waits;
    more where that lets two blocks fit (9 warps of 64 would leave room for one), and where fewer
    warps have less to exchange, which many queries make much of."""
    if 512 < widest <= 576:
        return 96
    exchanges_less = widest > 768 or (192 < widest <= 256 and n_queries > 8)
    return 128 if exchanges_less else 64


def _shared_bytes(stages: int, queries: int, d: int, dv: int, fmt: str, slice_dims: int) -> int:
    warps, parts = -(-max(d, dv) // slice_dims), 3 if fmt == "bf16" else 2
    rings = stages * (2 if dv else 1) * warps * TILE_ROWS * slice_dims * 2
    known = queries * (warps * _SCORE_BYTES + parts * _WEIGHT_BYTES + _STATE_BYTES)
    pieces = warps * (slice_dims // 16) * (queries // 8)
    return rings + known + _FLAG_BYTES + (parts - _PARTS_HELD) * pieces * _PART_BYTES


def compiled_plan(
    n_queries: int, d: int, dv: int, fmt: str, align_bytes: int, device: torch.device
) -> Plan | None:
    """`plan`, where its kernel can be launched on a device for blocks at multiples of so many
    bytes."""
    if fmt not in FORMATS or align_bytes % ALIGNMENT_BYTES:
        return None
    found = plan(n_queries, d, dv, fmt, shared_bytes_of(device))
    if found is None:
        return None
    is_there = device_code.is_there("attention", found.kernel, device, found.shared_bytes)
    return found if is_there else None


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory of a multiprocessor of a device; on a CPU (tests) of an H100's."""
    if device.type != "cuda":
        return _SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


class Sizes(NamedTuple):
    """What a launch is told as numbers: heads and KV heads of a sequence, queries of a head, and of
    a sequence, a head's blocks and their rows, rows of a part, and how long rows are (``dv = 0``:
    they are K and V at once)."""

    n_heads: int
    n_kv: int
    n_queries: int
    q_len: int
    n_blocks: int
    block_rows: int
    split_rows: int
    d: int
    dv: int


def launch(
    found: Plan,
    sizes: Sizes,
    query: torch.Tensor,
    buffer: torch.Tensor,
    tables: list[torch.Tensor],
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    visible_stride: int = 0,
    has_last: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    has_slopes: bool = False,
) -> None:
    """Fills ``o`` ``[n_splits, n_heads, n_queries, dv]`` and ``lse``: all on one device, checked
    and contiguous.

    Args:
        tables: blocks' offsets, numbers of rows, visible rows, last positions, positions and slopes
            as ``kernels/attention.py`` has them; those that are not there as any memory.
    """
    if query.data_ptr() % ALIGNMENT_BYTES:
        query = query.clone()
    q_blocks = -(-sizes.n_queries // found.queries)
    is_both = sizes.dv == 0
    flags = is_both | has_last << 1 | has_slopes << 2
    caps = struct.unpack("<2I", struct.pack("<2f", soft_cap, 1.0 / soft_cap if soft_cap else 0.0))
    wide = (sizes.n_blocks, visible_stride, 0 if is_both else 2 * sizes.block_rows * sizes.d)
    words = (
        sizes.n_heads,
        sizes.n_kv,
        sizes.n_queries,
        sizes.q_len,
        sizes.block_rows,
        sizes.split_rows,
        sizes.d,
        sizes.dv or sizes.d,
        found.stages,
        window,
        flags,
        *caps,
    )
    device_code.launch(
        "attention",
        found.kernel,
        o.shape[0] * sizes.n_heads * q_blocks,
        32 * found.warps,
        (
            query,
            buffer,
            *tables,
            o,
            lse,
            *(ctypes.c_int64(each) for each in wide),
            *(ctypes.c_uint32(each) for each in words),
        ),
        query.device,
        found.shared_bytes,
    )
