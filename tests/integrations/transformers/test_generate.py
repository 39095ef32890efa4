"""Tokens generated with a `KVCache` are those that the framework generates with its own cache:
every kind of attention, every way to generate."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import espnx
from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.cache_argument import CACHE_NAMES
from espnx.integrations.transformers.enable import enable_kv_cache
from tests.integrations.transformers import tiny
from tests.integrations.transformers.tiny import (
    CONFIGS,
    enabled,
    expected,
    generate,
    make,
    plain,
    prompt,
)
from tests.sweeps import in_steps

PADDED = [37, 20, 5]
MODES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    # Lengths of the prompts, options of generate, options of the cache.
    "greedy": (PADDED, {}, {}),
    "one token": ([1], {}, {}),
    "sampling": (
        PADDED[:2],
        {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
        {"spill_interval": 8},
    ),
    "beams": (PADDED[1:], {"num_beams": 3, "max_new_tokens": 20}, {"spill_interval": 1}),
    "small chunks": (PADDED, {"prefill_chunk_size": 7, "max_new_tokens": 12}, {}),
    "large chunks": (
        [60, 31],
        {"prefill_chunk_size": 19, "max_new_tokens": 12},
        {"spill_interval": 64},
    ),
    "X": (PADDED, {}, {"x_rows": 99}),
    "X and KV": (PADDED, {"prefill_chunk_size": 19}, {"x_rows": 2, "spill_interval": 1}),
    "X beams": (PADDED[1:], {"num_beams": 2, "max_new_tokens": 20}, {"x_rows": 4}),
}

pytestmark = pytest.mark.filterwarnings("ignore:no layer of this model")


class Written(StoppingCriteria):
    """After every step all rows are on the disk, however slow it is: the next step reads them there
    and not where they wait."""

    def __init__(self, cache: KVCache):
        self.cache = cache

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        self.cache.store.striped.flush()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@in_steps(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_the_frameworks(folder: Path, name: str, step: int) -> None:
    """In every mode, or every fourth one: others for the next model."""
    model = enabled(name)
    for mode in list(MODES)[list(CONFIGS).index(name) % step :: step]:
        lengths, options, stored = MODES[mode]
        # before anything is computed
        if "x_rows" in stored and getattr(model, "_espnx_why_no_x", None):
            with (
                KVCache(model.config, folder, **stored) as cache,
                pytest.raises(errors.InvalidInputError, match="x_rows"),
            ):
                generate(model, prompt(lengths), cache, **options)
            continue
        with KVCache(model.config, folder, **stored) as cache:
            got = generate(
                model,
                prompt(lengths),
                cache,
                stopping_criteria=StoppingCriteriaList([Written(cache)]),
                **options,
            )
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
    """Otherwise nothing above could fail: another token at the beginning of a prompt changes what
    these models say at the end."""
    inputs = prompt([40])
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, 0] += 1
    logits = [tiny.plain(name)(**each).logits[0, -1] for each in (inputs, changed)]
    assert float((logits[0] - logits[1]).abs().max().detach()) > 1e-3


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "opt"])
def test_assisted_decoding(folder: Path, name: str) -> None:
    """A smaller model proposes, and most of what it proposes is cropped again."""
    model, assistant = (
        enabled(name),
        make(
            name,
            seed=5,
            **({"word_embed_proj_dim": 128, "hidden_size": 128} if name == "opt" else {}),
        ),
    )
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
            assert torch.equal(
                generate(model, prompt([33]), cache, assistant_model=make(name, seed=5)),
                expected(name, [33]),
            )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("x_rows", [0, 2])
def test_a_conversation_goes_on(folder: Path, name: str, x_rows: int) -> None:
    """Three turns with one cache; only what is new is fed. Then another conversation with the same
    cache."""
    model, plain = enabled(name), tiny.plain(name)
    with KVCache(model.config, folder, x_rows=x_rows) as cache:
        for seed in (1, 2):
            theirs, said = tiny.DynamicCache(config=plain.config), prompt([25, 14], seed)
            for turn in range(3):
                wanted = generate(plain, said, theirs, max_new_tokens=9)
                assert torch.equal(generate(model, said, cache, max_new_tokens=9), wanted), (
                    f"conversation {seed}, turn {turn}"
                )
                assert cache.get_seq_length() == wanted.shape[1] - 1
                assert cache.tokens is not None
                assert torch.equal(cache.tokens, wanted[:, :-1])
                asked = prompt([22, 22], seed + turn)["input_ids"]
                mask = torch.cat(
                    [said["attention_mask"], torch.ones(2, 9 + 22, dtype=torch.long)], dim=1
                )
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
            alone = {
                "input_ids": torch.cat([inputs["input_ids"][:1], torch.tensor([[5]])], dim=1),
                "attention_mask": mask[:1],
            }
            wanted = tiny.plain(name)(**alone).logits[:, -1]
        torch.testing.assert_close(
            logits[:1, -1], wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())
        )


def test_without_a_cache_of_ours_nothing_changes(folder: Path) -> None:
    for name in CONFIGS:
        model, inputs = enabled(name), prompt(PADDED)
        theirs = tiny.DynamicCache(config=model.config)
        assert torch.equal(generate(model, inputs, theirs), expected(name, PADDED))
        assert enable_kv_cache(model) is model


SWITCH = 64
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "small chunks": {"prefill_chunk_size": 20},
    "large chunks": {"prefill_chunk_size": SWITCH + 6},
}


def longrope() -> PreTrainedModel:
    """Rotates texts of more than `SWITCH` tokens in another way than shorter ones, and drops its
    cache where they become so long."""
    config = transformers.Phi3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=SWITCH,
        sliding_window=None,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.3,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": SWITCH,
            "partial_rotary_factor": 1.0,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Phi3ForCausalLM(config).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("length", "new"),
    [(150, 20), (50, 40), (20, 20), (SWITCH - 1, 5), (SWITCH, 5), (SWITCH + 1, 5)],
)
def test_a_model_that_drops_its_cache_keeps_it(
    folder: Path, way: str, length: int, new: int
) -> None:
    """The text is read again into the same cache where it passes the switch; all of it is stored at
    the end."""
    plain, model = longrope(), espnx.enable_kv_cache(longrope())
    inputs = prompt([length] if way == "lookup" else [length, length - 9])
    wanted = generate(
        plain, inputs, DynamicCache(config=plain.config), max_new_tokens=new, **WAYS[way]
    )
    with KVCache(model.config, folder, x_rows=0) as cache:
        found = generate(
            model, inputs, cache, max_new_tokens=new, return_dict_in_generate=True, **WAYS[way]
        )
        assert torch.equal(found.sequences, wanted)
        assert found.past_key_values is cache
        assert cache.get_seq_length() == length + new - 1
        assert cache.tokens is not None
        assert way == "beams" or torch.equal(cache.tokens, wanted[:, :-1])


def test_a_cache_that_was_dropped_and_cannot_be_made_anew(folder: Path) -> None:
    """The model is about to read the last token alone (as Phi-4-multimodal does), or its prompt was
    vectors: nothing goes on beside the cache."""
    model = longrope()
    own = model.prepare_inputs_for_generation

    def drops(input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        prepared = own(input_ids, **kwargs)
        return {
            name: value
            for name, value in prepared.items()
            if name not in CACHE_NAMES or input_ids.shape[1] != 25
        }

    model.prepare_inputs_for_generation = drops  # type: ignore[method-assign]
    espnx.enable_kv_cache(model)
    with KVCache(model.config, folder, x_rows=0) as cache:
        with pytest.raises(
            errors.StateError,
            match=r"drops its cache; got a pass over 1 tokens without the 24.*error\.sequences",
        ) as caught:
            generate(model, prompt([20]), cache)
        said = caught.value.sequences  # type: ignore[attr-defined]
        assert said.shape == (1, 24)
        assert cache.get_seq_length() == 24
        cache.reset()
        whole = {"input_ids": said, "attention_mask": torch.ones_like(said)}
        found = generate(
            model, {name: each[:, :23] for name, each in whole.items()}, cache, max_new_tokens=2
        )
        assert torch.equal(found, generate(longrope(), prompt([20]), None, max_new_tokens=5))


def test_other_caches_are_left_alone(folder: Path) -> None:
    """No cache, the framework's, and a second of ours, beside one that is in use."""
    model = espnx.enable_kv_cache(longrope())
    said = prompt([60])
    wanted = generate(longrope(), said, DynamicCache(), max_new_tokens=10)
    with (
        KVCache(model.config, folder, x_rows=0) as cache,
        KVCache(model.config, folder, x_rows=0) as other,
    ):
        generate(model, said, cache, max_new_tokens=10)
        assert torch.equal(generate(model, said, None, max_new_tokens=10), wanted)
        assert torch.equal(generate(model, said, DynamicCache(), max_new_tokens=10), wanted)
        assert torch.equal(generate(model, said, other, max_new_tokens=10), wanted)
        assert torch.isfinite(model(wanted).logits).all()
        assert cache.get_seq_length() == other.get_seq_length() == 69


