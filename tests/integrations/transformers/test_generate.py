"""Tokens generated with a `KVCache` are those that the framework generates with its own cache: every kind of attention, every way to
generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from tests.integrations.transformers import tiny
from tests.integrations.transformers.tiny import CONFIGS, enabled, expected, generate, make, prompt

PADDED = [37, 20, 5]
MODES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    # Lengths of the prompts, options of generate, options of the cache.
    "greedy": (PADDED, {}, {}),
    "one token": ([1], {}, {}),
    "sampling": (PADDED[:2], {"do_sample": True, "num_return_sequences": 2, "top_k": 20}, {"spill_interval": 8}),
    "beams": (PADDED[1:], {"num_beams": 3, "max_new_tokens": 20}, {"spill_interval": 1}),
    "small chunks": (PADDED, {"prefill_chunk_size": 7, "max_new_tokens": 12}, {}),
    "large chunks": ([60, 31], {"prefill_chunk_size": 19, "max_new_tokens": 12}, {"spill_interval": 64}),
    "X": (PADDED, {}, {"x_rows": 99}),
    "X and KV": (PADDED, {"prefill_chunk_size": 19}, {"x_rows": 2, "spill_interval": 1}),
    "X beams": (PADDED[1:], {"num_beams": 2, "max_new_tokens": 20}, {"x_rows": 4}),
}

pytestmark = pytest.mark.filterwarnings("ignore:no layer of this model")


class Written(StoppingCriteria):
    """After every step all rows are on the disk, however slow it is: the next step reads them there and not where they wait."""

    def __init__(self, cache: KVCache):
        self.cache = cache

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options: Any) -> torch.Tensor:
        self.cache.store.striped.flush()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_the_frameworks(folder: Path, name: str) -> None:
    model = enabled(name)
    for mode, (lengths, options, stored) in MODES.items():
        if "x_rows" in stored and getattr(model, "_espnx_why_no_x", None):  # before anything is computed
            with KVCache(model.config, folder, **stored) as cache, pytest.raises(errors.InvalidInputError, match="x_rows"):
                generate(model, prompt(lengths), cache, **options)
            continue
        with KVCache(model.config, folder, **stored) as cache:
            got = generate(model, prompt(lengths), cache, stopping_criteria=StoppingCriteriaList([Written(cache)]), **options)
            was_read = cache.stats()["bytes_asked"]
        assert torch.equal(got, expected(name, lengths, **options)), f"{name}, {mode}"
        assert was_read > 0 or name == "mistral", f"{name}, {mode}: nothing was read from disk"
    assert not list(folder.iterdir())


def test_on_a_real_disk(tmp_path: Path) -> None:
    for directories in ([tmp_path / "one"], [tmp_path / "two", tmp_path / "three"]):
        model = enabled("llama")
        with KVCache(model.config, directories, capacity_tokens=200) as cache:
            assert torch.equal(generate(model, prompt(PADDED), cache), expected("llama", PADDED))
            assert cache.stats()["bytes_asked"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_the_context_matters(name: str) -> None:
    """Otherwise nothing above could fail: another token at the beginning of a prompt changes what these models say at the end."""
    inputs = prompt([40])
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, 0] += 1
    logits = [tiny.plain(name)(**each).logits[0, -1] for each in (inputs, changed)]
    assert float((logits[0] - logits[1]).abs().max().detach()) > 1e-3


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "opt"])
def test_assisted_decoding(folder: Path, name: str) -> None:
    """A smaller model proposes, and most of what it proposes is cropped again."""
    model, assistant = enabled(name), make(name, seed=5, **({"word_embed_proj_dim": 128, "hidden_size": 128} if name == "opt" else {}))
    inputs = prompt([33])
    for assisting in (assistant, tiny.plain(name)):
        with KVCache(model.config, folder, spill_interval=1) as cache:
            got = generate(model, inputs, cache, assistant_model=assisting)
            assert len(got[0]) == 63
            assert torch.equal(got, expected(name, [33]))


def test_assisted_decoding_of_x(folder: Path) -> None:
    for name in ("llama", "qwen3", "gpt2"):
        model = enabled(name)
        with KVCache(model.config, folder, x_rows=1, spill_interval=16) as cache:
            assert torch.equal(generate(model, prompt([33]), cache, assistant_model=make(name, seed=5)), expected(name, [33]))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("x_rows", [0, 2])
def test_a_conversation_goes_on(folder: Path, name: str, x_rows: int) -> None:
    """Three turns with one cache; only what is new is fed. Then another conversation with the same cache."""
    model, plain = enabled(name), tiny.plain(name)
    with KVCache(model.config, folder, x_rows=x_rows) as cache:
        for seed in (1, 2):
            theirs, said = tiny.DynamicCache(config=plain.config), prompt([25, 14], seed)
            for turn in range(3):
                wanted = generate(plain, said, theirs, max_new_tokens=9)
                assert torch.equal(generate(model, said, cache, max_new_tokens=9), wanted), f"conversation {seed}, turn {turn}"
                assert cache.get_seq_length() == wanted.shape[1] - 1
                assert cache.tokens is not None
                assert torch.equal(cache.tokens, wanted[:, :-1])
                asked = prompt([22, 22], seed + turn)["input_ids"]
                mask = torch.cat([said["attention_mask"], torch.ones(2, 9 + 22, dtype=torch.long)], dim=1)
                said = {"input_ids": torch.cat([wanted, asked], dim=1), "attention_mask": mask}
            cache.reset()
            assert cache.get_seq_length() == 0
            assert cache.stats()["stored_bytes"] == 0


def test_another_batch_after_reset(folder: Path) -> None:
    model = enabled("llama")
    with KVCache(model.config, folder) as cache:
        for lengths in ([30, 11], [40], [18, 18, 4]):
            assert torch.equal(generate(model, prompt(lengths), cache), expected("llama", lengths))
            cache.reset()


def test_a_row_of_padding_alone(folder: Path) -> None:
    """Its answers are finite, and the other rows are as if it were not there."""
    for name in ("llama", "gemma3", "opt"):
        model = enabled(name)
        inputs = prompt([30, 30])
        inputs["attention_mask"][1] = 0
        inputs["input_ids"][1] = tiny.PAD
        with KVCache(model.config, folder) as cache, torch.inference_mode():
            first = model(**inputs, past_key_values=cache)
            assert bool(torch.isfinite(first.logits).all())
            mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"][:, :1]], dim=1)
            more = {"input_ids": torch.tensor([[5], [5]]), "attention_mask": mask}
            ids = torch.tensor([[30], [0]])
            logits = model(**more, position_ids=ids, past_key_values=cache).logits
            assert bool(torch.isfinite(logits).all())
            alone = {"input_ids": torch.cat([inputs["input_ids"][:1], torch.tensor([[5]])], dim=1), "attention_mask": mask[:1]}
            wanted = tiny.plain(name)(**alone).logits[:, -1]
        torch.testing.assert_close(logits[:1, -1], wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_without_a_cache_of_ours_nothing_changes(folder: Path) -> None:
    for name in CONFIGS:
        model, inputs = enabled(name), prompt(PADDED)
        theirs = tiny.DynamicCache(config=model.config)
        assert torch.equal(generate(model, inputs, theirs), expected(name, PADDED))
        assert enable_kv_cache(model) is model
