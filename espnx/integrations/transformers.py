"""Hugging Face transformers: `enable` a model, then pass a `KVCache` to `generate`.

A `KVCache` is a transformers `Cache` whose full-attention layers hand only the new K and V to attention, tagged with the layer that keeps
the rest; the attention function that `enable` registers asks that layer for the answer. The past is never one tensor in Python.
Sliding-window, linear and other layers that hold little stay the framework's own, in memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import AttentionMaskInterface

from .. import errors
from ..kv.cache import SsdCache, Step
from ..kv.visibility import Visibility
from ..kv.xrows import Projection
from .projections import Rotations, attention_modules, projection_of

NAME = "espnx"
_QUERIES_AT_ONCE = 256
#: Arguments that change what attention computes; a model that passes one of them needs code of its own here.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Lets a model attend through espnx; without a `KVCache` it computes what it did before.

    Args:
        model: a decoder whose attention goes through transformers' attention interface (Llama, Qwen, Mistral, Mixtral, OPT, GPT-2, ...).

    Returns:
        The model itself.

    Raises:
        InvalidInputError: the model computes attention in a way that espnx does not; nothing was changed.
    """
    config = model.config.get_text_config(decoder=True)
    what = f"{type(model).__name__} cannot attend through espnx"
    if getattr(model.config, "is_encoder_decoder", False):
        raise errors.InvalidInputError(what, got="an encoder-decoder", expected="a decoder-only model")
    for name in ("attn_logit_softcapping", "alibi"):
        if getattr(config, name, None):
            raise errors.InvalidInputError(what, got=f"{name} in its config", expected="plain scaled dot products")
    AttentionInterface.register(NAME, espnx_attention)
    AttentionMaskInterface.register(NAME, _padding_mask)
    before = config._attn_implementation
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise errors.InvalidInputError(
            what, got=f"attention {config._attn_implementation!r} after asking for {NAME!r} (it was {before!r})",
            expected="a model class that uses transformers' attention interface",
        )  # fmt: skip
    if not getattr(model, "_espnx_hooks", None):
        hooks = [module.register_forward_pre_hook(_note_input, with_kwargs=True) for module in attention_modules(model)]
        model._espnx_hooks = [model.register_forward_pre_hook(_note_forward, with_kwargs=True), *hooks]
    return model


