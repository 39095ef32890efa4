"""Ways to reuse passages in memory give what one masked pass of the framework gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra [models])")

from espnx.benchmarks.rag.compared import at_random, composite, partly_anew
from espnx.benchmarks.rag.memory import computed
from tests.integrations.transformers.passages.families import (
    anew_in_memory,
    enabled,
    log_probabilities_anew,
    plain,
    words,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES, TAIL, KEEP = (40, 33, 1, 50), words(19, 5), 12
PASSAGES = [words(n, 10 + n) for n in SIZES]
FAMILIES = [("llama", 21), ("llama", 0), ("glm", 21), ("gpt_neox", 7)]


def masked(
    name: str, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities float64 [tail, words] of one pass by the framework alone."""
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = plain(name)(ids[None], attention_mask=mask, position_ids=positions[None]).logits
    return logits[0, -KEEP:].double().log_softmax(dim=-1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape == (KEEP, found.shape[1])
    torch.testing.assert_close(found.double().log_softmax(dim=-1), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "base"), FAMILIES)
def test_composite_positions(name: str, base: int) -> None:
    """All passages begin at the same position, and the tail behind the longest of them."""
    prefix, model = words(base, 0), enabled(name)
    before = model.config._attn_implementation
    found = composite(model, prefix, computed(model, prefix, PASSAGES), TAIL, KEEP)
    assert model.config._attn_implementation == before
    longest = base + max(SIZES)
    starts = [torch.arange(base, base + n) for n in SIZES]
    positions = torch.cat([torch.arange(base), *starts, longest + torch.arange(len(TAIL))])
    block = torch.cat([torch.full((n,), i) for i, n in enumerate((base, *SIZES, len(TAIL)))])
    seen = (block[:, None] == block) | (block == 0) | (block[:, None] == len(SIZES) + 1)
    seen &= torch.ones_like(seen).tril()
    close(found, masked(name, torch.cat([prefix, *PASSAGES, TAIL]), positions, seen))


@pytest.mark.parametrize(("name", "base"), FAMILIES)
def test_some_tokens_are_computed_anew(name: str, base: int) -> None:
    prefix, model = words(base, 0), enabled(name)
    texts, parts = [prefix, *PASSAGES], computed(model, prefix, PASSAGES)
    drawn = at_random([base, *SIZES], 0.15, np.random.default_rng(3))
    nothing, every = torch.zeros_like(drawn), torch.ones_like(drawn)
    every[: base + SIZES[0]] = False
    for chosen in (drawn, nothing):
        found = partly_anew(model, texts, parts, chosen, TAIL, KEEP)
        rows = anew_in_memory(plain(name), prefix, PASSAGES, chosen)
        close(found, log_probabilities_anew(plain(name), TAIL, rows, chosen)[-KEEP:])
    # all that lack something: full attention
    found = partly_anew(model, texts, parts, every, TAIL, KEEP)
    ids = torch.cat([*texts, TAIL])
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    close(found, masked(name, ids, torch.arange(len(ids)), seen))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.15, 1.0])
@pytest.mark.parametrize("base", [0, 32])
def test_tokens_at_random(share: float, base: int) -> None:
    """As many of all passages' tokens as are wanted, none of what lacks nothing; others by another
    seed."""
    sizes = [base, 128, 128, 1, 127]
    found = [at_random(sizes, share, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert len(found[0]) == sum(sizes)
    assert int(found[0].sum()) == min(-int(-share * 384 // 1), 256)
    assert not found[0][: base + 128].any()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) == (share in (0.0, 1.0))
