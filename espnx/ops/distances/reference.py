"""Distances in plain PyTorch: what the fast version is tested against, and what the op means."""

from __future__ import annotations

import torch

from .checks import check_arguments, check_format, check_inside, is_whole, vector_bytes


def distances_reference(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    format: str = "uint8",  # noqa: A002
    metric: str = "l2",
) -> torch.Tensor:
    """One vector after the other: whole numbers in int64, floats in float64, rounded once to
    float32.

    Arguments, result and errors are those of `espnx.ops.distances`; no compiled code.
    """
    check_arguments(query, buffer, offset_bytes, format, metric)
    size_bytes = vector_bytes(format, query.shape[-1])
    check_inside(buffer.numel(), offset_bytes, size_bytes)
    wide = torch.int64 if is_whole(format) else torch.float64
    wanted = query.to(wide)
    found = query.new_empty((*query.shape[:-1], offset_bytes.numel()), dtype=torch.float32)
    for i, begin in enumerate(offset_bytes.tolist()):
        vector = buffer[begin : begin + size_bytes].clone().view(check_format(format)).to(wide)
        found[..., i] = (
            ((wanted - vector) ** 2).sum(-1) if metric == "l2" else -(wanted * vector).sum(-1)
        )
    return found
