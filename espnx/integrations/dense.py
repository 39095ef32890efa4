"""How long a decoding step takes without attention: the model's products with its weights, done once."""

from __future__ import annotations

import time

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


@torch.inference_mode()
def dense_seconds(model: nn.Module, sequences: int) -> float:
    """Seconds of one token of each of `sequences` through every linear layer: measured twice, the faster counts, since weights that are
    mapped come from their file at the first touch. Layers whose weights are not in memory (streamed models) count nothing."""
    parts = [part for part in model.modules() if isinstance(part, (nn.Linear, Conv1D)) and not part.weight.is_meta]
    rows = {
        part: torch.zeros(sequences, part.in_features if isinstance(part, nn.Linear) else part.nx, dtype=part.weight.dtype,
                          device=part.weight.device)
        for part in parts
    }  # fmt: skip
    return min(_once(rows) for _ in range(2))


def _once(rows: dict[nn.Linear | Conv1D, torch.Tensor]) -> float:
    begun = time.perf_counter()
    for part, x in rows.items():
        type(part).forward(part, x)  # hooks are for the model's own passes
    if any(x.is_cuda for x in rows.values()):
        torch.cuda.synchronize()
    return time.perf_counter() - begun
