"""A layer of a `KVCache`: takes K and V where transformers hands them over, and answers when attention asks."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .. import errors
from ..kv.cache import Step
from ..kv.xrows import Projection
from .forward_pass import InferenceOnly
from .hf_attention import awaited
from .projections import projection_of

if TYPE_CHECKING:
    from .transformers import KVCache

#: What K and V are made of, and how.
Input = tuple[torch.Tensor | None, Projection | None]


def tag(rows: torch.Tensor, layer: Any) -> torch.Tensor:
    """The same rows, by which the attention function knows whose they are."""
    tagged = rows.view_as(rows)
    tagged._espnx = layer
    return tagged


class StoredLayer(CacheLayerMixin):
    """A full-attention layer whose rows lie on SSD."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: KVCache, number: int, *, is_shared: bool = False):
        super().__init__()
        self._cache, self.number, self._is_shared = weakref.ref(cache), number, is_shared
        self.answered: Step | None = None  # of this pass, where other layers will ask for the same rows
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.inputs: tuple[torch.nn.Module, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None] | None = None

    @property
    def cache(self) -> KVCache:
        cache = self._cache()
        if cache is None:
            raise errors.EngineClosedError("the cache of this layer is gone")
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.pending is not None:
            raise errors.InvalidInputError(
                "K and V went into the cache, but attention did not ask for them", fix="call espnx.enable(model) before generate"
            )
        self.cache.reach()
        self.pending, self.answered, awaited.layer = (key_states, value_states), None, self
        return tag(key_states, self), tag(value_states, self)

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Attention of the new tokens over everything: [sequences, heads, n, dv]."""
        pending, cache = self.pending, self.cache
        self.pending = awaited.layer = None
        try:
            with torch.autocast(query.device.type, enabled=False):
                o = self._again(query, scale) if pending is None else self._first(query, *pending, mask, scale)
        except BaseException as error:
            cache.abort_pass()
            if cache.tokens is not None:
                error.sequences = cache.tokens  # type: ignore[attr-defined]
            raise
        return InferenceOnly.apply(o, query) if torch.is_grad_enabled() and query.requires_grad else o

    def _first(self, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        cache, kept = self.cache, torch.promote_types(k.dtype, v.dtype)  # they differ under autocast
        k, v = k.to(kept), v.to(kept)
        visibility = cache.visibility(mask, k.shape[0], cache.store.length(self.number) + k.shape[2])
        step = Step(query, k, v, scale, visibility, *cache.confirmed(lambda: self._input(cache, k), k, v))
        if self._is_shared:
            self.answered = replace(step, q=query[:, :, :0])
        return cache.store.attend(self.number, step)

    def _again(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        if self.answered is None:
            raise errors.InvalidInputError("attention asked twice for one layer's rows")
        return self.cache.store.attend_again(self.number, replace(self.answered, q=query, scale=scale))

    def _input(self, cache: KVCache, k: torch.Tensor) -> Input:
        """What K and V were made of, and how, where X rows are kept."""
        if not cache.store.x_rows or self.inputs is None:
            return None, None
        module, x, rotary = self.inputs
        if rotary is not None:
            if any(each.device != x.device for each in cache.rotations.tensors().values()):  # of a kept cache
                cache.rotations.restore({name: each.to(x.device) for name, each in cache.rotations.tensors().items()})
            cache.rotations.extend(*rotary, past=cache.store.length(self.number))
        return x, projection_of(module, k.shape[1], None if rotary is None else cache.rotations)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1
