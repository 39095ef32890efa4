"""The `draft` that a cache is asked for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ... import errors
from ...kv.draft.sources import LOOKUP
from ...kv.draft.tally import ASSISTANT, KINDS, Tally
from ...sizes import parse_size


def draft_of(
    kind: Any,
    share: float | None,
    ahead: int | str | None,
    x_rows: int | None,
    config: PreTrainedConfig,
) -> Tally | None:
    """What is counted of the draft; None: there is none.

    Args:
        kind, share, ahead, x_rows: `draft`, `draft_memory`, `draft_read_ahead_bytes` and `x_rows`
            of `KVCache`.
        config: of the model.

    Raises InvalidInputError: what does not go together, and a smaller model that is no decoder or
    has another vocabulary.
    """
    if kind is None:
        for option, value in (("draft_memory", share), ("draft_read_ahead_bytes", ahead)):
            if value is not None:
                raise errors.InvalidInputError(
                    f"{option} of a cache without a draft", got=value, fix='draft="pages"'
                )
        return None
    ahead_bytes = None if ahead is None else parse_size(ahead)
    if isinstance(kind, torch.nn.Module):
        _check_assistant(kind, config)
        return Tally(ASSISTANT, share, ahead_bytes)
    if kind not in KINDS:
        raise errors.InvalidInputError(
            "draft of a cache",
            got=repr(kind),
            expected=f"{', '.join(map(repr, KINDS))}, or a smaller model",
        )
    if kind != LOOKUP and x_rows:
        raise errors.InvalidInputError(
            f"draft={kind!r} of sequences kept as X", got=f"x_rows={x_rows}", fix="x_rows=0"
        )
    return Tally(kind, share, ahead_bytes)


def _check_assistant(assistant: torch.nn.Module, config: PreTrainedConfig) -> None:
    what = "draft of a cache, a smaller model"
    if not isinstance(assistant, PreTrainedModel) or not assistant.can_generate():
        raise errors.InvalidInputError(
            what, got=type(assistant).__name__, expected="a model of transformers that generates"
        )
    if assistant.config.is_encoder_decoder:
        raise errors.InvalidInputError(
            what, got=f"{type(assistant).__name__}, with an encoder", expected="a decoder"
        )
    own, wanted = (
        each.get_text_config(decoder=True).vocab_size for each in (assistant.config, config)
    )
    if own != wanted:
        raise errors.InvalidInputError(
            what,
            got=f"a vocabulary of {own:,} tokens",
            expected=f"the model's own, of {wanted:,}",
            fix="a smaller model of the same family",
        )
