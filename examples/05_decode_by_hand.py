"""Decoding with K and V on SSD, every step in view, on the pieces that `KVCache` is made of.

    python examples/05_decode_by_hand.py

A tiny random Llama chooses tokens; each step's attention reads the rows of all earlier tokens from
a file. The framework, with its cache in memory, must choose the same.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import espnx
from espnx.device.interface import RowDevice, SegmentView
from espnx.device.row_layout import RowLayout
from espnx.ops.attention import Queries, merge

N_KV, GROUP, D = 2, 2, 128  # KV heads, query heads of each, values of a row
LAYOUT = RowLayout("fp32", D, D)  # blocks of whole pages: 8 tokens


class LayerRows:
    """K and V of one layer: whole blocks on the device, the newest few tokens in memory."""

    def __init__(self, device: RowDevice, k: torch.Tensor, v: torch.Tensor):
        self.device, self.views, self.n_stored = device, list[SegmentView](), 0
        self.k, self.v = k, v
        self.spill()

    def spill(self) -> None:
        """Puts the whole blocks among the rows in memory to the device. K and V: [sequences, KV
        heads, tokens, d]."""
        n = self.k.shape[2] // LAYOUT.block_rows * LAYOUT.block_rows
        if n:
            segments = self.device.put(LAYOUT, self.k[:, :, :n], self.v[:, :, :n], range(N_KV))
            self.views += [
                SegmentView(segment, sequence, n, self.n_stored)
                for sequence, segment in enumerate(segments)
            ]
            self.k, self.v, self.n_stored = self.k[:, :, n:], self.v[:, :, n:], self.n_stored + n

    def attend(
        self, ticket: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [sequences, KV heads, group, d] over every token so far; those on the device as their
        blocks arrive."""
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        stored, stored_lse = self.device.attend(ticket, Queries(q * D**-0.5, D))
        scores = (q * D**-0.5) @ self.k.transpose(2, 3)
        o, _ = merge(stored, stored_lse, scores.softmax(-1) @ self.v, scores.logsumexp(-1))
        return o


@torch.no_grad()
def decode_by_hand(
    model: LlamaForCausalLM, prompt: torch.Tensor, n_new: int, device: RowDevice
) -> torch.Tensor:
    """The tokens that follow a prompt [sequences, n], each the likeliest: [sequences, n_new]."""
    whole = model(prompt, use_cache=True)
    rows = [LayerRows(device, layer.keys, layer.values) for layer in whole.past_key_values.layers]
    tokens = [whole.logits[:, -1].argmax(-1)]
    for position in range(prompt.shape[1], prompt.shape[1] + n_new - 1):
        x = model.model.embed_tokens(tokens[-1][:, None])
        rotation = model.model.rotary_emb(x, torch.full((1, 1), position))
        # All layers' rows are put in line now: while one layer computes, those of the next are on
        # their way.
        tickets = [device.ahead(LAYOUT, each.views) for each in rows]
        for layer, stored, ticket in zip(model.model.layers, rows, tickets, strict=True):
            project, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                f(h).view(len(h), 1, -1, D).transpose(1, 2)
                for f in (project.q_proj, project.k_proj, project.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *rotation)
            o = stored.attend(ticket, q.reshape(len(h), N_KV, GROUP, D), k, v)
            x = x + project.o_proj(o.reshape(len(h), 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        tokens.append(model.lm_head(model.model.norm(x))[:, -1].argmax(-1))
        for each in rows:
            each.spill()
    return torch.stack(tokens, 1)


def main() -> None:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": N_KV * GROUP,
        "num_key_value_heads": N_KV,
        "head_dim": D,
    }
    config = LlamaConfig(
        vocab_size=97,
        num_hidden_layers=2,
        initializer_range=0.25,
        eos_token_id=None,
        pad_token_id=0,
        **shape,
    )
    model, prompt = LlamaForCausalLM(config).eval(), torch.randint(1, 97, (2, 40))
    with tempfile.TemporaryDirectory() as folder:
        device = espnx.device.open("ssd", folder).open_rows()
        tokens = decode_by_hand(model, prompt, 24, device)
        stats = device.stats()
        device.close()
    print(tokens.tolist())
    print(
        f"{stats.bytes_written:,} bytes of rows written, {stats.bytes_asked:,} read for attention"
    )
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
    )[:, prompt.shape[1] :]
    assert torch.equal(tokens, expected), expected


if __name__ == "__main__":
    main()
