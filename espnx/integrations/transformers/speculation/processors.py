"""Processors of logits for one text of a batch: some know where each text of the batch begins."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from transformers import LogitsProcessorList

#: Tokens of padding before each text, as processors of transformers 5.23 keep them.
_PADDING = "prompt_ignore_length"


def processors_of(
    processors: LogitsProcessorList, row: int, *, is_padded: bool = True
) -> LogitsProcessorList:
    """The processors, for text number `row` alone. `is_padded`: its tokens come with the padding
    before them."""

    def own(each: Any) -> Any:
        padding: Any = getattr(each, _PADDING, None)
        if not isinstance(padding, torch.Tensor):
            return each
        found = copy(each)
        setattr(found, _PADDING, padding[row : row + 1] if is_padded else None)
        return found

    return LogitsProcessorList([own(each) for each in processors])
