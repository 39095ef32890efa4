"""The CPU version of the distances op, by the extension, which checks every argument."""

from __future__ import annotations

import torch

from .._native import load_extension


def distances_cpu(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    fmt: str,
    metric: str,
    threads: int = 0,
) -> torch.Tensor:
    """`espnx.ops.distances` of tensors on the CPU; ``threads`` 0: as many as torch uses."""
    values = query.contiguous()
    if values.dtype == torch.int8:  # of which DLPack's view here knows nothing
        values = values.view(torch.uint8)
    return load_extension().distances(
        values, buffer, offset_bytes.contiguous(), fmt, metric, threads or torch.get_num_threads()
    )