PROMPTS = {
    "shorter": (20, 0),
    "shorter and another": (20, 1),
    "as long": (34, 0),
    "another as long": (34, 1),
    "longer and another": (50, 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["greedy", "beams", "lookup", "small chunks"])
@pytest.mark.parametrize("which", PROMPTS)
def test_a_prompt_that_does_not_go_on_from_the_cache(folder: Path, way: str, which: str) -> None:
    """The framework would add it to the tokens that are there, or fail in a reshape; the cache
    stays as it is, and serves after `reuse_prefix`."""
    length, seed = PROMPTS[which]
    model, other = enabled("llama"), prompt([length], seed)
    with KVCache(model.config, folder, x_rows=0) as cache:
        generate(model, prompt([30]), cache, max_new_tokens=5)
        with pytest.raises(
            errors.InvalidInputError,
            match=r"the 34 tokens that the cache holds, and more.*reuse_prefix",
        ):
            generate(model, other, cache, **WAYS[way])
        assert cache.get_seq_length() == 34
        cache.reuse_prefix(other["input_ids"], other["attention_mask"])
        assert torch.equal(generate(model, other, cache), expected("llama", [length], seed=seed))


@pytest.mark.parametrize(
    ("way", "lengths"),
    [
        ("greedy", [30]),
        ("greedy", [30, 21]),
        ("lookup", [30]),
        ("assistant", [30]),
        ("small chunks", [30]),
        ("small chunks", [30, 21]),
    ],
)
def test_a_conversation_goes_on_in_every_way(folder: Path, way: str, lengths: list[int]) -> None:
    """From a cache that holds the first part of the text; padding has other ids than before."""
    options = {"assistant_model": make("llama", seed=5)} if way == "assistant" else WAYS[way]
    model, said = enabled("llama"), prompt(lengths)
    with KVCache(model.config, folder, x_rows=0) as cache:
        first = generate(model, said, cache, max_new_tokens=5)
        asked, mask = prompt([10] * len(lengths), 4)["input_ids"], said["attention_mask"]
        mask = torch.cat([mask, torch.ones(len(lengths), 15, dtype=torch.long)], dim=1)
        whole = {
            "input_ids": torch.cat([first, asked], dim=1).masked_fill(mask == 0, 7),
            "attention_mask": mask,
        }
        wanted = generate(plain("llama"), whole, None, max_new_tokens=12)
        assert torch.equal(generate(model, whole, cache, max_new_tokens=12, **options), wanted)
        assert cache.get_seq_length() == wanted.shape[1] - 1


def test_new_tokens_alone_with_the_whole_mask(folder: Path) -> None:
    """As the framework takes them."""
    model = enabled("llama")
    whole = expected("llama", [30])
    with KVCache(model.config, folder, x_rows=0) as cache:
        model(whole[:, :40], past_key_values=cache)
        inputs = {
            "input_ids": whole[:, 40:50],
            "attention_mask": torch.ones(1, 50, dtype=torch.long),
        }
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=10)[:, 10:], whole[:, 50:])


