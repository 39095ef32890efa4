"""What a model will need before anything runs: bytes of weights, K and V by tier, and which
resource a decoding step will wait for.

Sizes are computed from the configuration (and, where there are weights, from their headers). Times
are modelled from bandwidths that are measured on the spot, as lower bounds: every byte once, every
operation once, at the measured rates, all resources at work at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from ... import errors
from ...device.interface import READ_AHEAD_BYTES
from ...device.row_layout import RowLayout, format_of
from ...weights.layers import LayerWeights, Share, share
from ...weights.safetensors_files import StoredTensor, find_tensors
from ...weights.speed import gemm_speed, memory_speed, read_speed, read_speed_of
from ..transformers.forward.positions import check_positions, learned_positions
from .drafts import Shape, add_seconds, plan_draft
from .model import ModelWeights, empty_model, main_dtype, match, read_config

_TAIL_BLOCKS = 3  # rows in memory: room for two blocks that wait, and half as much again
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class KVShape:
    """The shape of one layer: heads of K and V, the lengths of their rows, and the model's hidden
    size and heads of queries."""

    n_kv: int
    d: int
    dv: int
    hidden: int
    n_q: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KVShape:
        heads = config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // heads
        dv = d
        # multi-head latent attention: transformers caches the expanded rows
        if getattr(config, "kv_lora_rank", None):
            d, dv = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return cls(
            getattr(config, "num_key_value_heads", None) or heads, d, dv, config.hidden_size, heads
        )

    @property
    def ratio(self) -> float:
        """|X| / |KV|: X is stored instead of K and V where it is below 1."""
        return self.hidden / (self.n_kv * (self.d + self.dv))


@dataclass
class ModelPlan:
    """Sizes in bytes, of a whole batch with `context` + `new` tokens where they depend on it.

    Attributes:
        weights: resident, streamed in each pass, buffers.
        kv: by tier.
        step: bytes and operations of the last decoding step.
        resume: of a prompt that is kept: its K and V, and the operations that compute it anew; with
            a storage directory also `recompute_s` and `read_s`, modelled lower bounds, and
            `break_even_bytes_per_s`: K and V over `recompute_s`, the bandwidth from which on
            reading is sooner. Empty where no cache can be kept: some layers are not full attention.
        speeds: measured; empty without a storage directory.
        seconds: modelled lower bounds of the last step, by resource.
        draft: what `drafts.plan_draft` says, with seconds where speeds were measured; empty where
            no draft was asked for.
    """

    model: dict[str, Any]
    weights: dict[str, Any]
    kv: dict[str, Any]
    step: dict[str, Any]
    resume: dict[str, Any] = field(default_factory=dict)
    speeds: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)

    @property
    def bound_by(self) -> str | None:
        return max(self.seconds, key=lambda name: self.seconds[name], default=None)


def plan_model(
    path: str | os.PathLike[str],
    *,
    batch: int,
    context: int,
    new: int = 1,
    memory_bytes: int | None = None,
    storage: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    draft: str | None = None,
    draft_memory: float | None = None,
    draft_read_ahead_bytes: int | None = None,
) -> ModelPlan:
    """Computes a plan.

    Args:
        path: a model's folder, or a ``config.json`` alone.
        batch: sequences.
        context, new: tokens of each, in the prompt and generated.
        memory_bytes: for weights; None: all of them.
        storage: where K and V will lie; measured, with a temporary file of at most 256 MiB.
        dtype: of weights, K and V; None: as stored, else as the config says.
        draft, draft_memory, draft_read_ahead_bytes: as of `KVCache`.

    Raises:
        InvalidInputError: no such model, numbers out of range, more tokens than the model has
            positions, or a budget that is too small.
        FormatError: the folder's weights are damaged.
        WriteError: `storage` cannot be written.
    """
    for name, value in (("batch", batch), ("context", context), ("new", new)):
        if value < 1:
            raise errors.InvalidInputError(name, got=value, expected="at least 1")
    where = Path(path)
    config = read_config(where)
    has_weights = where.is_dir() and any(where.glob("*.safetensors*"))
    tensors = find_tensors(where) if has_weights else {}
    own = dtype or (
        main_dtype(tensors) if has_weights else getattr(config, "dtype", None) or torch.float32
    )
    model = empty_model(config, own)
    check_positions(f"context of model {where}", context, new, limit=learned_positions(model))
    weights = match(model, tensors if has_weights else _as_saved(model), dtype)
    shared = share(weights.other_bytes, weights.layers, memory_bytes)
    text = config.get_text_config(decoder=True)
    plan = ModelPlan(
        _about(model, own, has_weights),
        _weights(weights, shared),
        _kv(text, own, batch, context + new),
        {},
    )
    plan.step = _step(model, plan, KVShape.of(text), batch, context + new)
    if plan.kv["layers_on_ssd"] == plan.model["layers"]:
        plan.resume = _resume(model, plan, KVShape.of(text), batch, context)
    if draft is not None:
        of, tokens = KVShape.of(text), context + new
        shape = Shape(plan.kv["layers_on_ssd"], of.n_kv, of.n_q // of.n_kv, of.d, of.dv)
        streams = bool(plan.weights["layers_streamed"])
        plan.draft = plan_draft(
            draft,
            draft_memory,
            draft_read_ahead_bytes,
            shape,
            plan.step,
            batch=batch,
            tokens=tokens,
            dtype=own,
            streams_weights=streams,
        )
    if storage is not None:
        _measure(plan, storage, sorted({tensor.path for tensor in tensors.values()}), own, batch)
    return plan


def _as_saved(model: PreTrainedModel) -> dict[str, StoredTensor]:
    """The tensors of a model without files, as if they lay in one file in the model's order."""
    found, at = {}, 0
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            found[name] = StoredTensor(name, "", tensor.dtype, tuple(tensor.shape), at)
            at += found[name].size_bytes
    return found


