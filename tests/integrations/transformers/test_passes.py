"""Forward passes that must not go wrong silently: interrupted ones, those of other models, batches,
threads and masks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, StaticCache

from espnx import enable_kv_cache, errors
from espnx.integrations.transformers.cache import KVCache
from tests.integrations.transformers.tiny import enabled, expected, generate, make, plain, prompt

pytestmark = pytest.mark.filterwarnings("ignore:no layer of this model")


def logits(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, **more).logits


def interrupted(
    model: PreTrainedModel, layer: int, ids: torch.Tensor, cache: Any, error: type[BaseException]
) -> None:
    """A pass that ends after a layer."""

    def stop(*_: Any) -> None:
        raise error

    hook = model.model.layers[layer].register_forward_hook(stop)
    try:
        with pytest.raises(error):
            logits(model, ids, cache)
    finally:
        hook.remove()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("mistral", 2), ("gemma3", 4)])
def test_a_pass_that_is_interrupted_was_none(
    folder: Path, name: str, layers: int, error: type[BaseException]
) -> None:
    """After any layer, in the first pass and in a later one, for layers on SSD and layers in
    memory."""
    ids = prompt([41, 41])["input_ids"]
    reference = DynamicCache(config=plain(name).config)
    first, second = (logits(plain(name), part, reference) for part in (ids[:, :40], ids[:, 40:]))
    for layer in range(layers):
        with KVCache(enabled(name).config, folder, x_rows=0) as cache:
            interrupted(enabled(name), layer, ids[:, :40], cache, error)
            assert cache.get_seq_length() == 0
            torch.testing.assert_close(
                logits(enabled(name), ids[:, :40], cache), first, rtol=1e-4, atol=1e-4
            )
            interrupted(enabled(name), layer, ids[:, 40:], cache, error)
            assert cache.get_seq_length() == 40
            torch.testing.assert_close(
                logits(enabled(name), ids[:, 40:], cache), second, rtol=1e-4, atol=1e-4
            )
            assert cache.get_seq_length() == 41


def test_another_batch_after_an_interrupted_prefill(folder: Path) -> None:
    with KVCache(enabled("llama").config, folder, x_rows=0) as cache:
        interrupted(
            enabled("llama"), 0, prompt([20, 20, 20])["input_ids"], cache, KeyboardInterrupt
        )
        assert torch.equal(generate(enabled("llama"), prompt([20]), cache), expected("llama", [20]))


def test_attention_that_was_set_to_another(folder: Path) -> None:
    """The past would be left out; whoever turns espnx off so has the framework's own caches."""
    model = enable_kv_cache(make("llama"))
    ids = prompt([20])["input_ids"]
    with KVCache(model.config, folder, x_rows=0) as cache:
        logits(model, ids, cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(errors.StateError, match="enable"):
            logits(model, ids[:, :1], cache)
        assert torch.equal(generate(model, prompt([20]), DynamicCache()), expected("llama", [20]))
        enable_kv_cache(model)
        assert cache.get_seq_length() == 20
        logits(model, ids[:, :1], cache)


def test_attention_that_does_not_ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's own function under our name."""
    model = enable_kv_cache(make("llama"))
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "espnx", AttentionInterface._global_mapping["sdpa"]
    )
    with KVCache(model.config, folder, x_rows=0) as cache:
        with pytest.raises(errors.StateError, match="did not ask"):
            logits(model, prompt([20])["input_ids"], cache)
        assert cache.get_seq_length() == 0


def test_a_model_that_was_not_enabled(folder: Path) -> None:
    """At once, not after the prompt; and nothing is left that an enabled model would trip over."""
    ids = prompt([20])["input_ids"]
    with (
        KVCache(plain("llama").config, folder) as cache,
        pytest.raises(errors.StateError, match="not enabled"),
    ):
        logits(plain("llama"), ids, cache)
    logits(enabled("llama"), ids, None)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_with_another_number_of_layers(folder: Path, layers: int) -> None:
    other = enable_kv_cache(make("llama", num_hidden_layers=layers))
    with KVCache(enabled("llama").config, folder) as cache:
        with pytest.raises(errors.InvalidInputError, match=f"got {layers}; expected 2"):
            logits(other, prompt([20])["input_ids"], cache)
        assert torch.equal(generate(enabled("llama"), prompt([20]), cache), expected("llama", [20]))


