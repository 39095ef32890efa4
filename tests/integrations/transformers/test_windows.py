"""Windows that only the mask carries, arguments nobody knows, layers that share K and V, layers in
memory that cannot go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

import espnx
from espnx import errors
from espnx.integrations.transformers.forward.masks import Mask, meaning, padding_mask
from tests.sweeps import some

_BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 97, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_GEMMA: dict[str, Any] = {
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 16,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "global_head_dim": 64,
}
_3N: dict[str, Any] = {
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 6,
    "intermediate_size": [96] * 6,
}
_MIXED: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_NEXT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_JAMBA: dict[str, Any] = {
    "num_experts": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}


def build(family: str, config: str = "Config", **options: Any) -> PreTrainedModel:
    """A tiny model, the same every time."""
    made = getattr(transformers, family + config)(**_BASE | options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model


def prompts(n: int = 60) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (3, n), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : n // 3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(
    model: PreTrainedModel, cache: Any, inputs: dict[str, torch.Tensor] | None = None, **more: Any
) -> torch.Tensor:
    return model.generate(
        **inputs or prompts(),
        past_key_values=cache,
        **{"max_new_tokens": 12, "do_sample": False} | more,
    )


def reference(model: PreTrainedModel, **more: Any) -> torch.Tensor:
    return generate(model, DynamicCache(config=model.config), **more)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (
            "Qwen2Moe",
            _MOE
            | {
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 4,
                "layer_types": None,
            },
        ),
        (
            "Qwen2Moe",
            _MOE
            | {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        ("Phimoe", _MOE | {"sliding_window": 16}),
    ],
    ids=["all layers", "every other layer", "phimoe"],
)
@pytest.mark.filterwarnings("ignore:no layer of this model")
def test_a_window_that_only_the_mask_carries(
    folder: Path, family: str, options: dict[str, Any]
) -> None:
    """Attention is not told of it: without a cache, and with one."""
    model = build(family, **options)
    wanted = reference(model)
    espnx.enable_kv_cache(model)
    assert torch.equal(generate(model, None), wanted)
    with espnx.KVCache(model.config, folder) as cache:
        assert torch.equal(generate(model, cache), wanted)


def test_blocks_that_are_chosen() -> None:
    model = build(
        "MiniMaxM3VL",
        "TextConfig",
        **_MOE
        | {
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
            "index_block_size": 16,
            "index_topk_blocks": 2,
            "num_local_experts": 4,
        },
    )
    ids = prompts()["input_ids"]
    wanted, before = model(ids).logits, model.config._attn_implementation
    with pytest.raises(errors.InvalidInputError, match=r"block_indices|minimax_m3_sparse"):
        espnx.enable_kv_cache(model)
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, wanted)


def test_an_argument_that_is_not_known() -> None:
    from espnx.integrations.transformers.forward.attention import espnx_attention

    q = torch.randn(1, 2, 3, 16)
    espnx_attention(
        torch.nn.Module(),
        q,
        q,
        q,
        None,
        scaling=0.25,
        position_ids=None,
        use_cache=True,
        sinks=None,
    )
    with pytest.raises(errors.InvalidInputError, match="novelty"):
        espnx_attention(torch.nn.Module(), q, q, q, None, novelty=torch.zeros(1))
    with pytest.raises(errors.InvalidInputError, match="window of 2; expected None"):
        espnx_attention(torch.nn.Module(), q, q, q, None, sliding_window=2)


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("Gemma2", "Config", _MIXED),
        ("Gemma3", "TextConfig", _MIXED),
        ("Gemma3n", "TextConfig", _GEMMA | _3N),
        (
            "Qwen2",
            "Config",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
        ),
        ("GptOss", "Config", _MIXED | _MOE),
        ("Cohere2", "Config", _MIXED),
        ("Mistral", "Config", {"sliding_window": 16}),
    ],
)
@pytest.mark.filterwarnings("ignore:no layer of this model")
def test_a_chunk_of_padding_alone(
    folder: Path, family: str, config: str, options: dict[str, Any]
) -> None:
    """Prompts padded to a fixed length: in the first chunk nothing can be seen, and its mask still
    says how wide the window is."""
    model = build(family, config, **options)
    inputs = prompts(90)
    inputs["attention_mask"][:, :50] = 0
    wanted = reference(model, inputs=inputs, prefill_chunk_size=20)
    espnx.enable_kv_cache(model)
    assert torch.equal(
        generate(model, DynamicCache(config=model.config), inputs, prefill_chunk_size=20), wanted
    )
    with espnx.KVCache(model.config, folder, x_rows=0) as cache:
        assert torch.equal(generate(model, cache, inputs, prefill_chunk_size=20), wanted)


def test_what_masks_mean() -> None:
    from transformers import masking_utils as made

    shape = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    assert padding_mask(**shape) is None
    window = made.sliding_window_causal_mask_function(3)
    assert meaning(padding_mask(**shape, mask_function=window)) == Mask(window=3)
    assert meaning(
        padding_mask(
            **shape,
            mask_function=made.bidirectional_mask_function,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=True,
        )
    ) == Mask(is_causal=False)
    padded = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    for function, size in ((made.causal_mask_function, None), (window, 3)):
        mask = padding_mask(**shape, mask_function=function, attention_mask=padded)
        moved = mask.clone()  # to another device, say: what is known of it lies in its values
        assert torch.equal(meaning(moved).visible, padded.bool())
        assert meaning(moved).window == size
    # where nothing can be seen
    for function, size in ((made.causal_mask_function, None), (window, 3)):
        said = meaning(
            padding_mask(**shape, mask_function=function, attention_mask=torch.zeros(2, 4))
        )
        assert (said.window, said.is_causal) == (size, True)
        assert said.visible is not None
        assert not said.visible.any()
    one, two = torch.zeros(2, 4, dtype=torch.long), torch.tensor([[0, 0, 1, 1]] * 2)
    remapped = made.remap_positions_for_packed_sequence(window, torch.arange(4).expand(2, -1))
    for in_graphs in (
        (made.packed_sequence_mask_function(one), remapped),
        (remapped, made.packed_sequence_mask_function(one)),
    ):
        assert meaning(
            padding_mask(
                **shape, mask_function=made.and_masks(*in_graphs), allow_is_causal_skip=False
            )
        ) == Mask(window=3)
    left = torch.zeros(2, dtype=torch.long)
    for unknown in (
        made.chunked_causal_mask_function(2, left),
        made.sliding_window_bidirectional_mask_function(2),
        made.or_masks(made.causal_mask_function, made.blockwise_overlay(padded)),
        made.and_masks(made.causal_mask_function, made.packed_sequence_mask_function(padded)),
        made.and_masks(made.packed_sequence_mask_function(two), remapped),
        made.and_masks(remapped, made.packed_sequence_mask_function(two)),
        lambda b, h, q, k: q >= k,
    ):
        with pytest.raises(errors.InvalidInputError, match="mask"):
            padding_mask(**shape, mask_function=unknown)
    with pytest.raises(errors.InvalidInputError, match="changes further"):
        padding_mask(**shape, allow_is_causal_skip=False)
    for own in (
        torch.ones(2, 1, 1, 4),
        padded[:, None, None],
        padded.bool()[:, None, None],
        padded,
        torch.ones(2, 1, 4, 4).bool(),
    ):
        with pytest.raises(errors.InvalidInputError, match="attention mask"):
            meaning(own)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "options"),
    [("Gemma4", {}), ("Gemma4", {"attention_k_eq_v": True}), ("Gemma3n", _3N)],
)
@pytest.mark.parametrize("x_rows", [None, 2])
def test_layers_that_share_k_and_v(
    folder: Path, family: str, options: dict[str, Any], x_rows: int | None
) -> None:
    """Prompts longer than a chunk, chunks of them, and steps; the last of Gemma 4's layers are
    asked for the last positions alone."""
    model = build(family, "TextConfig", **_GEMMA | options)
    wanted = reference(model)
    espnx.enable_kv_cache(model)
    for more in ({}, {"prefill_chunk_size": 25}, {"prefill_chunk_size": 9}):
        with espnx.KVCache(model.config, folder, x_rows=x_rows) as cache:
            assert torch.equal(generate(model, cache, **more), wanted)
            assert cache.stats()["x_rows"] == (x_rows or 0)
            assert cache.stats()["bytes_asked"] > 0
    with torch.no_grad(), espnx.KVCache(model.config, folder, x_rows=x_rows) as cache:
        ids = prompts()
        apart = model(**ids, past_key_values=cache).logits - model(**ids).logits
        assert apart[ids["attention_mask"].bool()].abs().max() < 1e-3


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [("Gemma3", "TextConfig", _MIXED), ("Qwen3Next", "Config", _NEXT | _MOE)],
    ids=["windows", "states"],
)
def test_what_cannot_go_back(
    folder: Path, family: str, config: str, options: dict[str, Any]
) -> None:
    model = espnx.enable_kv_cache(build(family, config, **options))
    one, other = prompts(), prompts()
    other["input_ids"] = other["input_ids"].clone()
    other["input_ids"][:, 50:] = 5
    with espnx.KVCache(model.config, folder, x_rows=0) as cache:
        said = generate(model, cache, one)
        lengths = [*cache.lengths, cache.get_seq_length(1)]
        with pytest.raises(errors.InvalidInputError, match="Layer: "):
            cache.crop(-3)
        assert [*cache.lengths, cache.get_seq_length(1)] == lengths
        stats = cache.stats()
        assert stats["layers_in_memory"] == stats["layers_on_ssd"] == 2
        assert stats["layers_in_memory_bytes"] > 0
        mask = torch.nn.functional.pad(one["attention_mask"], (0, 12), value=1)
        again = generate(
            model, cache, {"input_ids": said, "attention_mask": mask}, max_new_tokens=1
        )
        assert again.shape[1] == 73
        assert cache.reuse_prefix(other["input_ids"], other["attention_mask"]) == 0
        assert torch.equal(generate(model, cache, other), generate(model, None, other))


@pytest.mark.parametrize(
    ("family", "config", "options"),
    some(
        [
            ("Gemma3", "TextConfig", _MIXED),
            ("Gemma4", "TextConfig", _GEMMA),
            ("Gemma3n", "TextConfig", _GEMMA | _3N),
            ("Qwen3Next", "Config", _NEXT | _MOE),
            ("Qwen3_5", "TextConfig", _NEXT),
            ("Jamba", "Config", _JAMBA),
        ],
        2,
    ),
)
def test_layers_in_memory_go_with_those_on_ssd(
    folder: Path, family: str, config: str, options: dict[str, Any]
) -> None:
    """Windows and states, through a prompt that is begun anew, a pass that breaks off in any layer,
    and beams."""
    model = build(family, config, **options)
    first, then = prompts(), {name: each[:, 20:] for name, each in prompts(81).items()}
    wanted, wanted_then, beams = (
        reference(model),
        generate(model, None, then),
        generate(model, None, num_beams=3, max_new_tokens=6),
    )
    espnx.enable_kv_cache(model)
    with espnx.KVCache(model.config, folder, x_rows=0) as cache:
        assert cache.stats()["layers_in_memory"]
        for layer in (0, 1, len(model.model.layers) - 1):
            hook = model.model.layers[layer].register_forward_hook(_stop)
            with pytest.raises(KeyboardInterrupt):
                generate(model, cache)
            hook.remove()
            assert torch.equal(generate(model, cache, first), wanted)
            cache.reset()
            assert torch.equal(generate(model, cache, then), wanted_then)
            cache.reset()
        assert torch.equal(generate(model, cache, num_beams=3, max_new_tokens=6), beams)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def test_windows_that_remember(folder: Path) -> None:
    """As assisted decoding asks them to: then `crop` is right."""
    model = build("Gemma3", "TextConfig", **_MIXED)
    ids, wanted = prompts(), reference(model)
    espnx.enable_kv_cache(model)
    with espnx.KVCache(model.config, folder, x_rows=0) as cache:
        cache.activate_past_recording()
        generate(model, cache)
        cache.crop(-8)
        assert torch.equal(
            generate(
                model,
                cache,
                {
                    "input_ids": wanted[:, :66],
                    "attention_mask": torch.nn.functional.pad(
                        ids["attention_mask"], (0, 6), value=1
                    ),
                },
                max_new_tokens=6,
            ),
            wanted,
        )


@pytest.mark.parametrize("where", ["memory", "ssd"])
@pytest.mark.parametrize("change", ["crop", "reorder"])
def test_a_change_that_breaks_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, change: str
) -> None:
    """No layer continues with what another has forgotten."""
    model = espnx.enable_kv_cache(build("Gemma3", "TextConfig", **_MIXED | {"sliding_window": 70}))
    with espnx.KVCache(model.config, folder, x_rows=0) as cache:
        wanted = generate(model, cache, max_new_tokens=5)
        owner = type(cache.layers[2]) if where == "memory" else type(cache.store)
        name = {"crop": "crop", "reorder": "reorder_cache" if where == "memory" else "select"}[
            change
        ]
        original = getattr(owner, name)

        def stop_at_the_second(changed: Any, *words: Any) -> None:
            if changed in (cache.layers[2], cache.store):
                raise KeyboardInterrupt
            original(changed, *words)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, stop_at_the_second)
            with pytest.raises(KeyboardInterrupt):
                _ = (
                    cache.crop(-2)
                    if change == "crop"
                    else cache.reorder_cache(torch.tensor([1, 0, 2]))
                )
        assert {cache.get_seq_length(layer) for layer in range(4)} == {0}
        assert torch.equal(generate(model, cache, max_new_tokens=5), wanted)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_autocast_with_padding(folder: Path, family: str) -> None:
    """As exact as the framework's own cache, where K is computed in another dtype than V."""
    options = _MIXED if family == "Gemma3" else {}
    model = build(family, "TextConfig" if options else "Config", **options)
    inputs = prompts()
    seen = inputs["attention_mask"].bool()
    exact = model(**inputs).logits[seen]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits[seen]
        espnx.enable_kv_cache(model)
        with espnx.KVCache(model.config, folder) as cache:
            ours = model(**inputs, past_key_values=cache).logits[seen]
            model(
                inputs["input_ids"][:, :1],
                past_key_values=cache,
                attention_mask=torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1),
            )
    assert (ours - exact).pow(2).mean() < 1.5 * (theirs - exact).pow(2).mean()


def test_what_is_no_model(folder: Path) -> None:
    with pytest.raises(errors.InvalidInputError, match="got str; expected a model"):
        espnx.enable_kv_cache("x")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInputError, match=r"expected a config.*KVCache\(model.config"):
        espnx.KVCache(build("Llama"), folder)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInputError, match="MambaForCausalLM cannot attend"):
        espnx.enable_kv_cache(build("Mamba", hidden_size=32, state_size=4, head_dim=8))


def test_a_cache_that_stores_nothing_says_so(folder: Path) -> None:
    model = espnx.enable_kv_cache(build("Mistral", sliding_window=16))
    with pytest.warns(UserWarning, match="nothing of this cache goes to SSD"):
        cache = espnx.KVCache(model.config, folder)
    with cache:
        assert cache.stats()["layers_on_ssd"] == 0
        generate(model, cache)
        cache.reorder_cache(torch.tensor([1, 0, 2]))