def _about(model: PreTrainedModel, dtype: torch.dtype, has_weights: bool) -> dict[str, Any]:
    text = model.config.get_text_config(decoder=True)
    return {
        "class": type(model).__name__,
        "layers": text.num_hidden_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "sizes_from": "headers" if has_weights else "config",
    }


def _weights(weights: ModelWeights, shared: Share) -> dict[str, Any]:
    def total(layers: list[LayerWeights]) -> int:
        return sum(layer.size_bytes for layer in layers)

    outside = sum(weight.size_bytes for weight in weights.others.values())
    streamed = [weights.layers[number] for number in shared.streamed]
    return {
        "total_bytes": outside + total(weights.layers),
        "outside_layers_bytes": outside,
        "layers_resident": len(shared.resident),
        "layers_streamed": len(shared.streamed),
        "resident_bytes": outside + total([weights.layers[n] for n in shared.resident]),
        "streamed_bytes": total(streamed),
        "read_bytes_per_pass": sum(layer.stored_bytes for layer in streamed),
        "buffer_bytes": shared.slots * shared.slot_bytes + shared.converted_bytes,
        "memory_bytes": shared.total_bytes,
        "least_memory_bytes": shared.least_bytes,
    }


def _kv(config: PreTrainedConfig, dtype: torch.dtype, batch: int, tokens: int) -> dict[str, Any]:
    """K and V as `espnx.KVCache` keeps them."""
    shape = KVShape.of(config)
    kinds, arguments = get_layer_types_and_kwargs(config)
    full = sum(kind == "full_attention" for kind in kinds)
    windows = [more["sliding_window"] for more in arguments if "sliding_window" in more]
    # full attention beside a state: the framework keeps all of its rows in memory
    hybrid = sum(kind == "hybrid" for kind in kinds)
    row_bytes = shape.n_kv * (shape.d + shape.dv) * dtype.itemsize
    in_memory = batch * row_bytes * (sum(min(w - 1, tokens) for w in windows) + hybrid * tokens)
    layout, x_layout = (
        RowLayout(format_of(dtype), shape.d, shape.dv),
        RowLayout(format_of(dtype), shape.hidden, shape.hidden, is_shared=True),
    )
    streams = batch * full * shape.n_kv
    whole = tokens // layout.block_rows
    ssd = streams * whole * layout.block_bytes
    ahead = min(ssd, READ_AHEAD_BYTES)
    return {
        "layers_on_ssd": full,
        "layers_with_window": len(windows),
        "layers_with_rows_and_state": hybrid,
        "layers_of_other_kinds": len(kinds) - full - len(windows) - hybrid,
        "bytes_per_token": row_bytes * full,
        "total_bytes": batch * row_bytes * full * tokens + in_memory,
        "ssd_bytes": ssd,
        "memory_tail_bytes": streams
        * _TAIL_BLOCKS
        * layout.block_rows
        * (shape.d + shape.dv)
        * dtype.itemsize,
        "memory_checksum_bytes": 4 * streams * whole,
        "memory_buffer_bytes": ahead,
        "memory_layers_bytes": in_memory,
        "x_bytes_per_token": shape.hidden * dtype.itemsize * full,
        "x_ssd_bytes": batch * full * (tokens // x_layout.block_rows) * x_layout.block_bytes,
        "x_to_kv_ratio": shape.ratio,
    }


@dataclass(frozen=True)
class _Used:
    """Parameters: of the head, that are multiplied with each token's row (the head among them), and
    that a step of a batch touches."""

    head: int
    by_token: int
    by_batch: int

    @classmethod
    def of(cls, model: PreTrainedModel, batch: int) -> _Used:
        config = model.config.get_text_config(decoder=True)
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        own = sum(p.numel() for p in model.parameters() if p is not embedding)
        if head is not None and head.weight is embedding:
            own += embedding.numel()
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        count = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), 1)
        chosen = min(getattr(config, "num_experts_per_tok", None) or count, count)
        rest = own - experts
        return cls(
            0 if head is None else head.weight.numel(),
            rest + experts * chosen // count,
            rest + experts * min(count, batch * chosen) // count,
        )


