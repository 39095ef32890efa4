"""Tokens of passages that are computed anew give what the same gives in memory, under masks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from espnx.integrations.transformers.passages import model as passage_model
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from tests.integrations.transformers.passages.families import (
    anew_in_memory,
    blocks_in_memory,
    enabled,
    log_probabilities,
    log_probabilities_anew,
    plain,
    words,
)

SIZES, QUESTION = (40, 33, 1, 50), words(19, 5)
PASSAGES = [words(n, 10 + n) for n in SIZES]


def exact(name: str, prefix: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    cache = anew_in_memory(plain(name), prefix, PASSAGES, chosen)
    return log_probabilities_anew(plain(name), QUESTION, cache, chosen)


def full(name: str, prefix: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
    """Full attention over everything."""
    model, ids = plain(name), torch.cat([prefix, *PASSAGES])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[None], past_key_values=cache)
    rows = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[None], past_key_values=rows)
    return log_probabilities(model, QUESTION, cache, len(ids)), rows


def first_of_each(prefix: int, count: int) -> torch.Tensor:
    """Those of every passage but the first, which lacks nothing."""
    chosen, begin = torch.zeros(prefix + sum(SIZES), dtype=torch.bool), prefix
    for number, n in enumerate(SIZES):
        chosen[begin : begin + min(count, n)] = number > 0
        begin += n
    return chosen


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.parametrize(
    ("name", "prefix", "count"),
    [("llama", 21, 3), ("llama", 0, 16), ("glm", 21, 16), ("gpt_neox", 0, 7)],
)
def test_first_tokens_are_computed_anew(folder: Path, name: str, prefix: int, count: int) -> None:
    before, chosen = words(prefix, 1), first_of_each(prefix, count)
    wanted = exact(name, before, chosen)
    plainly = exact(name, before, torch.zeros_like(chosen))
    with PassageKV(enabled(name), folder, prefix=before) as kv:
        with kv.compose(PASSAGES, repair=count) as cache:
            assert cache.get_seq_length() == len(chosen)
            found = log_probabilities(kv.model, QUESTION, cache, len(chosen))
            assert cache.reused["repaired"] == int(chosen.sum())
        with kv.compose(PASSAGES, repair=0) as cache:
            assert cache.reused["repaired"] == 0
            nothing = log_probabilities(kv.model, QUESTION, cache, len(chosen))
    assert far(found, wanted) <= 1e-4
    assert far(nothing, plainly) <= 1e-4
    assert far(wanted, plainly) > 0.01, "it makes a difference"


@pytest.mark.parametrize("chunk", [32, 1024])
def test_all_tokens_anew_are_full_attention(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(passage_model, "CHUNK_TOKENS", chunk)
    before = words(21, 1)
    wanted, _ = full("llama", before)
    with PassageKV(enabled("llama"), folder, prefix=before) as kv:
        for options, repaired in (({"repair": 50}, 84), ({"blend": 1.0}, 124)):
            with kv.compose(PASSAGES, **options) as cache:
                assert cache.reused["repaired"] == repaired
                assert far(log_probabilities(kv.model, QUESTION, cache, 145), wanted) <= 1e-4


@pytest.mark.parametrize(
    ("name", "prefix", "share"), [("llama", 21, 0.15), ("glm", 0, 0.4), ("llama", 0, 0.0)]
)
def test_the_tokens_that_deviate_most_are_computed_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, prefix: int, share: float
) -> None:
    monkeypatch.setattr(passage_model, "CHUNK_TOKENS", 32)
    before, chosen = words(prefix, 1), torch.zeros(prefix + sum(SIZES), dtype=torch.bool)
    rows = full(name, before)[1].layers[1]
    kept = blocks_in_memory(plain(name), before, PASSAGES).layers[1]
    distance = sum(
        (new.double() - old.double()).square().sum(dim=(0, 1, 3))
        for new, old in ((rows.keys, kept.keys), (rows.values, kept.values))
    )
    wanted = math.ceil(share * sum(SIZES))
    chosen[prefix + distance[prefix:].argsort(descending=True)[:wanted]] = True
    with (
        PassageKV(enabled(name), folder, prefix=before) as kv,
        kv.compose(PASSAGES, blend=share) as cache,
    ):
        found = log_probabilities(kv.model, QUESTION, cache, len(chosen))
        reused = cache.reused
    assert far(found, exact(name, before, chosen)) <= 1e-4
    assert reused["repaired"] == wanted
    if wanted:
        left = float(distance[~chosen].sum() / distance.sum())
        assert abs(reused["deviation_left"] - left) < 1e-3


def test_what_becomes_of_the_batch(folder: Path) -> None:
    """Several questions and beams, crop and reset: rows that were computed anew stay."""
    before = words(21, 1)
    chosen = first_of_each(21, 4)
    wanted, more = exact("llama", before, chosen), words(7, 9)
    with (
        PassageKV(enabled("llama"), folder, prefix=before) as kv,
        kv.compose(PASSAGES, repair=4) as cache,
    ):
        for _ in range(2):
            assert far(log_probabilities(kv.model, QUESTION, cache, 145), wanted) <= 1e-4
            cache.crop(-19)
        ids = torch.stack([QUESTION, torch.nn.functional.pad(more, (12, 0))])
        mask = torch.ones_like(ids)
        mask[1, :12] = 0
        given = cache.prompt(ids, mask)
        positions = (given["attention_mask"].cumsum(1) - 1)[:, 145:]
        with torch.no_grad():
            logits = kv.model(
                ids,
                attention_mask=given["attention_mask"],
                position_ids=positions,
                past_key_values=cache,
            ).logits
        assert far(logits[0].double().log_softmax(-1), wanted) <= 1e-4
        cache.reset()
        alone = log_probabilities(kv.model, more, cache, 145)
        assert far(logits[1, 12:].double().log_softmax(-1), alone) <= 1e-4
        cache.reset()
        beams = kv.model.generate(
            **cache.prompt(QUESTION[None]), past_key_values=cache, max_new_tokens=4, num_beams=3
        )
        assert beams.shape == (1, 145 + 19 + 4)
        cache.reset()
        assert cache.get_seq_length() == 145
        assert far(log_probabilities(kv.model, QUESTION, cache, 145), wanted) <= 1e-4
        assert cache.passage_mass(18).shape == (1, 3, 4)


def test_loss_says_what_is_lost(folder: Path) -> None:
    """Against full attention, by the framework's own."""
    before = words(21, 1)
    wanted, _ = full("llama", before)
    with PassageKV(enabled("llama"), folder, prefix=before) as kv:
        for options, chosen in (
            ({}, torch.zeros(145, dtype=torch.bool)),
            ({"repair": 16}, first_of_each(21, 16)),
        ):
            lossy = exact("llama", before, chosen)
            kl = float((wanted.exp() * (wanted - lossy)).sum(-1).mean())
            same = float((wanted.argmax(-1) == lossy.argmax(-1)).double().mean())
            found = kv.loss(PASSAGES, QUESTION, **options)
            assert abs(found.kl_nats - kl) <= 1e-3 * kl
            assert found.same_next == same
            assert found.repaired_share == int(chosen.sum()) / 145
        nothing = kv.loss(PASSAGES, QUESTION, blend=1.0)
        assert abs(nothing.kl_nats) < 1e-6
        assert nothing.same_next == 1
