"""Tiny random decoders for the tests of KV caches, of every attention that transformers' models
have; wide heads, so that few tokens fill blocks and most of what is attended over was read from
disk."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

VOCABULARY = 97
PAD = 0

#: Heads of 128 values: a block of fp32 rows holds 8 tokens.
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "init_std": 0.15,
    "dropout": 0.0,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 256,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 512,
    "initializer_range": 0.15,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_EIGHT = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SHARED),
    "qwen2": ("Qwen2", _SHARED),
    "qwen3": ("Qwen3", _SHARED),
    "mixtral": (
        "Mixtral",
        _SHARED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "mistral": ("Mistral", _SHARED | {"sliding_window": 12}),
    "gemma3": (
        "Gemma3",
        _SHARED
        | {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "query_pre_attn_scalar": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma2": (
        "Gemma2",
        _SHARED
        | {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "query_pre_attn_scalar": 128,
            "attn_logit_softcapping": 1.5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        _SHARED
        | {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "opt": ("OPT", _OPT),
    "gpt2": ("GPT2", _GPT2),
}


def make(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model of that kind, the same every time, in evaluation mode."""
    family, options = CONFIGS[name]
    kind = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + kind)(**_EIGHT | options | changes)
    torch.manual_seed(seed)
    model_class = getattr(
        transformers,
        {"OPT": "OPTForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(family, family + "ForCausalLM"),
    )
    with torch.random.fork_rng():
        model = model_class(config).to(dtype).eval()
    model.generation_config.update(pad_token_id=PAD, eos_token_id=None, bos_token_id=1)
    return model


@functools.cache
def plain(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With the framework's own attention (eager: the formula as it stands)."""
    model = make(name, dtype=dtype)
    model.set_attn_implementation("eager")
    return model


@functools.cache
def enabled(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights, after `espnx.enable_kv_cache`."""
    from espnx.integrations.transformers.enable import enable_kv_cache

    return enable_kv_cache(make(name, dtype=dtype))


def prompt(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, padded on the left to the longest."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    cache: Any,
    *,
    seed: int = 0,
    **options: Any,
) -> torch.Tensor:
    """Token ids, prompts included."""
    torch.manual_seed(seed)
    return model.generate(
        **inputs, past_key_values=cache, **{"max_new_tokens": 30, "do_sample": False} | options
    )


@functools.cache
def _known(
    name: str, lengths: tuple[int, ...], seed: int, options: tuple[tuple[str, Any], ...]
) -> torch.Tensor:
    model = plain(name)
    return generate(
        model,
        prompt(list(lengths), seed),
        DynamicCache(config=model.config),
        seed=seed,
        **dict(options),
    )


def expected(name: str, lengths: list[int], *, seed: int = 0, **options: Any) -> torch.Tensor:
    """What the framework generates with its own cache."""
    return _known(name, tuple(lengths), seed, tuple(sorted(options.items())))
