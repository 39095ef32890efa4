"""Attention over stored rows in plain PyTorch: what the fast versions are tested against, and what
the op means."""

from __future__ import annotations

import torch

from ..scales import scale_or_nan
from .checks import ROW_FORMATS, block_bytes, check_arguments, check_inside, check_rows


def attention_reference(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    *,
    block_rows: int,
    format: str = "fp16",  # noqa: A002
    scale: float | None = None,
    dv: int | None = None,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.attention` in plain PyTorch, on any device; same arguments, results and errors.
    ``dtype`` is what it computes in."""
    check_arguments(query, buffer, block_offset_bytes, n_rows, visible, last_position)
    batch, heads, q_len, d = query.shape
    values = d if dv is None else dv
    check_rows(block_rows, d, values, format)
    check_inside(
        buffer.numel(),
        block_offset_bytes,
        n_rows,
        block_rows,
        block_bytes(block_rows, d, values, format),
        visible,
    )
    n_kv = block_offset_bytes.shape[1]
    factor = d**-0.5 if scale is None else scale
    o = torch.zeros(batch, heads, q_len, values or d, dtype=dtype, device=query.device)
    lse = torch.full((batch, heads, q_len), -torch.inf, dtype=dtype, device=query.device)
    for i in range(batch):
        count = int(n_rows[i])
        seen = torch.ones(q_len, count, dtype=torch.bool, device=query.device)
        if visible is not None:
            seen &= visible[i, :count].to(query.device) != 0
        if last_position is not None:
            seen &= (
                torch.arange(count, device=query.device)
                <= last_position[i].to(query.device)[:, None]
            )
        for head in range(heads):
            if head % (heads // n_kv) == 0:
                table = block_offset_bytes[i, head // (heads // n_kv)].tolist()
                k, v = stored_rows(buffer, table, count, block_rows, d, values, format, dtype)
            o[i, head], lse[i, head] = _attend(query[i, head].to(dtype) * factor, k, v, seen)
    return o, lse


def stored_rows(
    buffer: torch.Tensor,
    table: list[int],
    n_rows: int,
    block_rows: int,
    d: int,
    dv: int,
    fmt: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[n_rows, d]`` and V ``[n_rows, dv]`` of one head, decoded; X rows, if ``dv`` is 0, are
    both."""
    blocks = [
        _block(
            buffer[offset : offset + block_bytes(block_rows, d, dv, fmt)].clone(),
            block_rows,
            d,
            dv,
            fmt,
            dtype,
        )
        for offset in table[: -(-n_rows // block_rows)]
    ]
    if not blocks:
        return buffer.new_empty((0, d), dtype=dtype), buffer.new_empty((0, dv or d), dtype=dtype)
    return torch.cat([k for k, _ in blocks])[:n_rows], torch.cat([v for _, v in blocks])[:n_rows]


def _block(
    data: torch.Tensor, block_rows: int, d: int, dv: int, fmt: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    item = ROW_FORMATS[fmt]
    if fmt != "int8":
        split = block_rows * d * item.itemsize
        k = data[:split].view(item).view(block_rows, d).to(dtype)
        return k, k if dv == 0 else data[split:].view(item).view(block_rows, dv).to(dtype)
    k_scales, codes, v_scales, v_codes = data.split(
        [4 * d, block_rows * d, 4 * block_rows, block_rows * dv]
    )
    k_scale, v_scale = (
        scale_or_nan(each.clone().view(torch.float32)).to(dtype) for each in (k_scales, v_scales)
    )
    k = codes.view(torch.int8).view(block_rows, d).to(dtype) * k_scale
    v = v_codes.view(torch.int8).view(block_rows, dv).to(dtype) * v_scale[:, None]
    return k, v


def _attend(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One head: query ``[q, d]``, already scaled, and which rows each query sees, ``[q, rows]``."""
    scores = torch.where(seen, query @ k.T, -torch.inf)
    peak = scores.amax(dim=-1) if k.shape[0] else scores.new_full((query.shape[0],), -torch.inf)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    p = torch.exp(scores - peak[:, None])
    total = p.sum(dim=-1)
    # Infinities and NaNs one by one, since a hidden row's probability of 0 would turn them into
    # NaN.
    finite = v.isfinite().all(dim=-1)
    o = p[:, finite] @ v[finite]
    for row in (~finite).nonzero().flatten().tolist():
        o += torch.where(seen[:, row, None], p[:, row, None] * v[row], 0.0)
    return torch.where(total == 0, 0.0, o.T / total).T, peak + torch.log(total)
