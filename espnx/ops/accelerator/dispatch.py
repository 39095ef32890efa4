"""Defines the accelerator's ops and registers their versions, which are for the CPU alone. Imported
once, by `load_ops`."""

from __future__ import annotations

import torch

from .cpu import accelerator_cpu, accelerator_scores_cpu

torch.library.define(
    "espnx::accelerator",
    "(Tensor query, Tensor buffer, Tensor pieces, int block_rows, float scale, Tensor? "
    "first_visible=None, Tensor? visible=None, Tensor? last_position=None, Tensor? scores=None, "
    "Tensor? values=None, int buffered_position=0, int threads=0) -> (Tensor, Tensor)",
)
torch.library.define(
    "espnx::accelerator_scores", "(Tensor query, Tensor rows, float scale, int threads=0) -> Tensor"
)
torch.library.impl("espnx::accelerator", "CPU")(accelerator_cpu)
torch.library.impl("espnx::accelerator_scores", "CPU")(accelerator_scores_cpu)


@torch.library.register_fake("espnx::accelerator")
def _(
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
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.register_fake("espnx::accelerator_scores")
def _(query: torch.Tensor, rows: torch.Tensor, scale: float, threads: int = 0) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], rows.shape[2]), dtype=torch.float32)