def test_another_batch(folder: Path) -> None:
    ids = prompt([20, 20])["input_ids"]
    with KVCache(enabled("llama").config, folder) as cache:
        logits(enabled("llama"), ids, cache)
        for more in ({"input_ids": ids[:1]}, {"inputs_embeds": torch.zeros(3, 1, 64)}):
            with pytest.raises(errors.InvalidInputError, match="expected 2, as in the cache"):
                enabled("llama")(**more, past_key_values=cache)
        cache.reset()
        logits(enabled("llama"), ids[:1], cache)
        assert cache.store.rows.sequences == 1


def test_two_threads(folder: Path) -> None:
    """The second is refused while the first computes, and may come after it."""
    model, ids = enable_kv_cache(make("llama")), prompt([20])["input_ids"]
    inside, seen, refused = threading.Event(), threading.Event(), list[Exception]()

    def other() -> None:
        inside.wait(60)
        for use in (
            lambda: logits(model, ids, cache),
            cache.reset,
            lambda: cache.crop(-1),
            lambda: cache.reuse_prefix(ids),
        ):
            try:
                use()
            except errors.StateError as error:
                refused.append(error)
        seen.set()

    def wait(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            inside.set()
            seen.wait(60)

    with KVCache(model.config, folder, x_rows=0) as cache:
        hook = model.model.layers[0].register_forward_hook(wait)
        thread = threading.Thread(target=other)
        thread.start()
        first = logits(model, ids, cache)
        thread.join()
        hook.remove()
        assert [("two threads" in str(error)) for error in refused] == [True] * 4
        assert torch.equal(first, logits(model, ids, None))
        after = threading.Thread(target=lambda: logits(model, ids[:, :1], cache))
        after.start()
        after.join()
        assert cache.get_seq_length() == 21


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_masks(folder: Path, name: str) -> None:
    """What is longer than the tokens so far counts from the first token, as with the framework;
    what is shorter says too little."""
    ids = prompt([41, 41])["input_ids"]
    long = torch.ones(2, 100, dtype=torch.long)
    long[:, :3] = 0
    wanted = logits(plain(name), ids, DynamicCache(config=plain(name).config), attention_mask=long)
    with KVCache(enabled(name).config, folder, x_rows=0) as cache:
        for mask in (torch.ones(2, 5), torch.ones(2, 40), torch.ones(1, 41), torch.ones(41)):
            with pytest.raises(errors.InvalidInputError, match="attention mask"):
                logits(enabled(name), ids, cache, attention_mask=mask)
        found = logits(enabled(name), ids, cache, attention_mask=long)
        torch.testing.assert_close(found[:, 3:], wanted[:, 3:], rtol=1e-4, atol=1e-4)
        with pytest.raises(errors.InvalidInputError, match=r"expected \[2, 42\]"):
            logits(enabled(name), ids[:, :1], cache, attention_mask=torch.ones(2, 1))


@pytest.mark.parametrize("x_rows", [0, 2])
def test_inference_mode_around_everything(folder: Path, x_rows: int) -> None:
    """Rows that are reordered, cropped, kept and opened in inference mode can be added to, in it
    and outside of it."""
    said, model = prompt([41, 41]), enabled("llama")
    ids, wanted = (
        said["input_ids"],
        logits(plain("llama"), said["input_ids"], DynamicCache(config=plain("llama").config)),
    )
    beams = plain("llama").generate(**said, num_beams=3, max_new_tokens=6, do_sample=False)
    with torch.inference_mode():
        with KVCache(model.config, folder, x_rows=0) as cache:
            assert torch.equal(
                model.generate(
                    **said, num_beams=3, max_new_tokens=6, do_sample=False, past_key_values=cache
                ),
                beams,
            )
        with KVCache(model.config, folder, name="kept", x_rows=x_rows) as cache:
            logits(model, ids[:, :12], cache)
            cache.batch_repeat_interleave(1 if x_rows else 2)
            cache.batch_select_indices(torch.tensor([0, 1] if x_rows else [0, 2]))
            cache.crop(-3)
        cache = KVCache(model.config, folder, name="kept", x_rows=x_rows)
    with cache:
        logits(model, ids[:, 9:10], cache)
        logits(model, ids[:, 10:40], cache)
        cache.crop(-25)
        logits(model, ids[:, 15:39], cache)
        found = logits(model, ids[:, 39:], cache)
    torch.testing.assert_close(found, wanted[:, 39:], rtol=1e-4, atol=1e-4)


def test_a_cache_of_fixed_size_is_refused() -> None:
    model = enabled("llama")
    with pytest.raises(errors.InvalidInputError, match="fixed size"):
        logits(model, prompt([9])["input_ids"], StaticCache(model.config, max_cache_len=20))


def test_no_gradient_is_lost(folder: Path) -> None:
    model, ids = enable_kv_cache(make("llama")), prompt([20])["input_ids"]
    with KVCache(model.config, folder, x_rows=0) as cache:
        loss = model(ids, past_key_values=cache, labels=ids).loss
        assert torch.isfinite(loss)
        with pytest.raises(errors.InvalidInputError, match="backward"):
            loss.backward()


def test_masks_follow_their_sequences(folder: Path) -> None:
    """`match` compares them; a batch that was reordered, repeated or cut has them in its order."""
    said = prompt([40, 25])
    ids, mask = said["input_ids"], said["attention_mask"]
    more = torch.cat([ids, ids[:, -1:]], dim=1), torch.cat([mask, mask[:, -1:]], dim=1)
    for rows in ([1, 0], [1], [0, 0, 1, 1]):
        with KVCache(enabled("llama").config, folder, x_rows=0) as cache:
            logits(enabled("llama"), ids, cache, attention_mask=mask)
            if len(rows) == 4:
                cache.batch_repeat_interleave(2)
            elif len(rows) == 1:
                cache.batch_select_indices(torch.tensor(rows))
            else:
                cache.reorder_cache(torch.tensor(rows))
            assert cache.reuse_prefix(*(each[rows] for each in more)) == 40
            wrong = more[1][rows].clone()
            wrong[-1, :20] = 1 - wrong[-1, :20]
            assert cache.reuse_prefix(more[0][rows], wrong) == 0


def test_options_out_of_range(folder: Path) -> None:
    config = enabled("llama").config
    for options in (
        {"x_rows": -1},
        {"x_rows": "all"},
        {"x_rows": 1.0},
        {"capacity_tokens": -5},
        {"capacity_tokens": "x"},
        {"threads": -1},
        {"spill_interval": 1.5},
        {"spill_interval": 0},
        {"read_ahead_bytes": "much"},
        {"read_ahead_bytes": -1},
        {"format": "int4"},
    ):
        with pytest.raises(errors.InvalidInputError):
            KVCache(config, folder, **options)  # type: ignore[arg-type]
    for more in (
        {"read_ahead_bytes": 0},
        {"deadline_s": 0},
        {"deadline_s": "3"},
        {"deadline_s": float("nan")},
    ):
        with pytest.raises(errors.InvalidInputError, match=next(iter(more))):
            KVCache(config, folder, **more)
    for storage in (None, 5, "", [], [folder, ""]):
        with pytest.raises(errors.InvalidInputError, match="storage"):
            KVCache(config, storage)  # type: ignore[arg-type]
    with KVCache(config, folder, read_ahead_bytes="1MiB", x_rows=0) as cache:
        assert torch.equal(generate(enabled("llama"), prompt([20]), cache), expected("llama", [20]))
