"""The dense layers of sentence-transformers' folders, PyLate's among them: what their config.json
and weights say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu

from ..errors import FormatError
from .checkpoints import read_object, read_weights

ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": relu,
    "GELU": gelu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Dense:
    """``activation(x @ weight.T + bias)``, and beside it x itself, or a projection of it."""

    weight: Tensor
    bias: Tensor | None
    activation: str
    use_residual: bool
    residual: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        made: Tensor = ACTIVATIONS[self.activation](linear(x, self.weight, self.bias))
        if not self.use_residual:
            return made
        return made + (x if self.residual is None else linear(x, self.residual))


def dense_files(where: Path) -> list[Path]:
    """The weights of a layer's folder: safetensors, or else what ``torch.save`` wrote."""
    safe = where / "model.safetensors"
    return [safe] if safe.is_file() else sorted(where.glob("pytorch_model.bin"))


def read_dense(
    where: Path, device: torch.device, dtype: torch.dtype, activation: str = "Identity"
) -> Dense:
    """The layer of a folder. `activation`: where its config names none. Raises FormatError for what
    is no such layer."""
    config = read_object(where / "config.json")
    name = str(config.get("activation_function", activation)).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise FormatError(
            "dense layer", path=where, got=f"activation {name}", expected=", ".join(ACTIVATIONS)
        )
    held = read_weights(dense_files(where), ["linear.weight", "linear.bias", "residual.weight"])
    use_residual = bool(config.get("use_residual"))
    needed = ["linear.weight", *(["linear.bias"] if config.get("bias", True) else [])]
    if use_residual and config.get("in_features") != config.get("out_features"):
        needed.append("residual.weight")
    missing = [name for name in needed if name not in held]
    if missing:
        raise FormatError(
            "dense layer", path=where, got=f"no {missing[0]}", expected="all of its weights"
        )
    placed = {name: held[name].to(device, dtype) for name in needed}
    return Dense(
        placed["linear.weight"],
        placed.get("linear.bias"),
        name,
        use_residual,
        placed.get("residual.weight"),
    )


def check_chain(layers: list[Dense], width: int, root: Path) -> None:
    """Raises FormatError unless each layer takes what the one before gives; the first takes `width`
    values."""
    for layer in layers:
        shape = list(layer.weight.shape)
        if len(shape) != 2 or shape[1] != width:
            raise FormatError(
                "dense layers", path=root, got=f"shape {shape}", expected=f"[any, {width}]"
            )
        for name, part in (("bias", layer.bias), ("residual", layer.residual)):
            wanted = shape if name == "residual" else shape[:1]
            if part is not None and list(part.shape) != wanted:
                raise FormatError(
                    "dense layers",
                    path=root,
                    got=f"{name} of shape {list(part.shape)}",
                    expected=wanted,
                )
        if layer.use_residual and layer.residual is None and shape[0] != width:
            raise FormatError(
                "dense layers",
                path=root,
                got=f"shape {shape} beside its input",
                expected=f"[{width}, {width}]",
            )
        width = shape[0]
