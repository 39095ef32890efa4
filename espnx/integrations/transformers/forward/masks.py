"""What the masks of transformers' models mean: padding, causality, a window. Anything else is
refused by name.

A model makes its masks with functions of (query, position) that it combines; the attention
implementation turns them into what its kernels take. Here that is [sequences, 1, 1, positions], for
a row of each query would take 16 GiB for a padded prompt of 128K tokens. The functions are
recognised one by one: none that is not known here goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any

import torch
from transformers import masking_utils

from .... import errors
from ..graphs import outside_graphs

_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__
_REMAPPED = masking_utils.remap_positions_for_packed_sequence(
    masking_utils.causal_mask_function, torch.empty(0)
).__code__

#: What is added to the values of our masks, so that no mask of a caller's own is taken for one.
_OURS = 1 << 40
_CAUSAL, _BOTH_WAYS, _WINDOWED = range(3)  # a window of n is _WINDOWED + n

_WHAT, _KNOWN = "this model's attention mask", "causal, window and padding"


@dataclass(frozen=True)
class Mask:
    """Attributes: visible: bool [sequences, positions], None: everywhere; window: a query sees so
    many positions, the last its own, None: all; is_causal: and nothing behind it."""

    visible: torch.Tensor | None = None
    window: int | None = None
    is_causal: bool = True


@outside_graphs
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
    """transformers' mask function: None (causal, no padding), else int64 [sequences, 1, 1,
    positions], which `meaning` reads.

    A model may move a mask to another device or pass it on, so all is in its values: each says
    which mask it is, by a number that is negative where the position is hidden.
    """
    mask_function, is_one_sequence = _unpacked(mask_function)
    window, is_causal = _recognised(mask_function)
    end = kv_offset + kv_length
    if is_causal and end > int(q_offset) + q_length:
        raise errors.InvalidInputError(
            "attention through espnx",
            got="a cache of a fixed size",
            expected="a KVCache, a cache that grows, or none",
            fix='model.set_attn_implementation("sdpa")',
        )
    if not (
        is_one_sequence or (allow_is_causal_skip if is_causal else allow_is_bidirectional_skip)
    ):
        raise errors.InvalidInputError(_WHAT, got="one that it changes further", expected=_KNOWN)
    if attention_mask is not None:
        if (
            attention_mask.dim() != 2
            or attention_mask.shape[0] != batch_size
            or attention_mask.shape[1] < end
        ):
            raise errors.InvalidInputError(
                "attention mask",
                got=list(attention_mask.shape),
                expected=f"[{batch_size}, {end}]: all tokens, those in the cache included",
            )
        attention_mask = attention_mask[:, kv_offset:end].bool()
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    if is_causal and window is None and attention_mask is None:
        return None
    code = _OURS + (
        _BOTH_WAYS if not is_causal else _CAUSAL if window is None else _WINDOWED + window
    )
    if attention_mask is not None:
        return torch.where(attention_mask, code, -code)[:, None, None]
    return torch.full((batch_size, 1, 1, kv_length), code, device=device)


def meaning(mask: torch.Tensor | None) -> Mask:
    """Reads what `padding_mask` returned, once for all layers. Raises InvalidInputError for a mask
    of another kind."""
    if mask is None:
        return Mask()
    said = getattr(mask, "_espnx_meaning", None)
    if said is None:
        said = mask._espnx_meaning = _read(mask)
    return said


def _read(mask: torch.Tensor) -> Mask:
    low, high = (
        (int(each) for each in mask.aminmax())
        if mask.dtype == torch.int64 and mask.numel()
        else (0, 0)
    )
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1) or min(abs(low), abs(high)) < _OURS:
        raise errors.InvalidInputError(
            "attention mask",
            got=f"{list(mask.shape)} of {mask.dtype}",
            expected="[sequences, positions]: where there are tokens",
            fix="pass the padding mask of all tokens, those in the cache included",
        )
    code = abs(high) - _OURS
    visible = None if low > 0 else mask[:, 0, 0] > 0
    return Mask(
        visible, code - _WINDOWED if code > _WINDOWED else None, is_causal=code != _BOTH_WAYS
    )


def _unpacked(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """What a mask function for packed sequences is made of, and whether it was one, where no
    sequence is packed: a graph that is being traced cannot look, and takes any for packed ones.
    Those that are packed stay what they are, and are refused."""
    # in another order from transformers 5.24 on
    parts = {getattr(part, "__code__", None): part for part in _parts(function)}
    if parts.keys() == {_PACKED, _REMAPPED}:
        numbers = _closure(parts[_PACKED])["packed_sequence_mask"]
        if bool((numbers[:, -1:] == 0).all()):  # they count up along each row
            return _closure(parts[_REMAPPED])["mask_function"], True
    return function, False


def _recognised(function: Callable[..., Any]) -> tuple[int | None, bool]:
    """(window, whether causal) of a mask function. Raises InvalidInputError for one that is not
    known."""
    if function is masking_utils.causal_mask_function:
        return None, True
    if function is masking_utils.bidirectional_mask_function:
        return None, False
    windows, is_causal = list[int](), False
    for part in _parts(function):
        if part is masking_utils.causal_mask_function:
            is_causal = True
        elif getattr(part, "__code__", None) is _WINDOW:
            windows.append(int(_closure(part)["sliding_window"]))
        else:
            raise errors.InvalidInputError(
                _WHAT,
                got=f"{getattr(part, '__qualname__', part)} besides",
                expected=_KNOWN,
                fix="do not pass packed sequences or custom masks",
            )
    if not is_causal or not windows:
        raise errors.InvalidInputError(_WHAT, got="a window in both directions", expected=_KNOWN)
    return min(windows), True


def _parts(function: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    """The functions all of which must let a position through."""
    return (
        _closure(function)["mask_functions"]
        if getattr(function, "__code__", None) is _AND
        else (function,)
    )


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(getclosurevars(function).nonlocals)
