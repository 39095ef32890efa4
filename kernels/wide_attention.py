"""Attention over rows of more than 256 values in place: latent rows and X rows, which are K and V
at once, and K and V rows of such a length; of 16 bits, where ``csrc/cuda`` is not compiled.

Arguments, results and parts as in ``attention.py``. A row's values do not fit beside one another in
a program's registers: scores are summed over BLOCK_K values of K at a time, with the query's values
fetched each time, and the sums of V lie in two pieces, BLOCK_DV and BLOCK_REST wide (a power of two
each: 576 is 512 and 64), so that a tile's V values are read once.
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
    store_state,
    stored_tile,
    v_begins,
    weighed_rows,
)


@triton.jit
def _wide_scores(
    query_rows,
    is_query,
    base,
    in_block,
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products ``[Q, T]`` of queries with a tile's K rows."""
    products = tl.zeros([BLOCK_Q, BLOCK_T], dtype=tl.float32)
    for first in tl.range(0, D, BLOCK_K, num_stages=2):
        k = first + tl.arange(0, BLOCK_K)
        query = tl.load(
            query_rows + k[None, :], mask=is_query[:, None] & (k < D)[None, :], other=0.0
        )
        if IS_PLAIN:
            rows = stored_tile(base, K_BEGIN, in_block, D, BLOCK_K, FORMAT, first)
            parts = (query, query, query)
            if FORMAT == "fp16":
                parts = in_fp16(query)
            elif FORMAT == "bf16":
                parts = in_bf16(query)
            products += row_products(query, parts, rows, 0.0, FORMAT, PRECISION)
        else:
            is_row = in_block >= 0
            rows = rows_tile(base, K_BEGIN, 0, in_block, is_row, D, BLOCK_K, FORMAT, False, first)
            products += tl.dot(query, tl.trans(rows), input_precision=PRECISION)
    return products


