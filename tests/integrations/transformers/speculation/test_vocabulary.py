"""Ids for which a model has a row and which it never says are text like any other; ids for which
somebody has none are refused before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation.vocabulary import check_tokens
from tests.integrations.transformers.tiny import VOCABULARY, make, prompt

ROWS = VOCABULARY + 23
KINDS = ("lookup", "pages", "4bit", "assistant")


def widened(model: Any, rows: int = ROWS) -> Any:
    """With an embedding of more rows, of which the first are what they were."""
    old = model.get_input_embeddings().weight.detach()
    more = torch.nn.Embedding(rows, old.shape[1])
    drawn = torch.randn(rows, old.shape[1], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        more.weight.copy_(drawn * old.std())
        more.weight[: len(old)] = old
    model.set_input_embeddings(more)
    return model


def strange(lengths: list[int], least: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Prompts in which every third token is one that the model never says."""
    asked = prompt(lengths)
    longest = asked["input_ids"].shape[1]
    ids = least + torch.arange(longest) % (ROWS - VOCABULARY)
    is_other = (torch.arange(longest) % 3 == 0) & asked["attention_mask"].bool()
    return asked | {"input_ids": torch.where(is_other, ids, asked["input_ids"])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_ids_that_are_never_said(folder: Path, kind: str, is_sampled: bool) -> None:
    """As the model without a cache takes them: in the prompt, in lookups, and for an assistant."""
    model = espnx.enable_kv_cache(widened(make("llama")))
    asked = strange([150] if is_sampled else [150, 70])
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": is_sampled}
    torch.manual_seed(5)
    wanted = model.generate(**asked, **options)
    draft: Any = widened(make("llama")) if kind == "assistant" else kind
    with KVCache(model.config, folder, draft=draft, spill_interval=8) as cache:
        torch.manual_seed(5)
        got = espnx.generate(model, **asked, past_key_values=cache, gamma=4, **options)
    if kind == "lookup" or not is_sampled:  # the others draw for their drafts, too
        assert torch.equal(got, wanted)
    assert int(got[:, 150:].max()) < VOCABULARY


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [ROWS, -1])
def test_ids_without_a_row(folder: Path, kind: str, wrong: int) -> None:
    model = espnx.enable_kv_cache(widened(make("llama")))
    asked = prompt([40, 30])
    asked["input_ids"][1, -2] = wrong
    draft: Any = widened(make("llama"), ROWS + 9) if kind == "assistant" else kind
    with KVCache(model.config, folder, draft=draft) as cache:
        with pytest.raises(
            errors.InvalidInputError, match=f"LlamaForCausalLM; got token id {wrong}"
        ):
            espnx.generate(model, **asked, past_key_values=cache, max_new_tokens=3)
        assert cache.get_seq_length() == 0


def test_an_assistant_that_knows_fewer(folder: Path) -> None:
    """It is asked for what it can be fed, and says so of the rest; the cache goes on without it."""
    model, small = espnx.enable_kv_cache(widened(make("llama"))), make("qwen3", seed=3)
    with KVCache(model.config, folder, draft=small, name="talk", x_rows=0) as cache:
        options: dict[str, Any] = {"past_key_values": cache, "max_new_tokens": 9}
        espnx.generate(model, **prompt([40]), **options)
        cache.reset()
        with pytest.raises(errors.InvalidInputError, match=r"Qwen3ForCausalLM; got .*it proposes"):
            espnx.generate(model, **strange([40]), **options)
        assert cache.get_seq_length() == 0
    with KVCache(model.config, folder, draft="lookup", name="talk", x_rows=0) as cache:
        got = espnx.generate(model, **strange([40]), past_key_values=cache, max_new_tokens=9)
    assert torch.equal(got, model.generate(**strange([40]), max_new_tokens=9))


def test_models_that_say_more_than_they_take() -> None:
    """A draft would run into such a token where no pass says it."""
    ids, usual = prompt([9])["input_ids"], make("llama")
    talkative = make("llama")
    talkative.set_output_embeddings(torch.nn.Linear(64, VOCABULARY + 3, bias=False))
    check_tokens(usual, ids, widened(make("llama")), drafts=True)
    check_tokens(talkative, ids)  # of itself alone, as transformers has it
    for models, options in (
        ((talkative, ids), {"drafts": True}),
        ((usual, ids, talkative), {}),
        ((talkative, ids, usual), {}),
        ((talkative, ids, talkative), {}),
    ):
        with pytest.raises(errors.InvalidInputError, match=r"logits of (100|97)\b"):
            check_tokens(*models, **options)
