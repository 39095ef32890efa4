"""Attention over K and V rows in place, in blocks, in a byte buffer.

``o[head, i] = sum over the rows r that query i sees of softmax_r(<query[head, i], k_r>) v_r``,
``lse`` the logarithm of its denominator

query    float32 ``[n_heads, n_queries, D]``, already multiplied by the softmax scale; ``n_heads``
         counts KV heads of all sequences, and their queries are all those of the query heads that
         share it, ``q_len`` of each
buffer   uint8 ``[bytes]``; block b of a head begins at byte ``block_offset_bytes[head, b]``. Its
         parts begin at constant distances: K_BEGIN, V_BEGIN (the same one for X rows), and K's and
         V's scales (int8 alone) at 0 and V_SCALE_BEGIN
n_rows   int64 ``[n_sequences]``; visible uint8 ``[n_sequences, visible_stride]``, none where that
         is 0; last_position int64 ``[n_sequences, q_len]``, none unless has_last
position int64 ``[n_sequences, q_len]``: where each query stands, counted from its sequence's first
         row; for a window and slopes alone
slope    float32 ``[n_heads, n_queries]``, with HAS_SLOPES
o        float32 ``[n_splits, n_heads, n_queries, DV]``
lse      float32 ``[n_splits, n_heads, n_queries]``

A score s becomes ``SOFT_CAP * tanh(s / SOFT_CAP)`` unless SOFT_CAP is 0, then with HAS_SLOPES row
t adds ``slope * (t - position)`` to it. With HAS_WINDOW a query sees the ``window`` rows up to its
own alone. These three are a model's, and make variants of their own: what a model does not have
costs its inner loop nothing.

What is not finite gives what IEEE products and sums in fp32 of the stored values give: where a
program's result is not finite, or NaN, it is made once more with care.

One program takes BLOCK_Q queries of one head over one of n_splits parts of its rows, in tiles of
BLOCK_T. The parts are merged afterwards. Addresses are 64 bits wide. Rows of more than 256 values
are for ``wide_attention.py``, long ones of 16 bits for ``csrc/cuda/attention.cu`` if compiled.
"""

import triton
import triton.language as tl

from .attention_parts import (
    TABLES,
    block_of,
    broken,
    in_bf16,
    in_fp16,
    last_rows,
    not_finite,
    place_of_results,
    program_place,
    program_rows,
    query_places,
    rescaled,
    row_products,
    rows_tile,
    ruled_scores,
    scale_or_nan,
    store_state,
    stored_tile,
    v_begins,
    weighed_rows,
)


