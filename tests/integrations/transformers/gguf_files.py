"""Tiny Llamas in GGUF files, written by the package gguf as llama.cpp lays them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, WIDE = 64, 64, 2, 4, 2, 96
D = HIDDEN // HEADS


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """float32, by their names in the file; the head is the embedding."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    found = {"token_embd.weight": draw(VOCABULARY, HIDDEN), "output_norm.weight": 1 + draw(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * D, HIDDEN),
            "attn_v": (KV_HEADS * D, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (WIDE, HIDDEN),
            "ffn_up": (WIDE, HIDDEN),
            "ffn_down": (HIDDEN, WIDE),
        }
        found |= {f"blk.{layer}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
    return found


def write(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    quantised: str | None = None,
    architecture: str = "llama",
) -> Path:
    """A file of a Llama with a byte-pair tokenizer of single letters. `quantised`: a type of gguf's
    that matrices are kept in."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<end>", "ab", *map(chr, range(64, 64 + VOCABULARY - 2))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for name, values in weights.items():
        if quantised is None or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
