"""The CPU version of the postings op, by the extension, which checks every argument."""

from __future__ import annotations

import torch

from .._native import load_extension


def postings_cpu(
    buffer: torch.Tensor,
    lists: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor | None,
    norms: torch.Tensor | None,
    allowed: torch.Tensor | None,
    salt: int,
    kind: int,
    n_records: int,
    k: int,
    variant: int,
    k1: float,
    delta: float,
    constant: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.postings` of tensors on the CPU."""
    offset, size, first_layer, term = lists.unbind(1)
    bits = weights.view(torch.int64)
    numbers, scores = load_extension().scan_postings(
        buffer,
        offset,
        size,
        first_layer,
        term,
        bits[:, 0],
        bits[:, 1],
        salt,
        kind,
        n_records,
        k,
        lengths,
        None if norms is None else norms.view(torch.int64),
        variant,
        k1,
        delta,
        constant,
        allowed,
    )
    return numbers[0], scores[0]
