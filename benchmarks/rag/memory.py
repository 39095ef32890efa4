"""The same blocks in memory: what a prompt that is composed of passages is held against. It shares
no code with what composes: each passage is computed behind a copy of the prefix, by the framework,
and its keys are rotated to their place by the model's own function."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

Rows = list[tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def computed(model: Any, prefix: torch.Tensor, passages: Sequence[torch.Tensor]) -> list[Rows]:
    """K and V of the prefix and of each passage, which sees the prefix and itself: by text, then by
    layer, [1, heads, n, d]. Token ids are int64 [n]; the prefix may be empty."""
    before = DynamicCache(config=model.config)
    if len(prefix):
        model.base_model(input_ids=prefix[None], past_key_values=before, use_cache=True)
    base, found = len(prefix), [_rows_of(before, 0)] if len(prefix) else []
    for passage in passages:
        cache = copy.deepcopy(before)
        model.base_model(input_ids=passage[None], past_key_values=cache, use_cache=True)
        found.append(_rows_of(cache, base))
    return found


def _rows_of(cache: Any, begin: int) -> Rows:
    return [
        (layer.keys[:, :, begin:].clone(), layer.values[:, :, begin:].clone())
        for layer in cache.layers
    ]


def joined(
    model: Any,
    parts: Sequence[Rows],
    *,
    has_prefix: bool,
    cache: DynamicCache | None = None,
    rotated: bool = True,
) -> DynamicCache:
    """A cache of texts in the order of the prompt, those behind the prefix with their keys rotated
    to their place, or as they are. `cache`: an empty one, to be filled."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    base = parts[0][0][0].shape[2] if has_prefix else 0
    offsets, begin = list[int](), 0
    for number, part in enumerate(parts):
        is_prefix = has_prefix and number == 0
        offsets.append(begin - base if rotated and not is_prefix else 0)
        begin += part[0][0].shape[2]
    for layer in range(len(parts[0])):
        keys = [
            turned(model, part[layer][0], offset)
            for part, offset in zip(parts, offsets, strict=True)
        ]
        values = [part[layer][1] for part in parts]
        cache.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), layer)
    return cache


def turned(model: Any, k: torch.Tensor, offset: int) -> torch.Tensor:
    """Keys [1, heads, n, d] by `offset` positions further on, as the model itself rotates."""
    if not offset:
        return k
    rotary = next(each for each in model.modules() if hasattr(each, "inv_freq"))
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    width = 2 * rotary.inv_freq.numel()
    positions = torch.full((1, k.shape[2]), offset)
    cos, sin = (each / rotary.attention_scaling for each in rotary(k, positions))
    part = k[..., :width]
    return torch.cat([apply(part, part, cos, sin)[1], k[..., width:]], dim=-1)


class BlocksInMemory:
    """Stands for a `PassageKV`, in memory, for `espnx.Rag`: nothing of it is kept, and it knows
    nothing of attention."""

    def __init__(self, model: Any, prefix: Sequence[int]):
        self._model, self._prefix = model, torch.tensor(list(prefix), dtype=torch.int64)

    def compose(self, passages: Sequence[Sequence[int]], /) -> Any:
        """See `espnx.rag.passages.PassageLibrary`."""
        texts = [torch.tensor(list(each), dtype=torch.int64) for each in passages]
        cache = _Composed(self._model.config, torch.cat([self._prefix, *texts]), len(texts))
        has_prefix = bool(len(self._prefix))
        parts = computed(self._model, self._prefix, texts)
        return joined(self._model, parts, has_prefix=has_prefix, cache=cache)


class _Composed(DynamicCache):
    """See `espnx.rag.passages.ComposedCache`."""

    def __init__(self, config: Any, ids: torch.Tensor, passages: int):
        super().__init__(config=config)
        self._ids, self._passages = ids, passages
        self.reused = {"tokens": len(ids), "computed": len(ids)}

    def prompt(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """Arguments of `generate` for what follows."""
        ids = torch.cat([self._ids.expand(len(input_ids), -1), input_ids], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def passage_mass(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Zeros [1, layers, passages]: it does not look."""
        return torch.zeros(1, len(self.layers), self._passages)

    def watch_heads(self, heads: Sequence[tuple[int, int]] | None = None) -> None:
        """It does not look."""

    def head_mass(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Nothing [1, 0, 0, passages]."""
        return torch.zeros(1, 0, 0, self._passages)

    def close(self) -> None:
        """Nothing is open."""
