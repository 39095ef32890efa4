"""Tokens of composed passages that are computed anew at their place, so that they see what stands
before their passage: the first ones of each (EPIC, 2410.15332, section 3: LegoLink), or those whose
rows differ most from what full attention gives (CacheBlend, 2405.16444, section 4).

Their rows are the prompt's own; those that the library has of them are hidden. Both are lossy:
tokens that are not chosen never saw the other passages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from .... import errors
from ....kv.passages.extent import Rows
from ....kv.passages.lossy import check_lossy
from ....kv.passages.rotation import Rotation
from .cache import PassageCache
from .prompts import Prompts

#: The first layer whose rows depend on what stands before: those of layer 0 are a token's and its
#: position's alone.
_LAYER = 1


class Runs(Protocol):
    """Runs the model over tokens int32 [n] at positions int64 [n], with a cache."""

    def __call__(self, cache: PassageCache, ids: np.ndarray, positions: torch.Tensor) -> None: ...


class _EnoughError(Exception):
    """A pass has shown what was wanted."""


def check_anew(repair: int | None, blend: float | None, mode: str, n_prompts: int) -> None:
    """Raises InvalidInputError for what cannot be computed anew so."""
    check_lossy(repair, blend)
    name = "repair" if repair is not None else "blend"
    if (repair is not None or blend is not None) and mode != "blocks":
        raise errors.InvalidInputError(
            f"compose({name}=...)", got=f"mode {mode!r}, which loses nothing", expected="'blocks'"
        )
    if (repair is not None or blend is not None) and n_prompts != 1:
        raise errors.InvalidInputError(
            f"compose({name}=...) of a batch",
            got=f"{n_prompts} prompts",
            expected="one, which any number of questions may follow",
            fix="compose each prompt by itself",
        )


def first_tokens(prompt: Prompts, count: int) -> list[torch.Tensor]:
    """bool [tokens] of each text: the first `count` of each passage that lacks what stands before
    it."""
    found = []
    for number, ids in enumerate(prompt.texts):
        chosen = torch.zeros(len(ids), dtype=torch.bool)
        if number >= prompt.n_prefix and prompt.offset(number):
            chosen[:count] = True
        found.append(chosen)
    return found


def deviating_tokens(
    cache: PassageCache,
    prompt: Prompts,
    share: float,
    run: Runs,
    rows: Callable[[int], Rows],
    rotation: Rotation | None,
    chunk_tokens: int,
) -> list[torch.Tensor]:
    """bool [tokens] of each text: the share of all passages' tokens whose K and V of layer 1 are
    farthest from those that full attention gives, by squared distance.

    Layer 0 alone is computed for that, some tokens at a time.

    Args:
        run: a pass.
        rows: of layer 1, as they are kept, by the number of the text.
        rotation: of its keys.
    """
    store, layers = cache.store, len(cache.layers)
    passages = store.context.passages
    wanted = math.ceil(share * sum(len(ids) for ids in prompt.texts[prompt.n_prefix :]))
    chosen = [torch.zeros(len(ids), dtype=torch.bool) for ids in prompt.texts]
    if not wanted or layers <= _LAYER:
        return chosen
    far = [torch.full((len(ids),), -1.0, dtype=torch.float64) for ids in prompt.texts]
    shown: list[Rows] = []

    def tap(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer == _LAYER:
            shown.append((k.detach(), v.detach()))
            raise _EnoughError

    store.tap = tap
    try:
        for number in range(prompt.n_prefix, len(prompt.texts)):
            ids, begin = prompt.texts[number], store.context.texts.begins[number]
            held = rows(number) if len(ids) else None
            for at in range(0, len(ids), chunk_tokens):
                part = ids[at : at + chunk_tokens]
                positions = begin + at + torch.arange(len(part))
                store.last = torch.full((len(part),), begin + at - 1)
                try:
                    run(cache, part, positions)
                except _EnoughError:
                    pass
                k, v = shown.pop()
                if rotation is not None:  # back to where the kept keys are
                    k = rotation.turned(k.float(), [-passages[number].offset])
                far[number][at : at + len(part)] = sum(
                    _distance(new, old[:, :, at : at + len(part)])
                    for new, old in zip((k, v), held or (), strict=True)
                )
    finally:
        store.tap = store.last = None
    every = torch.cat(far)
    order = torch.argsort(every, descending=True, stable=True)[:wanted]
    flat = torch.zeros(len(every), dtype=torch.bool)
    flat[order] = True
    whole = float(every.clamp_min(0).sum())
    left = float(every[~flat].clamp_min(0).sum())
    prompt.reused["deviation_left"] = left / whole if whole else 0.0
    return list(flat.split([len(ids) for ids in prompt.texts]))


def _distance(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """float64 [n]: the squared distance of rows [1, heads, n, width]."""
    return (new.cpu().double() - old.cpu().double()).square().sum(dim=(0, 1, 3))


def compute_anew(
    cache: PassageCache, prompt: Prompts, chosen: list[torch.Tensor], run: Runs, chunk_tokens: int
) -> None:
    """Computes tokens of the passages anew: each sees all that stands before it, those that are
    computed anew as they are now, the others as they are kept."""
    store = cache.store
    picks = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.bool)
    positions = torch.arange(len(picks))[picks]
    if not len(positions):
        return
    ids = np.concatenate(prompt.texts)[positions.numpy()]
    store.context.hide(chosen)
    for begin in range(0, len(positions), chunk_tokens):
        part = positions[begin : begin + chunk_tokens]
        store.last = part - 1
        run(cache, ids[begin : begin + chunk_tokens], part)
    store.stand()
    prompt.reused["repaired"] = len(positions)
