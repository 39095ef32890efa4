"""A long prompt and some steps through a KV cache, in a process of its own: says what its memory
came to, where a limit may end it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import espnx
from espnx.benchmarks.machine.memory import status_bytes

LAYERS, HEADS, HEAD_DIM, BATCH, CHUNK, STEPS = 4, 8, 128, 16, 64, 6
#: Of K and V in fp32, of a token of every sequence.
TOKEN_BYTES = LAYERS * HEADS * HEAD_DIM * 2 * 4 * BATCH


def resident_bytes() -> int:
    return status_bytes()["VmRSS"]


def main(storage: str, group: str, size_bytes: int) -> None:
    """`group`: of the memory group to join, or empty. `size_bytes`: of K and V."""
    tokens = size_bytes // TOKEN_BYTES
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=tokens + STEPS,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = espnx.enable_kv_cache(transformers.LlamaForCausalLM(config).eval()).model
    ids = torch.randint(1, 97, (BATCH, tokens))
    found = []
    with torch.inference_mode():
        model(ids[:, :CHUNK])
        before = resident_bytes()
        if group:
            Path(group).write_text(str(os.getpid()))
        with espnx.KVCache(config, storage, x_rows=0) as cache:
            for begin in range(0, tokens, CHUNK):
                model(ids[:, begin : begin + CHUNK], past_key_values=cache)
                found.append(resident_bytes() - before)
            stored = cache.stats()["stored_bytes"]
            for _ in range(STEPS):
                model(ids[:, :1], past_key_values=cache)
            stats = cache.stats()
            print(
                json.dumps(
                    {
                        "prefill": found,
                        "decode": resident_bytes() - before,
                        "stored": stored,
                        "stats": stats,
                    }
                )
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
        main(directory, sys.argv[2], int(sys.argv[3]))