class KVCache(Cache):
    """K and V on SSD for one batch of sequences. A context manager.

    Args:
        config: of the model, or the model's text config.
        storage: a directory on the SSD; several: one for each SSD.
        x_rows: of how many sequences of the batch the projections' input is kept instead of K and V.
        **options: of `espnx.kv.cache.SsdCache`: format, spill_interval, read_ahead_bytes, capacity_tokens, engine, threads, deadline_s.

    Attributes:
        store: the `SsdCache`.
        tokens: int64 [sequences, n]: what the model was fed since the cache was empty, or None where it was fed no ids.

    Raises (from the model's forward pass, as `generate` runs it):
        DiskFullError, WriteError, ReadError, ChecksumError, DeadlineExceededError: with `sequences`, the tokens so far; the cache is as it
            was before that forward pass, and can go on.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        storage: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        x_rows: int = 0,
        **options: Any,
    ):
        text = config.get_text_config(decoder=True)
        kinds, arguments = get_layer_types_and_kwargs(text)
        self.store = SsdCache(storage, len(kinds), **options)
        self.tokens: torch.Tensor | None = None
        self.rotations = Rotations()
        self.x_rows = self.store.x_rows = x_rows
        self._masks: tuple[torch.Tensor | None, int, Visibility] | None = None
        layers: list[Any] = []
        for number, (kind, more) in enumerate(zip(kinds, arguments, strict=True)):
            if kind == "full_attention":
                layers.append(StoredLayer(self, number))
            elif kind in DYNAMIC_LAYER_TYPE_MAPPING:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**more))
            else:
                self.store.close()
                raise errors.InvalidInputError(
                    f"layer {number} of this model", got=repr(kind), expected=", ".join(DYNAMIC_LAYER_TYPE_MAPPING)
                )
        super().__init__(layers=layers)

    @property
    def _stored(self) -> list[StoredLayer]:
        return [layer for layer in self.layers if isinstance(layer, StoredLayer)]

    @property
    def _in_memory(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, StoredLayer)]

    def visibility(self, mask: torch.Tensor | None, n_sequences: int, positions: int) -> Visibility:
        """Of a forward pass: computed for its first layer, and used by all."""
        known = self._masks
        if known is None or known[0] is not mask or known[1] != positions:
            known = self._masks = (mask, positions, Visibility.of(mask, n_sequences, positions))
        return known[2]

    def note(self, ids: torch.Tensor | None) -> None:
        """A forward pass with these new tokens begins."""
        held = self.get_seq_length()
        self.store.begin(held)
        for layer in self._stored:
            layer.pending = layer.inputs = None
        self.rotations.crop(held)
        if ids is None:
            self.tokens = None
        elif held == 0 or self.tokens is None:
            self.tokens = ids.detach().cpu().clone() if held == 0 else None
        else:
            self.tokens = torch.cat([self.tokens[:, :held], ids.detach().cpu()], dim=1)

    # --- what generate does to a batch; the framework would do it layer by layer ---

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())
        for layer in self._in_memory:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        count = self.store.sequences
        self._select([i for i in range(count) for _ in range(repeats)])
        for layer in self._in_memory:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(self.store.sequences)[indices.cpu()].tolist())
        for layer in self._in_memory:
            layer.batch_select_indices(indices)

    def _select(self, sequences: list[int]) -> None:
        if sequences != list(range(self.store.sequences)):
            self.rotations.select(sequences)
            self.store.select(sequences)
            if self.tokens is not None:
                self.tokens = self.tokens[sequences]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise errors.InvalidInputError("crop", got=tokens_to_remove, expected="a negative number: so many tokens go")
        if tokens_to_remove:
            self.store.crop(max(0, self.get_seq_length() + tokens_to_remove))
            for layer in self._in_memory:
                layer.crop(tokens_to_remove)

    def reset(self) -> None:
        self.store.clear()
        self.store.x_rows = self.x_rows
        self.rotations = Rotations()
        self.tokens = self._masks = None
        for layer in self._in_memory:
            layer.reset()

    def stats(self) -> dict[str, Any]:
        """Counters: tokens, bytes written and read, seconds of waiting and computing, the path that the bytes took."""
        devices = [device.stats() for device in self.store.spread.devices]
        totals = {
            name: sum(getattr(device, name) for device in devices)
            for name, value in asdict(devices[0]).items()
            if isinstance(value, (int, float))
        }
        return {
            "tokens": self.get_seq_length(), "sequences": self.store.sequences, **totals, "memory_bytes": self.store.memory_bytes,
            "effective_path": self.store.spread.devices[0].effective_path,
        }  # fmt: skip

    def close(self) -> None:
        """Ends all I/O and returns the space. Whatever was cached is gone."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class StoredLayer(CacheLayerMixin):
    """A full-attention layer whose rows lie on SSD."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: KVCache, number: int):
        super().__init__()
        self._cache, self.number = weakref.ref(cache), number
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
        tagged = key_states.view_as(key_states)
        tagged._espnx = self
        self.pending = key_states, value_states
        return tagged, value_states

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Attention of the new tokens over everything: [sequences, heads, n, dv]."""
        if self.pending is None:
            raise errors.InvalidInputError("attention asked twice for one layer's rows")
        (k, v), cache = self.pending, self.cache
        self.pending = None
        positions = cache.store.length(self.number) + k.shape[2]
        try:
            visibility = cache.visibility(mask, k.shape[0], positions)
            step = Step(query, k, v, scale, visibility, *self._input(cache, k))
            return cache.store.attend(self.number, step)
        except errors.EspnxError as error:
            if cache.tokens is not None:
                error.sequences = cache.tokens  # type: ignore[attr-defined]
            raise

    def _input(self, cache: KVCache, k: torch.Tensor) -> tuple[torch.Tensor | None, Projection | None]:
        """What K and V were made of, and how, where X rows are kept."""
        if not cache.store.x_rows or self.inputs is None:
            return None, None
        module, x, rotary = self.inputs
        if rotary is not None:
            cache.rotations.extend(*rotary, past=cache.store.length(self.number))
        return x, projection_of(module, k.shape[1], None if rotary is None else cache.rotations)

    def get_seq_length(self) -> int:
        return self.cache.store.length(self.number) + (0 if self.pending is None else self.pending[0].shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def _note_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, KVCache):
        cache.note(kwargs.get("input_ids", args[0] if args else None))


