"""What a kept cache must agree with: the model whose K and V it holds.

Every byte of every tensor counts, in memory or in the files that it is streamed from
(`weights.sums`). A tensor's checksum is remembered as long as it is the same tensor, unchanged:
PyTorch counts the changes made to it in place. Writes that bypass that count (through `.data`,
NumPy) are seen where they change one of about 4,096 values that are looked at each time; by a new
process always.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch

from .... import errors
from ....ops.crc32c import crc32c
from ....weights.sums import sampled, sum_of
from .model_parts import active_adapters, parts_of

#: Of a config: where it came from and how it is run, not what it computes.
_IRRELEVANT = (
    "architectures",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "id2label",
    "label2id",
    "transformers_version",
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "use_cache",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
)

KINDS = ("whole", "sampled")

#: By the identity of a tensor: itself, where it lay, how often it had been changed, and its
#: checksum then.
_known: dict[int, tuple[weakref.ref[torch.Tensor], tuple[Any, ...], int]] = {}


def fingerprint(model: torch.nn.Module, kind: str = "whole") -> dict[str, Any]:
    """What tells one transformers model from another: its config, and what its modules make K and V
    with, as `model_parts` finds it: a CRC32C of each tensor, and one of the settings of each
    module, without the output head, which comes after K and V.

    Args:
        kind: ``whole``: all bytes; ``sampled``: about 4,096 values of each, which sees another
            training and not every change.

    Streamed weights (`load_streamed`) are read from their files and count as if they lay in memory:
    whatever part of a model is streamed, it has the same fingerprint.

    Raises:
        InvalidInputError: something cannot be known, and is named: a weight whose bytes are nowhere
            (on the meta device, as of models that other packages offload), or packed in a way that
            nobody can read; a hook or a replaced forward pass of somebody else.
        ReadError, ...: of weights that are streamed.
    """
    stored, sums, settings = _stored(model), dict[str, int](), dict[str, int]()
    for part in parts_of(model):
        settings[_another(part.name, settings)] = crc32c(part.settings.encode())
        for name, tensor, owner in part.tensors:
            sums[_another(name, sums)] = _sum_of(
                name, tensor, kind, stored.get((id(owner), name.rpartition(".")[2]))
            )
    dtypes = {
        str(tensor.dtype)
        for name, tensor in model.named_parameters()
        if "lm_head" not in name.split(".")
    }
    config = json.dumps(_relevant(model.config.to_dict()), sort_keys=True, default=str)
    return {
        "model": type(model).__name__,
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "kind": kind,
        "adapters": ", ".join(active_adapters(model)),
        "weights": sums,
        "modules": settings,
        "dtype": ", ".join(sorted(dtypes)),
    }


def _another(name: str, taken: Container[str]) -> str:
    """A name of its own for what shares one: wrappers inside wrappers, tensors that a state dict
    lists once more."""
    while name in taken:
        name += "'"
    return name


def _relevant(config: Any) -> Any:
    """What counts of a config and of those inside it."""
    if isinstance(config, dict):
        return {
            str(key): _relevant(value) for key, value in config.items() if key not in _IRRELEVANT
        }
    return config


def _stored(model: torch.nn.Module) -> dict[tuple[int, str], Callable[..., int]]:
    """The function that makes the checksum of each streamed weight, by the identity of its module
    and its name there."""
    found = dict[tuple[int, str], Callable[..., int]]()
    for layer in model.modules():
        for name, make in getattr(layer, "espnx_streamed", {}).items():
            path, _, last = name.rpartition(".")
            found[id(layer.get_submodule(path)), last] = make
    return found


def _sum_of(name: str, tensor: torch.Tensor, kind: str, stored: Callable[..., int] | None) -> int:
    described = crc32c(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
    if not tensor.is_meta:
        with torch._C.DisableTorchFunctionSubclass():
            found = sum_of(sampled(tensor.detach()))
            found = found if kind == "sampled" else _whole(tensor, found)
    elif stored is not None:
        found = stored(is_whole=kind == "whole")
    else:
        raise errors.InvalidInputError(
            "fingerprint of a model, for a kept cache",
            got=f"{name} on the meta device, without bytes",
            expected="weights in memory, or streamed by load_streamed",
            fix="a cache without a name",
        )
    return crc32c(found.to_bytes(4, "little"), described)


def _whole(tensor: torch.Tensor, some: int) -> int:
    """The CRC32C of all bytes; `some`: of a few, which shows most changes that PyTorch does not
    count."""
    version = None if tensor.is_inference() else tensor._version
    state = tensor.data_ptr(), version, tuple(tensor.shape), tensor.stride(), tensor.dtype, some
    key = id(tensor)
    known = _known.get(key)
    if known is not None and version is not None and known[0]() is tensor and known[1] == state:
        return known[2]
    found = sum_of(tensor.detach())
    _known[key] = weakref.ref(tensor, lambda _: _known.pop(key, None)), state, found
    return found


def compare(kept: dict[str, Any], now: dict[str, Any], path: str) -> None:
    """Raises ForeignFileError where a cache belongs to another model, which names what differs."""
    fix = "choose another name, or remove the cache (`espnx cache rm`)"
    for key in ("model", "dtype", "config", "adapters", "kind"):
        if kept.get(key) != now[key]:
            what = (
                "was kept with another fingerprint"
                if key == "kind"
                else f"holds K and V of another model ({key})"
            )
            raise errors.ForeignFileError(
                f"the cache {what}",
                path=path,
                got=kept.get(key) or "none",
                expected=now[key] or "none",
                fix=fix,
            )
    for key, what in (("weights", "weights"), ("modules", "settings of modules")):
        before, after = kept.get(key), now[key]
        if before != after:
            known = before if isinstance(before, dict) else {}
            changed = sorted(
                name for name in known.keys() | after.keys() if known.get(name) != after.get(name)
            )
            shown = [name or "the model" for name in changed[:3]]
            raise errors.ForeignFileError(
                f"the cache holds K and V of another model ({shown[0]})",
                path=path,
                got=f"{len(changed)} that differ: {', '.join(shown)}",
                expected=f"the same {what}",
                fix=fix,
            )
