"""A look at a model before its tokens are decided several at a time: do logits depend on how many
tokens are computed at once?

They do not in a decoder, to rounding: a position sees those before it alone. They do where
activations are quantised with one scale for all positions, or positions are mixed otherwise. Then
no pass over several could stand for passes over one, and every comparison of tokens would be luck.
"""

from __future__ import annotations

import math
import weakref
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .... import errors
from ..identity.watch import Watch

_SEQUENCES, _TOKENS = 4, 3
#: The models that were looked at, as they were then.
_known: weakref.WeakKeyDictionary[torch.nn.Module, Watch] = weakref.WeakKeyDictionary()


def check_pass(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Compares logits of three tokens at once with those of two and one more, of four short
    sequences; once for each model, until its weights change.

    One place alone says nothing: where two experts weigh alike, rounding chooses. So most sequences
    must agree at either position.

    Args:
        model: a decoder.
        ids: int64 [sequences, n], tokens of which the last are taken.

    Raises InvalidInputError: they differ by more than rounding.
    """
    core = model.base_model
    known = _known.get(core)
    if known is not None and known.is_unchanged():
        return
    n = _SEQUENCES * _TOKENS
    tokens = ids.flatten().repeat(-(-n // ids.numel()))[-n:].view(_SEQUENCES, _TOKENS)
    whole = _logits(model, tokens, DynamicCache(config=model.config))[:, 1:]
    cache = DynamicCache(config=model.config)
    parts = [_logits(model, part, cache) for part in tokens.to(model.device).split([2, 1], dim=1)]
    apart = torch.cat([parts[0][:, 1:], parts[1]], dim=1)
    off = (whole - apart).abs().amax(dim=-1) / whole.std(dim=-1)
    if bool(((off > _allowed(model)).double().mean(dim=0) > 0.5).any()):
        raise errors.InvalidInputError(
            f"generation with a draft of {type(model).__name__}",
            got=(
                f"logits that are off by {float(off.max()):.2g} deviations where three tokens "
                "are computed at once"
            ),
            expected=f"the same as one by one, to {_allowed(model):.2g} (rounding)",
            fix="generate without custom_generate",
        )
    with suppress(errors.InvalidInputError):  # it cannot be watched, and is looked at each time
        _known[core] = Watch(core)


def _logits(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """float32 [sequences, n, vocabulary]."""
    found = model(tokens.to(model.device), past_key_values=cache, use_cache=True, return_dict=True)
    return found.logits.to("cpu", torch.float32)


def _allowed(model: PreTrainedModel) -> float:
    """How far two right computations of a logit may lie apart, in standard deviations of the
    logits: a layer rounds about twelve times to its dtype on the way into the residual stream, and
    once in fp32 for each term of its sums; five deviations of independent errors."""
    config = model.config.get_text_config(decoder=True)
    roundoff, fp32 = torch.finfo(model.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    wide = next(
        (
            width
            for name in ("intermediate_size", "ffn_dim", "n_inner")
            if (width := getattr(config, name, None))
        ),
        4 * config.hidden_size,
    )
    summed = 3 * config.hidden_size + wide
    return 5 * math.sqrt(config.num_hidden_layers * (12 * roundoff**2 + summed * fp32**2))
