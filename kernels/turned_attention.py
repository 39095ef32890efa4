"""Attention of few queries over rows of 16 bits. ``attention.py`` says what the arguments mean that
are not explained here.

BLOCKS  of so many blocks a tile has rows at most; where it is 1, each tile lies in one block
WHOLE   a tile is BLOCKS whole blocks

Products are turned, as in ``int8_attention.py``: rows are their left operand, queries their right
one, of which a tensor core takes 8 where it takes 16 of a left one. Two warps share a tile, and so
fewer of them load the same queries and weights. Scores are in powers of two until they are stored.
"""

import triton
import triton.language as tl

from .attention import attend_carefully
from .attention_parts import (
    TABLES,
    broken,
    dot_bf16,
    in_bf16,
    last_rows,
    place_of_results,
    power_pair,
    program_place,
    program_rows,
    query_places,
    stored_tile,
    tanh,
    v_begins,
)
from .int8_attention import LN_2, LOG2_E, power_of_two, two_parts

#: Of powers of two: the larger weights are, the fewer leave fp16's range.
SHIFT_BITS = tl.constexpr(13.0)


@triton.jit
def query_parts(query, FORMAT: tl.constexpr):
    """The queries ``[D, Q]`` in parts of the rows' dtype, and what their products are to be
    multiplied by."""
    down, up = power_pair(tl.max(tl.abs(query), axis=1), 0)
    turned = tl.trans(query)
    if FORMAT == "fp16":
        high, low = two_parts(turned * down[None, :])
        parts = (high, low, high)
    else:
        parts = in_bf16(turned)
        up = up * 0.0 + 1.0
    return parts, up


@triton.jit
def turned_products(rows, parts, up, FORMAT: tl.constexpr):
    """Products ``[T, Q]`` of rows with queries."""
    if FORMAT == "fp16":
        low = tl.dot(rows, parts[1])
        products = (tl.dot(rows, parts[0]) + low * (1.0 / 2048.0)) * up[None, :]
    else:
        products = dot_bf16(rows, parts[1], dot_bf16(rows, parts[2], None))
        products = dot_bf16(rows, parts[0], products)
    return products


