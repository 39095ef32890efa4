"""``csrc/cuda/maxsim.cu``, ``maxsim_fp32.cu`` and ``maxsim_residual.cu``: which rows and queries
they have kernels for, and their launch."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .. import device_code
from .formats import token_format
from .residual import ResidualFormat

QUERY_TOKENS_MAX = 32
ALIGNMENT_BYTES = 16  # of documents, and of the query
WARPS = 8  # of a block, of which a multiprocessor has one
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
    ("fp16", 64): Ring(1, 6),
    ("fp16", 96): Ring(1, 4),
    ("fp16", 128): Ring(1, 4),
    ("bf16", 64): Ring(1, 6),
    ("bf16", 96): Ring(1, 4),
    ("bf16", 128): Ring(1, 4),
    ("int8", 64): Ring(4, 4),
    ("int8", 96): Ring(2, 5),
    ("int8", 128): Ring(2, 4),
    ("bit1", 128): Ring(4, 4),
    **{(f"residual{nbits}", d): Ring(1, 4) for nbits in (1, 2) for d in (64, 96, 128)},
    ("residual4", 64): Ring(1, 4),
    ("residual4", 96): Ring(1, 4),
    ("residual4", 128): Ring(1, 3),
}


def name_of(fmt: str, d: int) -> str:
    return f"espnx_maxsim_{fmt}_{d}"


def source_of(fmt: str) -> str:
    """The file of csrc/cuda that has kernels for a format's rows."""
    if isinstance(token_format(fmt), ResidualFormat):
        return "maxsim_residual"
    return "maxsim_fp32" if fmt == "fp32" else "maxsim"


def shared_bytes(fmt: str, d: int) -> int:
    """A block has the rings, 16 bytes about each stage, and what registers do not hold of the
    query; of residual rows a table of weights, and centroids in fp32."""
    tiles, stages = RINGS[fmt, d]
    if source_of(fmt) == "maxsim_residual":
        ring_bytes = stages * (_TILE_ROWS * token_format(fmt).token_row_bytes(d) + 16)
        return (
            _TABLE_BYTES + _BASE_BYTES + WARPS * (_CENTROID_TILES * _TILE_ROWS * 4 * d + ring_bytes)
        )
    # rows of floats lie multiples of 128 bytes apart, others as they come
    row_bytes = token_format(fmt).token_row_bytes(d)
    pitch = row_bytes if fmt in ("int8", "bit1") else -(-row_bytes // 128) * 128
    parts = (3 if fmt == "bf16" else 2) - _PARTS_HELD
    pieces = d // 16 * (QUERY_TOKENS_MAX // 8)
    return WARPS * stages * (_TILE_ROWS * tiles * pitch + 16) + parts * pieces * _PART_BYTES


def is_compiled(fmt: str, d: int, n_query_tokens: int, device: torch.device) -> bool:
    """Whether a kernel can be launched for such rows and queries."""
    return (
        (fmt, d) in RINGS
        and n_query_tokens <= QUERY_TOKENS_MAX
        and device_code.is_there(source_of(fmt), name_of(fmt, d), device, shared_bytes(fmt, d))
    )


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
    if source_of(fmt) == "maxsim_residual":
        further = (_aligned(tables[0]), tables[1], ctypes.c_uint32(len(tables[0])))
    device_code.launch(
        source_of(fmt),
        name_of(fmt, d),
        n_queries * min(n, max(blocks_max(query.device) // n_queries, 1)),
        32 * WARPS,
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
        shared_bytes(fmt, d),
    )


def _aligned(values: torch.Tensor) -> torch.Tensor:
    return values.clone() if values.data_ptr() % ALIGNMENT_BYTES else values
