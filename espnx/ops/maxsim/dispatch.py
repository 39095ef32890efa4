"""Registers the versions of the MaxSim op that are written in Python. Imported once, by `load_ops`, after the op itself exists."""

from __future__ import annotations

import torch

from .cuda import maxsim_triton

torch.library.impl("espnx::maxsim", "CUDA")(maxsim_triton)


@torch.library.register_fake("espnx::maxsim")
def _(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    fmt: str,
    threads: int = 0,
    centroids: torch.Tensor | None = None,
    bucket_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-2], offset_bytes.shape[0]))