@triton.jit
def turned_tile(first, in_block, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Rows of a tile as they are stored, as ``[BLOCK, T]``; zeros in columns that are not there."""
    column = tl.arange(0, BLOCK)
    if FORMAT == "fp16":
        at = first.to(tl.pointer_type(tl.float16))
    else:
        at = first.to(tl.pointer_type(tl.bfloat16))
    place = at + (in_block[None, :] * WIDTH + column[:, None])
    if WIDTH == BLOCK:
        rows = tl.load(place)
    else:
        rows = tl.load(place, mask=(column < WIDTH)[:, None], other=0)
    return rows


@triton.jit
def rows_in_blocks(
    offset_ptr,
    tile,
    lane,
    end,
    block_rows,
    ALIGN_BYTES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(Byte offsets of the blocks of a tile's rows, int64 ``[T]``, and the rows' places in them).
    Rows after the last are the last one once more.

    Offsets are loaded block by block, for all threads, and chosen for each row: compilers know
    which rows of a tile of whole blocks are each block's, and then choose nothing.
    """
    if WHOLE:
        rows = BLOCK_T // BLOCKS
        at = lane
    else:
        rows = block_rows
        at = tile % block_rows + lane
    first = tile // rows
    further = (end - 1) // rows - first
    known = tl.minimum(at, end - 1 - first * rows)
    in_block = known
    offset = tl.multiple_of(tl.load(offset_ptr + first), ALIGN_BYTES) + tl.zeros_like(lane)
    for i in tl.static_range(1, BLOCKS):
        # Of blocks that are not there, the last one.
        block = tl.minimum(i, further)
        after = tl.multiple_of(tl.load(offset_ptr + (first + block)), ALIGN_BYTES)
        is_after = at >= i * rows
        offset = tl.where(is_after, after, offset)
        in_block = tl.where(is_after, known - block * rows, in_block)
    return offset, in_block


@triton.jit
def turned_sums(sums, p, values, FORMAT: tl.constexpr):
    """``sums`` ``[DV, Q]`` and those of V rows ``[DV, T]`` with weights p ``[T, Q]``."""
    if FORMAT == "fp16":
        high, low = two_parts(p)
        sums += tl.dot(values, high) + tl.dot(values, low) * (1.0 / 2048.0)
    else:
        parts = in_bf16(p)
        rest = dot_bf16(values, parts[1], dot_bf16(values, parts[2], None))
        sums += dot_bf16(values, parts[0], rest)
    return sums


@triton.jit
def turned_attend(
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
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """(Peaks, sums of weights, weighed sums of V) over rows ``begin`` to ``end``, of those that a
    query sees: up to ``last``. A value that is not finite makes all sums of its column so, an
    infinite value of K those of its row NaN."""
    SHIFT: tl.constexpr = SHIFT_BITS if FORMAT == "fp16" else 0.0
    best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    # A sum for each row of a tile, which are added up once.
    total = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.float32)
    sums = tl.zeros([BLOCK_DV, BLOCK_Q], dtype=tl.float32)
    lane = tl.arange(0, BLOCK_T)
    parts, up = query_parts(query, FORMAT)
    for tile in tl.range(begin, end, BLOCK_T):
        row = tile + lane
        seen = row[:, None] <= last[None, :]
        if HAS_WINDOW:
            seen = seen & (row[:, None] > (position - window)[None, :])
        # Rows after the last are the last one once more, which nobody sees.
        if BLOCKS == 1:
            offset = tl.load(offset_ptr + tile // block_rows)
            block = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES)
            in_block = tile % block_rows + tl.minimum(lane, end - 1 - tile)
            base = block + tl.zeros_like(lane)
        else:
            offset, in_block = rows_in_blocks(
                offset_ptr, tile, lane, end, block_rows, ALIGN_BYTES, BLOCK_T, BLOCKS, WHOLE
            )
            base = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES)
            block = base[None, :]
        rows = stored_tile(base, K_BEGIN, in_block, D, BLOCK_D, FORMAT)
        products = turned_products(rows, parts, up, FORMAT)
        if SOFT_CAP > 0:
            products = SOFT_CAP * tanh(products * (1.0 / SOFT_CAP))
        if HAS_SLOPES:
            products += slope[None, :] * (row[:, None] - position[None, :]).to(tl.float32)
        if SOFT_CAP > 0 or HAS_SLOPES:
            products *= LOG2_E
        scores = tl.where(seen, products, float("-inf"))
        if has_visible:
            is_visible = tl.load(visible_ptr + tl.minimum(row, end - 1)) != 0
            scores = tl.where(is_visible[:, None], scores, float("-inf"))
        above = tl.maximum(best, tl.max(scores, axis=0))
        # A query that has seen no row yet has no peak to subtract.
        peak = tl.where(above == float("-inf"), 0.0, above)
        alpha = power_of_two(best - peak)
        p = power_of_two(scores - (peak - SHIFT)[None, :])
        best = above
        total = total * alpha[None, :] + p
        values = turned_tile(block + v_begin, in_block, DV, BLOCK_DV, FORMAT)
        sums = turned_sums(sums * alpha[None, :], p, values, FORMAT)
    return best - SHIFT, tl.sum(total, axis=0), sums


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
def turned_attention_kernel(
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
    IS_X: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    IS_RULED: tl.constexpr = SOFT_CAP > 0 or HAS_SLOPES
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
    v_begin = tl.multiple_of(v_begin, 16)
    begin, end, last = program_rows(split_rows, n_rows, last)
    offset_ptr = block_offset_bytes_ptr + head * n_blocks
    sequence_visible_ptr = visible_ptr + sequence * visible_stride
    best, total, sums = turned_attend(
        query * (1.0 if IS_RULED else LOG2_E), last, position, slope, window, buffer_ptr,
        offset_ptr, sequence_visible_ptr, begin, end, block_rows, visible_stride != 0, v_begin,
        K_BEGIN, D, DV, FORMAT, ALIGN_BYTES, SOFT_CAP, HAS_WINDOW, HAS_SLOPES, BLOCKS, WHOLE,
        BLOCK_Q, BLOCK_T, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if broken(sums) == 0:
        place = place_of_results(head, q, n_queries)
        is_empty = total == 0
        column = tl.arange(0, BLOCK_DV)
        tl.store(
            o_ptr + place[None, :] * DV + column[:, None],
            tl.where(is_empty[None, :], 0.0, sums / total[None, :]),
            mask=is_query[None, :] & (column < DV)[:, None],
        )
        lse = tl.where(is_empty, float("-inf"), best * LN_2 + tl.log(total))
        tl.store(lse_ptr + place, lse, mask=is_query)
    else:
        # Rare: a value is not finite. What it does, and to whom, is found out tile by tile.
        attend_carefully(
            query_ptr, buffer_ptr, offset_ptr, n_rows, sequence_visible_ptr, last_position_ptr,
            position_ptr, slope_ptr, o_ptr, lse_ptr, head, sequence, tl.program_id(1) * BLOCK_Q,
            n_queries, q_len, block_rows, begin, end, visible_stride != 0, has_last, window,
            v_begin, v_scale_begin, K_BEGIN, D, DV, FORMAT, ALIGN_BYTES, SOFT_CAP, HAS_WINDOW,
            HAS_SLOPES, BLOCK_Q, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
