"""Several micro-batches per visit of a layer: the same tokens, caches filled as without, and what
cannot be split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from espnx import errors
from espnx.integrations.streamed.load import GroupedCache, load_streamed, micro_batches
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from tests.integrations.streamed.models import CONFIGS, GREEDY, IDS, LAYERS, MASK, least


@pytest.mark.parametrize(
    ("name", "n"),
    [*((name, 2) for name in CONFIGS), ("llama", 1), ("llama", 3), ("windows", 5), ("mixtral", 9)],
)
def test_micro_batches_change_no_token(name: str, n: int, folders: Any, expected: Any) -> None:
    model, tokens = expected[name]
    with micro_batches(model, n):
        assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), tokens)
        cache = DynamicCache(config=model.config)  # the caller's own object is filled
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        assert cache.get_seq_length() == IDS.shape[1]
        assert cache.layers[2].keys.shape[0] == len(IDS)
    assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), tokens)


def test_micro_batches_read_weights_once(folders: Any, expected: Any) -> None:
    model = load_streamed(folders["mixtral"], least(folders["mixtral"]))
    seen = []
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[0])
    )
    with micro_batches(model, 3):
        got = model.generate(IDS, attention_mask=MASK, **GREEDY)
    assert torch.equal(got, expected["mixtral"][1])
    assert model.espnx_stats()["layer_reads"] == LAYERS * GREEDY["max_new_tokens"]
    assert seen == [2, 2, 1] * GREEDY["max_new_tokens"]


def test_micro_batches_with_beams(expected: Any) -> None:
    model, _ = expected["llama"]
    beams = {**GREEDY, "num_beams": 3}
    want = model.generate(IDS, attention_mask=MASK, **beams)
    # 15 rows in parts of 4, 4, 4 and 3: beams of a prompt in two parts
    with micro_batches(model, 4):
        assert torch.equal(model.generate(IDS, attention_mask=MASK, **beams), want)
    caches = GroupedCache([DynamicCache(config=model.config) for _ in range(5)])
    with micro_batches(model, 5):
        assert torch.equal(
            model.generate(IDS, attention_mask=MASK, past_key_values=caches, **beams), want
        )
    caches = GroupedCache([DynamicCache(config=model.config) for _ in range(4)])
    with (
        micro_batches(model, 4),
        pytest.raises(errors.InvalidInputError, match="leaves its micro-batch"),
    ):
        model.generate(IDS, attention_mask=MASK, past_key_values=caches, **beams)


def test_micro_batches_with_caches_on_ssd(folders: Any, expected: Any, tmp_path: Path) -> None:
    model = enable_kv_cache(load_streamed(folders["qwen3"], least(folders["qwen3"])))
    caches = [KVCache(model.config, tmp_path) for _ in range(2)]
    with micro_batches(model, 2):
        got = model.generate(
            IDS, attention_mask=MASK, past_key_values=GroupedCache(caches), **GREEDY
        )
    assert torch.equal(got, expected["qwen3"][1])
    assert [cache.stats()["sequences"] for cache in caches] == [3, 2]
    assert [cache.tokens.shape[0] for cache in caches] == [3, 2]
    with (
        KVCache(model.config, tmp_path) as one,
        micro_batches(model, 2),
        pytest.raises(errors.InvalidInputError, match="GroupedCache"),
    ):
        model.generate(IDS, past_key_values=one, **GREEDY)
    for cache in caches:
        cache.close()


def test_a_grouped_cache_follows_its_batch(expected: Any) -> None:
    model, _ = expected["llama"]
    caches = GroupedCache([DynamicCache(config=model.config) for _ in range(2)])
    with micro_batches(model, 2), torch.no_grad():
        model(IDS, past_key_values=caches)
        whole = model(IDS, use_cache=True).past_key_values
        caches.batch_repeat_interleave(2)
        whole.batch_repeat_interleave(2)
        assert caches.sizes == [6, 4]
        for cache in (caches, whole):
            cache.batch_select_indices(torch.tensor([1, 0, 5, 9, 7]))
            cache.crop(-2)
        assert caches.sizes == [3, 2]
        joined = torch.cat([cache.layers[1].keys for cache in caches.caches])
        torch.testing.assert_close(joined, whole.layers[1].keys, rtol=0, atol=1e-5)
        with pytest.raises(errors.InvalidInputError, match="leaves"):
            caches.batch_select_indices(torch.tensor([4, 0]))
        with pytest.raises(errors.InvalidInputError, match="rows of a batch"):
            model(IDS[:4], past_key_values=caches)
        caches.reset()
        model(IDS[:2], past_key_values=caches)
        assert caches.sizes == [1, 1]
        caches.reset()
        with pytest.raises(errors.InvalidInputError, match="at least 2"):
            model(IDS[:1], past_key_values=caches)


def test_a_part_that_fails_leaves_no_trace(expected: Any) -> None:
    model, _ = expected["llama"]
    cache = DynamicCache(config=model.config)
    calls = []

    def fail_third(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("third part")

    with micro_batches(model, 3), torch.no_grad():
        hook = model.model.layers[0].mlp.register_forward_pre_hook(fail_third)
        with pytest.raises(RuntimeError, match="third part"):
            model(IDS, past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 0
        model(IDS, past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "ssd"])
def test_a_part_that_fails_is_taken_out_of_every_cache(
    kind: str, expected: Any, tmp_path: Path
) -> None:
    model = enable_kv_cache(expected["qwen3"][0])
    make: Any = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "ssd": lambda: KVCache(model.config, tmp_path),
    }[kind]
    caches = GroupedCache([make(), make()])
    calls = []

    def fail_fourth(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("fourth")

    with micro_batches(model, 2), torch.no_grad():
        model(IDS, past_key_values=caches)
        hook = model.model.layers[3].mlp.register_forward_pre_hook(fail_fourth)
        want = model(IDS[:, :1], past_key_values=caches).logits
        caches.crop(-1)
        with pytest.raises(RuntimeError, match="fourth"):
            model(IDS[:, :1], past_key_values=caches)
        hook.remove()
        assert [
            cache.get_seq_length(layer) for cache in caches.caches for layer in range(LAYERS)
        ] == [IDS.shape[1]] * 2 * LAYERS
        torch.testing.assert_close(
            model(IDS[:, :1], past_key_values=caches).logits, want, rtol=0, atol=1e-5
        )


def test_what_micro_batches_cannot_split(expected: Any) -> None:
    model, _ = expected["llama"]
    with pytest.raises(errors.InvalidInputError, match="at least 1"), micro_batches(model, 0):
        pass
    with micro_batches(model, 2), torch.no_grad():
        with pytest.raises(errors.InvalidInputError, match="output_attentions"):
            model(IDS, output_attentions=True)
        with pytest.raises(errors.StateError, match="one use at a time"), micro_batches(model, 2):
            pass
        static = transformers.StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(errors.InvalidInputError, match="GroupedCache"):
            model(IDS, past_key_values=static)
        whole = model(IDS, output_hidden_states=True)
        assert len(whole.hidden_states) == LAYERS + 1
    assert "forward" not in vars(model.model.layers[0])
