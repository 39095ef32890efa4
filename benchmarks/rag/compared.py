"""Ways to reuse passages that are there to be compared with, in memory: each passage at the
positions it was computed at, and tokens that are computed anew wherever chance puts them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from .memory import Rows, joined


@torch.inference_mode()
def composite(
    model: Any, prefix: torch.Tensor, parts: Sequence[Rows], tail: torch.Tensor, keep: int
) -> torch.Tensor:
    """Logits [keep, words] of the last tokens of `tail` behind passages that all stand at the
    positions they were computed at, right behind the prefix ("composite positions", TurboRAG,
    2410.07590, section 3); `tail` stands behind the longest of them.

    Args:
        parts: of `memory.computed`, with rows of the prefix in front, if there are any.
        prefix, tail: token ids, int64 [n].
    """
    has_prefix = bool(len(prefix))
    cache = joined(model, parts, has_prefix=has_prefix, rotated=False)
    longest = max((part[0][0].shape[2] for part in parts[has_prefix:]), default=0)
    positions = len(prefix) + longest + torch.arange(len(tail))
    seen = torch.ones(len(tail), _rows(cache) + len(tail), dtype=torch.bool).tril(_rows(cache))
    return _logits(model, tail, positions, cache, seen, keep)


@torch.inference_mode()
def partly_anew(
    model: Any,
    texts: Sequence[torch.Tensor],
    parts: Sequence[Rows],
    chosen: torch.Tensor,
    tail: torch.Tensor,
    keep: int,
) -> torch.Tensor:
    """Logits [keep, words] of the last tokens of `tail` behind passages of which some tokens are
    computed anew at their place: each sees itself, chosen ones before it as they are now, and
    others before it as they were.

    Args:
        texts: the prefix, which may be empty, and the passages, token ids int64 [n].
        parts: as of `composite`.
        chosen: bool [tokens of all texts].
        tail: token ids, int64 [n].
    """
    ids, begins = torch.cat(list(texts)), bool(len(texts[0]))
    cache = joined(model, parts, has_prefix=begins)
    there, at = len(ids), chosen.nonzero().flatten()
    if len(at):
        old = (torch.arange(there) < at[:, None]) & ~chosen
        seen = torch.cat([old, torch.ones(len(at), len(at), dtype=torch.bool).tril()], dim=1)
        _logits(model, ids[at], at, cache, seen, 1)
    past = _rows(cache)
    seen = torch.ones(len(tail), past + len(tail), dtype=torch.bool).tril(past)
    seen[:, :there] &= ~chosen
    return _logits(model, tail, there + torch.arange(len(tail)), cache, seen, keep)


def at_random(sizes: Sequence[int], share: float, rng: np.random.Generator) -> torch.Tensor:
    """bool [tokens]: a share of the tokens of all texts but the first, the prefix, drawn from those
    behind the first passage, which lacks nothing: as many as `blend` computes anew."""
    wanted = math.ceil(share * sum(sizes[1:]))
    first = sum(sizes[:2])
    drawn = rng.permutation(np.arange(first, sum(sizes)))[:wanted]
    chosen = torch.zeros(sum(sizes), dtype=torch.bool)
    chosen[torch.from_numpy(drawn)] = True
    return chosen


def _rows(cache: DynamicCache) -> int:
    return int(cache.get_seq_length())


def _logits(
    model: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: DynamicCache,
    seen: torch.Tensor,
    keep: int,
) -> torch.Tensor:
    """A pass over ids [n] at these positions, each of which sees what `seen`, bool [n, rows and n],
    says; their rows come behind those of the cache."""
    with _any_mask(model):
        found = model(
            input_ids=ids[None],
            attention_mask=seen[None, None],
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
    return torch.as_tensor(found.logits[0])


@contextlib.contextmanager
def _any_mask(model: Any) -> Iterator[None]:
    """The framework's own attention: espnx's takes causal masks alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