@triton.jit
def attend(
    query,
    last,
    position,
    slope,
    window,
    buffer_ptr,
    offset_ptr,
    visible_ptr,
    begin,
    end,
    block_rows,
    has_visible,
    v_begin,
    v_scale_begin,
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    CAREFUL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """(Peaks, sums of weights, weighed sums of V) over rows ``begin`` to ``end``, of those that a
    query sees: up to ``last``.

    Without CAREFUL, a value that is not finite makes all sums of its row or column so, also those
    of queries that do not see its row; and an infinite value of K makes NaN of what is an infinite
    score, since the parts that a query's value is multiplied in differ in sign, or are 0.
    """
    IS_PLAIN: tl.constexpr = not CAREFUL and (FORMAT != "int8" or IN_BLOCK)
    # Weights of fp16 values are fp16, too: the larger they are, the fewer leave its range.
    SHIFT: tl.constexpr = 9.0 if IS_PLAIN and FORMAT == "fp16" else 0.0
    best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    lane = tl.arange(0, BLOCK_T)
    inverse = 1.0 / block_rows.to(tl.float32)
    parts = (query, query, query)
    if FORMAT == "fp16" and IS_PLAIN:
        parts = in_fp16(query)
    elif FORMAT == "bf16" and IS_PLAIN:
        parts = in_bf16(query)
    for tile in tl.range(begin, end, BLOCK_T, num_stages=1 if CAREFUL else None):
        # Rows after the last are the last one once more, which nobody sees.
        t = tl.minimum(tile + lane, end - 1)
        is_visible = tl.load(visible_ptr + t, mask=has_visible, other=1) != 0
        seen = tl.where(is_visible, tile + lane, 2147483647)[None, :] <= last[:, None]
        if HAS_WINDOW:
            seen = seen & ((tile + lane)[None, :] > (position - window)[:, None])
        if IN_BLOCK:
            offset = tl.load(offset_ptr + tile // block_rows)
            base = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES) + tl.zeros_like(lane)
            in_block = tile % block_rows + (t - tile)
        else:
            block, in_block = block_of(tile, t - tile, block_rows, inverse)
            offset = tl.load(offset_ptr + block)
            base = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES)
        if IS_PLAIN:
            scales = 0.0
            if FORMAT == "int8":
                at = tl.arange(0, BLOCK_D)
                first = (buffer_ptr + tl.multiple_of(offset, 4)).to(tl.pointer_type(tl.float32))
                scales = scale_or_nan(tl.load(first + at, mask=at < D, other=0.0))
            rows = stored_tile(base, K_BEGIN, in_block, D, BLOCK_D, FORMAT)
            products = row_products(query, parts, rows, scales, FORMAT, PRECISION)
        else:
            rows = rows_tile(base, K_BEGIN, 0, in_block, lane < BLOCK_T, D, BLOCK_D, FORMAT, False)
            products = tl.dot(query, tl.trans(rows), input_precision=PRECISION)
        products = ruled_scores(products, slope, position, tile + lane, SOFT_CAP, HAS_SLOPES)
        scores = tl.where(seen, products, float("-inf"))
        best, total, alpha, p = rescaled(best, total, scores, SHIFT)
        if IS_PLAIN:
            scales = 0.0
            if FORMAT == "int8":
                first = (base + v_scale_begin).to(tl.pointer_type(tl.float32))
                scales = scale_or_nan(tl.load(first + in_block))
            values = stored_tile(base, v_begin, in_block, DV, BLOCK_DV, FORMAT)
            sums = weighed_rows(sums * alpha[:, None], p, values, scales, FORMAT, PRECISION)
        else:
            values = rows_tile(
                base, v_begin, v_scale_begin, in_block, lane < BLOCK_T, DV, BLOCK_DV, FORMAT, True
            )
            if CAREFUL:
                finite = tl.where(tl.abs(values) < float("inf"), values, 0.0)
                sums = sums * alpha[:, None] + tl.dot(p, finite, input_precision=PRECISION)
                sums += not_finite(p, values, seen)
            else:
                sums = sums * alpha[:, None] + tl.dot(p, values, input_precision=PRECISION)
    return best - SHIFT, total, sums


