"""How long a sequence a model takes: positions that it looks up in a table end with the table."""

from __future__ import annotations

from typing import Any

import torch

from .... import errors

#: Embeddings of learned positions, as transformers' decoders call them. Rotary and computed
#: positions have no end.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed")


def learned_positions(model: Any) -> int | None:
    """How many tokens a sequence may have, where the model looks their positions up in a table;
    None: as many as you like. Weights are not needed."""
    known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _TABLES and isinstance(module, torch.nn.Embedding):
            offset = getattr(module, "offset", 0)
            # and not that of an encoder of images or sound
            if module.num_embeddings - offset == known:
                return module.num_embeddings - (
                    offset if module.padding_idx is None else module.padding_idx + 1
                )
    return None


def check_positions(what: str, tokens: int, new: int, *, limit: int | None) -> None:
    """Whether a sequence ends before its positions do.

    Args:
        what: the sequence, for the message.
        tokens: of the prompt.
        new: tokens to generate; the last of them is not fed to the model.
        limit: as `learned_positions` has it.

    Raises InvalidInputError.
    """
    if limit is not None and tokens + new - 1 > limit:
        raise errors.InvalidInputError(
            what,
            got=f"{tokens} tokens and {new} new ones",
            expected=f"at most the model's {limit} positions",
            fix="shorten the prompt, or generate fewer tokens",
        )
