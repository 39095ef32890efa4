"""K and V in memory-mapped files: what a program does that leaves the reading to the kernel. One
pair of files for each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class MemmapLayer(CacheLayerMixin):
    """A layer whose rows [sequences, heads, capacity, d] are mapped; each step gathers those of all
    tokens into memory."""

    is_sliding = False
    is_croppable = False

    def __init__(self, folder: Path, number: int, capacity_tokens: int):
        super().__init__()
        self._paths = [folder / f"layer-{number}-{kind}.rows" for kind in ("k", "v")]
        self._capacity, self._count = capacity_tokens, 0
        self._areas: list[torch.Tensor] = []
        self._maps: list[np.memmap] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        for path, states in zip(self._paths, (key_states, value_states), strict=True):
            shape = (*states.shape[:2], self._capacity, states.shape[3])
            raw = np.memmap(
                path, np.uint8, "w+", shape=(int(np.prod(shape)) * states.element_size(),)
            )
            self._maps.append(raw)
            self._areas.append(torch.from_numpy(raw).view(states.dtype).view(shape))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self._count = self._count, self._count + key_states.shape[2]
        for area, states in zip(self._areas, (key_states, value_states), strict=True):
            area[:, :, begin : self._count] = states
        k, v = (area[:, :, : self._count].clone() for area in self._areas)
        return k, v

    def fill(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The rows of a prefill, without gathering them again."""
        self.lazy_initialization(k, v)
        for area, states in zip(self._areas, (k, v), strict=True):
            area[:, :, : k.shape[2]] = states
        self._count = k.shape[2]
        for raw in self._maps:
            raw.flush()

    def get_seq_length(self) -> int:
        return self._count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._count + query_length, 0

    def get_max_length(self) -> int:
        return self._capacity


class MemmapCache(Cache):
    """A cache for a model with that many layers; files lie in `folder`."""

    def __init__(self, folder: Path, n_layers: int, capacity_tokens: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        super().__init__(
            layers=[MemmapLayer(folder, number, capacity_tokens) for number in range(n_layers)]
        )

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.rows"))