@triton.jit
def attend_carefully(
    query_ptr,
    buffer_ptr,
    offset_ptr,
    n_rows,
    visible_ptr,
    last_position_ptr,
    position_ptr,
    slope_ptr,
    o_ptr,
    lse_ptr,
    head,
    sequence,
    first,
    n_queries,
    q_len,
    block_rows,
    begin,
    end,
    has_visible,
    has_last,
    window,
    v_begin,
    v_scale_begin,
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Writes the results of a program's BLOCK_Q queries from ``first`` on, 16 at most, which is the
    least that products take here: as fp32 products have them, whatever the rows hold."""
    lane = tl.arange(0, 16)
    q = first + lane
    is_query = (q < n_queries) & (lane < BLOCK_Q)
    k = tl.arange(0, BLOCK_D)
    query_rows = query_ptr + (head * n_queries + q)[:, None] * D
    query = tl.load(query_rows + k[None, :], mask=is_query[:, None] & (k < D)[None, :], other=0.0)
    at_position = sequence * q_len + q % q_len
    last = last_rows(last_position_ptr, at_position, is_query, has_last, n_rows)
    last = tl.minimum(tl.maximum(last, -1), end - 1).to(tl.int32)
    position, slope = query_places(
        position_ptr, slope_ptr, at_position, head * n_queries + q, is_query, HAS_WINDOW, HAS_SLOPES
    )
    best, total, sums = attend(
        query, last, position, slope, window, buffer_ptr, offset_ptr, visible_ptr, begin, end,
        block_rows, has_visible, v_begin, v_scale_begin, K_BEGIN, D, DV, FORMAT, "ieee",
        ALIGN_BYTES, False, True, SOFT_CAP, HAS_WINDOW, HAS_SLOPES, 16, 16, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    place = place_of_results(head, q, n_queries)
    store_state(o_ptr, lse_ptr, place, is_query, best, total, sums, DV, BLOCK_DV)


@triton.jit(
    do_not_specialize=[
        "n_kv",
        "n_queries",
        "q_len",
        "n_blocks",
        "block_rows",
        "split_rows",
        "visible_stride",
        "has_last",
        "window",
    ],
    do_not_specialize_on_alignment=TABLES,
)
def attention_kernel(
    query_ptr,
    buffer_ptr,
    block_offset_bytes_ptr,
    n_rows_ptr,
    visible_ptr,
    last_position_ptr,
    position_ptr,
    slope_ptr,
    o_ptr,
    lse_ptr,
    n_kv,
    n_queries,
    q_len,
    n_blocks,
    block_rows,
    split_rows,
    visible_stride,
    has_last,
    window,
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_X: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    head, sequence, q, is_query = program_place(n_kv, n_queries, BLOCK_Q)
    n_rows = tl.load(n_rows_ptr + sequence).to(tl.int32)
    k = tl.arange(0, BLOCK_D)
    query_rows = query_ptr + (head * n_queries + q)[:, None] * D
    query = tl.load(query_rows + k[None, :], mask=is_query[:, None] & (k < D)[None, :], other=0.0)
    at_position = sequence * q_len + q % q_len
    last = last_rows(last_position_ptr, at_position, is_query, has_last, n_rows)
    position, slope = query_places(
        position_ptr, slope_ptr, at_position, head * n_queries + q, is_query, HAS_WINDOW, HAS_SLOPES
    )
    v_begin, v_scale_begin = v_begins(block_rows, K_BEGIN, D, FORMAT, IS_X, ITEM_BYTES)
    if IN_BLOCK:
        # block_rows is a multiple of 4 then, and D of 8.
        v_begin = tl.multiple_of(v_begin, 16)
    begin, end, last = program_rows(split_rows, n_rows, last)
    offset_ptr = block_offset_bytes_ptr + head * n_blocks
    sequence_visible_ptr = visible_ptr + sequence * visible_stride
    best, total, sums = attend(
        query, last, position, slope, window, buffer_ptr, offset_ptr, sequence_visible_ptr, begin,
        end, block_rows, visible_stride != 0, v_begin, v_scale_begin, K_BEGIN, D, DV, FORMAT,
        PRECISION, ALIGN_BYTES, IN_BLOCK, False, SOFT_CAP, HAS_WINDOW, HAS_SLOPES, BLOCK_Q,
        BLOCK_T, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if BLOCK_Q == 16 and FORMAT != "fp16":
        if broken(sums) != 0:
            # Rare: a value is not finite. What it does, and to whom, is found out tile by tile.
            best, total, sums = attend(
                query, last, position, slope, window, buffer_ptr, offset_ptr, sequence_visible_ptr,
                begin, end, block_rows, visible_stride != 0, v_begin, v_scale_begin, K_BEGIN, D,
                DV, FORMAT, "ieee", ALIGN_BYTES, False, True, SOFT_CAP, HAS_WINDOW, HAS_SLOPES,
                BLOCK_Q, 16, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        place = place_of_results(head, q, n_queries)
        store_state(o_ptr, lse_ptr, place, is_query, best, total, sums, DV, BLOCK_DV)
    elif broken(sums) != 0:
        # The same, 16 queries at a time, which are loaded anew: that leaves registers to the rest.
        for first in tl.range(0, BLOCK_Q, 16):
            attend_carefully(
                query_ptr, buffer_ptr, offset_ptr, n_rows, sequence_visible_ptr, last_position_ptr,
                position_ptr, slope_ptr, o_ptr, lse_ptr, head, sequence,
                tl.program_id(1) * BLOCK_Q + first, n_queries, q_len, block_rows, begin, end,
                visible_stride != 0, has_last, window, v_begin, v_scale_begin, K_BEGIN, D, DV,
                FORMAT, ALIGN_BYTES, SOFT_CAP, HAS_WINDOW, HAS_SLOPES, BLOCK_Q, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    else:
        place = place_of_results(head, q, n_queries)
        store_state(o_ptr, lse_ptr, place, is_query, best, total, sums, DV, BLOCK_DV)