@triton.jit
def _wide_weighed(
    sums,
    p,
    seen,
    base,
    v_begin,
    v_scale_begin,
    in_block,
    FIRST: tl.constexpr,
    DV: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    CAREFUL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``sums`` and those of a tile's V rows, of the values from FIRST on."""
    if IS_PLAIN:
        values = stored_tile(base, v_begin, in_block, DV, BLOCK, FORMAT, FIRST)
        sums = weighed_rows(sums, p, values, 0.0, FORMAT, PRECISION)
    else:
        values = rows_tile(
            base, v_begin, v_scale_begin, in_block, in_block >= 0, DV, BLOCK, FORMAT, True, FIRST
        )
        if CAREFUL:
            finite = tl.where(tl.abs(values) < float("inf"), values, 0.0)
            sums += tl.dot(p, finite, input_precision=PRECISION)
            sums += not_finite(p, values, seen)
        else:
            sums += tl.dot(p, values, input_precision=PRECISION)
    return sums


@triton.jit
def _wide_attend(
    query_rows,
    is_query,
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
    CAREFUL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """(Peaks, sums of weights, the two pieces of the weighed sums of V) over rows ``begin`` to
    ``end``; see `attention.attend`."""
    IS_PLAIN: tl.constexpr = not CAREFUL and FORMAT != "int8"
    SHIFT: tl.constexpr = 9.0 if IS_PLAIN and FORMAT == "fp16" else 0.0
    best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    rest = tl.zeros([BLOCK_Q, BLOCK_REST], dtype=tl.float32)
    lane = tl.arange(0, BLOCK_T)
    inverse = 1.0 / block_rows.to(tl.float32)
    for tile in tl.range(begin, end, BLOCK_T, num_stages=1):
        # Rows after the last are the last one once more, which nobody sees.
        t = tl.minimum(tile + lane, end - 1)
        is_visible = tl.load(visible_ptr + t, mask=has_visible, other=1) != 0
        seen = tl.where(is_visible, tile + lane, 2147483647)[None, :] <= last[:, None]
        if HAS_WINDOW:
            seen = seen & ((tile + lane)[None, :] > (position - window)[:, None])
        block, in_block = block_of(tile, t - tile, block_rows, inverse)
        offset = tl.load(offset_ptr + block)
        base = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES)
        products = _wide_scores(
            query_rows,
            is_query,
            base,
            in_block,
            K_BEGIN,
            D,
            FORMAT,
            PRECISION,
            IS_PLAIN,
            BLOCK_Q,
            BLOCK_T,
            BLOCK_K,
        )
        products = ruled_scores(products, slope, position, tile + lane, SOFT_CAP, HAS_SLOPES)
        scores = tl.where(seen, products, float("-inf"))
        best, total, alpha, p = rescaled(best, total, scores, SHIFT)
        sums = _wide_weighed(
            sums * alpha[:, None],
            p,
            seen,
            base,
            v_begin,
            v_scale_begin,
            in_block,
            0,
            DV,
            FORMAT,
            PRECISION,
            IS_PLAIN,
            CAREFUL,
            BLOCK_DV,
        )
        if DV > BLOCK_DV:
            rest = _wide_weighed(
                rest * alpha[:, None],
                p,
                seen,
                base,
                v_begin,
                v_scale_begin,
                in_block,
                BLOCK_DV,
                DV,
                FORMAT,
                PRECISION,
                IS_PLAIN,
                CAREFUL,
                BLOCK_REST,
            )
    return best - SHIFT, total, sums, rest


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
def wide_attention_kernel(
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
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    head, sequence, q, is_query = program_place(n_kv, n_queries, BLOCK_Q)
    n_rows = tl.load(n_rows_ptr + sequence).to(tl.int32)
    query_rows = query_ptr + (head * n_queries + q)[:, None] * D
    at_position = sequence * q_len + q % q_len
    last = last_rows(last_position_ptr, at_position, is_query, has_last, n_rows)
    position, slope = query_places(
        position_ptr, slope_ptr, at_position, head * n_queries + q, is_query, HAS_WINDOW, HAS_SLOPES
    )
    v_begin, v_scale_begin = v_begins(block_rows, K_BEGIN, D, FORMAT, IS_X, ITEM_BYTES)
    begin, end, last = program_rows(split_rows, n_rows, last)
    offset_ptr = block_offset_bytes_ptr + head * n_blocks
    sequence_visible_ptr = visible_ptr + sequence * visible_stride
    best, total, sums, rest = _wide_attend(
        query_rows, is_query, last, position, slope, window, buffer_ptr, offset_ptr,
        sequence_visible_ptr, begin, end, block_rows, visible_stride != 0, v_begin, v_scale_begin,
        K_BEGIN, D, DV, FORMAT, PRECISION, ALIGN_BYTES, False, SOFT_CAP, HAS_WINDOW, HAS_SLOPES,
        BLOCK_Q, BLOCK_T, BLOCK_K, BLOCK_DV, BLOCK_REST,
    )  # fmt: skip
    if broken(sums) + broken(rest) != 0:
        # Rare: a value is not finite. What it does, and to whom, is found out tile by tile.
        best, total, sums, rest = _wide_attend(
            query_rows, is_query, last, position, slope, window, buffer_ptr, offset_ptr,
            sequence_visible_ptr, begin, end, block_rows, visible_stride != 0, v_begin,
            v_scale_begin, K_BEGIN, D, DV, FORMAT, "ieee", ALIGN_BYTES, True, SOFT_CAP, HAS_WINDOW,
            HAS_SLOPES, BLOCK_Q, 16, BLOCK_K, BLOCK_DV, BLOCK_REST,
        )  # fmt: skip
    place = place_of_results(head, q, n_queries)
    store_state(o_ptr, lse_ptr, place, is_query, best, total, sums, DV, BLOCK_DV)
    if DV > BLOCK_DV:
        store_state(o_ptr, lse_ptr, place, is_query, best, total, rest, DV, BLOCK_REST, BLOCK_DV)
