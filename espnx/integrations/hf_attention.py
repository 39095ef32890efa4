"""The attention and mask functions that espnx registers with transformers.

Keys that a stored layer handed on carry that layer (`_espnx`), which is asked for the answer; any other attention is computed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import errors

_QUERIES_AT_ONCE = 256
#: Arguments that change what attention computes; a model that passes one of them needs code of its own here.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


class _Awaited(threading.local):
    """The stored layer that has been given K and V and waits to be asked, of this thread's forward pass."""

    layer: Any = None


awaited = _Awaited()


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The two-dimensional mask as it is: causality and windows are the attention function's own affair. A matrix of queries x keys would
    take 16 GiB for a padded prompt of 128K tokens."""
    end = kv_offset + kv_length
    if end > int(q_offset) + q_length:
        raise errors.InvalidInputError(
            "attention through espnx", got="a cache of a fixed size", expected="a KVCache, a cache that grows, or none",
            fix='model.set_attn_implementation("sdpa")',
        )  # fmt: skip
    if not allow_is_causal_skip:
        raise errors.InvalidInputError(
            "this model's attention mask", got="more than causal, window and padding", expected="these alone",
            fix="do not pass packed sequences or custom masks",
        )  # fmt: skip
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size or attention_mask.shape[1] < end:
        raise errors.InvalidInputError(
            "attention mask", got=list(attention_mask.shape), expected=f"[{batch_size}, {end}]: all tokens, those in the cache included"
        )
    attention_mask = attention_mask[:, kv_offset:end]
    return None if bool(attention_mask.all()) else attention_mask


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
    if attention_mask is not None and attention_mask.dim() != 2:
        raise errors.InvalidInputError(
            "attention mask", got=f"{attention_mask.dim()} dimensions", expected="[sequences, positions]", fix="pass the padding mask"
        )
    if dropout:
        raise errors.InvalidInputError("attention dropout", got=dropout, expected=0.0, fix="model.eval()")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = getattr(key, "_espnx", None)
    window = kwargs.get("sliding_window")
    if layer is not None:
        if window is not None:
            raise errors.InvalidInputError(f"layer {layer.number}", got=f"a sliding window of {window}", expected="full attention")
        o = layer.attend(query, attention_mask, scale)
    elif awaited.layer is not None:
        awaited.layer = None
        raise errors.InvalidInputError(
            f"{type(module).__name__} and a cache on SSD", got="attention over other keys than the cache returned",
            expected="attention over K and V as they were cached (not compressed ones that are expanded again)", fix="DynamicCache",
        )  # fmt: skip
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