def _note_input(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, KVCache) and cache.store.x_rows:
        layer = cache.layers[module.layer_idx]  # type: ignore[index]
        if isinstance(layer, StoredLayer):
            layer.inputs = module, kwargs.get("hidden_states", args[0] if args else None), kwargs.get("position_embeddings")


def _padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The two-dimensional mask as it is: causality and windows are the attention function's own affair. A matrix of queries x keys would
    take 16 GiB for a padded prompt of 128K tokens."""
    if not allow_is_causal_skip:
        raise errors.InvalidInputError(
            "this model's attention mask", got="more than causal, window and padding", expected="these alone",
            fix="do not pass packed sequences or custom masks",
        )  # fmt: skip
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if bool(attention_mask.all()):
            return None
    return attention_mask


def espnx_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [b, heads, n, d], key and value as the cache returned them. Returns [b, n, heads, dv].

    Raises InvalidInputError for what espnx does not compute: dropout, soft caps, sinks, position biases.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise errors.InvalidInputError(f"attention of {type(module).__name__}", got=name, expected="plain scaled dot products")
    if dropout:
        raise errors.InvalidInputError("attention dropout", got=dropout, expected=0.0, fix="model.eval()")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer: StoredLayer | None = getattr(key, "_espnx", None)
    window = kwargs.get("sliding_window")
    if layer is not None:
        if window is not None:
            raise errors.InvalidInputError(f"layer {layer.number}", got=f"a sliding window of {window}", expected="full attention")
        o = layer.attend(query, attention_mask, scale)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        o = _attend_in_memory(query, key, value, attention_mask, scale, window, causal)
    return o.transpose(1, 2).contiguous(), None


def _attend_in_memory(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, window: int | None, causal: bool
) -> torch.Tensor:
    """Layers that keep little, and models without a `KVCache`: the framework's own attention, some hundred queries at a time."""
    n, length = q.shape[2], k.shape[2]
    run: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    shared = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    narrow = window is not None and length > window
    if mask is None and not narrow and (not causal or n == length or n == 1):
        return run(q, k, v, is_causal=causal and n > 1, **shared)
    parts = []
    for begin in range(0, n, _QUERIES_AT_ONCE):
        end = min(begin + _QUERIES_AT_ONCE, n)
        at = torch.arange(length - n + begin, length - n + end, device=q.device)[:, None]
        last = length - n + end if causal else length
        first = max(0, length - n + begin - window + 1) if window is not None else 0
        keys = torch.arange(first, last, device=q.device)
        seen = keys <= at if causal else torch.ones_like(keys <= at)
        if window is not None:
            seen = seen & (keys > at - window)
        if mask is not None:
            seen = seen & mask[:, None, None, first:last].bool()
        # A row that sees nothing is padding: it may see itself, so that no NaN arises, and nobody looks at it.
        seen = seen | ((keys == at) & ~seen.any(dim=-1, keepdim=True))
        parts.append(run(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], attn_mask=seen, **shared))
    return torch.cat(parts, dim=2)
