"""What a kept cache must agree with: the model whose K and V it holds.

Every byte of every parameter and buffer counts, in memory or in the files that it is streamed from (`weights.sums`). A tensor's checksum is
remembered as long as it is the same tensor, unchanged: PyTorch counts the changes made to it in place. Writes that bypass that count
(through `.data`, NumPy) are seen where they change one of about 4,096 values that are looked at each time; by a new process always.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ... import errors
from ...ops.crc32c import crc32c
from ...weights.sums import sampled, sum_of

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
)

KINDS = ("whole", "sampled")

#: By the identity of a tensor: itself, where it lay, how often it had been changed, and its checksum then.
_known: dict[int, tuple[weakref.ref[torch.Tensor], tuple[Any, ...], int]] = {}


def fingerprint(model: torch.nn.Module, kind: str = "whole") -> dict[str, Any]:
    """Of a transformers model: its config, and the CRC32C of each parameter and buffer (rotary frequencies among them), without the output
    head, which comes after K and V.

    Args:
        kind: ``whole``: all bytes; ``sampled``: about 4,096 values of each, which sees another training and not every change.

    Streamed weights (`load_streamed`) are read from their files and count as if they lay in memory: whatever part of a model is streamed,
    it has the same fingerprint.

    Raises:
        InvalidInputError: a weight's bytes are nowhere (on the meta device, as of models that other packages offload).
        ReadError, ...: of weights that are streamed.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IRRELEVANT}
    stored = _stored(model)
    sums = {name: _sum_of(name, tensor, kind, stored) for name, tensor in _tensors(model)}
    dtypes = {str(tensor.dtype) for name, tensor in model.named_parameters() if "lm_head" not in name.split(".")}
    return {
        "model": type(model).__name__, "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "kind": kind, "weights": sums, "dtype": ", ".join(sorted(dtypes)),
    }  # fmt: skip


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        yield from ((name, tensor) for name, tensor in named if "lm_head" not in name.split("."))


def _stored(model: torch.nn.Module) -> dict[str, Callable[..., int]]:
    """The function that makes the checksum of each streamed weight, by the weight's name."""
    return {
        f"{prefix}.{name}": make for prefix, module in model.named_modules() for name, make in getattr(module, "espnx_streamed", {}).items()
    }


def _sum_of(name: str, tensor: torch.Tensor, kind: str, stored: Mapping[str, Callable[..., int]]) -> int:
    described = crc32c(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
    if not tensor.is_meta:
        found = sum_of(sampled(tensor.detach()))
        found = found if kind == "sampled" else _whole(tensor, found)
    elif name in stored:
        found = stored[name](is_whole=kind == "whole")
    else:
        raise errors.InvalidInputError(
            "fingerprint of a model, for a kept cache", got=f"{name} on the meta device, without bytes",
            expected="weights in memory, or streamed by load_streamed", fix="a cache without a name",
        )  # fmt: skip
    return crc32c(found.to_bytes(4, "little"), described)


def _whole(tensor: torch.Tensor, some: int) -> int:
    """Of all bytes; `some`: of a few, which shows most changes that PyTorch does not count."""
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
    for key in ("model", "dtype", "config", "kind"):
        if kept.get(key) != now[key]:
            what = "was kept with another fingerprint" if key == "kind" else f"holds K and V of another model ({key})"
            raise errors.ForeignFileError(f"the cache {what}", path=path, got=kept.get(key), expected=now[key], fix=fix)
    before, after = kept.get("weights"), now["weights"]
    if before != after:
        known = before if isinstance(before, dict) else {}
        changed = sorted(name for name in known.keys() | after.keys() if known.get(name) != after.get(name))
        raise errors.ForeignFileError(
            f"the cache holds K and V of another model ({', '.join(changed[:1])})", path=path,
            got=f"{len(changed)} that differ: {', '.join(changed[:3])}", expected="the same weights", fix=fix,
        )  # fmt: skip
