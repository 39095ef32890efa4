"""What kernels of attention share, and some of it with MaxSim: rows as they are stored and as
numbers, products with them, and the softmax over tiles. ``attention.py`` says what its arguments
mean.
"""

import triton
import triton.language as tl

#: Pointers to tables, which are parts of others and so begin anywhere: loaded by elements, as they
#: are, they are no reason to compile a kernel once more in the midst of a generation.
TABLES = [
    "block_offset_bytes_ptr",
    "n_rows_ptr",
    "visible_ptr",
    "last_position_ptr",
    "position_ptr",
    "slope_ptr",
]
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
#: A tile's largest weight of int8 rows is brought to between 2^13 and 2^14: the larger weights are,
#: the fewer leave the range of fp16.
WEIGHT_BITS = tl.constexpr(13)
# Of both codes of a register; by their bits, since converting integers is slow: 1024 + n is fp16's
# 0x6400 + n, and 0x6480 is 1152. lop3 by 0x6a is (a & b) ^ c.
FIRST_CODES = tl.constexpr(
    "{ .reg .b32 %code<1>; mov.b32 %code0, 0x64806480;"
    " lop3.b32 $0, $1, 0x00ff00ff, %code0, 0x6a; sub.f16x2 $0, $0, %code0; }"
)
SECOND_CODES = tl.constexpr(
    "{ .reg .b32 %code<1>; mov.b32 %code0, 0x64806480; shr.u32 $0, $1, 8;"
    " lop3.b32 $0, $0, 0x00ff00ff, %code0, 0x6a; sub.f16x2 $0, $0, %code0; }"
)


@triton.jit
def scale_or_nan(scale):
    """A scale of int8 rows that is not finite as NaN, as everywhere else; one instruction."""
    return scale * 0.0 + scale


