"""What a `KVCache` and `enable_kv_cache` refuse, in words, and what state they leave behind."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.cache_argument import cache_name
from espnx.integrations.transformers.enable import enable_kv_cache
from tests.integrations.transformers import tiny
from tests.integrations.transformers.tiny import enabled, expected, generate, make, plain, prompt
from tests.storage.common import in_child


def test_a_model_that_is_not_enabled(folder: Path) -> None:
    """It attends to the new tokens alone: never more than one pass of that."""
    with KVCache(plain("llama").config, folder) as cache:
        with pytest.raises(errors.StateError, match="enable"):
            generate(plain("llama"), prompt([20]), cache)
        cache.reset()
        assert torch.equal(generate(enabled("llama"), prompt([20]), cache), expected("llama", [20]))


def test_a_model_in_place_of_its_config() -> None:
    """What it is told does not depend on what else is missing."""
    model: Any = plain("llama")
    with pytest.raises(errors.InvalidInputError, match=r"KVCache\(model.config, ...\)"):
        KVCache(model)


class OfANewerTransformers(transformers.LlamaForCausalLM):
    """Models take the cache by another name from 5.24 on."""

    def forward(
        self, input_ids: torch.Tensor, cache: transformers.Cache | None = None, **options: Any
    ) -> Any:
        own = cache_name(inspect.signature(transformers.LlamaForCausalLM.forward).parameters)
        return super().forward(input_ids, **{own: cache}, **options)


def test_the_cache_by_its_newer_name(folder: Path) -> None:
    model = OfANewerTransformers(plain("llama").config).eval()
    model.load_state_dict(plain("llama").state_dict())
    enable_kv_cache(model)
    ids = prompt([20])["input_ids"]
    with KVCache(model.config, folder) as cache, torch.no_grad():
        parts = [
            model(part, cache=cache, use_cache=True).logits for part in ids.split([15, 4, 1], dim=1)
        ]
        assert cache.get_seq_length() == 20
        wanted = plain("llama")(ids).logits
    torch.testing.assert_close(
        torch.cat(parts, dim=1), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())
    )


def test_two_caches_at_once(folder: Path) -> None:
    """As PEFT would give a model whose cache it knows by its older name alone."""
    model = enabled("llama")
    with (
        KVCache(model.config, folder) as cache,
        torch.no_grad(),
        pytest.raises(errors.InvalidInputError, match="two caches at once"),
    ):
        model(prompt([20])["input_ids"], past_key_values=transformers.DynamicCache(), cache=cache)


def small(name: str, **options: int) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(vocab_size=50, **options)
    kind = {"T5": "ForConditionalGeneration", "Bart": "ForConditionalGeneration"}.get(
        name, "ForCausalLM"
    )
    return getattr(transformers, name + kind)(config).eval()


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (
            lambda: small("T5", d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2),
            "encoder-decoder",
        ),
        (
            lambda: small(
                "Bart",
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
            ),
            "encoder-decoder",
        ),
        (lambda: small("Bloom", hidden_size=32, n_layer=2, n_head=2), "Bloom"),
    ],
)
def test_models_that_enable_refuses(model: object, match: str) -> None:
    """Nothing was changed."""
    made = model()  # type: ignore[operator]
    before = (
        made.config._attn_implementation,
        made.config.get_text_config(decoder=True)._attn_implementation,
    )
    with pytest.raises(errors.InvalidInputError, match=match):
        enable_kv_cache(made)
    assert (
        made.config._attn_implementation,
        made.config.get_text_config(decoder=True)._attn_implementation,
    ) == before
    assert not made._forward_pre_hooks


def test_dropout(folder: Path) -> None:
    model = enable_kv_cache(make("llama", attention_dropout=0.1))
    with KVCache(model.config, folder) as cache:
        some = generate(model, prompt([20]), cache, max_new_tokens=4)
        model.train()
        with pytest.raises(errors.InvalidInputError, match=r"dropout.*model\.eval"):
            model(input_ids=some[:, -1:], past_key_values=cache)
        model.eval()
        assert cache.get_seq_length() == 23
        inputs = {"input_ids": some, "attention_mask": torch.ones_like(some)}
        assert torch.equal(
            generate(model, inputs, cache, max_new_tokens=26), expected("llama", [20])
        )
        assert torch.equal(cache.tokens, expected("llama", [20])[:, :-1])  # type: ignore[arg-type]


@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("stored", [True, False])
def test_matrices_of_masks(folder: Path, dimensions: int, stored: bool) -> None:
    """With a cache of ours or without."""
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    mask[5:, 2] = False
    with (
        KVCache(enabled("llama").config, folder) as cache,
        pytest.raises((errors.InvalidInputError, ValueError)),
    ):
        enabled("llama")(
            input_ids=prompt([10])["input_ids"],
            attention_mask=mask[(None,) * (dimensions - 2)],
            **({"past_key_values": cache} if stored else {"use_cache": False}),
        )


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 1, 1, 10) > 0,
        torch.ones(1, 1, 1, 10, dtype=torch.long),
        torch.zeros(1, 1, 1, 10),
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_masks_of_ones_own_for_all_queries(folder: Path, mask: torch.Tensor, stored: bool) -> None:
    """The framework lets every query see all that they show, and what comes after it: no padding
    mask."""
    with KVCache(enabled("llama").config, folder) as cache:
        with pytest.raises(
            errors.InvalidInputError, match=r"attention mask; got \[1, 1, 1, 10\].*padding mask"
        ):
            enabled("llama")(
                prompt([10])["input_ids"],
                attention_mask=mask,
                **({"past_key_values": cache} if stored else {}),
            )
        assert cache.get_seq_length() == 0


def test_a_gpu_that_is_not_there(folder: Path) -> None:
    """What was named is not replaced by the CPU."""
    with (
        KVCache(enabled("llama").config, folder, device="gpu", x_rows=0) as cache,
        pytest.raises(errors.PathUnavailableError, match="'ssd'"),
    ):
        generate(enabled("llama"), prompt([10]), cache)
    with KVCache(enabled("llama").config, folder, device="gpu", compute="cpu", x_rows=0) as cache:
        assert torch.equal(
            generate(enabled("llama"), prompt([10]), cache, max_new_tokens=3),
            expected("llama", [10], max_new_tokens=3),
        )


def test_packed_sequences(folder: Path) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with pytest.raises(errors.InvalidInputError, match="packed"):
        enabled("llama")(
            input_ids=prompt([10])["input_ids"], position_ids=positions, use_cache=False
        )


@pytest.mark.parametrize("shape", [(1, 10), (2, 9)])
def test_masks_of_another_size(folder: Path, shape: tuple[int, int]) -> None:
    with KVCache(enabled("llama").config, folder) as cache:
        inputs = prompt([10, 7])
        with pytest.raises((errors.InvalidInputError, ValueError, IndexError, RuntimeError)):
            enabled("llama")(
                input_ids=inputs["input_ids"],
                attention_mask=torch.zeros(shape, dtype=torch.long),
                past_key_values=cache,
            )
        assert torch.equal(
            generate(enabled("llama"), inputs, cache, max_new_tokens=5),
            expected("llama", [10, 7], max_new_tokens=5),
        )


def test_options(folder: Path) -> None:
    config = plain("llama").config
    for options in (
        {"spill_interval": 0},
        {"spill_interval": -1},
        {"engine": "nvme"},
        {"format": "fp64"},
    ):
        with pytest.raises(errors.InvalidInputError), KVCache(config, folder, **options) as cache:
            generate(enabled("llama"), prompt([5]), cache, max_new_tokens=2)
    for storage in ([], ()):
        with pytest.raises(errors.InvalidInputError, match="storage"):
            KVCache(config, storage)
    with KVCache(config, folder) as cache, pytest.raises(errors.InvalidInputError, match="crop"):
        cache.crop(3)
    assert not list(folder.iterdir())


def test_x_rows_and_beams_that_mix(folder: Path) -> None:
    """Beams of a prompt kept as X may not become beams of one kept as K and V; the error says what
    to do, and the cache is whole."""
    model = enabled("llama")
    with KVCache(model.config, folder, x_rows=1) as cache:
        inputs = prompt([20, 14, 9])
        some = generate(model, inputs, cache, max_new_tokens=3)
        with pytest.raises(errors.InvalidInputError, match="x_rows=0"):
            cache.reorder_cache(torch.tensor([1, 0, 2]))
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 3, dtype=torch.long)], dim=1)
        got = generate(model, {"input_ids": some, "attention_mask": mask}, cache, max_new_tokens=27)
        assert torch.equal(got, expected("llama", [20, 14, 9]))


@pytest.mark.parametrize("kept", [[0], [2], [1, 1]])
def test_parts_of_a_batch(folder: Path, kept: list[int]) -> None:
    """Of three sequences, one of them kept as X, some go on."""
    model, lengths = enabled("llama"), [20, 14, 9]
    inputs = prompt(lengths)
    with KVCache(model.config, folder, x_rows=1) as cache:
        some = generate(model, inputs, cache, max_new_tokens=6)
        cache.batch_select_indices(torch.tensor(kept))
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 6, dtype=torch.long)], dim=1)
        got = generate(
            model, {"input_ids": some[kept], "attention_mask": mask[kept]}, cache, max_new_tokens=24
        )
        assert torch.equal(got, expected("llama", lengths)[kept])


def test_a_cache_is_not_copied(folder: Path) -> None:
    with KVCache(plain("llama").config, folder) as cache:
        for make in (copy.deepcopy, copy.copy):
            with pytest.raises(errors.InvalidInputError, match=r"name=\.\.\."):
                make(cache)


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_comes_and_goes(folder: Path, first: bool) -> None:
    """As with the framework's cache."""
    for x_rows in (0, 1):
        with KVCache(enabled("llama").config, folder, x_rows=x_rows) as cache:
            with torch.inference_mode(first):
                some = generate(enabled("llama"), prompt([20]), cache, max_new_tokens=5)
            with torch.inference_mode(not first):
                inputs = {"input_ids": some, "attention_mask": torch.ones_like(some)}
                assert torch.equal(
                    generate(enabled("llama"), inputs, cache, max_new_tokens=25),
                    expected("llama", [20]),
                )


