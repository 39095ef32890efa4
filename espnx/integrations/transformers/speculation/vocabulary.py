"""Which token ids a model takes and says: an embedding may have more rows than the model says
tokens (rows for images, padding), and another model may have fewer.

A draft that ran into an id that has no row would end a text that decoding one by one continues.
So it is looked at before anything is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .... import errors


def check_tokens(
    model: PreTrainedModel,
    ids: torch.Tensor,
    assistant: PreTrainedModel | None = None,
    *,
    drafts: bool = False,
) -> None:
    """Looks at the ids of a prompt and at what models may say after it.

    Args:
        model: decides.
        ids: int64 [sequences, n], of the prompt, padding included.
        assistant: proposes, with the text so far in its own cache; None: there is none.
        drafts: the model itself proposes, by other rows than it decides by.

    Raises InvalidInputError: an id that one of them has no row for, be it in the prompt or among
    those that a model may say; or models that say unlike many.
    """
    rows, says = _rows(model), _says(model)
    _check_ids(model, ids, rows, "a row of its embedding")
    if drafts:  # what it proposes it may never say
        _check_says(model, says, model, rows)
    if assistant is None:
        return
    own_rows, own_says = _rows(assistant), _says(assistant)
    if says is not None and own_says is not None and says != own_says:
        raise errors.InvalidInputError(
            f"a draft of {type(assistant).__name__}",
            got=f"logits of {own_says:,} tokens",
            expected=f"{says:,}, as of {type(model).__name__}",
            fix="a smaller model of the same family",
        )
    _check_ids(assistant, ids, own_rows, "a row of its embedding: it proposes for the prompt")
    _check_says(model, says, assistant, own_rows)
    _check_says(assistant, own_says, model, rows)


def _rows(model: PreTrainedModel) -> int | None:
    """Ids that its embedding has rows for; None: that cannot be told."""
    return _whole(model.get_input_embeddings(), "num_embeddings")


def _says(model: PreTrainedModel) -> int | None:
    """Tokens that it has logits of; None: that cannot be told."""
    return _whole(model.get_output_embeddings(), "out_features")


def _whole(module: Any, name: str) -> int | None:
    found = getattr(module, name, None)
    return found if isinstance(found, int) else None


def _check_ids(model: PreTrainedModel, ids: torch.Tensor, rows: int | None, what: str) -> None:
    if rows is None or not ids.numel():
        return
    for wrong in (int(ids.max()), int(ids.min())):
        if not 0 <= wrong < rows:
            raise errors.InvalidInputError(
                f"a prompt for {type(model).__name__}",
                got=f"token id {wrong}",
                expected=f"0 to {rows - 1}: {what}",
                fix="the tokenizer of the model",
            )


def _check_says(
    speaker: PreTrainedModel, says: int | None, listener: PreTrainedModel, rows: int | None
) -> None:
    if says is not None and rows is not None and says > rows:
        raise errors.InvalidInputError(
            f"tokens that {type(speaker).__name__} says",
            got=f"logits of {says:,}",
            expected=f"at most {rows:,}, the rows of {type(listener).__name__}'s embedding",
            fix="generate without custom_generate, or a model whose embedding has them all",
        )