@triton.jit
def rows_tile(
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
            values = (
                codes * scale_or_nan(tl.load(scales + in_block, mask=is_row, other=0.0))[:, None]
            )
        else:
            per_channel = tl.load(scales[:, None] + column[None, :], mask=mask, other=0.0)
            values = codes * scale_or_nan(per_channel)
    return values


@triton.jit
def not_finite(p, values, seen):
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
def tanh(x):
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
def ruled_scores(scores, slope, position, row, SOFT_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Scores ``[Q, T]`` of these rows as a soft cap and then slopes change them."""
    if SOFT_CAP > 0:
        scores = SOFT_CAP * tanh(scores * (1.0 / SOFT_CAP))
    if HAS_SLOPES:
        scores += slope[:, None] * (row[None, :] - position[:, None]).to(tl.float32)
    return scores


@triton.jit
def query_places(
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
def rescaled(best, total, scores, SHIFT: tl.constexpr):
    """Online softmax: (the new peaks, the new sums, what older sums are worth now, the scores'
    weights, e^SHIFT at most)."""
    above = tl.maximum(best, tl.max(scores, axis=1))
    # A query that has seen no row yet has no peak to subtract.
    peak = tl.where(above == float("-inf"), 0.0, above)
    alpha = tl.exp(best - peak)
    p = tl.exp(scores - (peak - SHIFT)[:, None])
    return above, total * alpha + tl.sum(p, axis=1), alpha, p


@triton.jit
def store_state(
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
def power_pair(peak, BITS: tl.constexpr):
    """A power of two that brings a magnitude to between 2^BITS and twice that, and its inverse."""
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, BITS + 1), 253)
    down = ((254 - exponent + BITS) << 23).to(tl.float32, bitcast=True)
    return down, ((exponent - BITS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def in_fp16(values):
    """float32 ``[Q, K]`` in two fp16 parts, good to 2^-22 of each value, and a power of two for
    each row that the parts are to be multiplied by."""
    peak_bits = tl.max(tl.abs(values), axis=1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(peak_bits >> 23, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scaled = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = scaled.to(tl.float16)
    return high, ((scaled - high.to(tl.float32)) * 2048.0).to(tl.float16), scale


@triton.jit
def as_fp16(rows, FORMAT: tl.constexpr):
    """fp16 rows as they are; int8 rows by their bits, since converting integers is slow:
    1024 + n is fp16's 0x6400 + n."""
    if FORMAT == "int8":
        bits = ((rows.to(tl.int16) & 0xFF) ^ 0x6480).to(tl.int16)
        rows = bits.to(tl.float16, bitcast=True) - 1152.0
    return rows


@triton.jit
def codes_of(pairs, IS_SECOND: tl.constexpr):
    """The first (lower) or second int8 of each int16, in fp16."""
    if INTERPRETED:
        code = (pairs.to(tl.int32) >> (8 if IS_SECOND else 0)) & 0xFF
        values = (code ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    elif IS_SECOND:
        values = tl.inline_asm_elementwise(
            SECOND_CODES, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        values = tl.inline_asm_elementwise(
            FIRST_CODES, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    return values


@triton.jit
def in_bf16(values):
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
def dot_bf16(a, b, added):
    """Their product; NumPy, which interprets kernels, has no bf16."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), added, input_precision="ieee")
    else:
        product = tl.dot(a, b, added)
    return product


@triton.jit
def row_products(query, parts, rows, scales, FORMAT: tl.constexpr, PRECISION: tl.constexpr):
    """Products ``[Q, T]`` of the queries with a tile's K rows, as they are stored."""
    if FORMAT == "fp16" or FORMAT == "int8":
        if FORMAT == "int8":
            # The tile's rows have their block's scales, which the query takes instead.
            parts = in_fp16(query * scales[None, :])
        keys = tl.trans(as_fp16(rows, FORMAT))
        scores = tl.dot(parts[0], keys) * parts[2][:, None]
        scores += tl.dot(parts[1], keys) * (parts[2] * (1.0 / 2048.0))[:, None]
    elif FORMAT == "bf16":
        keys = tl.trans(rows)
        scores = dot_bf16(parts[2], keys, dot_bf16(parts[1], keys, None))
        scores = dot_bf16(parts[0], keys, scores)
    else:
        scores = tl.dot(query, tl.trans(rows), input_precision=PRECISION)
    return scores


@triton.jit
def weighed_rows(sums, p, rows, scales, FORMAT: tl.constexpr, PRECISION: tl.constexpr):
    """``sums`` and those ``[Q, DV]`` of a tile's V rows, as they are stored, with weights of at
    most e^9."""
    if FORMAT == "fp16" or FORMAT == "int8":
        if FORMAT == "int8":
            p *= scales[None, :]
            # Of each query's own: the scale of a row that it does not see must not weaken the
            # others.
            down, up = power_pair(tl.max(tl.abs(p), axis=1), WEIGHT_BITS)
            p *= down[:, None]
        # Weights below fp16's normal range lose bits: what they miss is in the second part.
        high = p.to(tl.float16)
        low = ((p - high.to(tl.float32)) * 2048.0).to(tl.float16)
        values = as_fp16(rows, FORMAT)
        if FORMAT == "int8":
            sums += (tl.dot(high, values) + tl.dot(low, values) * (1.0 / 2048.0)) * up[:, None]
        else:
            sums += tl.dot(high, values) + tl.dot(low, values) * (1.0 / 2048.0)
    elif FORMAT == "bf16":
        parts = in_bf16(p)
        rest = dot_bf16(parts[2], rows, dot_bf16(parts[1], rows, None))
        sums += dot_bf16(parts[0], rows, rest)
    else:
        sums = tl.dot(p, rows, sums, input_precision=PRECISION)
    return sums


@triton.jit
def stored_tile(
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
def block_of(begin, lane, block_rows, inverse):
    """The block of each of a tile's rows, and their places in it. Division by floats: exact, since
    a tile and a block have fewer than 2^21 rows, and a tile at most 129 blocks."""
    first = begin // block_rows
    at = begin % block_rows + lane
    further = ((at.to(tl.float32) + 0.5) * inverse).to(tl.int32)
    return first + further, at - further * block_rows


@triton.jit
def v_begins(
    block_rows,
    K_BEGIN: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_X: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
):
    """Finds where the V rows of a block begin, and their scales; in 64 bits where K rows of 2^20,
    the most that a block has, are more than 32 bits count."""
    if D * ITEM_BYTES >= 2048:
        v_scale_begin = K_BEGIN + block_rows.to(tl.int64) * (D * ITEM_BYTES)
    else:
        v_scale_begin = K_BEGIN + block_rows * D * ITEM_BYTES
    v_begin = v_scale_begin
    if FORMAT == "int8":
        v_begin += 4 * block_rows
    if IS_X:
        v_begin = v_scale_begin * 0 + K_BEGIN
    return v_begin, v_scale_begin


@triton.jit
def broken(sums):
    """1 if a value is infinite or NaN, else 0."""
    return tl.max(tl.max((tl.abs(sums) < float("inf")).to(tl.int32) ^ 1, axis=1), axis=0)


@triton.jit
def program_place(n_kv, n_queries, BLOCK_Q: tl.constexpr):
    """What a program is to do: (its head and the sequence that has it, numbers of its queries,
    which of them there are)."""
    head = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    return head, head // n_kv, q, q < n_queries


@triton.jit
def last_rows(last_position_ptr, at_position, is_query, has_last, n_rows):
    """The last row that each query sees, by its position or, without one, by the sequence's length.

    Masks that are not there are not loaded, by no variant of their own: each would be seconds of
    compiling in the midst of a generation.
    """
    last = tl.load(last_position_ptr + at_position, mask=is_query & (has_last != 0), other=0)
    return tl.where(has_last != 0, last, n_rows)


@triton.jit
def program_rows(split_rows, n_rows, last):
    """The rows of a program's part, and the last of them that each query sees."""
    begin = tl.program_id(2) * split_rows
    end = tl.minimum(begin + split_rows, n_rows)
    return begin, end, tl.minimum(tl.maximum(last, -1), end - 1).to(tl.int32)


@triton.jit
def place_of_results(head, q, n_queries):
    """The place of a program's part of o and lse: int64 ``[Q]``."""
    return (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + head) * n_queries + q
