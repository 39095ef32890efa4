"""What a kept cache must agree with: the model whose K and V it holds.

Every byte of every parameter and buffer counts. A tensor's checksum is remembered as long as it is the same tensor, unchanged: PyTorch
counts the changes made to it in place. Writes that bypass that count (through `.data`, NumPy) are seen where they change one of about 4,096
values that are looked at each time; by a new process always.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .. import errors
from ..ops.crc32c import crc32c, crc32c_ranges

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
_SAMPLES = 4096  # values of each tensor: what was trained on has moved in all of them
_PIECE_BYTES = 1 << 20  # of a tensor on a GPU: so many pieces are summed at the same time

#: By the identity of a tensor: itself, where it lay, how often it had been changed, and its checksum then.
_known: dict[int, tuple[weakref.ref[torch.Tensor], tuple[Any, ...], int]] = {}


def fingerprint(model: torch.nn.Module, kind: str = "whole") -> dict[str, Any]:
    """Of a transformers model: its config, and the CRC32C of each parameter and buffer (rotary frequencies among them), without the output
    head, which comes after K and V.

    Args:
        kind: ``whole``: all bytes; ``sampled``: about 4,096 values of each, which sees another training and not every change.

    Parameters without bytes of their own (streamed weights) count by name, shape and dtype.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IRRELEVANT}
    sums = {name: _sum_of(name, tensor, kind) for name, tensor in _tensors(model)}
    dtypes = {str(tensor.dtype) for name, tensor in model.named_parameters() if "lm_head" not in name.split(".")}
    return {
        "model": type(model).__name__, "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "kind": kind, "weights": sums, "dtype": ", ".join(sorted(dtypes)),
    }  # fmt: skip


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        yield from ((name, tensor) for name, tensor in named if "lm_head" not in name.split("."))


def _sum_of(name: str, tensor: torch.Tensor, kind: str) -> int:
    described = crc32c(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
    if tensor.is_meta:
        return described
    data = tensor.detach()
    found = _sum_of_bytes(data.reshape(-1)[:: max(1, data.numel() // _SAMPLES)])
    return crc32c((found if kind == "sampled" else _whole(tensor, found)).to_bytes(4, "little"), described)


def _whole(tensor: torch.Tensor, sampled: int) -> int:
    """Of all bytes; `sampled` of some, which shows most changes that PyTorch does not count."""
    version = None if tensor.is_inference() else tensor._version
    state = tensor.data_ptr(), version, tuple(tensor.shape), tensor.stride(), tensor.dtype, sampled
    key = id(tensor)
    known = _known.get(key)
    if known is not None and version is not None and known[0]() is tensor and known[1] == state:
        return known[2]
    found = _sum_of_bytes(tensor.detach())
    _known[key] = weakref.ref(tensor, lambda _: _known.pop(key, None)), state, found
    return found


def _sum_of_bytes(data: torch.Tensor) -> int:
    """That of the sums of its pieces, which on a GPU are made there."""
    flat = data.contiguous().reshape(-1).view(torch.uint8)
    begins = torch.arange(0, flat.numel(), _PIECE_BYTES)
    sizes = (flat.numel() - begins).clamp_max(_PIECE_BYTES)
    sums = crc32c_ranges(flat, begins, sizes) if flat.numel() else begins
    return crc32c(sums.cpu().contiguous())


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
