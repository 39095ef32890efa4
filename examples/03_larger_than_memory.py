"""A model whose layers stay in their file, with K and V on the SSD: what is in memory is a budget
that you name.

    python examples/03_larger_than_memory.py

Each prompt says something in its first line and asks for it in its last, with text between: what
the model answers has been on the SSD.

Needs `espnx[kv]`. The model is the small one that comes with espnx; any folder of safetensors will
do.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import espnx

MODEL = espnx.demo_model()
KEPT = {
    "garden": "silver river",
    "window": "green lamp",
    "letter": "quiet harbor",
    "bridge": "yellow stone",
}
BETWEEN = 40 * "Return the sum of two numbers. "


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = [f"KEY {key}: {words}\n{BETWEEN}\nGET {key}:" for key, words in KEPT.items()]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 8, "do_sample": False}
    whole = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = whole.generate(**prompts, **options)

    # 27 MB of weights through 14 MiB: while one layer computes, the next is being read.
    model = espnx.enable_kv_cache(espnx.load_streamed(MODEL, memory="14MiB", dtype=torch.float32))
    with tempfile.TemporaryDirectory() as folder, espnx.KVCache(model.config, folder) as cache:
        ids = model.generate(**prompts, past_key_values=cache, **options)
        weights, rows = model.espnx_stats(), cache.stats()
    model.espnx_weights.close()

    answers = tokenizer.batch_decode(
        ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    for (key, words), answer in zip(KEPT.items(), answers, strict=True):
        print(f"GET {key}:{answer.splitlines()[0]}")
        assert answer.startswith(f" {words}"), answer
    print(
        f"weights: {weights['resident_bytes']} bytes in memory, {weights['bytes_per_pass']} read "
        "in each pass"
    )
    print(f"K and V: {rows['bytes_written']} bytes written, {rows['bytes_moved']} read")
    assert rows["bytes_moved"] > rows["bytes_written"] > 0, "K and V did not leave memory"
    assert ids.equal(expected), "not the tokens of the whole model in memory"


if __name__ == "__main__":
    main()
