"""Attention of few queries over int8 rows, each tile's of one block. ``attention.py`` says what the
arguments mean that are not explained here.

Products are turned: rows are their left operand, queries their right one, of which a tensor core
takes 8 where it takes 16 of a left one. So 8 queries cost half of what they cost there.

Two codes are loaded as one int16, and the first and the second of each are multiplied apart, since
a byte cannot be moved within a matrix where 16 bits can: instructions that load matrices turn V's
rows as they are stored. Scores are in powers of two until they are stored.
"""

import triton
import triton.language as tl

from .attention_parts import (
    INTERPRETED,
    TABLES,
    WEIGHT_BITS,
    broken,
    codes_of,
    last_rows,
    place_of_results,
    power_pair,
    program_place,
    program_rows,
    query_places,
    scale_or_nan,
    tanh,
    v_begins,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def power_of_two(x):
    """2^x, 0 below fp32's normal range."""
    if INTERPRETED:
        power = tl.exp2(x)
    else:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return power


@triton.jit
def two_parts(values):
    """float32 in fp16 and what that misses, times 2^11: see `attention_parts.in_fp16`."""
    high = values.to(tl.float16)
    return high, ((values - high.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def pairs_tile(first, lane, pair, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a tile from byte address ``first`` on, int16 ``[T, BLOCK / 2]``; zeros in columns
    that are not there."""
    HALF: tl.constexpr = WIDTH // 2
    place = first.to(tl.pointer_type(tl.int16)) + (lane[:, None] * HALF + pair[None, :])
    if WIDTH == BLOCK:
        pairs = tl.load(place)
    else:
        pairs = tl.load(place, mask=(pair < HALF)[None, :], other=0)
    return pairs


@triton.jit
def turned_tile(first, lane, pair, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`pairs_tile` as ``[BLOCK / 2, T]``: of a tile that is turned after it was loaded, the codes
    would be converted before products' layout is known, and stored once more."""
    HALF: tl.constexpr = WIDTH // 2
    place = first.to(tl.pointer_type(tl.int16)) + (lane[None, :] * HALF + pair[:, None])
    if WIDTH == BLOCK:
        pairs = tl.load(place)
    else:
        pairs = tl.load(place, mask=(pair < HALF)[:, None], other=0)
    return pairs


@triton.jit
def turned_products(query, k_scale_ptr, pairs, pair, D: tl.constexpr, CAREFUL: tl.constexpr):
    """Products ``[T, Q]`` of rows with the queries, which take the scales of the rows' block. With
    CAREFUL, an infinite value has no lower part, which were NaN."""
    is_pair = pair < D // 2
    first_scale = scale_or_nan(tl.load(k_scale_ptr + 2 * pair, mask=is_pair, other=0.0))
    second_scale = scale_or_nan(tl.load(k_scale_ptr + 2 * pair + 1, mask=is_pair, other=0.0))
    first = query[0] * first_scale[None, :]
    second = query[1] * second_scale[None, :]
    down, up = power_pair(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1), 0)
    first_high, first_low = two_parts(first * down[:, None])
    second_high, second_low = two_parts(second * down[:, None])
    if CAREFUL:
        first_low = tl.where(first_low != first_low, 0.0, first_low)
        second_low = tl.where(second_low != second_low, 0.0, second_low)
    first_codes = codes_of(pairs, False)
    second_codes = codes_of(pairs, True)
    high = tl.dot(first_codes, tl.trans(first_high))
    high = tl.dot(second_codes, tl.trans(second_high), high)
    low = tl.dot(first_codes, tl.trans(first_low))
    low = tl.dot(second_codes, tl.trans(second_low), low)
    return (high + low * (1.0 / 2048.0)) * up[None, :]


@triton.jit
def turned_sums(first_sums, second_sums, alpha, p, scales, pairs):
    """Sums ``[DV / 2, Q]`` of V's first and second columns of each pair, older ones times alpha,
    with those of a tile of weights p."""
    weights = p * scales[:, None]
    # Of each query's own: the scale of a row that it does not see must not weaken the others.
    down, up = power_pair(tl.max(tl.abs(weights), axis=0), WEIGHT_BITS)
    # Weights below fp16's normal range lose bits: what they miss is in the second part.
    high, low = two_parts(weights * down[None, :])
    first_codes = codes_of(pairs, False)
    second_codes = codes_of(pairs, True)
    first = tl.dot(first_codes, high) + tl.dot(first_codes, low) * (1.0 / 2048.0)
    second = tl.dot(second_codes, high) + tl.dot(second_codes, low) * (1.0 / 2048.0)
    first_sums = first_sums * alpha[None, :] + first * up[None, :]
    return first_sums, second_sums * alpha[None, :] + second * up[None, :]


@triton.jit
def _is_visible(visible_ptr, row, end, has_visible):
    """Whether a mask leaves these rows, bool ``[T]``."""
    return tl.load(visible_ptr + tl.minimum(row, end - 1), mask=has_visible, other=1) != 0


@triton.jit
def _attend(
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
    ALIGN_BYTES: tl.constexpr,
    CAREFUL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """(Peaks, sums of weights, weighed sums of V's first and of its second columns) over rows
    ``begin`` to ``end``, of those that a query sees: up to ``last``.

    Without CAREFUL, a scale of V that is not finite makes all sums NaN, also those of queries that
    do not see its row, and an infinite value of a query all of its own.
    """
    best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    # A sum for each row of a tile, which are added up once.
    total = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.float32)
    first_sums = tl.zeros([BLOCK_DV // 2, BLOCK_Q], dtype=tl.float32)
    second_sums = tl.zeros([BLOCK_DV // 2, BLOCK_Q], dtype=tl.float32)
    sees_nan = tl.zeros([BLOCK_Q], dtype=tl.int32)
    lane = tl.arange(0, BLOCK_T)
    k_pair = tl.arange(0, BLOCK_D // 2)
    v_pair = tl.arange(0, BLOCK_DV // 2)
    for tile in tl.range(begin, end, BLOCK_T, num_stages=1 if CAREFUL else None):
        # Blocks are whole: rows after the last lie in the buffer, too, and nobody sees them.
        row = tile + lane
        seen = row[:, None] <= last[None, :]
        if HAS_WINDOW:
            seen = seen & (row[:, None] > (position - window)[None, :])
        if CAREFUL:
            seen = seen & _is_visible(visible_ptr, row, end, has_visible)[:, None]
        offset = tl.load(offset_ptr + tile // block_rows)
        block = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES)
        first_row = tl.multiple_of(tile % block_rows, BLOCK_T)
        pairs = pairs_tile(block + (K_BEGIN + first_row * D), lane, k_pair, D, BLOCK_D)
        k_scale_ptr = block.to(tl.pointer_type(tl.float32))
        products = turned_products(query, k_scale_ptr, pairs, k_pair, D, CAREFUL)
        if SOFT_CAP > 0:
            products = SOFT_CAP * tanh(products * (1.0 / SOFT_CAP))
        if HAS_SLOPES:
            products += slope[None, :] * (row[:, None] - position[None, :]).to(tl.float32)
        if SOFT_CAP > 0 or HAS_SLOPES:
            products *= LOG2_E
        scores = tl.where(seen, products, float("-inf"))
        if not CAREFUL:
            # In a branch, since compilers divide V's rows to suit the shortest values that weights
            # are made of, which are those of a mask.
            if has_visible:
                is_visible = _is_visible(visible_ptr, row, end, True)
                scores = tl.where(is_visible[:, None], scores, float("-inf"))
        above = tl.maximum(best, tl.max(scores, axis=0))
        # A query that has seen no row yet has no peak to subtract.
        peak = tl.where(above == float("-inf"), 0.0, above)
        alpha = power_of_two(best - peak)
        p = power_of_two(scores - peak[None, :])
        best = above
        total = total * alpha[None, :] + p
        v_scale_ptr = (block + v_scale_begin).to(tl.pointer_type(tl.float32)) + first_row
        scales = tl.where(row < end, scale_or_nan(tl.load(v_scale_ptr + lane)), 0.0)
        if CAREFUL:
            is_nan = scales != scales
            sees_nan = tl.maximum(sees_nan, tl.max((seen & is_nan[:, None]).to(tl.int32), axis=0))
            scales = tl.where(is_nan, 0.0, scales)
        pairs = turned_tile(block + (v_begin + first_row * DV), lane, v_pair, DV, BLOCK_DV)
        first_sums, second_sums = turned_sums(first_sums, second_sums, alpha, p, scales, pairs)
    if CAREFUL:
        first_sums = tl.where((sees_nan > 0)[None, :], float("nan"), first_sums)
        second_sums = tl.where((sees_nan > 0)[None, :], float("nan"), second_sums)
    return best, tl.sum(total, axis=0), first_sums, second_sums


@triton.jit
def _load_query(query_ptr, head, q, is_query, n_queries, pair, D: tl.constexpr, FACTOR):
    """The queries' first and second values of each pair, float32 ``[Q, BLOCK_D / 2]``."""
    place = query_ptr + (head * n_queries + q)[:, None] * D + pair[None, :]
    mask = is_query[:, None] & (pair < D // 2)[None, :]
    return (
        tl.load(place, mask=mask, other=0.0) * FACTOR,
        tl.load(place + D // 2, mask=mask, other=0.0) * FACTOR,
    )


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
def int8_attention_kernel(
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
    ALIGN_BYTES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """``block_rows`` is a multiple of BLOCK_T; of a query the first values of all pairs come before
    the second ones."""
    IS_RULED: tl.constexpr = SOFT_CAP > 0 or HAS_SLOPES
    head, sequence, q, is_query = program_place(n_kv, n_queries, BLOCK_Q)
    n_rows = tl.load(n_rows_ptr + sequence).to(tl.int32)
    query = _load_query(
        query_ptr, head, q, is_query, n_queries, tl.arange(0, BLOCK_D // 2), D,
        1.0 if IS_RULED else LOG2_E,
    )  # fmt: skip
    at_position = sequence * q_len + q % q_len
    last = last_rows(last_position_ptr, at_position, is_query, has_last, n_rows)
    position, slope = query_places(
        position_ptr, slope_ptr, at_position, head * n_queries + q, is_query, HAS_WINDOW, HAS_SLOPES
    )
    v_begin, v_scale_begin = v_begins(block_rows, K_BEGIN, D, "int8", False, 1)
    v_begin, v_scale_begin = tl.multiple_of(v_begin, 16), tl.multiple_of(v_scale_begin, 16)
    begin, end, last = program_rows(split_rows, n_rows, last)
    offset_ptr = block_offset_bytes_ptr + head * n_blocks
    sequence_visible_ptr = visible_ptr + sequence * visible_stride
    best, total, first_sums, second_sums = _attend(
        query, last, position, slope, window, buffer_ptr, offset_ptr, sequence_visible_ptr, begin,
        end, block_rows, visible_stride != 0, v_begin, v_scale_begin, K_BEGIN, D, DV, ALIGN_BYTES,
        False, SOFT_CAP, HAS_WINDOW, HAS_SLOPES, BLOCK_Q, BLOCK_T, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if broken(tl.abs(first_sums) + tl.abs(second_sums)) != 0:
        # Rare: a scale or a query is not finite. Whom it changes is found out tile by tile.
        best, total, first_sums, second_sums = _attend(
            query, last, position, slope, window, buffer_ptr, offset_ptr, sequence_visible_ptr,
            begin, end, block_rows, visible_stride != 0, v_begin, v_scale_begin, K_BEGIN, D, DV,
            ALIGN_BYTES, True, SOFT_CAP, HAS_WINDOW, HAS_SLOPES, BLOCK_Q, 32, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    place = place_of_results(head, q, n_queries)
    is_empty = total == 0
    pair = tl.arange(0, BLOCK_DV // 2)
    columns = o_ptr + place[None, :] * DV + 2 * pair[:, None]
    mask = is_query[None, :] & (pair < DV // 2)[:, None]
    tl.store(columns, tl.where(is_empty[None, :], 0.0, first_sums / total[None, :]), mask=mask)
    tl.store(columns + 1, tl.where(is_empty[None, :], 0.0, second_sums / total[None, :]), mask=mask)
    lse = tl.where(is_empty, float("-inf"), best * LN_2 + tl.log(total))
    tl.store(lse_ptr + place, lse, mask=is_query)
