"""A model whose KV cache lies on emulated devices: HILOS's accelerator attends, layer by layer,
step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import espnx
from espnx.device.registry import open_device
from espnx.integrations.transformers.enable import enable_kv_cache
from tests.integrations.transformers.tiny import enabled, generate, make, plain, prompt

PROMPT = [40, 23]


def logits_of(
    model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor, read: int
) -> torch.Tensor:
    """Of each token from `read` on, [sequences, n, vocabulary]: the ones before it are read at
    once, then one at a time."""
    found = []
    with torch.no_grad():
        for begin, end in ((0, read), *((i, i + 1) for i in range(read, tokens.shape[1]))):
            out = model(
                tokens[:, begin:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            found.append(out.logits[:, -1].double())
    return torch.stack(found[1:], dim=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{"hand_over": "scores"}, {"hand_over": "lse"}], ids=["scores", "lse"]
)
@pytest.mark.parametrize("count", [1, 3])
def test_logits_of_a_model_in_fp16(folder: Path, options: dict[str, str], count: int) -> None:
    """As close to those in fp64, of the same weights, as the framework's own in fp16: its rounding
    of o to fp16 is the accelerator's."""
    model, inputs = enabled("llama", torch.float16), prompt(PROMPT)
    tokens = torch.cat(
        [
            inputs["input_ids"],
            torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(3)),
        ],
        dim=1,
    )
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 24, dtype=torch.int64)], dim=1)
    exact_model = make("llama").double()
    exact_model.load_state_dict(
        {name: value.double() for name, value in plain("llama", torch.float16).state_dict().items()}
    )
    exact = logits_of(exact_model, DynamicCache(), tokens, mask, 40)
    theirs = logits_of(plain("llama", torch.float16), DynamicCache(), tokens, mask, 40)
    devices = open_device("smartssd", [folder / f"{i}" for i in range(count)], stretch=0, **options)
    with espnx.KVCache(model.config, device=devices, x_rows=0) as cache:
        ours = logits_of(model, cache, tokens, mask, 40)
        stats = cache.stats()
    assert stats["bytes_asked"] > 0
    assert (stats["layers_attended_on_host"], stats["devices_lack"]) == (0, "")
    assert (
        sum(
            use.amount
            for name, use in devices[0].topology.traffic().items()
            if "accelerator" in name
        )
        > 0
    )
    apart, own = ((each - exact).square().mean().sqrt() for each in (ours, theirs))
    assert float(apart) <= 1.25 * float(own)
    for each in devices:
        each.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hand_over", ["scores", "lse"])
@pytest.mark.parametrize("spill_interval", [None, 1, 16])
def test_bits_of_a_model_on_more_devices(
    folder: Path, spill_interval: int | None, hand_over: str
) -> None:
    """Where writes have ended before each pass, so that the same rows are read back; with `scores`
    also where they have not."""
    model = enable_kv_cache(make("llama", dtype=torch.float16, num_key_value_heads=4))
    ids, found = (
        torch.randint(3, 97, (2, 55), generator=torch.Generator().manual_seed(1)),
        list[torch.Tensor](),
    )
    for count in (1, 2, 4, 16):
        devices = open_device(
            "smartssd",
            [folder / f"{count}-{i}" for i in range(count)],
            stretch=0,
            hand_over=hand_over,
        )
        with (
            espnx.KVCache(
                model.config, device=devices, x_rows=0, threads=1, spill_interval=spill_interval
            ) as cache,
            torch.no_grad(),
        ):
            passes = list[torch.Tensor]()
            for part in ids.split([40, 3, 3, 3, 3, 3], dim=1):
                passes.append(model(part, past_key_values=cache).logits)
                if hand_over == "lse":
                    cache.store.striped.flush()
            found.append(torch.cat(passes, dim=1))
        for each in devices:
            each.close()
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_tokens_of_a_model_in_fp32_with_rows_in_fp16(folder: Path) -> None:
    """The rows are rounded, which the caller asked for; the same rows on a plain device give the
    same tokens."""
    model, found = enabled("llama"), []
    for device in ("ssd", "smartssd"):
        near = open_device(
            device, folder / device, **({"stretch": 0} if device == "smartssd" else {})
        )
        with espnx.KVCache(model.config, device=near, format="fp16", x_rows=0) as cache:
            found.append(generate(model, prompt(PROMPT), cache))
            assert cache.stats()["layers_attended_on_host"] == 0
        near.close()
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "options", "lacks"),
    [
        ("llama", {}, "attends_formats"),
        ("gemma2", {"format": "fp16"}, "attends_soft_cap"),
        ("gpt_oss", {"format": "fp16"}, ""),
    ],
)
def test_layers_that_the_accelerator_does_not_do(
    folder: Path, name: str, options: dict[str, Any], lacks: str
) -> None:
    """Run on the host, and `stats` says why; sinks are corrected for on the host in any case."""
    model = enabled(name)
    tokens = []
    for device in ("ssd", "smartssd"):
        near = open_device(
            device, folder / device, **({"stretch": 0} if device == "smartssd" else {})
        )
        with espnx.KVCache(model.config, device=near, x_rows=0, **options) as cache:
            tokens.append(generate(model, prompt(PROMPT), cache))
            stats = cache.stats()
        near.close()
    assert lacks in stats["devices_lack"]
    assert bool(stats["layers_attended_on_host"]) == bool(lacks)
    assert torch.equal(*tokens)


def test_a_cache_opens_its_own(folder: Path) -> None:
    model = enabled("llama", torch.float16)
    with espnx.KVCache(
        model.config, [folder / "a", folder / "b"], device="smartssd", x_rows=0
    ) as cache:
        generate(model, prompt([20]), cache, max_new_tokens=3)
        assert cache.stats()["layers_attended_on_host"] == 0
        assert cache.stats()["bytes_written"] > 0
