"""The CUDA version of the MaxSim op: checks, allocates and launches ``kernels/maxsim.py``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ...errors import InvalidInputError
from .._native import load_kernel
from .checks import check_aligned, check_arguments, check_inside
from .formats import token_format

_PROGRAMS_MAX = 2**31 - 1  # the largest CUDA grid


def launch_shape(n_query_tokens: int, d: int, tokens_max: int, fmt: str) -> dict[str, int]:
    """Block sizes. The least that a tensor core takes is 16 each way; a block of values divides d where it can.

    fp32 products are plain multiply-adds, one instruction each, so their blocks are kept short along d.
    """
    power_in_d = d & -d
    return {
        "BLOCK_Q": min(max(16, 1 << (n_query_tokens - 1).bit_length()), 64),
        "BLOCK_T": 16 if tokens_max <= 16 else 64,
        "BLOCK_D": min(max(16, power_in_d), 128 if fmt == "fp16" else 32),
    }


def maxsim_triton(
    query: torch.Tensor, buffer: torch.Tensor, offset_bytes: torch.Tensor, n_tokens: torch.Tensor, fmt: str, threads: int = 0
) -> torch.Tensor:
    """`espnx.ops.maxsim` by Triton: CUDA tensors, or CPU tensors in Triton's interpreter. ``threads`` has no meaning here."""
    token = token_format(fmt)
    check_arguments(query, buffer, offset_bytes, n_tokens)
    check_inside(buffer.numel(), offset_bytes, n_tokens, token.token_row_bytes(query.shape[-1]))
    is_aligned = check_aligned(buffer.data_ptr(), offset_bytes, token)
    n_query_tokens, d = query.shape[-2:]
    n, n_queries = offset_bytes.numel(), query.shape[0] if query.dim() == 3 else 1
    if n * n_queries > _PROGRAMS_MAX:
        raise InvalidInputError(
            "maxsim documents times queries", got=n * n_queries, expected=f"at most {_PROGRAMS_MAX}", fix="score fewer queries at once"
        )
    scores = torch.empty((*query.shape[:-2], n), dtype=torch.float32, device=query.device)
    counts = n_tokens.to(query.device, non_blocking=True)
    if scores.numel() == 0:
        return scores
    if n_query_tokens == 0:
        return scores.copy_(torch.where(counts > 0, 0.0, -torch.inf))
    kernel: Any = load_kernel("maxsim")
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        kernel.maxsim_kernel[(n * n_queries,)](
            query.contiguous(),
            buffer,
            offset_bytes.to(query.device, non_blocking=True).contiguous(),
            counts.contiguous(),
            scores,
            n,
            n_queries,
            n_query_tokens,
            D=d,
            FORMAT=fmt,
            ALIGN_BYTES=16 if is_aligned else token.alignment_bytes,
            enable_fp_fusion=True,
            **launch_shape(n_query_tokens, d, int(n_tokens.max()), fmt),
        )
    return scores
