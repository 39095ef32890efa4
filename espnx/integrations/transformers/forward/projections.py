"""How the attention modules of transformers' models make K and V of their input: what X rows
need."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from .... import errors
from ....kv.x_rows import Projection

#: X rows [sequences, n, hidden] of new tokens, and how K and V are made of them.
Source = tuple[torch.Tensor, Projection]


@dataclass(frozen=True)
class LayerInput:
    """What an attention module was called with.

    Attributes:
        module: the module.
        x: [sequences, n, hidden], what it projects; None where it is called in a way that is not
            known here.
        rotary: cosines and sines of the new tokens' positions, or None.
    """

    module: torch.nn.Module
    x: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of_call(
        cls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerInput:
        """Takes it from the arguments of the module's forward pass."""
        return cls(
            module,
            kwargs.get("hidden_states", args[0] if args else None),
            kwargs.get("position_embeddings"),
        )

    def source(self, n_heads: int, rotations: Rotations, past: int) -> Source | None:
        """What K and V of new tokens after `past` others are made of; their rotations are added to
        `rotations`. None: not known.

        Raises InvalidInputError: the module projects K and V in a way that is not known here.
        """
        if self.rotary is not None:
            rotations.extend(*self.rotary, past=past)
        projection = projection_of(self.module, n_heads, None if self.rotary is None else rotations)
        return None if self.x is None else (self.x, projection)


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that know their layer's number and whose projections of K and V are known
    here."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and _weights(module) is not None
    ]


def _weights(
    module: torch.nn.Module,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None] | None:
    """(K weight, K bias, V weight, V bias), as of linear layers."""
    k, v, both = (getattr(module, name, None) for name in ("k_proj", "v_proj", "c_attn"))
    # Gemma 4's wide layers: V is made of K's projection
    v = k if v is None and hasattr(module, "v_proj") else v
    # a subclass may compute something else
    if k is not None and v is not None and type(k) is type(v) is torch.nn.Linear:
        return k.weight, k.bias, v.weight, v.bias
    if isinstance(both, Conv1D) and both.weight.shape[1] == 3 * both.weight.shape[0]:
        width = both.weight.shape[0]
        weight = both.weight.t()
        return (
            weight[width : 2 * width],
            both.bias[width : 2 * width],
            weight[2 * width :],
            both.bias[2 * width :],
        )
    return None


class Rotations:
    """The cosines and sines of every token's position, as the model's first X layer was given them.

    Rows [sequences or 1, n, d]; kept once for all layers, since their position embeddings are one.
    """

    def __init__(self) -> None:
        self._cos = self._sin = torch.empty(0)
        self.count = 0

    def extend(self, cos: torch.Tensor, sin: torch.Tensor, past: int) -> None:
        """Adds those of new tokens, after the first `past`."""
        if self._cos.device != cos.device:  # they were kept
            self._cos, self._sin = self._cos.to(cos.device), self._sin.to(cos.device)
        if past >= self.count:
            # Copies: a compiled model may use the memory of one pass's tensors again in the next.
            # One row stands for all sequences where none of them is padded.
            cos, sin = cos.detach().clone(), sin.detach().clone()
            if self.count:
                cos, sin = _joined(self._cos, cos), _joined(self._sin, sin)
            self._cos, self._sin, self.count = cos, sin, cos.shape[1]

    def at(self, sequence: int, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        one = min(sequence, self._cos.shape[0] - 1)
        return self._cos[one : one + 1, first : first + n], self._sin[
            one : one + 1, first : first + n
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a kept cache saves."""
        return {"rotations.cos": self._cos, "rotations.sin": self._sin} if self.count else {}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the tensors that a kept cache saved."""
        if "rotations.cos" in tensors:
            self._cos, self._sin = tensors["rotations.cos"], tensors["rotations.sin"]
            self.count = self._cos.shape[1]

    def crop(self, count: int) -> None:
        if count < self.count:
            self._cos, self._sin, self.count = self._cos[:, :count], self._sin[:, :count], count

    def accept(self, begin: int, ends: Sequence[int], kept: Sequence[int]) -> None:
        """Keeps of each sequence's tokens from `begin` on the first `kept`, behind its `ends`."""
        if self.count and self._cos.shape[0] > 1:
            for rows in (self._cos, self._sin):
                for sequence, (end, n) in enumerate(zip(ends, kept, strict=True)):
                    rows[sequence, end : end + n] = rows[sequence, begin : begin + n].clone()

    def twin(self) -> Rotations:
        """The same once more."""
        other = Rotations()
        other._cos, other._sin, other.count = self._cos.clone(), self._sin.clone(), self.count
        return other

    def select(self, sequences: list[int]) -> None:
        if self.count and self._cos.shape[0] > 1:
            self._cos, self._sin = self._cos[sequences], self._sin[sequences]


def _joined(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    sequences = max(len(old), len(new))
    return torch.cat([rows.expand(sequences, -1, -1) for rows in (old, new)], dim=1)


def projection_of(module: torch.nn.Module, n_heads: int, rotations: Rotations | None) -> Projection:
    """How an attention module makes K and V. `rotations`: where positions are rotary. Raises
    InvalidInputError."""
    weights = _weights(module)
    if weights is None:
        raise errors.InvalidInputError(
            f"the projections of {type(module).__name__}",
            expected="linear layers k_proj and v_proj, or c_attn",
            fix="x_rows=0",
        )
    k_weight, k_bias, v_weight, v_bias = (
        None if part is None else part.detach() for part in weights
    )
    norm, finish_v = getattr(module, "k_norm", None), getattr(module, "v_norm", None)
    rotate: Callable[..., Any] | None = getattr(
        sys.modules[type(module).__module__], "apply_rotary_pos_emb", None
    )
    if rotations is not None and rotate is None:
        raise errors.InvalidInputError(
            f"the rotation of {type(module).__name__}",
            expected="apply_rotary_pos_emb",
            fix="x_rows=0",
        )

    is_single = rotate is not None and list(inspect.signature(rotate).parameters)[1:3] == [
        "cos",
        "sin",
    ]

    def finish(k: torch.Tensor, sequence: int, first: int) -> torch.Tensor:
        if norm is not None:
            k = norm(k)
        if rotations is not None and rotate is not None:
            cos, sin = rotations.at(sequence, first, k.shape[2])
            # q is not needed here, so it is one head; some models rotate one tensor at a time.
            k = rotate(k, cos, sin) if is_single else rotate(k[:, :1], k, cos, sin)[1]
        return k

    needs_finish = norm is not None or rotations is not None or finish_v is not None
    return Projection(
        k_weight, v_weight, k_bias, v_bias, n_heads, finish if needs_finish else None, finish_v
    )
