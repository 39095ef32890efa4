"""K and V in four bits, K by channel and V by token, and attention over them in place (KIVI, arXiv
2402.02750, section 3.2): for drafts, whose tokens are verified.

A page has `PACKED_ROWS` consecutive tokens of one (sequence, KV head), the first at a multiple of
as many; csrc/cpu/packed/packed.hpp says how it lies in memory. Each channel of K has a step and
a least value a page, and of V each token, for every `PACKED_CHANNELS` channels; both are fp16.
"""

from __future__ import annotations

import torch

from ...errors import InvalidInputError
from .._native import load_extension
from .api import merge
from .memory import attend_rows
from .rows import Queries, RowsInMemory, check_rows_in_memory, native_arguments

PACKED_ROWS, PACKED_CHANNELS = 32, 64
_CODES = 15  # the largest code
#: Pages that are decoded at a time where no kernel attends in place.
_PAGES_AT_ONCE = 64


def packed_page_bytes(d: int, dv: int) -> int:
    """Bytes of a page of rows of these lengths: 4.75 bits a value for d and dv of 64."""
    groups = -(-dv // PACKED_CHANNELS)
    return (4 + PACKED_ROWS // 2) * d + PACKED_ROWS * 4 * groups + PACKED_ROWS // 2 * dv


def pack_pages(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Packs whole pages: compiled on the CPU, by `pack_pages_reference` elsewhere.

    Args:
        k, v: [..., n, d] and [..., n, dv] of any float dtype; n: a multiple of `PACKED_ROWS`, dv of
            8. What is not finite becomes the nearest number of fp16 (NaN: 0).

    Returns:
        uint8 [..., n / PACKED_ROWS, page_bytes], on the same device.

    Raises:
        InvalidInputError: another n.
    """
    n, d, dv = k.shape[-2], k.shape[-1], v.shape[-1]
    if k.device.type != "cpu" or n % PACKED_ROWS or k.shape[:-1] != v.shape[:-1]:
        return pack_pages_reference(k, v)
    shape = (*k.shape[:-2], n // PACKED_ROWS, packed_page_bytes(d, dv))
    pages = torch.empty(shape, dtype=torch.uint8)
    if pages.numel():
        k, v = (each.float().contiguous().view(-1, each.shape[-1]) for each in (k, v))
        load_extension().pack_pages(k, v, pages.view(-1, shape[-1]), torch.get_num_threads())
    return pages


def pack_pages_reference(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`pack_pages` in plain PyTorch, to the bit the same."""
    n = k.shape[-2]
    if n % PACKED_ROWS or v.shape[-2] != n:
        raise InvalidInputError(
            "rows to pack",
            got=f"{n} of K and {v.shape[-2]} of V",
            expected=f"as many, a multiple of {PACKED_ROWS}",
        )
    k, v = (_finite(each).unflatten(-2, (-1, PACKED_ROWS)) for each in (k, v))
    codes_k, *scales_k = _quantise(k, -2)
    of_groups = [_quantise(some, -1) for some in v.split(PACKED_CHANNELS, dim=-1)]
    codes_v = torch.cat([codes for codes, *_ in of_groups], dim=-1)
    scales_v = (torch.stack([each[i] for each in of_groups], dim=-1) for i in (1, 2))
    parts = [
        each.contiguous().view(torch.uint8).flatten(v.dim() - 2) for each in (*scales_k, *scales_v)
    ]
    pairs = [_pairs(codes_k), _pairs(codes_v)]
    return torch.cat([*parts[:2], pairs[0], *parts[2:], pairs[1]], dim=-1)


def _finite(rows: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(torch.float16).max
    return rows.float().nan_to_num(nan=0.0).clamp(-most, most)


def _quantise(rows: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 like rows, steps fp16, least values fp16), both without `dim`."""
    least = rows.amin(dim=dim).half()
    reach = rows.amax(dim=dim) - least.float()
    step = (reach / _CODES).clamp_max(torch.finfo(torch.float16).max).half()
    by = step.float().unsqueeze(dim)
    above = rows - least.float().unsqueeze(dim)
    codes = torch.where(by > 0, above / by, 0.0).round_().clamp_(0, _CODES)
    return codes.to(torch.uint8), step, least


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two tokens a byte: uint8 [..., PACKED_ROWS / 2 * width]."""
    first, second = codes[..., ::2, :], codes[..., 1::2, :]
    return (first | second << 4).flatten(-2)


def unpack_pages(pages: torch.Tensor, d: int, dv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) float32 [..., n, d] and [..., n, dv] of uint8 [..., pages, page_bytes]: the reference
    of what the kernel attends to, in plain PyTorch."""
    groups = -(-dv // PACKED_CHANNELS)
    sizes = [2 * d, 2 * d, PACKED_ROWS // 2 * d, *[2 * PACKED_ROWS * groups] * 2]
    parts = pages.split([*sizes, pages.shape[-1] - sum(sizes)], dim=-1)
    step_k, least_k, step_v, least_v = (
        parts[i].contiguous().view(torch.float16).float() for i in (0, 1, 3, 4)
    )
    k = _codes(parts[2], d) * step_k[..., None, :] + least_k[..., None, :]
    step_v, least_v = (
        each.unflatten(-1, (PACKED_ROWS, groups)).repeat_interleave(PACKED_CHANNELS, dim=-1)
        for each in (step_v, least_v)
    )
    v = _codes(parts[5], dv) * step_v[..., :dv] + least_v[..., :dv]
    return k.flatten(-3, -2), v.flatten(-3, -2)


def _codes(pairs: torch.Tensor, width: int) -> torch.Tensor:
    both = pairs.unflatten(-1, (-1, width))
    return torch.stack([both & 15, both >> 4], dim=-2).flatten(-3, -2).float()


def attend_packed(
    queries: Queries,
    pages: torch.Tensor,
    n_pages: int,
    rows: RowsInMemory | None = None,
    *,
    threads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed pages, and rows beside them: on the CPU compiled, each page decoded
    where it is needed and nowhere kept; elsewhere some pages at a time, by `attend_rows`.

    Args:
        queries: what attends, with any of its masks and rules.
        pages: uint8 [sequences, KV heads, capacity, page_bytes], contiguous, where the queries are.
        n_pages: that count; the first row stands at position 0.
        rows: where the queries are, further rows; None: there are none.
        threads: at most so many CPU threads; 0: as many as PyTorch uses.

    Returns:
        (o float32 [sequences, KV heads, n, dv], lse float32 [sequences, KV heads, n]); 0 and -inf
        for a query that sees nothing.

    Raises:
        InvalidInputError: a wrong dtype, shape or device.
    """
    check_rows_in_memory(queries, rows)
    q, d = queries.q, queries.q.shape[-1]
    wanted = (*q.shape[:2], packed_page_bytes(d, queries.dv))
    fits = pages.dim() == 4 and (*pages.shape[:2], pages.shape[3]) == wanted
    if (
        not fits
        or pages.dtype != torch.uint8
        or pages.device != q.device
        or not pages.is_contiguous()
        or not 0 <= n_pages <= pages.shape[2]
    ):
        raise InvalidInputError(
            "packed pages",
            got=f"{pages.dtype} {list(pages.shape)} on {pages.device}, {n_pages} of them",
            expected=f"contiguous uint8 [{wanted[0]}, {wanted[1]}, pages, {wanted[2]}]",
        )
    if q.device.type == "cpu":
        given = native_arguments(queries, rows, threads)
        return load_extension().attend_packed(pages, n_pages, **given)
    o, lse = attend_rows(queries, rows, threads=threads)
    for begin in range(0, n_pages, _PAGES_AT_ONCE):
        some = pages[:, :, begin : min(begin + _PAGES_AT_ONCE, n_pages)]
        k, v = (each.contiguous() for each in unpack_pages(some, d, queries.dv))
        rows = RowsInMemory(k, v, 0, k.shape[2], begin * PACKED_ROWS)
        o, lse = merge(o, lse, *attend_rows(queries, rows))
    return o, lse
