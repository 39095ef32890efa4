"""Defines the distances op and registers its versions. Imported once, by `load_ops`."""

from __future__ import annotations

import torch

from .cpu import distances_cpu

# threads: 0 leaves it to the op, at most torch's own number.
torch.library.define(
    "espnx::distances",
    "(Tensor query, Tensor buffer, Tensor offset_bytes, str format, str metric, int threads=0) -> "
    "Tensor",
)
torch.library.impl("espnx::distances", "CPU")(distances_cpu)


@torch.library.register_fake("espnx::distances")
def _(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    fmt: str,
    metric: str,
    threads: int = 0,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], offset_bytes.shape[0]), dtype=torch.float32)
