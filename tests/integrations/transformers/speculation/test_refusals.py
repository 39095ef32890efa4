"""What decoding with drafts does not do is refused by name, before anything is computed or with the
cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import espnx
from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation.probe import check_pass
from tests.integrations.transformers.speculation.drafts import drafting, one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, make, prompt

REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "beams": (lambda: {"num_beams": 3}, "beam search"),
    "sampled beams": (lambda: {"num_beams": 3, "do_sample": True}, "beam sample"),
    "scores": (lambda: {"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "guidance": (lambda: {"guidance_scale": 2.0}, "ClassifierFreeGuidance"),
    "allowed tokens of a batch": (
        lambda: {"prefix_allowed_tokens_fn": lambda number, ids: [number]},
        "PrefixConstrained",
    ),
    "a streamer of a batch": (lambda: {"streamer": _Put()}, "streamer"),
    "gamma": (lambda: {"gamma": -1}, "gamma"),
}


class _Put(BaseStreamer):
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.tokens = list[int]()

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(folder: Path, what: str) -> None:
    options, named = REFUSED[what]
    with KVCache(enabled("llama").config, folder, draft="lookup") as cache:
        with pytest.raises(errors.InvalidInputError, match=named):
            speculated("llama", prompt([20, 12]), cache, **options())
        assert cache.get_seq_length() == 0


def test_other_inputs_than_text(folder: Path) -> None:
    with (
        KVCache(enabled("gpt2").config, folder, draft="lookup") as cache,
        pytest.raises(errors.InvalidInputError, match="token_type_ids"),
    ):
        kinds = torch.zeros(1, 20, dtype=torch.int64)
        speculated("gpt2", prompt([20]) | {"token_type_ids": kinds}, cache)


def test_caches_without_a_draft(folder: Path) -> None:
    model = enabled("llama")
    with KVCache(model.config, folder) as cache:
        assert cache.stats()["speculation"] is None
        with pytest.raises(errors.InvalidInputError, match="a cache without one"):
            speculated("llama", prompt([20]), cache)
    for other in (None, DynamicCache(config=model.config)):
        with pytest.raises(errors.InvalidInputError, match="expected a KVCache"):
            espnx.generate(model, **prompt([20]), past_key_values=other, max_new_tokens=3)
    for kind in ("beams", "", 3):
        with pytest.raises(errors.InvalidInputError, match="'lookup'"):
            KVCache(model.config, folder, draft=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_read_ahead_bytes": "1GiB"}, "draft_read_ahead_bytes of a cache without a draft"),
        ({"draft": "lookup", "draft_read_ahead_bytes": 0}, "it takes no time"),
        ({"draft": "pages", "draft_read_ahead_bytes": -1}, "size"),
        ({"draft": "4bit", "draft_read_ahead_bytes": "much"}, "size"),
    ],
)
def test_reads_ahead_of_drafts(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=named):
        KVCache(enabled("llama").config, folder, **options)


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.filterwarnings("ignore:no layer of this model")
def test_layers_that_stay_in_memory(folder: Path, name: str) -> None:
    with (
        KVCache(enabled(name).config, folder, draft="lookup") as cache,
        pytest.raises(errors.InvalidInputError, match="layers that stay in memory"),
    ):
        speculated(name, prompt([20]), cache)


def test_rotations_that_change_with_the_text(folder: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = espnx.enable_kv_cache(make("llama", rope_parameters=rope))
    with (
        KVCache(model.config, folder, draft="lookup") as cache,
        pytest.raises(errors.InvalidInputError, match="dynamic"),
    ):
        espnx.generate(model, **prompt([20]), past_key_values=cache, max_new_tokens=3)


def test_a_model_whose_pass_changes_with_its_tokens(folder: Path) -> None:
    """As where activations are quantised with one scale for all of a pass: refused before anything
    is read, and looked at again when it is another model."""
    model = espnx.enable_kv_cache(make("llama"))

    def quantised(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        scale = output.abs().max() / 127
        return (output / scale).round() * scale

    hook = model.model.layers[0].mlp.register_forward_hook(quantised)
    with KVCache(model.config, folder, draft="lookup") as cache:
        options: dict[str, Any] = {"past_key_values": cache, "max_new_tokens": 3}
        with pytest.raises(errors.InvalidInputError, match="three tokens are computed at once"):
            espnx.generate(model, **prompt([20]), **options)
        assert cache.get_seq_length() == 0
        hook.remove()
        espnx.generate(model, **prompt([20]), **options)
        assert cache.get_seq_length() == 22


@pytest.mark.parametrize("name", ["llama", "mixtral", "opt", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_whose_passes_are_alike(name: str, dtype: torch.dtype) -> None:
    for tokens in (1, 20):
        check_pass(enabled(name, dtype), prompt([tokens])["input_ids"])


@pytest.mark.parametrize("nth", [1, 4])
def test_logits_that_are_nan(folder: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompt, and of a pass: the cache is as before the pass, and goes on when the model is
    well again."""
    inputs = prompt([30])
    wanted = one_by_one("llama", inputs, max_new_tokens=30)
    drafting(monkeypatch, wanted)
    model: PreTrainedModel = enabled("llama")
    check_pass(model, inputs["input_ids"])
    calls = 0

    def broken(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output * float("nan") if calls == nth else output

    hook = model.lm_head.register_forward_hook(broken)
    with KVCache(model.config, folder, draft="lookup", spill_interval=8) as cache:
        with pytest.raises(errors.StateError, match="NaN") as caught:
            speculated("llama", inputs, cache, max_new_tokens=30)
        hook.remove()
        so_far = caught.value.sequences  # type: ignore[attr-defined]
        assert torch.equal(so_far, wanted[:, : so_far.shape[1]])
        if nth == 1:
            assert cache.get_seq_length() == so_far.shape[1] == 30
            cache.reuse_prefix(so_far)
        else:
            assert cache.get_seq_length() == so_far.shape[1] - 1 > 30
        left = 60 - so_far.shape[1]
        got = speculated("llama", {"input_ids": so_far}, cache, max_new_tokens=left)
    assert torch.equal(got, wanted)


def test_a_streamer_is_put_every_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = prompt([25])
    wanted = one_by_one("llama", inputs, max_new_tokens=20)
    drafting(monkeypatch, wanted)
    streamer = _Put()
    with KVCache(enabled("llama").config, folder, draft="lookup") as cache:
        speculated("llama", inputs, cache, max_new_tokens=20, streamer=streamer)
    assert streamer.tokens == [*wanted[0].tolist(), -1]


@pytest.mark.parametrize("nth", [1, 6])
def test_a_cache_that_is_reset_meanwhile(folder: Path, nth: int) -> None:
    """By whoever is told of tokens: no pass has rows to decide on any more. The error says so, and
    brings the tokens so far; the cache can be used."""

    class Resets(_Put):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 25 + nth:
                cache.reset()

    inputs = prompt([25])
    wanted = one_by_one("llama", inputs, max_new_tokens=20)
    with KVCache(enabled("llama").config, folder, draft="lookup") as cache:
        with pytest.raises(errors.StateError, match="may be rejected") as caught:
            speculated("llama", inputs, cache, max_new_tokens=20, streamer=Resets())
        so_far = caught.value.sequences  # type: ignore[attr-defined]
        assert so_far.shape[1] >= 25 + nth - 1
        assert torch.equal(so_far, wanted[:, : so_far.shape[1]])
        assert torch.equal(speculated("llama", inputs, cache, max_new_tokens=20), wanted)
