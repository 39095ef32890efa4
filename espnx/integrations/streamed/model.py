"""A transformers decoder without weights, and where its weights lie in the files of its folder.

transformers renames what old checkpoints call otherwise and puts experts together; its own tables
say how. Reading straight into place works where every stored tensor is one contiguous part of a
parameter; other conversions are refused.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ... import errors
from ...suggestions import downloading
from ...weights.layers import LayerWeights, Piece, Weight
from ...weights.safetensors_files import StoredTensor


@dataclass
class ModelWeights:
    """A model's weights: `layers` in order, `others` by name; `missing` are those that the model
    ties to one of `others`."""

    layers: list[LayerWeights]
    others: dict[str, Weight]
    missing: set[str] = field(default_factory=set)

    @property
    def other_bytes(self) -> int:
        return sum(weight.memory_bytes for weight in self.others.values())


def read_config(path: str | os.PathLike[str]) -> PreTrainedConfig:
    """The config of a folder, or of a ``config.json``. No code from the folder is run. Raises
    InvalidInputError."""
    where = Path(path)
    file = where / "config.json" if where.is_dir() else where
    if not file.is_file():
        raise errors.InvalidInputError(
            f"model {where}",
            got="no config.json",
            expected="a Hugging Face model's folder, or its config.json",
            fix=downloading(str(where)),
        )
    try:
        fields = json.loads(file.read_bytes())
        kind = fields.pop("model_type", None) if isinstance(fields, dict) else None
        if kind is None:
            raise errors.InvalidInputError(
                f"config {file}",
                got="no model_type",
                expected="a configuration that transformers wrote",
            )
        config = CONFIG_MAPPING[kind].from_dict(fields)
    except errors.EspnxError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        # what wrong JSON and wrong fields provoke
        raise errors.InvalidInputError(
            f"config {file}", got=_line(error), expected="one that transformers knows"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise errors.InvalidInputError(
            f"model {where}", got=f"an encoder-decoder ({kind})", expected="a decoder-only model"
        )
    if getattr(config, "quantization_config", None):
        raise errors.InvalidInputError(
            f"model {where}", got="quantised weights", expected="weights in fp32, fp16 or bf16"
        )
    return config


def main_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """The floating dtype of most of the stored bytes."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors.values():
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] += tensor.size_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with parameters on the meta device. Raises InvalidInputError for what is no causal
    language model."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise errors.InvalidInputError(
            "dtype of a model", got=dtype, expected="float32, float16, bfloat16 or float64"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    except ValueError as error:
        raise errors.InvalidInputError(
            f"model of type {config.model_type}",
            got=_line(error),
            expected="a causal language model",
        ) from error
    return model.eval().requires_grad_(False)


def fill_buffers(model: PreTrainedModel) -> None:
    """Computes what is no weight and in no file (frequencies of rotary embeddings, ...), as
    `from_pretrained` does."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = True
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
                module._is_hf_initialized = False
    model.initialize_weights()


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder's layers and their name. Raises InvalidInputError."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    found = [
        (name, module)
        for name, module in found
        if not any(name.startswith(outer + ".") for outer, _ in found)
    ]
    if len(found) != 1:
        raise errors.InvalidInputError(
            f"layers of {type(model).__name__}",
            got=f"{len(found)} lists of {count} modules",
            expected="one: the decoder's layers",
        )
    return found[0]


def match(
    model: PreTrainedModel, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None
) -> ModelWeights:
    """Finds every weight of a model among stored tensors.

    Args:
        dtype: what floating-point weights become; None: they stay what they are.

    Raises:
        FormatError: tensors are missing, left over, or of another shape.
        InvalidInputError: the model is of a kind that cannot be read layer by layer.
    """
    wanted = model.state_dict()
    parts = _collect(model, tensors, wanted)
    keep = _kept_in_fp32(model, dtype)
    weights: dict[str, Weight] = {}
    for name, pieces in parts.items():
        own = pieces[0].source.dtype
        if any(piece.source.dtype != own for piece in pieces):
            raise errors.FormatError(
                f"parts of {name}", path=pieces[0].source.path, got="several dtypes", expected="one"
            )
        target = own
        if dtype is not None and own.is_floating_point:
            target = torch.float32 if keep is not None and keep.search(name) else dtype
        weights[name] = Weight(name, tuple(wanted[name].shape), target, tuple(pieces))
    missing = _missing(model, set(wanted) - set(weights), weights, tensors)
    prefix, layers = find_layers(model)
    found: list[LayerWeights] = []
    for number, layer in enumerate(layers):
        names = [
            f"{prefix}.{number}.{name}"
            for name, _ in layer.named_parameters(remove_duplicate=False)
        ]
        shared = [
            name for name in names if name not in weights or name in model.all_tied_weights_keys
        ]
        if shared or len(names) != len(list(layer.parameters())):
            raise errors.InvalidInputError(
                f"layer {number} of {type(model).__name__}",
                got=f"shared weights ({', '.join(shared[:3])})",
                expected="weights of its own",
            )
        found.append(LayerWeights([weights.pop(name) for name in names]))
    return ModelWeights(found, weights, missing)


def _collect(
    model: PreTrainedModel, tensors: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor]
) -> dict[str, list[Piece]]:
    """The stored pieces of each parameter."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    of_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    ignored = _ignored(model)
    found: dict[str, list[Piece]] = {}
    groups: dict[str, dict[str, list[StoredTensor]]] = {}
    extra: list[StoredTensor] = []
    for key in sorted(tensors, key=dot_natural_key):
        tensor = tensors[key]
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, dict(wanted)
        )
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            extra += [] if ignored.search(name) or ignored.search(key) else [tensor]
        elif pattern is not None:
            groups.setdefault(name, {}).setdefault(pattern, []).append(tensor)
        elif name in found:
            raise errors.FormatError(
                f"read {name}",
                path=tensor.path,
                got=f"{key} beside {found[name][0].source.name}",
                expected="one of them",
            )
        else:
            _check_shape(name, tensor.path, tensor.shape, wanted[name])
            found[name] = [Piece(tensor, 0)]
    if extra:
        raise errors.FormatError(
            f"weights of {type(model).__name__}",
            path=extra[0].path,
            got=f"{len(extra)} tensors it has no place for: {_some(extra)}",
            expected="the tensors of this model alone",
            fix="check that config.json belongs to these weights",
        )
    for name, parts in groups.items():
        found[name] = _put_together(name, parts, of_pattern[next(iter(parts))], wanted[name])
    return found