def _step(
    model: PreTrainedModel, plan: ModelPlan, shape: KVShape, batch: int, tokens: int
) -> dict[str, Any]:
    """What crosses each resource once in the last step."""
    used = _Used.of(model, batch)
    size = plan.weights["total_bytes"] / plan.model["parameters"]
    attention = 2 * batch * plan.kv["layers_on_ssd"] * shape.n_q * (shape.d + shape.dv) * tokens
    return {
        "read_bytes": plan.weights["read_bytes_per_pass"] + plan.kv["ssd_bytes"],
        "read_weight_bytes": plan.weights["read_bytes_per_pass"],
        "read_kv_bytes": plan.kv["ssd_bytes"],
        "memory_bytes": round(used.by_batch * size) + plan.kv["total_bytes"],
        "operations": 2 * used.by_token * batch + attention,
    }


def _resume(
    model: PreTrainedModel, plan: ModelPlan, shape: KVShape, batch: int, tokens: int
) -> dict[str, Any]:
    """What computing prompts of so many tokens anew takes. Only the last token needs the head; a
    token attends to those before it and to itself."""
    used = _Used.of(model, batch)
    dense = 2 * batch * ((used.by_token - used.head) * tokens + used.head)
    attention = (
        2
        * batch
        * plan.kv["layers_on_ssd"]
        * shape.n_q
        * (shape.d + shape.dv)
        * tokens
        * (tokens + 1)
        // 2
    )
    return {
        "tokens": tokens,
        "kv_bytes": batch * plan.kv["bytes_per_token"] * tokens,
        "operations": dense + attention,
    }


def _measure(
    plan: ModelPlan,
    storage: str | os.PathLike[str],
    files: list[str],
    dtype: torch.dtype,
    batch: int,
) -> None:
    """Fills in speeds and seconds."""
    speed = read_speed(storage)
    plan.speeds = {
        "storage_bytes_per_s": speed.bytes_per_s,
        "storage_path": speed.effective_path,
        "probe_bytes": speed.bytes_asked,
    }
    weights_bytes, kv_bytes = plan.step["read_weight_bytes"], plan.step["read_kv_bytes"]
    if weights_bytes and files and os.stat(files[0]).st_dev != os.stat(storage).st_dev:
        other = read_speed_of(files)
        plan.speeds |= {
            "weights_bytes_per_s": other.bytes_per_s,
            "weights_path": other.effective_path,
        }
        plan.seconds["disk of weights"] = weights_bytes / other.bytes_per_s
        plan.seconds["disk of K and V"] = kv_bytes / speed.bytes_per_s
    else:
        plan.seconds["disk"] = (weights_bytes + kv_bytes) / speed.bytes_per_s
    memory, gemm = memory_speed(), gemm_speed(dtype, batch)
    plan.speeds |= {"memory_bytes_per_s": memory, "gemm_operations_per_s": gemm}
    plan.seconds |= {
        "memory": plan.step["memory_bytes"] / memory,
        "compute": plan.step["operations"] / gemm,
    }
    if plan.draft:
        add_seconds(plan.draft, plan.seconds, plan.speeds, batch=batch, dtype=dtype)
    if resume := plan.resume:
        plan.speeds["prefill_operations_per_s"] = rate = gemm_speed(dtype, batch * resume["tokens"])
        resume["recompute_s"] = resume["operations"] / rate
        resume["read_s"] = resume["kv_bytes"] / speed.bytes_per_s
        resume["break_even_bytes_per_s"] = resume["kv_bytes"] / resume["recompute_s"]
