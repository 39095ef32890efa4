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
o        float32 ``[n_splits, n_heads, n_queries, DV]``, lse float32 ``[n_splits, n_heads,
n_queries]``

One program takes BLOCK_Q queries of one head over one of n_splits parts of its rows, in tiles of
BLOCK_T. The parts are merged afterwards. Addresses are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_tile(
    base,
    begin,
    scale_begin,
    in_block,
    is_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Rows of a tile decoded to float32, ``[T, BLOCK]``; zeros for rows and columns that are not
    there."""
    column = tl.arange(0, BLOCK)
    at = in_block[:, None] * WIDTH + column[None, :]
    mask = is_row[:, None] & (column < WIDTH)[None, :]
    first = base + begin
    if FORMAT == "fp32":
        values = tl.load(first.to(tl.pointer_type(tl.float32))[:, None] + at, mask=mask, other=0.0)
    elif FORMAT == "fp16":
        values = tl.load(
            first.to(tl.pointer_type(tl.float16))[:, None] + at, mask=mask, other=0.0
        ).to(tl.float32)
    elif FORMAT == "bf16":
        high = tl.load(first.to(tl.pointer_type(tl.int16))[:, None] + at, mask=mask, other=0).to(
            tl.int32
        )
        values = (high << 16).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(FORMAT == "int8")
        codes = tl.load(first.to(tl.pointer_type(tl.int8))[:, None] + at, mask=mask, other=0).to(
            tl.float32
        )
        scales = (base + scale_begin).to(tl.pointer_type(tl.float32))
        if PER_ROW:
            values = codes * tl.load(scales + in_block, mask=is_row, other=0.0)[:, None]
        else:
            values = codes * tl.load(scales[:, None] + column[None, :], mask=mask, other=0.0)
    return values


@triton.jit
def _not_finite(p, values, seen):
    """What infinities and NaNs of V add to the queries that see them, and to no other."""
    zero = tl.zeros([p.shape[0], values.shape[1]], dtype=tl.float32)
    weighed = seen & (p != 0)
    is_infinite = tl.abs(values) == float("inf")
    nans = tl.dot(seen.to(tl.float16), (values != values).to(tl.float16))
    nans += tl.dot((seen & (p == 0)).to(tl.float16), is_infinite.to(tl.float16))
    highs = tl.dot(weighed.to(tl.float16), (values == float("inf")).to(tl.float16))
    lows = tl.dot(weighed.to(tl.float16), (values == float("-inf")).to(tl.float16))
    added = tl.where(highs > 0, float("inf"), zero) + tl.where(lows > 0, float("-inf"), zero)
    return tl.where(nans > 0, float("nan"), added)


@triton.jit
def _rescaled(best, total, scores):
    """Online softmax: (the new peaks, the new sums, what older sums are worth now, the scores'
    weights)."""
    above = tl.maximum(best, tl.max(scores, axis=1))
    # A query that has seen no row yet has no peak to subtract.
    peak = tl.where(above == float("-inf"), 0.0, above)
    alpha = tl.exp(best - peak)
    p = tl.exp(scores - peak[:, None])
    return above, total * alpha + tl.sum(p, axis=1), alpha, p


@triton.jit
def _store_state(
    o_ptr, lse_ptr, place, is_query, best, total, sums, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """Writes o, normalised, and its log-sum-exp; zeros and -inf for a query that saw nothing."""
    is_empty = total == 0
    column = tl.arange(0, BLOCK_DV)
    o = tl.where(is_empty[:, None], 0.0, sums / total[:, None])
    tl.store(
        o_ptr + place[:, None] * DV + column[None, :],
        o,
        mask=is_query[:, None] & (column < DV)[None, :],
    )
    tl.store(
        lse_ptr + place, tl.where(is_empty, float("-inf"), best + tl.log(total)), mask=is_query
    )


@triton.jit
def _v_begins(
    block_rows,
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_X: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
):
    """Where the V rows of a block begin, and their scales."""
    v_scale_begin = K_BEGIN + block_rows * D * ITEM_BYTES
    v_begin = v_scale_begin
    if FORMAT == "int8":
        v_begin += 4 * block_rows
    if IS_X:
        v_begin = v_scale_begin * 0 + K_BEGIN
    return v_begin, v_scale_begin


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
    ]
)
def attention_kernel(
    query_ptr,
    buffer_ptr,
    block_offset_bytes_ptr,
    n_rows_ptr,
    visible_ptr,
    last_position_ptr,
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
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_X: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    sequence = head // n_kv
    n_rows = tl.load(n_rows_ptr + sequence)
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_query = q < n_queries
    k = tl.arange(0, BLOCK_D)
    query_rows = query_ptr + (head * n_queries + q)[:, None] * D
    query = tl.load(query_rows + k[None, :], mask=is_query[:, None] & (k < D)[None, :], other=0.0)
    # Masks that are not there are not loaded, by no variant of their own: each would be seconds of
    # compiling in the midst of a generation.
    last = tl.load(
        last_position_ptr + sequence * q_len + q % q_len, mask=is_query & (has_last != 0), other=0
    )
    last = tl.where(has_last != 0, last, n_rows)
    v_begin, v_scale_begin = _v_begins(block_rows, K_BEGIN, D, FORMAT, IS_X, ITEM_BYTES)
    best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    end = tl.minimum((split + 1) * split_rows, n_rows)
    for begin in range(split * split_rows, end, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        is_row = t < end
        is_row &= (
            tl.load(
                visible_ptr + sequence * visible_stride + t,
                mask=is_row & (visible_stride != 0),
                other=1,
            )
            != 0
        )
        offset = tl.load(
            block_offset_bytes_ptr + head * n_blocks + t // block_rows, mask=is_row, other=0
        )
        base = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES)
        in_block = (t % block_rows).to(tl.int32)
        keys = _rows_tile(base, K_BEGIN, 0, in_block, is_row, D, BLOCK_D, FORMAT, False)
        seen = is_query[:, None] & is_row[None, :] & (t[None, :] <= last[:, None])
        scores = tl.where(
            seen, tl.dot(query, tl.trans(keys), input_precision=PRECISION), float("-inf")
        )
        best, total, alpha, p = _rescaled(best, total, scores)
        values = _rows_tile(
            base, v_begin, v_scale_begin, in_block, is_row, DV, BLOCK_DV, FORMAT, True
        )
        is_finite = tl.abs(values) < float("inf")
        sums = sums * alpha[:, None] + tl.dot(
            p, tl.where(is_finite, values, 0.0), input_precision=PRECISION
        )
        if tl.min(tl.min(is_finite.to(tl.int32), axis=1), axis=0) == 0:
            sums += _not_finite(p, values, seen)

    place = (split * tl.num_programs(0) + head) * n_queries + q
    _store_state(o_ptr, lse_ptr, place, is_query, best, total, sums, DV, BLOCK_DV)
