"""Attention over stored rows, for callers: checks, then dispatch by device; and the merging of
partial results."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError
from ...forks import compute_alone
from .._native import is_direct, load_ops
from .checks import ROW_FORMATS, block_bytes, check_arguments, check_inside, check_rows
from .cpu import attention_cpu
from .cuda import attention_inside_triton, attention_triton


def attention(
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
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of queries over K and V rows that lie in place, in blocks, in an I/O
    buffer.

    Products, sums and exponentials are fp32 whatever the format; the buffer is not copied. A block
    of ``block_rows`` tokens holds, one after the other: with int8 alone, K's scales, fp32 ``[d]``
    (one per channel); K rows ``[block_rows, d]``; with int8 alone, V's scales, fp32
    ``[block_rows]`` (one per token); V rows ``[block_rows, dv]``. With ``dv=0`` it holds X rows
    ``[block_rows, d]``, which stand for K and V at once.

    Args:
        query: float32, float16 or bfloat16 ``[B, H, q, d]``; ``d`` is a multiple of 8 from 8 to
            16384.
        buffer: uint8 ``[bytes]``, contiguous, on the query's device. It must not be written to
            until the result is there.
        block_offset_bytes: int64 ``[B, n_kv, n_blocks]``, where each block begins: any address on
            the CPU. ``H`` is a multiple of ``n_kv``, and the query heads of a KV head are adjacent.
            Entries beyond a sequence's last block are not looked at.
        n_rows: int64 ``[B]``, the rows of each sequence, 0 allowed; on CUDA fewer than
            2^31 - 2^20.
        block_rows: tokens in a block, the last one of a sequence included (its other rows are not
            looked at, but must be there).
        format: of the rows: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        scale: what scores are multiplied by; by default ``d ** -0.5``.
        dv: values of a V row, by default ``d``; 0 for X rows.
        visible: uint8 ``[B, rows]``: a row whose entry is 0 is hidden from every query (padding).
            By default all are visible.
        last_position: int64 ``[B, q]``: a query sees rows 0 to this one, and none where it is
            negative. By default all of them.
        threads: at most so many CPU threads; by default as many as torch uses, fewer where the work
            does not pay for them.

    Returns:
        ``o`` float32 ``[B, H, q, dv]`` and ``lse`` float32 ``[B, H, q]``, the logarithm of the
        softmax's denominator, by which results over different rows can be merged. A query that sees
        no row: 0 and -inf. What is not finite gives what IEEE products and sums in fp32 give, on
        every device: a row whose score is -inf weighs nothing, one of +inf or NaN makes the query's
        results NaN, a NaN or an infinity of V its value of ``o`` (docs/lossless.md); what hidden
        rows hold has no effect.

    Raises:
        InvalidInputError: a wrong dtype, shape, device, format or dimension; a block outside the
            buffer (checked before any is read).
        MissingDependencyError: the extension is not built, or on CUDA Triton is not installed.
    """
    compute_alone()
    check_arguments(query, buffer, block_offset_bytes, n_rows, visible, last_position)
    d = query.shape[-1]
    values = d if dv is None else dv
    check_rows(block_rows, d, values, format)
    if threads is not None and threads < 1:
        raise InvalidInputError(
            "attention threads", got=threads, expected="1 or more, or None to leave it to the op"
        )
    factor = d**-0.5 if scale is None else float(scale)
    given = (
        query,
        buffer,
        block_offset_bytes,
        n_rows,
        block_rows,
        format,
        factor,
        values,
        visible,
        last_position,
        threads or 0,
    )
    try:
        if is_direct(query, buffer):
            return attention_cpu(*given)
        if is_direct(query, buffer, on="cuda"):
            return attention_triton(*given)
        load_ops()
        return torch.ops.espnx.attention(*given)
    except (IndexError, ValueError) as error:
        # C++ looks at each entry once; Python looks again only where it has found something
        if query.device.type != "cpu" or isinstance(error, InvalidInputError):
            raise  # of another device: Triton's own, which say nothing of the tables
        found = error
    check_inside(
        buffer.numel(),
        block_offset_bytes,
        n_rows,
        block_rows,
        block_bytes(block_rows, d, values, format),
        visible,
    )
    raise found


def attention_inside(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    *,
    rows_max: int,
    align_bytes: int,
    block_rows: int,
    format: str,  # noqa: A002
    dv: int,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` over blocks whose places are known to be right, of queries that are scaled
    already, with every table where the query is: nobody looks at them, and so the host does not
    wait for a device.

    Args:
        rows_max: the largest of `n_rows`.
        align_bytes: what the addresses of all blocks are multiples of (`alignment`).

    The other arguments, and what it returns, as of `attention`. On the CPU entries are
    checked all the same.
    """
    given = (block_rows, format, 1.0, dv, visible, last_position, threads or 0)
    if is_direct(query, buffer):
        return attention_cpu(query, buffer, block_offset_bytes, n_rows, *given)
    whole = (query, buffer, block_offset_bytes, n_rows, rows_max, align_bytes, *given)
    if is_direct(query, buffer, on="cuda"):
        return attention_inside_triton(*whole)
    load_ops()
    o, lse = torch.ops.espnx.attention_inside(*whole)
    return o, lse


def alignment(buffer: torch.Tensor, offset_multiple: int, fmt: str) -> int:
    """What the addresses of blocks are multiples of that lie at multiples of so many bytes: 16, or
    the size of an element (int8: of a scale), which is then all that loads may count on."""
    if buffer.data_ptr() % 16 == 0 and offset_multiple % 16 == 0:
        return 16
    return max(ROW_FORMATS[fmt].itemsize, 4 if fmt == "int8" else 1)


def merge(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the rows of two results of the same queries, as if they had been attended
    to at once.

    Args:
        o1, o2: ``[..., dv]``.
        lse1, lse2: ``[...]``; -inf where a result has seen no row.

    Returns:
        ``o`` and ``lse`` like the arguments.

    Raises:
        InvalidInputError: the shapes do not fit.
    """
    compute_alone()
    if o1.shape != o2.shape or lse1.shape != lse2.shape or o1.shape[:-1] != lse1.shape:
        got = ", ".join(str(list(tensor.shape)) for tensor in (o1, lse1, o2, lse2))
        raise InvalidInputError(
            "merge of attention results",
            got=got,
            expected="o1 and o2 [..., dv], lse1 and lse2 [...]",
        )
    lse = torch.logaddexp(lse1, lse2)
    peak = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(lse1 - peak)[..., None] * o1 + torch.exp(lse2 - peak)[..., None] * o2, lse
