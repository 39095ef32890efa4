"""Attention of many queries over rows that all of them see, by the framework's fused kernel, with
its log-sum-exp. For a chunk of a prompt over stored rows: the kernels of `espnx.kernels` are made
for few queries, whose time is that of reading the rows. A file of its own: nothing here is ours."""

from __future__ import annotations

import torch

#: So many queries of a KV head take it: fewer are bound by the bytes of the rows, which it reads
#: twice more (they are laid together first).
QUERIES_MIN = 64
_WIDEST, _MULTIPLE = 256, 8
_CAPABILITY_MIN = (8, 0)
_HALVES = (torch.float16, torch.bfloat16)


def takes_fused(d: int, dv: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel takes rows of these lengths and this dtype, and is there for a device."""
    return d == dv <= _WIDEST and d % _MULTIPLE == 0 and dtype in _HALVES and has_flash(device)


def has_flash(device: torch.device) -> bool:
    """Whether the framework has its flash kernel for a device: it refuses GPUs before Ampere."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= _CAPABILITY_MIN


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o float32 [chains, n, d], lse float32 [chains, n]) of queries q float32 [chains, n, d],
    which were multiplied by `scale` and before that had the dtype of the rows k and v [chains,
    rows, d]. Rows that are not finite make the results NaN.

    Weights are rounded to the dtype of the rows, as in the framework's own attention
    (docs/tolerances.md).
    """
    # what they were, to the bit: a product and a quotient in fp32 are off by less than half a unit
    # of a half
    queries = q.div(scale).to(k.dtype).unsqueeze(1)
    keys, values = k.unsqueeze(1), v.unsqueeze(1)
    if q.device.type == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, scale=scale
        )
    else:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, keys, values, 0.0, False, False, scale=scale
        )
    n = q.shape[1]
    o, lse = o.float().squeeze(1), lse.float().reshape(len(q), 1, -1)[:, 0, :n]
    # the kernel has 0 x infinity for a row that weighs nothing, and infinity for other weights
    bad_k, bad_v = (~rows.isfinite().all(dim=-1).all(dim=-1) for rows in (k, v))
    o = o.masked_fill((bad_k | bad_v)[:, None, None], torch.nan)
    return o, lse.masked_fill(bad_k[:, None], torch.nan)