def test_use_cache_is_the_caches(folder: Path) -> None:
    model = enabled("llama")
    with KVCache(model.config, folder, x_rows=0) as cache:
        with pytest.raises(errors.InvalidInputError, match=r"use_cache=False.*leave out"):
            generate(model, prompt([20]), cache, use_cache=False)
        assert cache.get_seq_length() == 0
        assert torch.equal(
            generate(model, prompt([20]), None, use_cache=False), expected("llama", [20])
        )


def test_continuous_batching_is_refused() -> None:
    """The fix that the message names works."""
    model = espnx.enable_kv_cache(make("llama"))
    with pytest.raises(
        errors.InvalidInputError, match=r"continuous batching.*set_attn_implementation"
    ):
        model.generate_batch([[5, 6, 7]], max_new_tokens=3)
    model.set_attn_implementation("sdpa")
    assert model.init_continuous_batching() is not None


def test_a_copy_generates_by_itself(folder: Path) -> None:
    """What watches generation is copied with its model, and shows the framework's signature."""
    model = espnx.enable_kv_cache(make("llama"))
    other = copy.deepcopy(model)
    assert other.generate.args[0].__self__ is other
    assert inspect.signature(other.generate) == inspect.signature(make("llama").generate)
    torch.save(model, io.BytesIO())
    with KVCache(other.config, folder, x_rows=0) as cache:
        assert torch.equal(generate(other, prompt([20]), cache), expected("llama", [20]))


def test_another_prompt_for_beams(folder: Path) -> None:
    """One sequence of a prompt stands for the beams that it was."""
    model = enabled("llama")
    with KVCache(model.config, folder, x_rows=0) as cache:
        generate(model, prompt([30]), cache, max_new_tokens=5, num_beams=2)
        with pytest.raises(errors.InvalidInputError, match="another text than the cache holds"):
            generate(model, prompt([50], 1), cache, num_beams=2)
