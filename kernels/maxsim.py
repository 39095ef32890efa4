"""MaxSim over token rows in place in a byte buffer.

``score[q, i] = sum over t < Lq of  max over j < n_tokens[i] of <query[q, t], row j of document i>``

query     float32 ``[n_queries, Lq, D]``
buffer    uint8 ``[bytes]``; row j of document i begins at byte ``offset_bytes[i] + j * row bytes``
centroid  float32 ``[n_centroids, D]``, and weight float32 ``[2^N]``: of residual formats, unused by
          others
scores    float32 ``[n_queries, n_docs]``; -inf without tokens, NaN where a product with a
          document's row is NaN, or where a row names a centroid that does not exist

One program scores one document after another for one query, in tiles of BLOCK_Q query tokens x
BLOCK_T document tokens, up to the document's real length. Programs of one document are neighbours,
so its bytes come from memory once. Addresses are 64 bits wide.

With IS_WHOLE all query tokens are one tile, and stay in parts that tensor cores take. The products
of all parts are then summed in one place, the smallest first, and a maximum keeps NaNs: nothing
else is done with a product. Infinities that meet zeros in a part turn into NaN there, so where a
document's score is NaN it is made once more, with care; of int8 rows also where it is infinite,
since a row's scale may make a product so until the query's factor makes it less.

D, FORMAT and the block sizes are compile-time constants; numbers of documents, queries and tokens
are not, so that no candidate count compiles anew. ALIGN_BYTES is what every offset is known to be a
multiple of: 16 lets the compiler load 16 bytes at a time.
"""

import triton
import triton.language as tl

from .attention_parts import INTERPRETED, codes_of, dot_bf16, in_bf16, scale_or_nan

#: Query values are brought below 2^14: what misses of them in fp16 stays in its normal range.
LIFT = tl.constexpr(8192.0)


@triton.jit
def _powers(peak):
    """A power of two that brings a token's values, of that magnitude at most, to below 2 (the
    parts are of 2^13 times as much), and what products are to be multiplied by then."""
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return down, (exponent << 23).to(tl.float32, bitcast=True) * (1.0 / LIFT)


@triton.jit
def _in_fp16(query, down):
    """float32 ``[Q, K]`` in two fp16 parts, good to 2^-22 of each value, or to 2^-38 of its
    token's largest, as ``[K, Q]``: what is nearest in fp16, and what that misses."""
    scaled = query * down[:, None] * LIFT
    high = scaled.to(tl.float16)
    return tl.trans(high), tl.trans((scaled - high.to(tl.float32)).to(tl.float16))


@triton.jit
def _query_values(query_rows, is_query, k, D: tl.constexpr):
    return tl.load(query_rows + k[None, :], mask=is_query[:, None] & (k < D)[None, :], other=0.0)


@triton.jit
def _query_parts(query, down, FORMAT: tl.constexpr):
    """Values of a query tile in the three parts that products take: ``[K, Q]``, the largest
    first."""
    if FORMAT == "bf16":
        thirds = in_bf16(query)
        parts = (tl.trans(thirds[0]), tl.trans(thirds[1]), tl.trans(thirds[2]))
    elif FORMAT == "fp16" or FORMAT == "int8" or FORMAT == "bit1":
        halves = _in_fp16(query, down)
        parts = (halves[0], halves[1], 0)
    else:
        parts = (tl.trans(query), 0, 0)
    return parts