def test_the_cache_as_a_positional_argument(folder: Path) -> None:
    """The tokens are known then, too."""
    model = enabled("llama")
    with KVCache(model.config, folder) as cache, torch.no_grad():
        inputs = prompt([20])
        model(inputs["input_ids"], inputs["attention_mask"], None, cache)
        assert cache.tokens is not None
        assert torch.equal(cache.tokens, inputs["input_ids"])


def test_vectors_instead_of_tokens(folder: Path) -> None:
    model = plain("llama")
    vectors = model.get_input_embeddings()(prompt([20])["input_ids"]).detach()
    wanted = model.generate(inputs_embeds=vectors, max_new_tokens=20, do_sample=False)
    with KVCache(model.config, folder) as cache:
        assert torch.equal(
            enabled("llama").generate(
                inputs_embeds=vectors, max_new_tokens=20, do_sample=False, past_key_values=cache
            ),
            wanted,
        )
        assert cache.tokens is None


def test_capacity_is_reserved_once(folder: Path) -> None:
    """Not again for each conversation."""
    with KVCache(enabled("llama").config, folder, capacity_tokens=50_000) as cache:
        sizes = []
        for _ in range(3):
            generate(enabled("llama"), prompt([20]), cache, max_new_tokens=2)
            sizes.append(
                [device.space.extents.size_bytes for device in cache.store.striped.devices]
            )
            cache.reset()
        assert sizes[0] == sizes[1] == sizes[2]
        # K and V of 50 000 tokens, two layers, two heads of 128 values, fp32.
        assert 50_000 * 2 * 2 * 2 * 128 * 4 <= sizes[0][0] < 1.5 * 50_000 * 2 * 2 * 2 * 128 * 4


