"""The layers of a model's cache: which are stored, which the framework keeps in memory, and what the latter can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin, get_layer_types_and_kwargs

from .. import errors

#: Kinds that the framework keeps in memory. Not those that attend to chosen tokens or to chunks.
_IN_MEMORY = ("sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "dummy")


class MakeLayer(Protocol):
    """Makes a layer whose rows are stored; `is_shared`: other layers of the model attend over them, too."""

    def __call__(self, number: int, *, is_shared: bool) -> Any: ...


def layers_of(config: PreTrainedConfig, stored: MakeLayer) -> list[Any]:
    """A cache layer for each layer of a decoder; `stored` makes those of full attention. Raises InvalidInputError."""
    what = f"the layers of {type(config).__name__}"
    try:
        kinds, arguments = get_layer_types_and_kwargs(config)
    except Exception as error:  # a config that transformers' own caches cannot read either
        raise errors.InvalidInputError(what, got=str(error), expected="layers that transformers' DynamicCache can be made of") from error
    layers, sharing = list[Any](), getattr(config, "kv_sharing_modes", None)
    for number, (kind, more) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "full_attention":
            layers.append(stored(number, is_shared=sharing is not None and sharing[number] == "store"))
        elif kind not in _IN_MEMORY:
            known = ", ".join(("full_attention", *_IN_MEMORY))
            raise errors.InvalidInputError(f"layer {number} of this model", got=repr(kind), expected=known)
        else:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**more))
    return layers


def why_not_cropped(layers: Sequence[Any], tokens: int) -> str | None:
    """Which of the framework's layers cannot forget their last `tokens` tokens, and why; None: all can."""
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            return f"{type(layer).__name__}: its state has all tokens in it"
        window = getattr(layer, "sliding_window", None)
        if window is not None and layer.is_initialized and layer.get_seq_length() >= window:
            kept = min(layer.get_seq_length(), layer.keys.shape[-2])
            if not layer.record_past or kept - tokens < min(window - 1, layer.get_seq_length() - tokens):
                return f"{type(layer).__name__}: of {layer.get_seq_length()} tokens it has the last {kept}, for a window of {window}"
    return None


def bytes_of(layers: Sequence[Any]) -> int:
    """Of the tensors that layers in memory keep."""
    return sum(_size(value) for layer in layers for value in vars(layer).values())


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_size(each) for each in value.values())
    return sum(_size(each) for each in value) if isinstance(value, (list, tuple)) else 0


def sequences_of(layer: Any) -> int:
    """In the batch, by a layer in memory; 0: it holds nothing."""
    tensors = [getattr(layer, "keys", None), *getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return next((each.shape[0] for each in tensors if each is not None and each.numel()), 0)
