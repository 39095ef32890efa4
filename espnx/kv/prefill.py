"""Attention of a chunk of new tokens over itself (prefill): the framework's fused kernels, never a
matrix of chunk x chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ops.attention.fused import has_flash
from ..ops.precision import whole_float32
from .scores import PLAIN, ScoreRules

_QUERIES_AT_ONCE = 256
_WIDEST_FUSED = 256  # values of a head, on a GPU
_FUSED_MULTIPLE = 8  # of them there, where kernels are called by their names


def chunk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    wants_lse: bool,
    rules: ScoreRules = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention of n tokens over themselves, but for sinks.

    Args:
        q: [sequences, heads, n, d].
        k, v: [sequences, KV heads, n, d] and [..., dv].
        scale: of the scores.
        hidden: bool [sequences, n]: padding, or None; on the host, where it is looked at. A token
            that sees nothing but padding gets zeros.
        wants_lse: whether the log-sum-exp is needed, for merging with what came before.
        rules: what the model does to scores.

    Returns:
        (o [sequences, heads, n, dv], lse float32 [sequences, heads, n] or None).
    """
    q, k, v = (rows.to(torch.promote_types(q.dtype, k.dtype)) for rows in (q, k, v))
    if not rules.are_plain:
        on_device = None if hidden is None else hidden.to(q.device, non_blocking=True)
        return _masked(q, k, v, scale, on_device, rules)
    if hidden is None:
        return _causal(q, k, v, scale, wants_lse)
    o = q.new_zeros((*q.shape[:3], v.shape[-1]))
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32) if wants_lse else None
    for first, which in _by_padding(hidden):
        sequences = which.to(q.device, non_blocking=True)
        if first is None:  # padding elsewhere than on the left
            elsewhere = hidden[which].to(q.device, non_blocking=True)
            part, sums = _masked(q[sequences], k[sequences], v[sequences], scale, elsewhere)
            first = 0
        else:
            part, sums = _causal(
                q[sequences, :, first:],
                k[sequences, :, first:],
                v[sequences, :, first:],
                scale,
                wants_lse,
            )
        o[sequences, :, first:] = part
        if lse is not None and sums is not None:
            lse[sequences, :, first:] = sums
    return o, lse


def _by_padding(hidden: torch.Tensor) -> list[tuple[int | None, torch.Tensor]]:
    """Sequences with the same number of hidden tokens on the left; None where others are hidden
    too."""
    counts = hidden.sum(dim=1)
    on_left = (torch.arange(hidden.shape[1]) < counts[:, None]).eq(hidden).all(dim=1)
    keys = torch.where(on_left, counts, -1)
    return [
        (None if key < 0 else int(key), (keys == key).nonzero().flatten())
        for key in keys.unique().tolist()
    ]


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wants_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if q.shape[2] == 0:
        return q.new_zeros((*q.shape[:3], v.shape[-1])), q.new_zeros(
            q.shape[:3], dtype=torch.float32
        )
    if not has_fused(q, v):
        return _masked(q, k, v, scale, None)
    if wants_lse and q.device.type != "cpu":
        return _causal_on_gpu(q, k, v, scale)
    k, v = for_fused(q, k, v)
    if not wants_lse:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        ), None
    k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], dim=1) for rows in (k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scale
    )
    return o, lse.float().reshape(q.shape[:3])


def _causal_on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the kernels behind `F.scaled_dot_product_attention`, which does not show the
    log-sum-exp: FlashAttention for half precision, the memory-efficient one for fp32, whose
    log-sum-exps are as many as a whole number of its tiles."""
    n = q.shape[2]
    is_half = q.dtype != torch.float32
    if q.shape[-1] % _FUSED_MULTIPLE or (is_half and not has_flash(q.device)):
        return _masked(q, k, v, scale, None)
    k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], dim=1) for rows in (k, v))
    if not is_half:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, True, scale=scale
        )
    else:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )
    return o, lse[:, :, :n]


def has_fused(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether there is a kernel that keeps no matrix of queries x positions; where there is none,
    PyTorch makes that matrix."""
    return q.shape[-1] == v.shape[-1] and (q.device.type == "cpu" or q.shape[-1] <= _WIDEST_FUSED)


def for_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as a fused kernel takes them: on a GPU the one for fp32 knows no grouped queries."""
    if q.device.type == "cpu" or q.dtype != torch.float32 or q.shape[1] == k.shape[1]:
        return k, v
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


@whole_float32()
def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    rules: ScoreRules = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with any hidden tokens, or with a log-sum-exp where no fused kernel gives one: some
    hundred queries at a time."""
    groups, n = q.shape[1] // k.shape[1], q.shape[2]
    keys, values = (rows.float().repeat_interleave(groups, dim=1) for rows in (k, v))
    outputs, sums = [], []
    for begin in range(0, n, _QUERIES_AT_ONCE):
        end = min(begin + _QUERIES_AT_ONCE, n)
        scores = q[:, :, begin:end].float() @ keys[:, :, :end].transpose(-1, -2) * scale
        distance = (
            torch.arange(end, device=q.device) - torch.arange(begin, end, device=q.device)[:, None]
        )
        scores, seen = rules.changed(scores, distance), distance <= 0
        if hidden is not None:
            seen = seen & ~hidden[:, None, None, :end]
        scores = scores.masked_fill(~seen, float("-inf"))
        lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - lse.clamp_min(torch.finfo(torch.float32).min)[..., None])
        # Not 0 x NaN: what a hidden token holds has no effect.
        safe = (
            values[:, :, :end]
            if hidden is None
            else values[:, :, :end].masked_fill(hidden[:, None, :end, None], 0.0)
        )
        outputs.append((weights @ safe).to(q.dtype))
        sums.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)
