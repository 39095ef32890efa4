"""Logits in bf16 and fp16: no further from the exact ones than the framework's own, which round at
the same places and more often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from espnx.integrations.transformers.cache import KVCache
from tests.integrations.transformers.tiny import enabled, plain, prompt

NEW = 20


def fed(
    model: PreTrainedModel, cache: Any, lengths: list[int], new: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Logits of a prompt, in chunks, and of `new` [sequences, n] tokens after it, one by one;
    padding left out."""
    inputs = prompt(lengths)
    ids, longest = torch.cat([inputs["input_ids"], new], dim=1), max(lengths)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(new)], dim=1)
    ends = [*range(chunk, longest, chunk), *range(longest, ids.shape[1] + 1)]
    parts, begin = [], 0
    with torch.no_grad():
        for end in ends:
            positions = (mask[:, :end].cumsum(dim=1) - 1).clamp_min(0)[:, begin:]
            more = {} if model.config.model_type == "opt" else {"position_ids": positions}
            parts.append(
                model(
                    ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, **more
                ).logits.double()
            )
            begin = end
    return torch.cat(parts, dim=1)[mask.bool()]


def distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean of squares: thousands of roundings average out, and so two correct
    computations are equally far."""
    return float((logits - exact).square().mean().sqrt())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "opt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_halves(folder: Path, name: str, dtype: torch.dtype) -> None:
    lengths, new = (
        [40, 23],
        torch.randint(3, 90, (2, NEW), generator=torch.Generator().manual_seed(3)),
    )
    model = plain(name, dtype)
    exact = fed(_double(model), DynamicCache(config=model.config), lengths, new, 64)
    theirs = distance(fed(model, DynamicCache(config=model.config), lengths, new, 64), exact)
    assert theirs > 0
    for chunk, options in ((64, {}), (19, {}), (7, {}), (19, {"x_rows": 1}), (7, {"x_rows": 2})):
        if name == "gemma3" and chunk != 64:
            continue
        with KVCache(model.config, folder, **options) as cache:
            ours = distance(fed(enabled(name, dtype), cache, lengths, new, chunk), exact)
        assert ours <= 1.25 * theirs, (
            f"{chunk} {options}: {ours / theirs:.3g} times as far from the exact logits as the "
            "framework"
        )


def _double(model: PreTrainedModel) -> PreTrainedModel:
    """The same (rounded) weights, computed in fp64."""
    copied = type(model)(model.config)
    copied.load_state_dict(model.state_dict())
    copied = copied.double().eval()
    copied.set_attn_implementation("sdpa")  # the eager one has its softmax in fp32
    return copied


def test_int8_is_as_lossy_as_said(folder: Path) -> None:
    """Rows in int8 are half a step of 1/127 of their largest value apart; logits stay near, and far
    nearer than without those rows."""
    new = torch.randint(3, 90, (2, NEW), generator=torch.Generator().manual_seed(3))
    model = enabled("llama")
    exact = fed(plain("llama"), DynamicCache(config=model.config), [280, 261], new, 512)
    with KVCache(model.config, folder, format="int8", spill_interval=64) as cache:
        got = fed(model, cache, [280, 261], new, 512)
        assert cache.stats()["bytes_asked"] > 0
    size, apart = float(exact.square().mean().sqrt()), distance(got, exact)
    assert 0 < apart < 0.05 * size
