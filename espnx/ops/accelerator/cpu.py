"""The CPU versions of the accelerator's ops, by the extension, which checks every argument."""

from __future__ import annotations

import torch

from .._native import load_extension


def accelerator_cpu(
    query: torch.Tensor,
    buffer: torch.Tensor,
    pieces: torch.Tensor,
    block_rows: int,
    scale: float,
    first_visible: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    buffered_position: int = 0,
    threads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.accelerator.accelerator`; ``threads`` 0: as many as torch uses."""
    return load_extension().accelerator(
        query,
        buffer,
        pieces,
        block_rows,
        scale,
        first_visible,
        visible,
        last_position,
        scores,
        values,
        buffered_position,
        threads or torch.get_num_threads(),
    )


def accelerator_scores_cpu(
    query: torch.Tensor, rows: torch.Tensor, scale: float, threads: int = 0
) -> torch.Tensor:
    """`espnx.ops.accelerator.accelerator_scores`; ``threads`` 0: as many as torch uses."""
    return load_extension().accelerator_scores(
        query, rows, scale, threads or torch.get_num_threads()
    )
