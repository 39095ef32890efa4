"""What a kept cache must agree with: the model whose K and V it holds."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from .. import errors
from ..ops.crc32c import crc32c

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


_WHOLE = ("k_proj", "v_proj", "c_attn", "k_norm", "qkv_proj", "query_key_value", "embed_tokens", "wte")
_SAMPLES = 4096  # values of each other parameter: what was trained on has moved in all of them


def fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """Of a transformers model: its config, the bytes of its input embeddings and of every layer's k and v projections, and a sample of all
    other weights, which K and V of the later layers depend on.

    Parameters without bytes of their own (streamed weights) count by name and shape.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IRRELEVANT}
    sums, dtypes = dict[str, int](), set[str]()
    for name, parameter in model.named_parameters():
        words, data = name.split("."), parameter.detach()
        if "lm_head" in words:  # what is said comes after K and V
            continue
        if any(word in _WHOLE for word in words):
            dtypes.add(str(data.dtype))
        elif not data.is_meta:
            data = data.reshape(-1)[:: max(1, data.numel() // _SAMPLES)]
        described = repr((name, tuple(parameter.shape), str(data.dtype))).encode()
        sums[name] = crc32c(described) if data.is_meta else crc32c(data.cpu().contiguous())
    canonical = json.dumps([config, sums], sort_keys=True, default=str)
    return {
        "model": type(model).__name__, "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "weights": hashlib.sha256(canonical.encode()).hexdigest(), "dtype": ", ".join(sorted(dtypes)),
    }  # fmt: skip


def compare(kept: dict[str, Any], now: dict[str, Any], path: str) -> None:
    """Raises ForeignFileError where a cache belongs to another model."""
    for key in ("model", "dtype", "config", "weights"):
        if kept.get(key) != now[key]:
            raise errors.ForeignFileError(
                f"the cache holds K and V of another model ({key})", path=path, got=kept.get(key), expected=now[key],
                fix="choose another name, or remove the cache (`espnx cache rm`)",
            )  # fmt: skip
