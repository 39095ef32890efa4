"""How a model rotates its keys: as its config and modules say, and two short forward passes show.

A passage may stand anywhere only if its keys at one position are those at another, rotated. If
that is so, of which values, and which of them are pairs, no config says for all models: so a few
tokens go through the model at two places, and their keys are compared, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .... import errors
from ....device.row_layout import RowLayout, format_of
from ....kv.passages.extent import RowShape
from ....kv.passages.rotation import Rotation
from ..forward.layers import layers_of
from ..forward.positions import learned_positions

#: Whose angles are linear in the position, with frequencies that do not depend on the text.
KINDS = ("default", "linear", "llama3", "yarn")
_TOKENS, _SHIFT = 6, 11
#: Keys at two positions differ by so much of their norm at most, by the precision of the model:
#: what rounding, layer after layer, may do. Wrong pairs are all of the norm away.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class RotaryRows:
    """What a model's passages are kept as.

    Attributes:
        shape: of their rows.
        rotations: of each layer's keys; None: a layer without positions.
    """

    shape: RowShape
    rotations: Sequence[Rotation | None]


class _Kind:
    """A layer that is stored, as `layers_of` wants it."""

    def __init__(self, number: int, *, is_shared: bool):
        self.number, self.is_shared = number, is_shared


def rotary_rows(model: PreTrainedModel) -> RotaryRows:
    """Looks at a model and runs it over a few tokens, twice.

    Raises InvalidInputError for what cannot stand elsewhere, by name: dynamic NTK, longrope,
    M-RoPE, windows, states, ALiBi, learned positions, latent rows, layers that share rows, layers
    of several shapes.
    """
    config = model.config.get_text_config(decoder=True)
    _check_config(model, config)
    radians = _radians(model)
    before, after = (_rows_at(model, first) for first in (0, _SHIFT))
    rotations = [
        _rotation(number, radians, k, moved, v, moved_v)
        for number, ((k, v), (moved, moved_v)) in enumerate(zip(before, after, strict=True))
    ]
    shapes = {(k.shape[1], k.shape[-1], v.shape[-1], k.dtype, v.dtype) for k, v in before}
    if len(shapes) != 1:
        raise _refused(model, "layers of several shapes", "K and V of one shape in every layer")
    heads, d, dv, dtype, dtype_v = shapes.pop()
    layout = RowLayout(format_of(torch.promote_types(dtype, dtype_v)), d, dv)
    return RotaryRows(RowShape(len(before), heads, layout), rotations)


def _refused(model: PreTrainedModel, got: str, expected: str) -> errors.InvalidInputError:
    return errors.InvalidInputError(
        f"passages of {type(model).__name__}", got=got, expected=expected, fix="KVCache"
    )


def _check_config(model: PreTrainedModel, config: Any) -> None:
    """Raises InvalidInputError for what a config tells."""
    rotary = "rotary positions, linear in the position"
    if getattr(config, "alibi", None):
        raise _refused(model, "ALiBi", rotary)
    if learned_positions(model) is not None:
        raise _refused(model, "learned positions", rotary)
    if getattr(config, "kv_lora_rank", None):
        raise _refused(model, "latent rows", "K and V of each head")
    said = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in said.values() if isinstance(each, dict)]
    for each in nested or [said]:
        kind = each.get("rope_type", "default")
        if "mrope_section" in each or kind == "mrope":
            raise _refused(model, "M-RoPE", rotary)
        if kind not in KINDS:
            name = {"dynamic": "dynamic NTK"}.get(kind, kind)
            raise _refused(model, f"rotations of the kind {name}", ", ".join(KINDS))
    layers = layers_of(config, _Kind)
    for number, layer in enumerate(layers):
        if not isinstance(layer, _Kind):
            what = "a window" if getattr(layer, "sliding_window", None) else type(layer).__name__
            raise _refused(model, f"{what} in layer {number}", "full attention in every layer")
        if layer.is_shared:
            raise _refused(
                model,
                f"layer {number}, whose rows other layers attend to, too",
                "rows of its own in every layer",
            )


def _radians(model: PreTrainedModel) -> tuple[float, ...]:
    """The angle of each pair of values, for one position. Raises InvalidInputError."""
    found = set[tuple[float, ...]]()
    for module in model.base_model.modules():
        value = getattr(module, "inv_freq", None)
        if isinstance(value, torch.Tensor) and value.dim() == 1 and not value.is_meta:
            found.add(tuple(value.detach().double().cpu().tolist()))
    if len(found) != 1:
        raise _refused(
            model,
            "no rotary positions" if not found else "several kinds of rotation",
            "one kind of rotary positions",
        )
    return found.pop()


def _rows_at(model: PreTrainedModel, first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of a few tokens that stand at `first` and behind it, of each layer."""
    config = model.config.get_text_config(decoder=True)
    device = next(
        (each.device for each in model.parameters() if not each.is_meta), torch.device("cpu")
    )
    size = int(config.vocab_size)
    ids = torch.tensor([[(3 + 7 * i) % size for i in range(_TOKENS)]], device=device)
    cache = DynamicCache(config=model.config)
    positions = torch.arange(first, first + _TOKENS, device=device)[None]
    try:
        with torch.no_grad():
            model.base_model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
            )
    except (TypeError, ValueError) as error:
        raise _refused(
            model, f"{type(error).__name__}: {error}", "a decoder that takes position_ids"
        ) from error
    return [(layer.keys, layer.values) for layer in cache.layers]


def _rotation(
    number: int,
    radians: tuple[float, ...],
    k: torch.Tensor,
    moved: torch.Tensor,
    v: torch.Tensor,
    moved_v: torch.Tensor,
) -> Rotation | None:
    """Which rotation takes keys k [1, heads, n, d] to those of the same tokens elsewhere. Raises
    InvalidInputError: none does, or values differ, too."""
    most = _TOLERANCES.get(k.dtype, 0.0)
    tries: list[Rotation | None] = [None]
    if 2 * len(radians) <= k.shape[-1]:
        tries += [Rotation(radians, is_interleaved=each) for each in (False, True)]
    far = [
        _distance(k.float() if each is None else each.turned(k.float(), [_SHIFT]), moved)
        for each in tries
    ]
    best = min(range(len(tries)), key=far.__getitem__)
    if far[best] > most or _distance(v.float(), moved_v) > most:
        raise errors.InvalidInputError(
            f"passages, by layer {number} of the model",
            got=f"keys at two positions that differ by {far[best]:.1%} of their norm from a "
            "rotation",
            expected=f"at most {most:.1%}: rotary positions, of the first values of each head",
            fix="KVCache",
        )
    return tries[best]


def _distance(k: torch.Tensor, other: torch.Tensor) -> float:
    other = other.float()
    return float((k - other).norm() / other.norm().clamp_min(torch.finfo(torch.float32).tiny))
