"""Models whose attention is made in another way: refused in words, or cached as K and V where X
rows cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import espnx
from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.forward import schedule as scheduling
from espnx.integrations.transformers.forward.schedule import dense_seconds
from espnx.kv.schedule import Decision
from tests.integrations.transformers.tiny import enabled, expected, generate, make, prompt

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip


def build(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**_BASE | options)
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def test_keys_that_are_expanded_after_they_were_cached() -> None:
    """Attention over them would see the new tokens alone: told before anything has changed."""
    model, ids = build("DeepseekV3", **_LATENT), torch.arange(3, 23)[None]
    expected_ids = model.generate(ids, max_new_tokens=4)
    with pytest.raises(errors.InvalidInputError, match="other keys than the cache returned"):
        espnx.enable_kv_cache(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(ids, max_new_tokens=4), expected_ids)
    # Nor is another model in the way, of this thread, after the error.
    logits = enabled("llama")(ids).logits
    assert torch.isfinite(logits).all()


def test_attention_in_chunks() -> None:
    config = transformers.Llama4TextConfig(
        **_BASE, head_dim=16, num_local_experts=2, intermediate_size_mlp=64, attention_chunk_size=8
    )
    with pytest.raises(errors.InvalidInputError, match="chunked_attention"):
        espnx.enable_kv_cache(transformers.Llama4ForCausalLM(config))


@pytest.mark.parametrize(
    ("family", "options"),
    [("Phi", {}), ("StableLm", {}), ("Olmo2", {}), ("HunYuanDenseV1", {"head_dim": 16})],
    ids=[
        "partial rotation",
        "partial rotation, another model",
        "norm before heads",
        "norm after rotation",
    ],
)
def test_x_rows_that_cannot_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    """Asked for, they are an error; the cache's own idea gives way to K and V."""
    model = espnx.enable_kv_cache(build(family, **options))
    ids = torch.arange(3, 63).view(2, 30)
    with (
        espnx.KVCache(model.config, folder, x_rows=1) as cache,
        pytest.raises(errors.InvalidInputError, match="x_rows=0"),
    ):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    monkeypatch.setattr(scheduling, "decide", lambda *_: Decision(2, "a test"))
    with espnx.KVCache(model.config, folder) as cache:
        found = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
        stats = cache.stats()
    assert stats["x_rows"] == 0
    assert "x_rows=0" in stats["decision"]["why"]
    assert torch.equal(
        found, build(family, **options).generate(ids, max_new_tokens=9, do_sample=False)
    )


def test_x_rows_of_ones_own_idea(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "decide", lambda *_: Decision(1, "a test"))
    model = espnx.enable_kv_cache(build("Llama"))
    ids = torch.arange(3, 63).view(2, 30)
    with espnx.KVCache(model.config, folder) as cache:
        found = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
        assert cache.stats()["x_rows"] == 1
    assert torch.equal(found, build("Llama").generate(ids, max_new_tokens=9, do_sample=False))


def test_more_x_rows_than_sequences(folder: Path) -> None:
    with espnx.KVCache(enabled("llama").config, folder, x_rows=99) as cache:
        assert torch.equal(
            generate(enabled("llama"), prompt([20, 20]), cache), expected("llama", [20, 20])
        )
        assert cache.stats()["x_rows"] == 2


def test_the_dense_part_of_a_step() -> None:
    """Each product twice, hooks untouched; weights that are elsewhere do not count."""
    seen: list[str] = []
    model = nn.Sequential(
        nn.Linear(8, 4), Conv1D(4, 8), nn.Linear(4, 4, device="meta"), nn.Embedding(5, 8)
    )
    for part in model:
        part.register_forward_pre_hook(lambda *_: seen.append("a hook"))
    assert dense_seconds(model, 3) > 0
    assert not seen
    assert dense_seconds(nn.ReLU(), 3) < 1


def test_a_step_is_timed_on_every_device_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of which need be the thread's current one."""
    waited_for: list[torch.device] = []
    monkeypatch.setattr(scheduling, "wait_for", waited_for.append)
    parts = {
        nn.Linear(4, 4, device=name): torch.zeros(2, 4, device=name) for name in ("cpu", "meta")
    }
    scheduling._once(parts)
    assert sorted(each.type for each in waited_for) == ["cpu", "meta"]


def adapted(kind: str, *, enabled_first: bool = False) -> Any:
    """A model of PEFT, the same every time."""
    peft = pytest.importorskip("peft")
    model = make("llama")
    if enabled_first:
        espnx.enable_kv_cache(model)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        configs = {
            "lora": lambda: peft.LoraConfig(
                r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
            ),
            "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
            "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        }
        return peft.get_peft_model(model, configs[kind]()).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Position ids are not supported")
@pytest.mark.parametrize("enabled_first", [True, False])
@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_adapters(folder: Path, kind: str, enabled_first: bool) -> None:
    """Of a model that was enabled before it was adapted, and of one that is enabled through
    `PeftModel`."""
    wanted = generate(adapted(kind), prompt([20, 9]), None, max_new_tokens=8)
    model = adapted(kind, enabled_first=enabled_first)
    if not enabled_first:
        assert espnx.enable_kv_cache(model) is model
    with KVCache(model.config, folder, x_rows=0) as cache:
        assert torch.equal(generate(model, prompt([20, 9]), cache, max_new_tokens=8), wanted)
        assert cache.get_seq_length() >= 27


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Position ids are not supported")
@pytest.mark.parametrize("enabled_first", [True, False])
def test_prefix_tuning_brings_a_cache_of_its_own(folder: Path, enabled_first: bool) -> None:
    """Which would take the place of ours; without ours it works."""
    wanted = generate(adapted("prefix"), prompt([20, 9]), None, max_new_tokens=8)
    model = adapted("prefix", enabled_first=enabled_first)
    espnx.enable_kv_cache(model)
    with (
        KVCache(model.config, folder, x_rows=0) as cache,
        pytest.raises(errors.InvalidInputError, match=r"prefix tuning.*LoRA"),
    ):
        generate(model, prompt([20, 9]), cache, max_new_tokens=8)
    assert torch.equal(generate(model, prompt([20, 9]), None, max_new_tokens=8), wanted)
