"""Prompts of a batch, each behind passages of its own: as each alone, and what they share is read
once a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from espnx.kv.passages import context as contexts
from tests.integrations.transformers.passages.families import (
    blocks_in_memory,
    enabled,
    log_probabilities,
    plain,
    words,
)

BEFORE = words(9, 1)
A, B, C = (words(n, 30 + n) for n in (40, 33, 64))
PROMPTS = [[A, B], [C, A, B, A], [], [B]]
QUESTIONS = [words(n, 50 + n) for n in (12, 5, 1, 9)]


def alone(passages: list[torch.Tensor], question: torch.Tensor) -> torch.Tensor:
    cache = blocks_in_memory(plain("llama"), BEFORE, passages)
    first = 9 + sum(map(len, passages))
    return log_probabilities(plain("llama"), question, cache, first)


def padded(questions: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    most = max(map(len, questions))
    ids = torch.stack([torch.nn.functional.pad(x, (most - len(x), 0)) for x in questions])
    return ids, torch.tensor([[0] * (most - len(x)) + [1] * len(x) for x in questions])


def run(model: Any, cache: Any, given: dict[str, torch.Tensor], begin: int, end: int) -> Any:
    """Logits of some of the positions behind the passages."""
    mask = given["attention_mask"]
    first = cache.composed_tokens
    positions = (mask.cumsum(1) - 1)[:, first + begin : first + end].clamp_min(0)
    with torch.no_grad():
        return model(
            given["input_ids"][:, first + begin : first + end],
            attention_mask=mask[:, : first + end],
            position_ids=positions,
            past_key_values=cache,
        ).logits


@pytest.mark.parametrize("part_bytes", [None, 1])
def test_each_sequence_has_its_own_passages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int | None
) -> None:
    if part_bytes:
        monkeypatch.setattr(contexts, "_PART_BYTES", part_bytes)
    with PassageKV(enabled("llama"), folder, prefix=BEFORE) as kv:
        for _ in range(2):
            with kv.compose(PROMPTS) as cache:
                given = cache.prompt(*padded(QUESTIONS))
                logits = torch.cat(
                    [run(kv.model, cache, given, *at) for at in ((0, 11), (11, 12))], dim=1
                )
                mass = cache.passage_mass(11)
                reused = cache.reused
        assert cache.passages == [40, 33, 64, 40, 33, 40, 33]
    assert reused["computed"] == 0
    assert reused["tokens"] == 4 * 9 + 73 + 64 + 113 + 33
    for row, (passages, question) in enumerate(zip(PROMPTS, QUESTIONS, strict=True)):
        found = logits[row, 12 - len(question) :].double().log_softmax(-1)
        assert float((found - alone(passages, question)).abs().max()) <= 1e-4
        assert (mass[row, :, len(passages) :] == 0).all()
        assert (mass[row, :, : len(passages)] > 0).all()
    assert mass.shape == (4, 3, 4)


def test_each_extent_is_read_once_a_layer(folder: Path) -> None:
    """16 requests over 8 passages, at the first pass and at every step."""
    passages, made = [words(32 + 16 * (i % 3), 70 + i) for i in range(8)], torch.Generator()
    prompts = [
        [passages[i] for i in torch.randperm(8, generator=made.manual_seed(row))[:5].tolist()]
        for row in range(16)
    ]
    # of whole blocks of 16 tokens, 3 layers of 2 heads of 64 + 64 values in fp32
    once = sum(map(len, passages)) * 3 * 2 * 128 * 4
    packed = 9 * 3 * 2 * 128 * 4
    with PassageKV(enabled("llama"), folder, prefix=BEFORE) as kv:
        with kv.compose(prompts) as cache:
            assert cache.reused["computed"] == sum(map(len, passages)) + 9, "each once"
        with kv.compose(prompts) as cache:
            given = cache.prompt(words(16 * 6, 3).view(16, 6))
            run(kv.model, cache, given, 0, 5)
            assert cache.reused["bytes"] == once + packed
            run(kv.model, cache, given, 5, 6)
            assert cache.reused["bytes"] == 2 * once + packed


def test_generation_of_a_batch(folder: Path) -> None:
    """Beams and samples of several prompts, and what is left when they are over."""
    model = plain("llama")
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    questions = [words(7, 4), words(7, 5)]
    with (
        PassageKV(enabled("llama"), folder, prefix=BEFORE) as kv,
        kv.compose([[A, B], [B, C]]) as cache,
    ):
        for _ in range(2):
            found = kv.model.generate(
                **cache.prompt(torch.stack(questions)), past_key_values=cache, **options
            )
            cache.reset()
        assert cache.get_seq_length() == 9 + 97
    for row, passages in enumerate(([A, B], [B, C])):
        memory = blocks_in_memory(model, BEFORE, passages)
        memory.batch_repeat_interleave(2)
        ids = torch.cat([BEFORE, *passages, questions[row]])[None]
        wanted = model.generate(ids, past_key_values=memory, **options)
        assert torch.equal(found[row, -13:], wanted[0, -13:])


def test_what_a_batch_refuses(folder: Path) -> None:
    with (
        PassageKV(enabled("llama"), folder, prefix=BEFORE) as kv,
        kv.compose([[A, B], [B]]) as cache,
    ):
        with pytest.raises(errors.InvalidInputError, match="a multiple of it"):
            cache.prompt(words(9, 3).view(3, 3))
        with pytest.raises(errors.InvalidInputError, match="got none"):
            kv.model(words(6, 3).view(2, 3), past_key_values=cache)
        mask = torch.ones(2, cache.composed_tokens + 3, dtype=torch.int64)
        with pytest.raises(errors.InvalidInputError, match="over composed passages"):
            kv.model(words(6, 3).view(2, 3), attention_mask=mask, past_key_values=cache)
        with pytest.raises(errors.InvalidInputError, match="behind composed prompts"):
            kv.model(words(3, 3)[None], past_key_values=cache)
        given = cache.prompt(words(6, 3).view(2, 3))
        assert run(kv.model, cache, given, 0, 3).isfinite().all(), "the cache goes on"
        assert cache.reuse_prefix(given["input_ids"], given["attention_mask"]) > 82
