"""What the masks of transformers' models mean: padding, causality, a window. Anything else is refused by name.

A model makes its masks with functions of (query, position) that it combines; the attention implementation turns them into what its kernels
take. Here that is [sequences, 1, 1, positions], for a row of each query would take 16 GiB for a padded prompt of 128K tokens. The
functions are recognised one by one: none that is not known here goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any

import torch
from transformers import masking_utils

from ... import errors

_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__

_WHAT, _KNOWN = "this model's attention mask", "causal, window and padding"


@dataclass(frozen=True)
class Mask:
    """Attributes: visible: bool [sequences, positions], None: everywhere; window: a query sees so many positions, the last its own, None:
    all; is_causal: and nothing behind it."""

    visible: torch.Tensor | None = None
    window: int | None = None
    is_causal: bool = True


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask function: None (causal, no padding), else [sequences, 1, 1, positions], which `meaning` reads.

    A model may move a mask to another device or pass it on, so all is in its values: bool for causality and padding alone; int64 where
    visible positions hold the window + 1, or -1 for attention in both directions; 0: hidden.
    """
    window, is_causal = _recognised(mask_function)
    end = kv_offset + kv_length
    if is_causal and end > int(q_offset) + q_length:
        raise errors.InvalidInputError(
            "attention through espnx", got="a cache of a fixed size", expected="a KVCache, a cache that grows, or none",
            fix='model.set_attn_implementation("sdpa")',
        )  # fmt: skip
    if not (allow_is_causal_skip if is_causal else allow_is_bidirectional_skip):
        raise errors.InvalidInputError(_WHAT, got="one that it changes further", expected=_KNOWN)
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size or attention_mask.shape[1] < end:
            raise errors.InvalidInputError(
                "attention mask", got=list(attention_mask.shape), expected=f"[{batch_size}, {end}]: all tokens, those in the cache included"
            )
        attention_mask = attention_mask[:, kv_offset:end].bool()
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    if is_causal and window is None:
        return None if attention_mask is None else attention_mask[:, None, None]
    code = -1 if window is None else window + 1
    if attention_mask is not None:
        return attention_mask[:, None, None].long() * code
    return torch.full((batch_size, 1, 1, kv_length), code, device=device)


def meaning(mask: torch.Tensor | None) -> Mask:
    """Of what `padding_mask` returned: read once for all layers. Raises InvalidInputError for a mask of another kind."""
    if mask is None:
        return Mask()
    said = getattr(mask, "_espnx_meaning", None)
    if said is None:
        said = mask._espnx_meaning = _read(mask)
    return said


def _read(mask: torch.Tensor) -> Mask:
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    if mask.dim() != 2 or mask.dtype not in (torch.bool, torch.int64):
        raise errors.InvalidInputError(
            "attention mask", got=f"{mask.dim()} dimensions of {mask.dtype}", expected="[sequences, positions]", fix="pass the padding mask"
        )
    if mask.dtype == torch.bool:
        return Mask(mask)
    low, high = (int(each) for each in mask.aminmax())
    visible = None if low and high else mask != 0
    if low < 0:
        return Mask(visible, is_causal=False)
    return Mask(visible, high - 1 if high > 1 else None)


def _recognised(function: Callable[..., Any]) -> tuple[int | None, bool]:
    """(window, whether causal) of a mask function. Raises InvalidInputError for one that is not known."""
    if function is masking_utils.causal_mask_function:
        return None, True
    if function is masking_utils.bidirectional_mask_function:
        return None, False
    parts = _closure(function).get("mask_functions", ()) if getattr(function, "__code__", None) is _AND else (function,)
    windows, is_causal = list[int](), False
    for part in parts:
        if part is masking_utils.causal_mask_function:
            is_causal = True
        elif getattr(part, "__code__", None) is _WINDOW:
            windows.append(int(_closure(part)["sliding_window"]))
        else:
            raise errors.InvalidInputError(
                _WHAT, got=f"{getattr(part, '__qualname__', part)} besides", expected=_KNOWN,
                fix="do not pass packed sequences or custom masks",
            )  # fmt: skip
    if not is_causal or not windows:
        raise errors.InvalidInputError(_WHAT, got="a window in both directions", expected=_KNOWN)
    return min(windows), True


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(getclosurevars(function).nonlocals)
