"""CPU time of a decode step after tokens that came one by one, beside the same tokens prefilled.

python -m espnx.benchmarks.kv.generated DIRECTORY [TOKENS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch
import transformers

import espnx

_STEPS, _CHUNK_TOKENS = 31, 512


def step_cpu_s(storage: str, tokens: int, chunk_tokens: int) -> float:
    """Median of a step of one thread, after `tokens` that came `chunk_tokens` at a time."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=tokens + _STEPS,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = espnx.enable_kv_cache(transformers.LlamaForCausalLM(config).eval()).model
    ids, found = torch.randint(1, 97, (1, tokens + _STEPS)), list[float]()
    with (
        tempfile.TemporaryDirectory(dir=storage) as folder,
        torch.inference_mode(),
        espnx.KVCache(config, folder, x_rows=0) as cache,
    ):
        for part in [*ids[:, :tokens].split(chunk_tokens, dim=1), *ids[:, tokens:].split(1, dim=1)]:
            begun = time.process_time()
            model(part, past_key_values=cache)
            found.append(time.process_time() - begun)
    return statistics.median(found[-_STEPS:])


def main() -> None:
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 8192
    prefilled, generated = (step_cpu_s(sys.argv[1], tokens, chunk) for chunk in (_CHUNK_TOKENS, 1))
    print(
        f"{tokens} tokens: {prefilled * 1e3:.2f} ms prefilled, {generated * 1e3:.2f} ms generated, "
        f"{generated / prefilled:.2f}x"
    )


if __name__ == "__main__":
    main()
