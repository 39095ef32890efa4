"""Tokens from several at a pass are those of decoding one by one: every model whose layers all go
to disk, batches, processors, stop conditions; and the cache goes on afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

import espnx
from espnx.integrations.transformers.cache import KVCache
from tests.integrations.transformers.speculation.drafts import drafting, one_by_one, speculated
from tests.integrations.transformers.tiny import PAD, enabled, make, plain, prompt
from tests.sweeps import in_steps

PADDED = [37, 20, 5]
MODES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    # Lengths of the prompts, options of generate, options of the cache.
    "one": ([37], {}, {}),
    "a batch": (PADDED, {}, {"spill_interval": 8}),
    "ends": (PADDED, {"eos_token_id": [5, 11, 40, 60, 71]}, {"spill_interval": 8}),
    "wide passes": (PADDED, {"gamma": 19}, {"spill_interval": 1}),
    "no drafts": (PADDED[:2], {"gamma": 0}, {}),
    "a chosen number": (PADDED, {"gamma": None}, {"spill_interval": 8}),
    "chunks": ([60, 31], {"prefill_chunk_size": 19}, {}),
    "X": (PADDED, {}, {"x_rows": 99, "spill_interval": 8}),
    "X and KV": (PADDED, {"eos_token_id": [5, 11, 40]}, {"x_rows": 2, "spill_interval": 8}),
}
NAMES = ("llama", "qwen2", "qwen3", "mixtral", "opt", "gpt2")


@in_steps(3)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_one_by_one(
    folder: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(NAMES.index(name) % step, len(MODES), step):
        mode = list(MODES)[number]
        lengths, options, stored = MODES[mode]
        inputs = prompt(lengths)
        own = {key: value for key, value in options.items() if key != "gamma"}
        wanted = one_by_one(name, inputs, max_new_tokens=60, **own)
        drafting(monkeypatch, wanted, right=0.8)
        with KVCache(enabled(name).config, folder, draft="lookup", **stored) as cache:
            got = speculated(name, inputs, cache, max_new_tokens=60, **options)
            said = cache.stats()
        assert torch.equal(got, wanted), f"{name}, {mode}"
        assert said["bytes_asked"] > 0
        assert said["speculation"]["draft_bytes_asked"] == 0
        if "gamma" not in options:
            assert said["speculation"]["tokens_a_pass"] > 2
        assert said["speculation"]["why"]
    assert not list(folder.iterdir())


def test_the_lookup_itself(folder: Path) -> None:
    """A model that says a token again and again."""
    model = make("llama", tie_word_embeddings=True, num_hidden_layers=1, initializer_range=0.05)
    espnx.enable_kv_cache(model)
    ids = prompt([30])["input_ids"]
    wanted = model.generate(ids, max_new_tokens=40, do_sample=False)
    with KVCache(model.config, folder, draft="lookup") as cache:
        got = espnx.generate(model, ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    assert said["tokens_a_pass"] > 1.5


def test_each_sequence_accepts_its_own_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One's drafts are always right, another's never: the first ends in a fifth of the passes, and
    what comes after costs nothing of its rows."""
    inputs = prompt([40, 40])
    wanted = one_by_one("llama", inputs, max_new_tokens=40)
    drafting(monkeypatch, wanted[:1], right=1.0)
    known = espnx.integrations.transformers.speculation.decoding.continuation  # type: ignore[attr-defined]
    right = wanted[0].tolist()

    def one_sided(tokens: Any, n: int) -> list[int]:
        if right[: len(tokens)] == tokens.tolist():
            return list(known(tokens, n))
        return [PAD] * n

    monkeypatch.setattr(
        "espnx.integrations.transformers.speculation.decoding.continuation", one_sided
    )
    with KVCache(enabled("llama").config, folder, draft="lookup") as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=40)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    # 39 tokens each after the prompt's own: 5 passes of 9, then one by one for the second alone
    assert said["passes"] == 39
    assert said["tokens"] == 78


