"""Tiny models of several kinds, saved whole and in shards, and the tokens that they generate in
memory. For the tests of streaming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from espnx import errors
from espnx.integrations.streamed.load import load_streamed

LAYERS = 5
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "pad_token_id": 0,
}
GQA = {**SHAPE, "intermediate_size": 96, "num_key_value_heads": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GQA),
    "mixtral": transformers.MixtralConfig(**GQA, num_local_experts=3, num_experts_per_tok=2),
    "qwen3": transformers.Qwen3Config(**GQA, head_dim=16, tie_word_embeddings=True),
    "opt": transformers.OPTConfig(
        **SHAPE, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=97, n_positions=64
    ),
    "windows": transformers.MistralConfig(**GQA, sliding_window=6),
}
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
IDS = torch.randint(3, 97, (5, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0


def save(where: Path, name: str) -> dict[str, Path]:
    """A model saved whole, and (`-sharded`) in many files."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(list(CONFIGS).index(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    # biases and norms begin as zeros and ones, which would hide a mix-up
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    found = {}
    for kind, options in (("", {}), ("-sharded", {"max_shard_size": "60KB"})):
        found[name + kind] = where / (name + kind)
        model.save_pretrained(found[name + kind], **options)
    return found


def resident(folder: Path) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model in memory, and its tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, model.generate(IDS, attention_mask=MASK, **GREEDY)


def least(folder: Path, **options: Any) -> int:
    """The smallest budget, as the error says it."""
    with pytest.raises(errors.InvalidInputError, match="at least") as caught:
        load_streamed(folder, 1, **options)
    return int(str(caught.value.expected).split()[2])