def test_generated_with_padding_elsewhere(folder: Path) -> None:
    """Padding on the right and in the middle: the framework's logits, where there are tokens."""
    for name, x_rows in (("llama", 0), ("llama", 2), ("opt", 2)):
        inputs, positions = prompt([30, 30]), torch.arange(31)[None]
        mask = torch.ones(2, 31, dtype=torch.long)
        mask[0, 20:30], mask[1, 5:9] = 0, 0
        outputs = []
        with (
            KVCache(enabled(name).config, folder, x_rows=x_rows, spill_interval=1) as ours,
            torch.no_grad(),
        ):
            for model, cache in (
                (enabled(name), ours),
                (plain(name), tiny.DynamicCache(config=plain(name).config)),
            ):
                parts = []
                for begin, end in ((0, 25), (25, 30), (30, 31)):
                    new = torch.cat([inputs["input_ids"], torch.full((2, 1), 7)], dim=1)[
                        :, begin:end
                    ]
                    parts.append(
                        model(
                            new,
                            attention_mask=mask[:, :end],
                            position_ids=positions[:, begin:end],
                            past_key_values=cache,
                        ).logits
                    )
                outputs.append(torch.cat(parts, dim=1)[mask.bool()])
        torch.testing.assert_close(
            outputs[0], outputs[1], rtol=1e-3, atol=1e-4 * float(outputs[1].abs().max())
        )


def test_a_cache_in_a_forked_child(folder: Path) -> None:
    """The child is told; the parent's cache goes on. One that the child makes itself works."""
    model = enabled("llama")
    with KVCache(model.config, folder, x_rows=0) as cache:
        generate(model, prompt([20]), cache)
        length = cache.get_seq_length()

        def child() -> str:
            try:
                model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
            except errors.InvalidInputError as error:
                return str(error)
            return ""

        assert "Fix: make the cache in the process that uses it" in in_child(child)
        assert cache.get_seq_length() == length
        cache.reset()
        assert torch.equal(generate(model, prompt([20]), cache), expected("llama", [20]))
