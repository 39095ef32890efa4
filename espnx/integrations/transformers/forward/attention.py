"""The attention function that espnx registers with transformers, and how a stored layer and it find
one another.

A layer's `update` returns only the new K and V, and the attention function must ask that layer for
the answer over all of them. The framework carries nothing from one to the other but the two
tensors, and a model may do anything with these, so there are three signals:

- the tag: K and V that `update` returned carry their layer (`tag`, `layer_of`). Whoever gets them
  knows whom to ask.
- `awaited.layer`: the layer of this thread that waits to be asked. Keys without a tag while a layer
  waits were made of the tagged ones (compressed ones that are expanded, say): attention over them
  would leave out everything that is stored, so it is refused.
- `StoredLayer.pending`: the K and V themselves, until they are asked for. What is still there at
  the layer's next `update` or at the end of the pass shows that attention never came here, as where
  another implementation was set.

Any other attention is computed here, by the framework's own kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Number
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F

from .... import errors
from ....kv.prefill import for_fused, has_fused
from ....kv.scores import PLAIN, ScoreRules
from ....ops.attention import add_sinks
from ....ops.precision import whole_float32
from ..graphs import outside_graphs
from .masks import Mask, meaning

_QUERIES_AT_ONCE = 256
#: Arguments that models pass along and that do not change what attention computes. Any other needs
#: code of its own here.
_HARMLESS = frozenset({
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "token_type_ids",
    "use_cache",
})  # fmt: skip

#: Those that change what attention computes, and that are computed: a window (as in the mask), soft
#: caps, and sink logits.
_COMPUTED = frozenset({"sliding_window", "softcap", "s_aux"})


NAME = "espnx"  # of this attention and its masks, with transformers


class _Awaited(threading.local):
    """The stored layer that has been given K and V and waits to be asked, of this thread's forward
    pass."""

    layer: Any = None


awaited = _Awaited()


def tag(rows: torch.Tensor, layer: Any) -> torch.Tensor:
    """The same rows, by which the attention function knows whose they are."""
    tagged = rows.view_as(rows)
    tagged._espnx = layer
    return tagged


def layer_of(rows: torch.Tensor) -> Any:
    """The layer that the rows were tagged with, or None."""
    return getattr(rows, "_espnx", None)


@outside_graphs
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
    """transformers' attention function: query [b, heads, n, d], key and value as the cache returned
    them. Returns [b, n, heads, dv].

    Raises InvalidInputError for what espnx does not compute: dropout, and arguments that are not
    known here (position biases, indices of blocks) and may count. What may not, `generate` passes
    down as it comes: a tokenizer.
    """
    where = f"attention of {type(module).__name__}"
    if unknown := [
        name
        for name, value in kwargs.items()
        if name not in _HARMLESS | _COMPUTED and _may_count(value)
    ]:
        raise errors.InvalidInputError(
            where, got=", ".join(unknown), expected="plain scaled dot products"
        )
    if dropout:
        raise errors.InvalidInputError(
            "attention dropout", got=dropout, expected=0.0, fix="model.eval()"
        )
    said, asked = meaning(attention_mask), kwargs.get("sliding_window")
    if asked is not None and said.is_causal and asked != said.window:
        raise errors.InvalidInputError(
            where, got=f"a window of {asked}", expected=f"{said.window}, as in its mask"
        )
    causal = (
        said.is_causal
        if attention_mask is not None
        else getattr(module, "is_causal", True)
        if is_causal is None
        else is_causal
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    soft_cap, sinks, layer = kwargs.get("softcap"), kwargs.get("s_aux"), layer_of(key)
    rules = (
        PLAIN if soft_cap is None and sinks is None else ScoreRules(soft_cap=soft_cap, sinks=sinks)
    )
    if layer is not None:
        if said.window is not None or not (causal or query.shape[2] == 1):
            got = (
                "attention in both directions"
                if said.window is None
                else f"a sliding window of {said.window}"
            )
            raise errors.InvalidInputError(
                f"layer {layer.number}", got=got, expected="full attention"
            )
        if layer_of(value) is not layer:
            raise errors.InvalidInputError(
                where,
                got="other values than the cache returned",
                expected="K and V as they were cached",
            )
        o = layer.attend(query, said.visible, scale, rules)
    elif awaited.layer is not None:
        awaited.layer = None
        raise errors.InvalidInputError(
            f"{type(module).__name__} and a cache on SSD",
            got="attention over other keys than the cache returned",
            expected=(
                "attention over K and V as they were cached (not compressed ones that are expanded "
                "again)"
            ),
            fix="DynamicCache",
        )
    else:
        o = attend_in_memory(query, key, value, said, scale, causal, rules)
    return o.transpose(1, 2).contiguous(), None


def _may_count(value: Any) -> bool:
    """Whether an argument that nobody knows may change what attention computes: numbers, tensors,
    names and functions may, and what has them in it."""
    if isinstance(value, (torch.Tensor, Number, str, FunctionType, MethodType, partial)):
        return True
    if isinstance(value, Mapping):
        return any(map(_may_count, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_may_count, value))
    return any(isinstance(part, torch.Tensor) for part in getattr(value, "__dict__", {}).values())


def attend_in_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    said: Mask,
    scale: float,
    causal: bool,
    rules: ScoreRules = PLAIN,
) -> torch.Tensor:
    """Layers that keep little, and models without a `KVCache`: the framework's own attention, some
    hundred queries at a time."""
    mask, window = said.visible, said.window
    n, length = q.shape[2], k.shape[2]
    run: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    k, v = for_fused(q, k, v)
    shared = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    narrow = window is not None and length > window
    is_own = rules == PLAIN
    if (
        is_own
        and mask is None
        and not narrow
        and (not causal or n == length or n == 1)
        and (has_fused(q, v) or n <= _QUERIES_AT_ONCE)
    ):
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
        # A row that sees nothing is padding: it may see itself, so that no NaN arises, and its
        # result is never used.
        seen = seen | ((keys == at) & ~seen.any(dim=-1, keepdim=True))
        rows = q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last]
        parts.append(
            run(*rows, attn_mask=seen, **shared)
            if is_own
            else _attend_by(rules, *rows, seen, keys - at, scale)
        )
    return torch.cat(parts, dim=2)


def _attend_by(
    rules: ScoreRules,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    distance: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What the framework's fused kernels do not compute: soft caps and sinks."""
    k, v = (rows.float().repeat_interleave(q.shape[1] // rows.shape[1], dim=1) for rows in (k, v))
    with whole_float32():
        scores = rules.changed(q.float() @ k.transpose(-1, -2) * scale, distance).masked_fill(
            ~seen, float("-inf")
        )
        lse = scores.logsumexp(dim=-1)
        o = torch.exp(scores - lse[..., None]) @ v
    return (o if rules.sinks is None else add_sinks(o, lse, rules.sinks[:, None])[0]).to(q.dtype)
