"""The attention function that espnx registers with transformers.

Keys that a stored layer handed on carry that layer (`_espnx`), which is asked for the answer; any other attention is computed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import errors
from ..kv.chunk import for_fused, has_fused
from .masks import Mask, meaning

_QUERIES_AT_ONCE = 256
#: Arguments that models pass along and that do not change what attention computes. Any other needs code of its own here.
_HARMLESS = frozenset({
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "token_type_ids", "use_cache",
})  # fmt: skip


class _Awaited(threading.local):
    """The stored layer that has been given K and V and waits to be asked, of this thread's forward pass."""

    layer: Any = None


awaited = _Awaited()


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

    Raises InvalidInputError for what espnx does not compute: dropout, and arguments that are not known here (soft caps, sinks, position
    biases, indices of blocks).
    """
    where = f"attention of {type(module).__name__}"
    if unknown := [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS and name != "sliding_window"]:
        raise errors.InvalidInputError(where, got=", ".join(unknown), expected="plain scaled dot products")
    if dropout:
        raise errors.InvalidInputError("attention dropout", got=dropout, expected=0.0, fix="model.eval()")
    said, asked = meaning(attention_mask), kwargs.get("sliding_window")
    if asked is not None and said.is_causal and asked != said.window:
        raise errors.InvalidInputError(where, got=f"a window of {asked}", expected=f"{said.window}, as in its mask")
    causal = said.is_causal if attention_mask is not None else getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = _layer_of(key)
    if layer is not None:
        if said.window is not None or not (causal or query.shape[2] == 1):
            got = "attention in both directions" if said.window is None else f"a sliding window of {said.window}"
            raise errors.InvalidInputError(f"layer {layer.number}", got=got, expected="full attention")
        if _layer_of(value) is not layer:
            raise errors.InvalidInputError(where, got="other values than the cache returned", expected="K and V as they were cached")
        o = layer.attend(query, said.visible, scale)
    elif awaited.layer is not None:
        awaited.layer = None
        raise errors.InvalidInputError(
            f"{type(module).__name__} and a cache on SSD", got="attention over other keys than the cache returned",
            expected="attention over K and V as they were cached (not compressed ones that are expanded again)", fix="DynamicCache",
        )  # fmt: skip
    else:
        o = attend_in_memory(query, key, value, said, scale, causal)
    return o.transpose(1, 2).contiguous(), None


def _layer_of(rows: torch.Tensor) -> Any:
    return getattr(rows, "_espnx", None)


def attend_in_memory(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, said: Mask, scale: float, causal: bool) -> torch.Tensor:
    """Layers that keep little, and models without a `KVCache`: the framework's own attention, some hundred queries at a time."""
    mask, window = said.visible, said.window
    n, length = q.shape[2], k.shape[2]
    run: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    k, v = for_fused(q, k, v)
    shared = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    narrow = window is not None and length > window
    if mask is None and not narrow and (not causal or n == length or n == 1) and (has_fused(q, v) or n <= _QUERIES_AT_ONCE):
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
