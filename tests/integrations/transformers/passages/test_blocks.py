"""Passages at their places in a prompt give what the same rows in memory give, whose keys were
rotated there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from tests.integrations.transformers.passages.families import (
    FAMILIES,
    blocks_in_memory,
    enabled,
    log_probabilities,
    make,
    plain,
    words,
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prefix", [0, 21])
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_what_they_are_in_memory(folder: Path, name: str, prefix: int) -> None:
    before, sizes = words(prefix, 1), (40, 1, 33, 130)
    passages = [words(n, 10 + n) for n in sizes]
    question, first = words(27, 5), prefix + sum(sizes)
    exact = log_probabilities(
        plain(name), question, blocks_in_memory(plain(name), before, passages), first
    )
    with PassageKV(enabled(name), folder, prefix=before) as kv:
        kv.add(passages[2])
        with kv.compose(passages) as cache:
            assert cache.get_seq_length() == first
            found = log_probabilities(enabled(name), question, cache, first)
            assert cache.stats()["effective_path"]
            assert cache.reused["bytes"] > 0
    assert float((found - exact).abs().max()) <= 1e-4


def test_order_and_place_count(folder: Path) -> None:
    """The test above could fail: without rotation, and with passages exchanged, it does."""
    model, passages, question = enabled("llama"), [words(40, 1), words(33, 2)], words(20, 3)
    with PassageKV(model, folder) as kv:
        with kv.compose(passages) as cache:
            right = log_probabilities(model, question, cache, 73)
        with kv.compose(passages[::-1]) as cache:
            assert float((log_probabilities(model, question, cache, 73) - right).abs().max()) > 0.01
        with kv.compose(passages) as cache:
            for each in cache._context.passages:
                each.offset = 0
            wrong = log_probabilities(model, question, cache, 73)
    assert float((wrong - right).abs().max()) > 0.01


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_prefix_mode_generates_what_the_framework_does(folder: Path, name: str) -> None:
    before, passages, question = (
        words(9, 1),
        [words(40, 2), words(17, 3), words(55, 4)],
        words(6, 5),
    )
    ids = torch.cat([before, *passages, question])[None]
    model = plain(name)
    wanted = model.generate(
        ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=24, do_sample=False
    )
    for turn in range(2):
        with (
            PassageKV(enabled(name), folder, prefix=before) as kv,
            kv.compose(passages, mode="prefix") as cache,
        ):
            assert cache.reused["computed"] == (121 if not turn else 0)
            found = enabled(name).generate(
                **cache.prompt(question[None]),
                past_key_values=cache,
                max_new_tokens=24,
                do_sample=False,
            )
        assert torch.equal(found, wanted)


def test_prefix_mode_takes_only_what_stood_there(folder: Path) -> None:
    """Another order, another text before: computed anew; the same beginning: not."""
    a, b, c = words(40, 1), words(33, 2), words(20, 3)
    with PassageKV(enabled("llama"), folder) as kv:
        for passages, computed in (
            ([a, b], 73),
            ([b, a], 73),
            ([a, b, c], 20),
            ([torch.cat([a, b]), c], 73),  # a longer first passage; c stands behind the same tokens
        ):
            with kv.compose(passages, mode="prefix") as cache:
                assert cache.reused["computed"] == computed


@pytest.mark.parametrize("name", ["llama", "glm"])
def test_bf16_is_no_farther_from_exact_than_rotated_keys(folder: Path, name: str) -> None:
    """Keys that are rotated are rounded once more; queries are rotated in fp32."""
    before, passages, question = words(21, 1), [words(n, n) for n in (40, 33, 130)], words(64, 5)
    rounded, first = make(name, torch.bfloat16), 21 + 203
    exact_model = make(name, torch.float64)
    exact_model.load_state_dict(rounded.state_dict())
    exact_model.set_attn_implementation("sdpa")  # the eager one has its softmax in fp32

    def distance(found: torch.Tensor) -> float:
        return float((found - exact).square().mean().sqrt())

    exact = log_probabilities(
        exact_model, question, blocks_in_memory(exact_model, before, passages), first
    )
    theirs = distance(
        log_probabilities(rounded, question, blocks_in_memory(rounded, before, passages), first)
    )
    model = enable_kv_cache(make(name, torch.bfloat16))
    with PassageKV(model, folder, prefix=before) as kv, kv.compose(passages) as cache:
        ours = distance(log_probabilities(model, question, cache, first))
    assert 0 < ours <= 1.25 * theirs
