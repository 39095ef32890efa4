"""Defines the MaxSim op and registers its versions. Imported once, by `load_ops`."""

from __future__ import annotations

import torch

from .cpu import maxsim_cpu
from .cuda import maxsim_cuda

# threads: 0 leaves it to the op, at most torch's own number; CUDA ignores it.
torch.library.define(
    "espnx::maxsim",
    "(Tensor query, Tensor buffer, Tensor offset_bytes, Tensor n_tokens, str format, int "
    "threads=0, Tensor? centroids=None, Tensor? bucket_weights=None) -> Tensor",
)
torch.library.impl("espnx::maxsim", "CPU")(maxsim_cpu)
torch.library.impl("espnx::maxsim", "CUDA")(maxsim_cuda)


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