def test_the_conversation_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts, without, and in another process's place: the kept cache is opened again without
    a draft."""
    inputs = prompt([33])
    first = one_by_one("llama", inputs, max_new_tokens=30)
    second = torch.cat([first, prompt([12], seed=4)["input_ids"]], dim=1)
    wanted = one_by_one("llama", {"input_ids": second}, max_new_tokens=30)
    drafting(monkeypatch, wanted, right=0.7)
    options: dict[str, Any] = {"name": "talk"}
    with KVCache(enabled("llama").config, folder, draft="lookup", **options) as cache:
        assert torch.equal(speculated("llama", inputs, cache, max_new_tokens=30), first)
        assert cache.get_seq_length() == first.shape[1] - 1
        assert torch.equal(cache.tokens, first[:, :-1])
    with KVCache(enabled("llama").config, folder, draft="lookup", **options) as cache:
        asked = {"input_ids": second}
        assert torch.equal(speculated("llama", asked, cache, max_new_tokens=30), wanted)
        assert cache.stats()["prefill_tokens"] == 13
    with KVCache(enabled("llama").config, folder, **options) as cache:
        assert cache.get_seq_length() == wanted.shape[1] - 1
        third = torch.cat([wanted, prompt([12], seed=5)["input_ids"]], dim=1)
        got = enabled("llama").generate(
            third, past_key_values=cache, max_new_tokens=9, do_sample=False
        )
    assert torch.equal(got, one_by_one("llama", {"input_ids": third}, max_new_tokens=9))


def test_a_batch_whose_texts_ended_apart_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has all sequences again, and of each what all of them had."""
    inputs = prompt(PADDED)
    ends = {"eos_token_id": [5, 11, 40, 60, 71], "max_new_tokens": 60}
    wanted = one_by_one("llama", inputs, **ends)
    drafting(monkeypatch, wanted)
    with KVCache(enabled("llama").config, folder, draft="lookup", spill_interval=8) as cache:
        got = speculated("llama", inputs, cache, **ends)
        assert cache.store.rows.sequences == 3
        held = cache.get_seq_length()
        assert held >= max(PADDED)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, got.shape[1] - 37).long()], dim=1)
        longer = {"input_ids": torch.cat([got, prompt([8] * 3)["input_ids"]], dim=1)}
        longer["attention_mask"] = torch.cat([mask, torch.ones(3, 8).long()], dim=1)
        assert cache.reuse_prefix(**longer) == held
        model = enabled("llama")
        again = model.generate(**longer, past_key_values=cache, max_new_tokens=9, do_sample=False)
    assert torch.equal(again, one_by_one("llama", longer, max_new_tokens=9))


class _Either(StoppingCriteria):
    """A text ends with one of some tokens."""

    def __init__(self, ends: set[int]):
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.tensor([int(row[-1]) in self.ends for row in input_ids])


def test_processors_and_criteria(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They see every text as it is when its token is decided."""
    inputs = prompt([30, 21])
    for n, more in ((2, {}), (1, {"return_dict_in_generate": True})):
        asked = {name: rows[:n] for name, rows in inputs.items()}
        rules: dict[str, Any] = {
            "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
            "stopping_criteria": StoppingCriteriaList([_Either({3, 8, 50})]),
            "eos_token_id": 9,
            "max_new_tokens": 50,
        }
        wanted = one_by_one("llama", asked, **rules)
        assert wanted.shape[1] < 80
        drafting(monkeypatch, wanted)
        with KVCache(enabled("llama").config, folder, draft="lookup") as cache:
            got = speculated("llama", asked, cache, **rules, **more)
        assert torch.equal(got.sequences if more else got, wanted)


def test_sampled_tokens_are_those_of_the_seed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one text: the same numbers are drawn, one for each token."""
    inputs = prompt([30])
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    wanted = one_by_one("llama", inputs, max_new_tokens=40, seed=7, **options)
    drafting(monkeypatch, wanted, right=0.7)
    with KVCache(enabled("llama").config, folder, draft="lookup") as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=40, seed=7, **options)
        assert cache.stats()["speculation"]["tokens_a_pass"] > 2
    assert torch.equal(got, wanted)


def test_positions_end_with_the_models_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that would reach behind it are cut, and so are those behind the last token."""
    model = make("opt", max_position_embeddings=50)
    ids = prompt([30])["input_ids"]
    wanted = model.generate(
        ids, max_new_tokens=21, do_sample=False, past_key_values=DynamicCache(config=model.config)
    )
    espnx.enable_kv_cache(model)
    drafting(monkeypatch, torch.cat([wanted, wanted], dim=1), right=1.0)
    with KVCache(model.config, folder, draft="lookup") as cache:
        got = espnx.generate(model, ids, past_key_values=cache, max_new_tokens=21, do_sample=False)
    assert torch.equal(got, wanted)
    assert plain("opt").config.max_position_embeddings > 50
