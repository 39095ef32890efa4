"""K and V on the SSD: the tokens of the framework, and a document that is read once and asked about
twice.

    python examples/02_long_context.py

The model is the small one that comes with espnx, which recalls lines such as ``KEY garden: silver
river``. Needs `espnx[kv]`.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import espnx

MODEL = espnx.demo_model()
LINES = 20 * "Return the sum of two numbers. "
DOCUMENT = f"KEY garden: silver river\n{LINES}\nKEY window: yellow stone\n{LINES}\n"
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # In fp32 tokens are equal, one by one; in fp16 and bf16 unless two of them are closer than
    # rounding (docs/lossless.md).
    model = espnx.enable_kv_cache(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))

    with tempfile.TemporaryDirectory() as folder:  # a directory on the SSD
        first = tokenizer(f"{DOCUMENT}GET window:", return_tensors="pt")
        # kept under this name when the block ends
        with espnx.KVCache(model.config, folder, name="document") as cache:
            ids = model.generate(**first, past_key_values=cache, **GREEDY)
            stats = cache.stats()
        print(tokenizer.decode(ids[0, first.input_ids.shape[1] :]).strip())
        print(
            f"{stats['bytes_written']} bytes written, {stats['bytes_moved']} read by "
            f"{stats['effective_path']}"
        )
        assert ids.equal(model.generate(**first, **GREEDY)), (
            "not the tokens that the cache in memory gives"
        )

        # Another process could do this: what both prompts begin with is not computed again.
        second = tokenizer(f"{DOCUMENT}GET garden:", return_tensors="pt")
        with espnx.KVCache(model.config, folder, name="document") as cache:
            known = cache.reuse_prefix(second.input_ids)
            ids = model.generate(**second, past_key_values=cache, **GREEDY)
        print(tokenizer.decode(ids[0, second.input_ids.shape[1] :]).strip())
        print(f"{known} of {second.input_ids.shape[1]} tokens were there already")
        assert known > 0.9 * second.input_ids.shape[1]
        assert ids.equal(model.generate(**second, **GREEDY))


if __name__ == "__main__":
    main()
