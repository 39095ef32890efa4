"""Tiny random decoders with every rotation that passages can stand under, and what their prompts
give in memory: the framework's own attention over keys that were rotated to their place by the
model's own function."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from espnx.integrations.transformers.enable import enable_kv_cache

WORDS = 97
_LLAMA: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_NEOX = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "linear": ("Llama", _LLAMA | _rope("linear", factor=4.0)),
    "llama3": (
        "Llama",
        _LLAMA
        | _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "yarn": ("Llama", _LLAMA | _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen3": ("Qwen3", _LLAMA),
    "phi": ("Phi", _LLAMA | _rope("default", partial_rotary_factor=0.5)),
    "gpt_neox": ("GPTNeoX", _NEOX | _rope("default", partial_rotary_factor=0.25)),
    "cohere": ("Cohere", _LLAMA),  # interleaved
    "glm": ("Glm", _LLAMA | _rope("default", partial_rotary_factor=0.5)),  # both
}


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of that kind, the same every time, with the framework's attention."""
    family, options = FAMILIES[name]
    config = getattr(transformers, family + "Config")(**options | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, family + "ForCausalLM")(config).to(dtype).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=1)
    model.set_attn_implementation("eager")
    return model


@functools.cache
def plain(name: str) -> PreTrainedModel:
    """With the framework's own attention (eager: the formula as it stands)."""
    return make(name)


@functools.cache
def enabled(name: str) -> PreTrainedModel:
    """The same weights, after `enable_kv_cache`."""
    return enable_kv_cache(make(name))


def words(n: int, seed: int) -> torch.Tensor:
    """Random tokens, int64 [n]."""
    return torch.randint(3, WORDS, (n,), generator=torch.Generator().manual_seed(seed))


def turned(model: PreTrainedModel, k: torch.Tensor, offset: int) -> torch.Tensor:
    """Keys [1, heads, n, d] by `offset` positions further on, as the model itself rotates."""
    rotary = next(each for each in model.modules() if hasattr(each, "inv_freq"))
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    width = 2 * rotary.inv_freq.numel()
    positions = torch.full((1, k.shape[2]), offset)
    cos, sin = (each / rotary.attention_scaling for each in rotary(k, positions))
    part = k[..., :width]
    return torch.cat([apply(part, part, cos, sin)[1], k[..., width:]], dim=-1)


def blocks_in_memory(
    model: PreTrainedModel, prefix: torch.Tensor, passages: Sequence[torch.Tensor]
) -> DynamicCache:
    """One masked pass: each passage sees the prefix and itself, and its positions are counted from
    the prefix's end; then its keys are rotated to their place in the prompt."""
    base, sizes = len(prefix), [len(each) for each in passages]
    ids = torch.cat([prefix, *passages])
    block = torch.cat([torch.full((n,), number) for number, n in enumerate([base, *sizes])])
    positions = torch.cat([torch.arange(base), *[torch.arange(base, base + n) for n in sizes]])
    seen = (block[:, None] == block) | (block == 0)
    seen &= torch.arange(len(ids))[:, None] >= torch.arange(len(ids))
    least = torch.finfo(torch.float32).min
    mask = torch.where(seen, 0.0, least)[None, None]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[None], attention_mask=mask, position_ids=positions[None], past_key_values=cache)
    begin = base
    for n in sizes:
        for layer in cache.layers:
            at = (slice(None), slice(None), slice(begin, begin + n))
            layer.keys[at] = turned(model, layer.keys[at], begin - base)
        begin += n
    return cache


def anew_in_memory(
    model: PreTrainedModel,
    prefix: torch.Tensor,
    passages: Sequence[torch.Tensor],
    chosen: torch.Tensor,
) -> DynamicCache:
    """`blocks_in_memory`, and behind its rows those of the chosen tokens (bool [tokens]), which
    were computed once more: each sees itself, chosen ones before it, and of the rows that were
    there those before it that are not chosen."""
    cache, ids = blocks_in_memory(model, prefix, passages), torch.cat([prefix, *passages])
    at = chosen.nonzero().flatten()
    if len(at):
        kept = (torch.arange(len(ids)) < at[:, None]) & ~chosen
        seen = torch.cat([kept, torch.ones(len(at), len(at)).tril().bool()], dim=1)
        _pass(model, ids[at], at, cache, seen)
    return cache


def _pass(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: DynamicCache,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Logits [n, words] under a mask bool [n, positions]."""
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return model(
            ids[None], attention_mask=mask, position_ids=positions[None], past_key_values=cache
        ).logits[0]


def log_probabilities_anew(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, chosen: torch.Tensor
) -> torch.Tensor:
    """float64 [n, words] of tokens behind what `anew_in_memory` returned."""
    n, past = len(ids), int(cache.get_seq_length())
    seen = torch.ones(n, past + n, dtype=torch.bool).tril(past)
    seen[:, : len(chosen)] &= ~chosen
    found = _pass(model, ids, len(chosen) + torch.arange(n), cache, seen)
    return found.double().log_softmax(dim=-1)


def log_probabilities(
    model: PreTrainedModel, ids: torch.Tensor, cache: Any, first: int
) -> torch.Tensor:
    """float64 [n, words] of tokens behind the first ones, in a pass over all but the last three,
    and a pass for each of these."""
    parts = []
    cuts = [0, *range(max(len(ids) - 3, 1), len(ids) + 1)]
    with torch.no_grad():
        for begin, end in itertools.pairwise(cuts):
            positions = torch.arange(first + begin, first + end)[None]
            found = model(ids[None, begin:end], position_ids=positions, past_key_values=cache)
            parts.append(found.logits[0].double().log_softmax(dim=-1))
    return torch.cat(parts)