def _put_together(
    name: str, parts: dict[str, list[StoredTensor]], converter: Any, wanted: torch.Tensor
) -> list[Piece]:
    """Places of the tensors that a converter stacks or concatenates."""
    kinds = [
        (type(operation), getattr(operation, "dim", None)) for operation in converter.operations
    ]
    columns = [parts.get(pattern, []) for pattern in converter.source_patterns]
    first = next(column for column in columns if column)[0]
    if kinds == [(Concatenate, 0)]:
        rows = [[tensor for column in columns for tensor in column]]
        shape: tuple[int, ...] = (sum(tensor.shape[0] for tensor in rows[0]), *first.shape[1:])
    elif kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        if len({len(column) for column in columns}) != 1:
            counts = {
                pattern: len(column)
                for pattern, column in zip(converter.source_patterns, columns, strict=True)
            }
            raise errors.FormatError(
                f"parts of {name}", path=first.path, got=f"{counts}", expected="as many of each"
            )
        rows = [list(row) for row in zip(*columns, strict=True)]
        shape = (len(rows), sum(column[0].shape[0] for column in columns), *first.shape[1:])
        for column in columns:
            for tensor in column:
                _check_shape(tensor.name, tensor.path, tensor.shape, column[0])
    else:
        operations = ", ".join(kind.__name__ for kind, _ in kinds)
        raise errors.InvalidInputError(
            f"{name} is stored in another form",
            got=operations,
            expected="whole, stacked or concatenated tensors",
            fix=(
                "load the model whole and save it with save_original_format=False, then stream "
                "that folder"
            ),
        )
    _check_shape(name, first.path, shape, wanted)
    pieces, at = [], 0
    for row in rows:
        for tensor in row:
            _check_shape(tensor.name, tensor.path, tensor.shape[1:], first.shape[1:])
            pieces.append(Piece(tensor, at))
            at += math.prod(tensor.shape)
    return pieces


def _check_shape(name: str, path: str, got: tuple[int, ...], wanted: Any) -> None:
    expected = tuple(getattr(wanted, "shape", wanted))
    if tuple(got) != expected:
        raise errors.FormatError(
            f"shape of {name}", path=path, got=list(got), expected=list(expected)
        )


def _missing(
    model: PreTrainedModel,
    missing: set[str],
    weights: Mapping[str, Weight],
    tensors: Mapping[str, StoredTensor],
) -> set[str]:
    """The weights that are tied to one that is there. Raises FormatError for others that are
    not."""
    tied = model.all_tied_weights_keys
    known = {name for name in missing if name in tied and tied[name] in weights}
    known |= {source for target, source in tied.items() if source in missing and target in weights}
    known |= {name for name in missing if name in tied and tied[name] in known}
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    lost = sorted(
        name for name in missing - known if not any(pattern.search(name) for pattern in patterns)
    )
    if lost:
        path = next(iter(tensors.values())).path if tensors else None
        shown = ", ".join(lost[:3])
        raise errors.FormatError(
            f"weights of {type(model).__name__}",
            path=path,
            got=f"{len(lost)} missing: {shown}",
            expected="all of them",
        )
    return known


def _ignored(model: PreTrainedModel) -> re.Pattern[str]:
    """Stored tensors that transformers passes over: what old checkpoints held beside the
    weights."""
    patterns = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        r"rotary_emb\.inv_freq",
        r"(^|\.)position_ids$",
    }
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)))


def _kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """The weights that a model keeps in fp32 whatever dtype is asked for, as `from_pretrained`
    does."""
    globs = model._get_dtype_plan(dtype) if dtype is not None else {}
    return re.compile("|".join(glob.replace("*", ".*") for glob in globs)) if globs else None


def _some(tensors: list[StoredTensor]) -> str:
    return ", ".join(tensor.name for tensor in tensors[:3])


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
