"""Drafts that know what comes, and err as often as a test wants: the tests' tiny models say nothing
that they have said before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import espnx
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation import decoding
from tests.integrations.transformers import tiny


def knowing(texts: torch.Tensor, right: float, seed: int = 0) -> Callable[[np.ndarray, int], Any]:
    """Proposes what `texts` [sequences, n] continue with, a token right with that probability."""
    draw = random.Random(seed)
    rows = texts.tolist()

    def draft(tokens: np.ndarray, n: int) -> list[int]:
        length = len(tokens)
        text = next(row for row in rows if row[:length] == tokens.tolist())
        return [
            token if draw.random() < right else (token + 1) % tiny.VOCABULARY
            for token in text[length : length + n]
        ]

    return draft


def drafting(
    patch: pytest.MonkeyPatch, texts: torch.Tensor, right: float = 0.8, seed: int = 0
) -> None:
    """From here on the lookup is a draft that knows these texts."""
    patch.setattr(decoding, "continuation", knowing(texts, right, seed))


def one_by_one(name: str, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """What the framework generates with its own cache."""
    model = tiny.plain(name)
    return tiny.generate(model, inputs, DynamicCache(config=model.config), **options)


def speculated(
    name: str,
    inputs: dict[str, torch.Tensor],
    cache: KVCache,
    *,
    gamma: int | None = 8,
    **options: Any,
) -> torch.Tensor:
    """What `espnx.generate` generates. `gamma` None: it chooses."""
    asked = {} if gamma is None else {"gamma": gamma}
    return tiny.generate(
        tiny.enabled(name), inputs, cache, custom_generate=espnx.generate, **asked, **options
    )
