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

One program takes BLOCK_Q queries of one head over one of n_splits parts of its rows, in tiles of
BLOCK_T. The parts are merged afterwards. Addresses are 64 bits wide. Rows of more than 256 values
are for ``wide_attention.py``.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
    first_column=0,
):
    """Rows of a tile decoded to float32, ``[T, BLOCK]``; zeros for rows and columns that are not
    there."""
    column = first_column + tl.arange(0, BLOCK)
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
def _tanh(x):
    """Good to a few units in the last place also near 0, where 1 - e^-2x would lose all."""
    size = tl.abs(x)
    square = x * x
    # Taylor's series up to x^9: off by 2^-27 at most below 1/4
    series = square * (62.0 / 2835.0) - 17.0 / 315.0
    series = (series * square + 2.0 / 15.0) * square - 1.0 / 3.0
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(size < 0.25, x + x * square * series, tl.where(x < 0, -far, far))


@triton.jit
def _ruled(scores, slope, position, row, SOFT_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Scores ``[Q, T]`` of these rows as a soft cap and then slopes change them."""
    if SOFT_CAP > 0:
        scores = SOFT_CAP * _tanh(scores * (1.0 / SOFT_CAP))
    if HAS_SLOPES:
        scores += slope[:, None] * (row[None, :] - position[:, None]).to(tl.float32)
    return scores


@triton.jit
def _query_places(
    position_ptr,
    slope_ptr,
    at_position,
    at_slope,
    is_query,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Positions int32 ``[Q]`` and slopes float32 ``[Q]`` of queries; zeros where nobody asks."""
    position = tl.zeros_like(is_query.to(tl.int32))
    slope = position.to(tl.float32)
    if HAS_WINDOW or HAS_SLOPES:
        position = tl.load(position_ptr + at_position, mask=is_query, other=0).to(tl.int32)
    if HAS_SLOPES:
        slope = tl.load(slope_ptr + at_slope, mask=is_query, other=0.0)
    return position, slope


@triton.jit
def _rescaled(best, total, scores, SHIFT: tl.constexpr):
    """Online softmax: (the new peaks, the new sums, what older sums are worth now, the scores'
    weights, e^SHIFT at most)."""
    above = tl.maximum(best, tl.max(scores, axis=1))
    # A query that has seen no row yet has no peak to subtract.
    peak = tl.where(above == float("-inf"), 0.0, above)
    alpha = tl.exp(best - peak)
    p = tl.exp(scores - (peak - SHIFT)[:, None])
    return above, total * alpha + tl.sum(p, axis=1), alpha, p


@triton.jit
def _store_state(
    o_ptr,
    lse_ptr,
    place,
    is_query,
    best,
    total,
    sums,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FIRST_COLUMN: tl.constexpr = 0,
):
    """Writes o, normalised, and its log-sum-exp; zeros and -inf for a query that saw nothing."""
    is_empty = total == 0
    column = FIRST_COLUMN + tl.arange(0, BLOCK_DV)
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
def _in_fp16(values):
    """float32 ``[Q, K]`` in two fp16 parts, good to 2^-22 of each value, and a power of two for
    each row that the parts are to be multiplied by, see `maxsim._dot_split`."""
    peak_bits = tl.max(tl.abs(values), axis=1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(peak_bits >> 23, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scaled = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = scaled.to(tl.float16)
    return high, ((scaled - high.to(tl.float32)) * 2048.0).to(tl.float16), scale


@triton.jit
def _as_fp16(rows, FORMAT: tl.constexpr):
    """fp16 rows as they are; int8 rows by their bits, since converting integers is slow:
    1024 + n is fp16's 0x6400 + n."""
    if FORMAT == "int8":
        bits = ((rows.to(tl.int16) & 0xFF) ^ 0x6480).to(tl.int16)
        rows = bits.to(tl.float16, bitcast=True) - 1152.0
    return rows


@triton.jit
def _in_bf16(values):
    """float32 in three bf16 parts, which add up to it: its leading bits, those of what they miss,
    and so on."""
    bits = values.to(tl.int32, bitcast=True)
    rest = values - (bits & -65536).to(tl.float32, bitcast=True)
    rest_bits = rest.to(tl.int32, bitcast=True)
    third = rest - (rest_bits & -65536).to(tl.float32, bitcast=True)
    first = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return (
        first,
        (rest_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
        third.to(tl.bfloat16),
    )


@triton.jit
def _dot_bf16(a, b, added):
    """Their product; NumPy, which interprets kernels, has no bf16."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), added, input_precision="ieee")
    else:
        product = tl.dot(a, b, added)
    return product


@triton.jit
def _scores(query, parts, rows, scales, FORMAT: tl.constexpr, PRECISION: tl.constexpr):
    """Products ``[Q, T]`` of the queries with a tile's K rows, as they are stored."""
    if FORMAT == "fp16" or FORMAT == "int8":
        if FORMAT == "int8":
            # The tile's rows have their block's scales, which the query takes instead.
            parts = _in_fp16(query * scales[None, :])
        keys = tl.trans(_as_fp16(rows, FORMAT))
        scores = tl.dot(parts[0], keys) * parts[2][:, None]
        scores += tl.dot(parts[1], keys) * (parts[2] * (1.0 / 2048.0))[:, None]
    elif FORMAT == "bf16":
        keys = tl.trans(rows)
        scores = _dot_bf16(parts[2], keys, _dot_bf16(parts[1], keys, None))
        scores = _dot_bf16(parts[0], keys, scores)
    else:
        scores = tl.dot(query, tl.trans(rows), input_precision=PRECISION)
    return scores


@triton.jit
def _weighed(sums, p, rows, scales, FORMAT: tl.constexpr, PRECISION: tl.constexpr):
    """``sums`` and those ``[Q, DV]`` of a tile's V rows, as they are stored, with weights of at
    most e^9, or twice that."""
    if FORMAT == "fp16" or FORMAT == "int8":
        if FORMAT == "int8":
            peak_bits = tl.max(tl.abs(scales), axis=0).to(tl.int32, bitcast=True)
            exponent = tl.minimum(tl.maximum(peak_bits >> 23, 1), 253)
            p *= (scales * ((254 - exponent) << 23).to(tl.float32, bitcast=True))[None, :]
        # Weights below fp16's normal range lose bits: what they miss is in the second part.
        high = p.to(tl.float16)
        low = ((p - high.to(tl.float32)) * 2048.0).to(tl.float16)
        values = _as_fp16(rows, FORMAT)
        if FORMAT == "int8":
            factor = (exponent << 23).to(tl.float32, bitcast=True)
            sums += (tl.dot(high, values) + tl.dot(low, values) * (1.0 / 2048.0)) * factor
        else:
            sums += tl.dot(high, values) + tl.dot(low, values) * (1.0 / 2048.0)
    elif FORMAT == "bf16":
        parts = _in_bf16(p)
        rest = _dot_bf16(parts[2], rows, _dot_bf16(parts[1], rows, None))
        sums += _dot_bf16(parts[0], rows, rest)
    else:
        sums = tl.dot(p, rows, sums, input_precision=PRECISION)
    return sums


@triton.jit
def _stored_tile(
    base,
    begin,
    in_block,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    first_column=0,
):
    """Rows of a tile as they are stored, ``[T, BLOCK]``; zeros in columns that are not there."""
    column = first_column + tl.arange(0, BLOCK)
    if FORMAT == "fp16":
        first = (base + begin).to(tl.pointer_type(tl.float16))
    elif FORMAT == "bf16":
        first = (base + begin).to(tl.pointer_type(tl.bfloat16))
    elif FORMAT == "int8":
        first = (base + begin).to(tl.pointer_type(tl.int8))
    else:
        first = (base + begin).to(tl.pointer_type(tl.float32))
    place = first[:, None] + (in_block[:, None] * WIDTH + column[None, :])
    if WIDTH == BLOCK:
        rows = tl.load(place)
    else:
        rows = tl.load(place, mask=(column < WIDTH)[None, :], other=0)
    return rows


@triton.jit
def _block_of(begin, lane, block_rows, inverse):
    """The block of each of a tile's rows, and their places in it. Division by floats: exact, since
    a tile and a block have fewer than 2^21 rows, and a tile at most 129 blocks."""
    first = begin // block_rows
    at = begin % block_rows + lane
    further = ((at.to(tl.float32) + 0.5) * inverse).to(tl.int32)
    return first + further, at - further * block_rows


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
    of queries that do not see its row.
    """
    IS_PLAIN: tl.constexpr = not CAREFUL and (FORMAT != "int8" or IN_BLOCK)
    # Weights of fp16 values are fp16, too: the larger they are, the fewer leave its range.
    SHIFT: tl.constexpr = 9.0 if IS_PLAIN and (FORMAT == "fp16" or FORMAT == "int8") else 0.0
    best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    lane = tl.arange(0, BLOCK_T)
    inverse = 1.0 / block_rows.to(tl.float32)
    parts = (query, query, query)
    if FORMAT == "fp16" and IS_PLAIN:
        parts = _in_fp16(query)
    elif FORMAT == "bf16" and IS_PLAIN:
        parts = _in_bf16(query)
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
            block, in_block = _block_of(tile, t - tile, block_rows, inverse)
            offset = tl.load(offset_ptr + block)
            base = buffer_ptr + tl.multiple_of(offset, ALIGN_BYTES)
        if IS_PLAIN:
            scales = 0.0
            if FORMAT == "int8":
                at = tl.arange(0, BLOCK_D)
                first = (buffer_ptr + tl.multiple_of(offset, 4)).to(tl.pointer_type(tl.float32))
                scales = tl.load(first + at, mask=at < D, other=0.0)
            rows = _stored_tile(base, K_BEGIN, in_block, D, BLOCK_D, FORMAT)
            products = _scores(query, parts, rows, scales, FORMAT, PRECISION)
        else:
            rows = _rows_tile(base, K_BEGIN, 0, in_block, lane < BLOCK_T, D, BLOCK_D, FORMAT, False)
            products = tl.dot(query, tl.trans(rows), input_precision=PRECISION)
        products = _ruled(products, slope, position, tile + lane, SOFT_CAP, HAS_SLOPES)
        scores = tl.where(seen, products, float("-inf"))
        best, total, alpha, p = _rescaled(best, total, scores, SHIFT)
        if IS_PLAIN:
            scales = 0.0
            if FORMAT == "int8":
                first = (base + v_scale_begin).to(tl.pointer_type(tl.float32))
                scales = tl.load(first + in_block)
            values = _stored_tile(base, v_begin, in_block, DV, BLOCK_DV, FORMAT)
            sums = _weighed(sums * alpha[:, None], p, values, scales, FORMAT, PRECISION)
        else:
            values = _rows_tile(
                base, v_begin, v_scale_begin, in_block, lane < BLOCK_T, DV, BLOCK_DV, FORMAT, True
            )
            if CAREFUL:
                finite = tl.where(tl.abs(values) < float("inf"), values, 0.0)
                sums = sums * alpha[:, None] + tl.dot(p, finite, input_precision=PRECISION)
                sums += _not_finite(p, values, seen)
            else:
                sums = sums * alpha[:, None] + tl.dot(p, values, input_precision=PRECISION)
    return best - SHIFT, total, sums


@triton.jit
def _v_begins(
    block_rows,
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_X: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
):
    """Finds where the V rows of a block begin, and their scales."""
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
        "window",
    ]
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
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    sequence = head // n_kv
    n_rows = tl.load(n_rows_ptr + sequence).to(tl.int32)
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
    position, slope = _query_places(
        position_ptr,
        slope_ptr,
        sequence * q_len + q % q_len,
        head * n_queries + q,
        is_query,
        HAS_WINDOW,
        HAS_SLOPES,
    )
    v_begin, v_scale_begin = _v_begins(block_rows, K_BEGIN, D, FORMAT, IS_X, ITEM_BYTES)
    if IN_BLOCK:
        # block_rows is a multiple of 4 then, and D of 8.
        v_begin = tl.multiple_of(v_begin, 16)
    begin = split * split_rows
    end = tl.minimum(begin + split_rows, n_rows)
    last = tl.minimum(tl.maximum(last, -1), end - 1).to(tl.int32)
    offset_ptr = block_offset_bytes_ptr + head * n_blocks
    sequence_visible_ptr = visible_ptr + sequence * visible_stride
    best, total, sums = _attend(
        query, last, position, slope, window, buffer_ptr, offset_ptr, sequence_visible_ptr, begin,
        end, block_rows, visible_stride != 0, v_begin, v_scale_begin, K_BEGIN, D, DV, FORMAT,
        PRECISION, ALIGN_BYTES, IN_BLOCK, False, SOFT_CAP, HAS_WINDOW, HAS_SLOPES, BLOCK_Q,
        BLOCK_T, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if tl.max(tl.max((tl.abs(sums) < float("inf")).to(tl.int32) ^ 1, axis=1), axis=0) != 0:
        # Rare: a value of V is not finite. Who sees it is found out tile by tile.
        best, total, sums = _attend(
            query, last, position, slope, window, buffer_ptr, offset_ptr, sequence_visible_ptr,
            begin, end, block_rows, visible_stride != 0, v_begin, v_scale_begin, K_BEGIN, D, DV,
            FORMAT, "ieee" if FORMAT == "fp32" else PRECISION, ALIGN_BYTES, False, True, SOFT_CAP,
            HAS_WINDOW, HAS_SLOPES, BLOCK_Q, 16, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    place = (split.to(tl.int64) * tl.num_programs(0) + head) * n_queries + q
    _store_state(o_ptr, lse_ptr, place, is_query, best, total, sums, DV, BLOCK_DV)
