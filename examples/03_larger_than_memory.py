"""A model whose layers stay in their file, with K and V on the SSD: what is in memory is a budget that you name.

    python examples/03_larger_than_memory.py

Needs `espnx[kv]`. The model is the small one that comes with espnx; any folder of safetensors will do.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import espnx

MODEL = espnx.demo_model()
PROMPTS = ["Return the number of", "Remove all white space", "Read a file and return", "Open a connection to"]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 12, "do_sample": False}
    whole = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = whole.generate(**prompts, **options)

    # 27 MB of weights through 14 MiB: while one layer computes, the next is being read.
    model = espnx.enable_kv_cache(espnx.load_streamed(MODEL, memory="14MiB", dtype=torch.float32))
    with tempfile.TemporaryDirectory() as folder, espnx.KVCache(model.config, folder) as cache:
        ids = model.generate(**prompts, past_key_values=cache, **options)
        weights, rows = model.espnx_stats(), cache.stats()
    model.espnx_weights.close()

    for line in tokenizer.batch_decode(ids, skip_special_tokens=True):
        print(repr(line))
    print(f"weights: {weights['resident_bytes']} bytes in memory, {weights['bytes_per_pass']} read in each pass")
    print(f"K and V: {rows['bytes_written']} bytes written, {rows['bytes_moved']} read")
    assert ids.equal(expected), "not the tokens of the whole model in memory"


if __name__ == "__main__":
    main()
