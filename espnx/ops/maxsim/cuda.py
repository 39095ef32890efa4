"""The CUDA versions of the MaxSim op: check, allocate and launch ``csrc/cuda`` where it has a
kernel for such rows and a build has compiled it (by_warps.py), else ``kernels/maxsim.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import InvalidInputError
from .._native import load_kernel, on_current
from ..tables import on_device, on_host, unused
from . import by_warps
from .checks import check_arguments, is_aligned, look_inside
from .formats import TokenFormat, token_format
from .residual import ResidualFormat

_BLOCK_D = 128  # values of a row taken at a time
_SHORT_TILE = 16  # rows of a tile where no document has more
_BLOCK_D_OF_FP32 = 32  # where they are multiplied in fp32
_PROGRAMS_MAX = 2**31 - 1  # the largest CUDA grid
#: Bytes of a query value's parts, of formats that are multiplied as they are.
_PART_BYTES = {"fp16": 4, "int8": 4, "bit1": 4, "bf16": 6}
_WHOLE_QUERY_BYTES = 72 << 10  # of a query that is kept in shared memory
_MULTIPROCESSORS, _SHARED_BYTES = 132, 227 << 10  # of an H100 or H200; of each of them
_BLOCK_SHARED_BYTES = 99 << 10  # that a block may have on every GPU since 8.0


def launch_shape(n_query_tokens: int, d: int, tokens_max: int, fmt: str) -> dict[str, Any]:
    """Block sizes. The least that a tensor core takes is 16 each way; a block of values divides d
    where it can.

    fp32 products are plain multiply-adds, one instruction each, so their blocks are kept short
    along d.
    """
    whole = is_whole(n_query_tokens, d, fmt)
    block_d = max(32 if whole and fmt == "int8" else 16, d & -d)
    if fmt not in _PART_BYTES:
        block_d = min(block_d, _BLOCK_D_OF_FP32)
    elif fmt == "bf16" and not whole:
        block_d = min(block_d, 64)
    is_short = fmt == "fp32" or (fmt == "fp16" and d <= 128 and not whole)
    return {
        "BLOCK_Q": _block_q(n_query_tokens),
        "BLOCK_T": _SHORT_TILE if tokens_max <= _SHORT_TILE else 32 if is_short else 64,
        "BLOCK_D": min(block_d, _BLOCK_D),
        "IS_WHOLE": whole,
    }


def _kept_values(d: int, fmt: str) -> int:
    """Values of a query's row as it is kept whole: whole blocks of them."""
    block_d = min(max(32 if fmt == "int8" else 16, d & -d), _BLOCK_D)
    return -(-d // block_d) * block_d


def _block_q(n_query_tokens: int) -> int:
    return min(max(16, 1 << (n_query_tokens - 1).bit_length()), 64)


def is_whole(n_query_tokens: int, d: int, fmt: str) -> bool:
    """Whether all of a query stays where it is multiplied."""
    block_q = _block_q(n_query_tokens)
    return (
        fmt in _PART_BYTES
        and n_query_tokens <= block_q
        and block_q * _kept_values(d, fmt) * _PART_BYTES[fmt] <= _WHOLE_QUERY_BYTES
        and not (fmt == "int8" and d % 2)  # whose codes are loaded in pairs
    )


def launch_options(n_query_tokens: int, d: int, fmt: str) -> dict[str, int]:
    """Warps, stages of the loop over tiles, and registers: so many that four programs fit on a
    multiprocessor, or three of 64 query tokens. Four warps multiply 64 rows at a time by what lies
    in shared memory; the next ones are loaded meanwhile, where that has room for them."""
    registers = 128
    if is_whole(n_query_tokens, d, fmt):
        has_room = _whole_bytes(n_query_tokens, d, fmt) <= _BLOCK_SHARED_BYTES
        options = {"num_stages": 2 if has_room else 1, "num_warps": 4}
        registers = 128 if _block_q(n_query_tokens) < 64 else 168
    elif fmt in _PART_BYTES and fmt != "bf16":
        few = {"num_stages": 2, "num_warps": 2}
        options = few if fmt == "fp16" and d <= 128 else {"num_stages": 1, "num_warps": 4}
    else:
        # Triton 3.6 puts no fence between copies ahead of bf16 rows of one piece and the products
        # that four warps make of them: such rows are not copied ahead.
        return {"num_stages": 1 if fmt == "bf16" and d <= 64 else 2, "num_warps": 4}
    return options | ({"maxnreg": registers} if d <= 128 else {})


def programs(n_docs: int, n_queries: int, n_query_tokens: int, d: int, fmt: str) -> int:
    """The grid: programs take documents in turns, each for one query that it prepares once."""
    if is_whole(n_query_tokens, d, fmt):
        # so many as their registers and shared memory allow at once
        most = 2 if d > 128 else 4 if _block_q(n_query_tokens) < 64 else 3
        resident = max(min(_SHARED_BYTES // _whole_bytes(n_query_tokens, d, fmt), most), 1)
    else:
        resident = 8 if d <= 128 else 2
    wanted = _MULTIPROCESSORS * resident
    return n_queries * min(n_docs, max(wanted // n_queries, 1))


def _whole_bytes(n_query_tokens: int, d: int, fmt: str) -> int:
    """Shared memory of a program: a query's parts, a tile of rows that is loaded ahead, and what
    the system takes."""
    values = _kept_values(d, fmt)
    return _block_q(n_query_tokens) * values * _PART_BYTES[fmt] + 64 * 2 * values + 1024


def row_constants(token: TokenFormat, d: int) -> dict[str, Any]:
    """What the kernel is told about rows of a format."""
    return {
        "D": d,
        "FORMAT": token.name,
        "ROW_BYTES": token.token_row_bytes(d),
        "SIGN_VALUE": d**-0.5,
    }


@functools.lru_cache(maxsize=1024)
def _variant(n_query_tokens: int, d: int, tokens_max: int, fmt: str) -> dict[str, Any]:
    """Constants and options of a launch of Triton's, beside alignment."""
    return {
        "enable_fp_fusion": True,
        **launch_options(n_query_tokens, d, fmt),
        **row_constants(token_format(fmt), d),
        **launch_shape(n_query_tokens, d, tokens_max, fmt),
    }


def maxsim_cuda(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    fmt: str,
    threads: int = 0,
    centroids: torch.Tensor | None = None,
    bucket_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`espnx.ops.maxsim` of CUDA tensors. ``threads`` has no meaning here."""
    tables = (centroids, bucket_weights)
    return _scores(query, buffer, offset_bytes, n_tokens, fmt, tables, takes_compiled=True)


def maxsim_triton(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    fmt: str,
    threads: int = 0,
    centroids: torch.Tensor | None = None,
    bucket_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`espnx.ops.maxsim` by Triton: CUDA tensors, or CPU tensors in Triton's interpreter.
    ``threads`` has no meaning here."""
    tables = (centroids, bucket_weights)
    return _scores(query, buffer, offset_bytes, n_tokens, fmt, tables, takes_compiled=False)


def _scores(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    fmt: str,
    tables: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    takes_compiled: bool,
) -> torch.Tensor:
    """``takes_compiled``: by csrc/cuda where it has such a kernel."""
    token = token_format(fmt)
    check_arguments(query, buffer, offset_bytes, n_tokens)
    n_query_tokens, d = query.shape[-2:]
    tables_there = _tables(token, query, *tables)
    at, many = on_host(offset_bytes, n_tokens)
    found = look_inside(buffer, at, many, token.token_row_bytes(d))
    are_aligned = is_aligned(found, buffer, at, token)
    n, n_queries = offset_bytes.numel(), query.shape[0] if query.dim() == 3 else 1
    if n * n_queries > _PROGRAMS_MAX:
        raise InvalidInputError(
            "maxsim documents times queries",
            got=n * n_queries,
            expected=f"at most {_PROGRAMS_MAX}",
            fix="score fewer queries at once",
        )
    scores = torch.empty((*query.shape[:-2], n), dtype=torch.float32, device=query.device)
    if scores.numel() == 0:
        return scores
    offsets, counts = on_device((offset_bytes, n_tokens), query.device)
    if n_query_tokens == 0:
        return scores.copy_(torch.where(counts > 0, 0.0, -torch.inf))
    launch_scores(
        query.contiguous(),
        buffer,
        offsets,
        counts,
        scores,
        token,
        tables_there,
        tokens_max=found.tokens_max,
        is_aligned=are_aligned,
        takes_compiled=takes_compiled,
    )
    return scores


def launch_scores(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    scores: torch.Tensor,
    token: TokenFormat,
    tables: tuple[torch.Tensor, torch.Tensor],
    *,
    tokens_max: int,
    is_aligned: bool,
    takes_compiled: bool,
) -> None:
    """The device's part of the op: fills ``scores`` ``[..., n]``, with documents and query tokens;
    everything is on one device, contiguous and known to be right.

    Args:
        offsets, counts: int64 [n].
        tables: centroids and weights of residual formats, else two tensors that are not looked at.
        tokens_max: the largest of `counts`: Triton's kernel has a variant for short ones.
        is_aligned: all documents begin at multiples of 16 bytes.
        takes_compiled: by csrc/cuda where it has such a kernel.
    """
    n_query_tokens, d = query.shape[-2:]
    n, n_queries = offsets.numel(), query.shape[0] if query.dim() == 3 else 1
    if (
        takes_compiled
        and is_aligned
        and by_warps.is_compiled(token.name, d, n_query_tokens, query.device)
    ):
        by_warps.launch(query, buffer, offsets, counts, scores, token.name, tables)
        return
    kernel: Any = load_kernel("maxsim")
    with on_current(query.device):
        kernel.maxsim_kernel[(programs(n, n_queries, n_query_tokens, d, token.name),)](
            query,
            buffer,
            offsets,
            counts,
            *tables,
            scores,
            n,
            n_queries,
            n_query_tokens,
            len(tables[0]),
            ALIGN_BYTES=16 if is_aligned else token.alignment_bytes,
            # of documents it matters only whether a short tile holds the longest
            **_variant(n_query_tokens, d, min(tokens_max, _SHORT_TILE + 1), token.name),
        )


def _tables(
    token: TokenFormat,
    query: torch.Tensor,
    centroids: torch.Tensor | None,
    bucket_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids and weights for the kernel, shapes checked; for other formats two tensors that it
    does not look at."""
    if not isinstance(token, ResidualFormat) and centroids is None and bucket_weights is None:
        nothing = unused(query.device)[torch.float32]
        return nothing, nothing
    expected = (
        "float32 [K, d] and [2^N], contiguous, with the residual formats, and with them alone"
    )
    if not isinstance(token, ResidualFormat) or centroids is None or bucket_weights is None:
        raise InvalidInputError(
            "maxsim centroids and bucket_weights", got=f"format {token.name}", expected=expected
        )
    tables = (centroids, bucket_weights)
    shapes_fit = (
        centroids.dim() == 2
        and centroids.shape[1] == query.shape[-1]
        and bucket_weights.shape == (2**token.nbits,)
    )
    if not shapes_fit or any(
        table.dtype != torch.float32 or not table.is_contiguous() or table.device != query.device
        for table in tables
    ):
        got = ", ".join(f"{table.dtype} {list(table.shape)} on {table.device}" for table in tables)
        raise InvalidInputError(
            "maxsim centroids and bucket_weights",
            got=got,
            expected=f"{expected}, on {query.device}",
        )
    return tables