@triton.jit
def _whole_query(
    query_rows, is_query, D: tl.constexpr, FORMAT: tl.constexpr, BLOCK_D: tl.constexpr
):
    """(Three parts for each piece of BLOCK_D values, what products are to be multiplied by). Of
    int8 rows a piece's even values come first, then its odd ones, as three parts each."""
    peak = tl.max(tl.abs(_query_values(query_rows, is_query, tl.arange(0, BLOCK_D), D)), axis=1)
    for i in tl.static_range(1, (D + BLOCK_D - 1) // BLOCK_D):
        k = i * BLOCK_D + tl.arange(0, BLOCK_D)
        values = _query_values(query_rows, is_query, k, D)
        peak = tl.maximum(peak, tl.max(tl.abs(values), axis=1))
    down, factor = _powers(peak)
    parts = ()
    for i in tl.static_range(0, (D + BLOCK_D - 1) // BLOCK_D):
        if FORMAT == "int8":
            k = i * BLOCK_D + 2 * tl.arange(0, BLOCK_D // 2)
            even = _query_values(query_rows, is_query, k, D)
            odd = _query_values(query_rows, is_query, k + 1, D)
            parts = parts + _query_parts(even, down, FORMAT) + _query_parts(odd, down, FORMAT)
        else:
            k = i * BLOCK_D + tl.arange(0, BLOCK_D)
            parts = parts + _query_parts(_query_values(query_rows, is_query, k, D), down, FORMAT)
    return parts, factor


@triton.jit
def _code_tile(rows, k, is_value, NBITS: tl.constexpr):
    """Packed codes of NBITS bits, int32 ``[T, K]``, of dimensions k of rows ``[T, 1]``; a byte's
    first code is its highest bits."""
    PER_BYTE: tl.constexpr = 8 // NBITS
    packed = tl.load(rows + (k // PER_BYTE)[None, :], mask=is_value, other=0).to(tl.int32)
    return (packed >> ((PER_BYTE - 1 - k % PER_BYTE) * NBITS)[None, :]) & ((1 << NBITS) - 1)


@triton.jit
def _bits_turned(codes, NBITS: tl.constexpr):
    """ColBERT packs a code's lowest bit first."""
    if NBITS == 1:
        turned = codes
    elif NBITS == 2:
        turned = ((codes & 1) << 1) | (codes >> 1)
    else:
        turned = ((codes & 1) << 3) | ((codes & 2) << 1) | ((codes & 4) >> 1) | (codes >> 3)
    return turned


@triton.jit
def _prefix(rows, is_token):
    """The first four bytes of each row as int32 ``[T]``. Rows of an odd number of bytes are not
    aligned, so one byte after the other."""
    word = tl.load(rows, mask=is_token, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        word |= tl.load(rows + i, mask=is_token, other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def _stored_values(rows, k, in_doc, FORMAT: tl.constexpr):
    """Values k of rows ``[T]`` as products take them; without scales, and of int8 rows as numbers,
    not as pairs."""
    if FORMAT == "fp32":
        first = rows.to(tl.pointer_type(tl.float32))
        values = tl.load(first[:, None] + k[None, :], mask=in_doc, other=0.0)
    elif FORMAT == "fp16":
        first = rows.to(tl.pointer_type(tl.float16))
        values = tl.load(first[:, None] + k[None, :], mask=in_doc, other=0.0)
    elif FORMAT == "bf16":
        first = rows.to(tl.pointer_type(tl.bfloat16))
        values = tl.load(first[:, None] + k[None, :], mask=in_doc, other=0.0)
    elif FORMAT == "int8":
        # Whole numbers up to 128 are exact in fp16.
        first = (rows + 4).to(tl.pointer_type(tl.int8))
        codes = tl.load(first[:, None] + k[None, :], mask=in_doc, other=0)
        # By their bits, since converting integers is slow: 1024 + n is fp16's 0x6400 + n.
        bits = ((codes.to(tl.int16) & 0xFF) ^ 0x6480).to(tl.int16)
        values = bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        tl.static_assert(FORMAT == "bit1")
        packed = tl.load(rows[:, None] + (k // 8)[None, :], mask=in_doc, other=0).to(tl.int32)
        values = (2 * ((packed >> (k % 8)[None, :]) & 1) - 1).to(tl.float16)
    return values


@triton.jit
def _summed_with_care(values, parts, FORMAT: tl.constexpr):
    """Products of a tile's values with all parts of a query's. An infinity that meets a zero in a
    further part would turn into NaN."""
    if FORMAT == "bf16":
        first = dot_bf16(values, parts[0], None)
        rest = dot_bf16(values, parts[1], dot_bf16(values, parts[2], None))
    else:
        first = tl.dot(values, parts[0])
        rest = tl.dot(values, parts[1])
    return tl.where(tl.abs(first) < float("inf"), first + rest, first)


@triton.jit
def _with_rest(values, parts, products, FORMAT: tl.constexpr):
    """``products`` and those of a tile's values with all parts of a query's but the first."""
    if FORMAT == "bf16":
        products = dot_bf16(values, parts[1], dot_bf16(values, parts[2], products))
    else:
        products = tl.dot(values, parts[1], products)
    return products


@triton.jit
def _with_first(values, parts, products, FORMAT: tl.constexpr):
    """``products`` and those of a tile's values with the first part of a query's."""
    if FORMAT == "bf16":
        products = dot_bf16(values, parts[0], products)
    else:
        products = tl.dot(values, parts[0], products)
    return products


@triton.jit
def _in_registers(values):
    """The same numbers of 16 bits, which products of four warps then take from registers: from
    shared memory each part of the query would take them anew."""
    if not INTERPRETED:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=True, pack=2
        )
    return values


@triton.jit
def _whole_values(
    rows, is_token, i: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A piece of BLOCK_D values of rows, as products take them: in one, or of int8 rows, which are
    loaded two in an int16, as the even and the odd ones."""
    if FORMAT == "int8":
        k = i * BLOCK_D // 2 + tl.arange(0, BLOCK_D // 2)
        in_row = k < D // 2
    else:
        k = i * BLOCK_D + tl.arange(0, BLOCK_D)
        in_row = k < D
    in_doc = is_token[:, None]
    if D % BLOCK_D != 0:
        in_doc = in_doc & in_row[None, :]
    if FORMAT == "int8":
        place = (rows + 4).to(tl.pointer_type(tl.int16))[:, None] + k[None, :]
        pairs = tl.load(place, mask=in_doc, other=0)
        values = (codes_of(pairs, False), codes_of(pairs, True))
    else:
        values = (_in_registers(_stored_values(rows, k, in_doc, FORMAT)),)
    return values


@triton.jit
def _whole_products(
    parts,
    rows,
    is_token,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Products ``[T, Q]`` of a query of one tile, without its factor; -inf in rows that are not
    there, and perhaps NaN where one is infinite."""
    HALVES: tl.constexpr = 2 if FORMAT == "int8" else 1
    there = tl.where(is_token, 0.0, float("-inf"))
    products = there[:, None] + tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.float32)
    # What is added to a large sum is rounded as it is: small products are summed first, or apart.
    if D <= BLOCK_D:
        values = _whole_values(rows, is_token, 0, D, FORMAT, BLOCK_D)
        for h in tl.static_range(0, HALVES):
            products = _with_rest(values[h], parts[3 * h : 3 * h + 3], products, FORMAT)
        for h in tl.static_range(0, HALVES):
            products = _with_first(values[h], parts[3 * h : 3 * h + 3], products, FORMAT)
    else:
        rest = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.float32)
        for i in tl.static_range(0, (D + BLOCK_D - 1) // BLOCK_D):
            values = _whole_values(rows, is_token, i, D, FORMAT, BLOCK_D)
            for h in tl.static_range(0, HALVES):
                own = parts[3 * (HALVES * i + h) : 3 * (HALVES * i + h) + 3]
                rest = _with_rest(values[h], own, rest, FORMAT)
                products = _with_first(values[h], own, products, FORMAT)
        products += rest
    if FORMAT == "int8":
        # A scale that is not there must not turn -inf into anything else.
        scale = tl.load(rows.to(tl.pointer_type(tl.float32)), mask=is_token, other=1.0)
        products *= scale_or_nan(scale)[:, None]
    return products


@triton.jit
def _residual_values(rows, k, in_doc, centroids, is_known, weight_ptr, NBITS: tl.constexpr):
    """Values k, not yet normalised, of residual rows, float32 ``[T, K]``. A row that names no
    centroid becomes NaN."""
    codes = _bits_turned(_code_tile((rows + 4)[:, None], k, in_doc, NBITS), NBITS)
    known = tl.load(centroids + k[None, :], mask=in_doc & is_known[:, None], other=0.0)
    values = tl.where(is_known[:, None], known + tl.load(weight_ptr + codes), float("nan"))
    return tl.where(in_doc, values, 0.0)


@triton.jit
def _with_scales(products, rows, is_token, FORMAT: tl.constexpr, SIGN_VALUE: tl.constexpr):
    """Products of stored values times what their rows are to be multiplied by."""
    if FORMAT == "int8":
        scale = tl.load(rows.to(tl.pointer_type(tl.float32)), mask=is_token, other=0.0)
        products *= scale_or_nan(scale)[:, None]
    elif FORMAT == "bit1":
        products *= SIGN_VALUE
    return products


@triton.jit
def _products(
    query_rows,
    is_query,
    rows,
    is_token,
    centroid_ptr,
    weight_ptr,
    n_centroids,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    SIGN_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Products ``[T, Q]`` of document tokens with query tokens, whole rows."""
    NBITS: tl.constexpr = 4 if FORMAT == "residual4" else (2 if FORMAT == "residual2" else 1)
    IS_RESIDUAL: tl.constexpr = (
        FORMAT == "residual1" or FORMAT == "residual2" or FORMAT == "residual4"
    )
    products = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.float32)
    if IS_RESIDUAL:
        number = _prefix(rows, is_token)
        is_known = (number >= 0) & (number < n_centroids)
        centroids = centroid_ptr + number.to(tl.int64)[:, None] * D
        squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    for k_begin in range(0, D, BLOCK_D):
        k = k_begin + tl.arange(0, BLOCK_D)
        query = _query_values(query_rows, is_query, k, D)
        in_doc = is_token[:, None] & (k < D)[None, :]
        if IS_RESIDUAL:
            values = _residual_values(rows, k, in_doc, centroids, is_known, weight_ptr, NBITS)
            squares += tl.sum(values * values, axis=1)
            products += tl.dot(values, tl.trans(query), input_precision="ieee")
        elif FORMAT == "fp32":
            values = _stored_values(rows, k, in_doc, FORMAT)
            products += tl.dot(values, tl.trans(query), input_precision="ieee")
        else:
            down, factor = _powers(tl.max(tl.abs(query), axis=1))
            values = _stored_values(rows, k, in_doc, FORMAT)
            added = _summed_with_care(values, _query_parts(query, down, FORMAT), FORMAT)
            products += added if FORMAT == "bf16" else added * factor[None, :]
    if IS_RESIDUAL:
        products /= tl.maximum(tl.sqrt(squares), 1e-12)[:, None]
    else:
        products = _with_scales(products, rows, is_token, FORMAT, SIGN_VALUE)
    return products


@triton.jit
def _taken(best, nans, products, is_token):
    """``best`` and ``nans`` with a tile's products. The maximum drops NaNs, so they are counted
    beside it."""
    nans += (is_token[:, None] & (products != products)).to(tl.int32)
    return tl.maximum(best, tl.where(is_token[:, None], products, float("-inf"))), nans


@triton.jit
def _score(best, nans, is_query):
    """The sum of the largest products of a tile of query tokens, NaN where one of theirs is."""
    largest = tl.where(tl.max(nans, axis=0) > 0, float("nan"), tl.max(best, axis=0))
    return tl.sum(tl.where(is_query, largest, 0.0), axis=0)


@triton.jit
def _tile_score(
    query_rows,
    is_query,
    first_row,
    n_tokens,
    centroid_ptr,
    weight_ptr,
    n_centroids,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SIGN_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A document's score for a tile of query tokens, which are fetched and made parts of for each
    tile of the document."""
    lane = tl.arange(0, BLOCK_T)
    best = tl.full([BLOCK_T, BLOCK_Q], float("-inf"), dtype=tl.float32)
    nans = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.int32)
    for t_begin in tl.range(0, n_tokens, BLOCK_T, num_stages=STAGES):
        is_token = t_begin + lane < n_tokens
        products = _products(
            query_rows,
            is_query,
            first_row + (t_begin + lane).to(tl.int64) * ROW_BYTES,
            is_token,
            centroid_ptr,
            weight_ptr,
            n_centroids,
            D,
            FORMAT,
            SIGN_VALUE,
            BLOCK_Q,
            BLOCK_T,
            BLOCK_D,
        )
        best, nans = _taken(best, nans, products, is_token)
    return _score(best, nans, is_query)


@triton.jit(
    do_not_specialize=["n_docs", "n_queries", "Lq", "n_centroids"],
    do_not_specialize_on_alignment=["offset_bytes_ptr", "n_tokens_ptr"],
)
def maxsim_kernel(
    query_ptr,
    buffer_ptr,
    offset_bytes_ptr,
    n_tokens_ptr,
    centroid_ptr,
    weight_ptr,
    score_ptr,
    n_docs,
    n_queries,
    Lq,
    n_centroids,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SIGN_VALUE: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    query_index = (tl.program_id(0) % n_queries).to(tl.int64)
    first = tl.program_id(0) // n_queries
    stride = tl.num_programs(0) // n_queries
    scores = score_ptr + query_index * n_docs
    lane = tl.arange(0, BLOCK_T)
    q = tl.arange(0, BLOCK_Q)
    if IS_WHOLE:
        # The query stays, and where the next document is, is read while one is multiplied.
        query_rows = query_ptr + (query_index * Lq + q)[:, None] * D
        parts, factor = _whole_query(query_rows, q < Lq, D, FORMAT, BLOCK_D)
        if FORMAT == "bf16":
            factor = tl.full([BLOCK_Q], 1.0, dtype=tl.float32)
        row_bytes = lane.to(tl.int64) * ROW_BYTES
        next_tokens = tl.load(n_tokens_ptr + first)
        next_offset = tl.multiple_of(tl.load(offset_bytes_ptr + first), ALIGN_BYTES)
        for doc in tl.range(first, n_docs, stride, num_stages=1):
            n_tokens = next_tokens.to(tl.int32)
            first_row = buffer_ptr + next_offset
            further = tl.minimum(doc + stride, n_docs - 1)
            next_tokens = tl.load(n_tokens_ptr + further)
            next_offset = tl.multiple_of(tl.load(offset_bytes_ptr + further), ALIGN_BYTES)
            best = tl.full([BLOCK_T, BLOCK_Q], float("-inf"), dtype=tl.float32)
            tile = first_row
            for t_begin in range(0, n_tokens, BLOCK_T):
                is_token = lane < n_tokens - t_begin
                products = _whole_products(
                    parts, tile + row_bytes, is_token, D, FORMAT, BLOCK_Q, BLOCK_T, BLOCK_D
                )
                best = tl.maximum(best, products, propagate_nan=tl.PropagateNan.ALL)
                tile += BLOCK_T * ROW_BYTES
            if FORMAT == "bit1":
                # Here, since the factor of a query of the least values has few bits.
                best *= SIGN_VALUE
            nans = (best != best).to(tl.int32)
            score = _score(best * factor[None, :], nans, q < Lq)
            is_broken = score != score
            if FORMAT == "int8":
                is_broken = (tl.abs(score) < float("inf")) == 0
            if is_broken:
                # Rare; few rows and values at a time, for the sake of registers.
                score = _tile_score(
                    query_rows, q < Lq, first_row, n_tokens, centroid_ptr, weight_ptr, n_centroids,
                    D, FORMAT, ROW_BYTES, SIGN_VALUE, BLOCK_Q, 16,
                    32 if BLOCK_D > 32 else BLOCK_D, 1,
                )  # fmt: skip
            tl.store(scores + doc, score)
    else:
        for doc in tl.range(first, n_docs, stride, num_stages=1):
            n_tokens = tl.load(n_tokens_ptr + doc).to(tl.int32)
            first_row = buffer_ptr + tl.multiple_of(tl.load(offset_bytes_ptr + doc), ALIGN_BYTES)
            total = 0.0
            for q_begin in range(0, Lq, BLOCK_Q):
                is_query = q_begin + q < Lq
                query_rows = query_ptr + (query_index * Lq + q_begin + q)[:, None] * D
                total += _tile_score(
                    query_rows, is_query, first_row, n_tokens, centroid_ptr, weight_ptr,
                    n_centroids, D, FORMAT, ROW_BYTES, SIGN_VALUE, BLOCK_Q, BLOCK_T, BLOCK_D, None,
                )  # fmt: skip
            tl.store(scores + doc, total)
