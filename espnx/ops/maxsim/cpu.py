"""The CPU version of the MaxSim op, by the extension, which checks every argument."""

from __future__ import annotations

import torch

from .._native import load_extension


def maxsim_cpu(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    fmt: str,
    threads: int = 0,
    centroids: torch.Tensor | None = None,
    bucket_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`espnx.ops.maxsim` of tensors on the CPU; ``threads`` 0: as many as torch uses."""
    return load_extension().maxsim(
        query.contiguous(),
        buffer,
        offset_bytes.contiguous(),
        n_tokens.contiguous(),
        fmt,
        threads or torch.get_num_threads(),
        centroids,
        bucket_weights,
    )
