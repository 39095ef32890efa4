"""MaxSim over token rows in place in a byte buffer.

``score[q, i] = sum over t < Lq of  max over j < n_tokens[i] of <query[q, t], row j of document i>``

query     float32 ``[n_queries, Lq, D]``
buffer    uint8 ``[bytes]``; row j of document i begins at byte ``offset_bytes[i] + j * row bytes``
centroid  float32 ``[n_centroids, D]``, and weight float32 ``[2^N]``: of residual formats, unused by
          others
scores    float32 ``[n_queries, n_docs]``; -inf without tokens, NaN where a product with a
          document's row is NaN, or where a row names a centroid that does not exist

One program scores one document for one query, in tiles of BLOCK_Q query tokens x BLOCK_T document
tokens, up to the document's real length. Programs of one document are neighbours, so its bytes come
from memory once. Addresses are 64 bits wide.

D, FORMAT and the block sizes are compile-time constants; numbers of documents, queries and tokens
are not, so that no candidate count compiles anew. ALIGN_BYTES is what every offset is known to be a
multiple of: 16 lets the compiler load 16 bytes at a time.
"""

import triton
import triton.language as tl

from .attention_parts import dot_bf16, in_bf16, scale_or_nan


@triton.jit
def _in_fp16(query):
    """float32 ``[Q, K]`` in two fp16 parts, good to 2^-22 of each value, as ``[K, Q]``, and a power
    of two for each query token that products are to be multiplied by.

    The power brings a token's values below 2; fp16(q) is the first part, and what it misses, times
    2^11, the second: both stay in fp16's normal range, where plain fp16 would lose small values.
    """
    peak_bits = tl.max(tl.abs(query), axis=1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(peak_bits >> 23, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = query * inverse[:, None]
    high = scaled.to(tl.float16)
    low = ((scaled - high.to(tl.float32)) * 2048.0).to(tl.float16)
    return tl.trans(high), tl.trans(low), scale


@triton.jit
def _dot_split(rows, parts):
    """``rows @ query`` for fp16 rows ``[T, K]`` on tensor cores, the query in the parts of
    `_in_fp16`."""
    product = tl.dot(rows, parts[0])
    both = product + tl.dot(rows, parts[1]) * (1.0 / 2048.0)
    # An infinity meets a zero in the second part and would turn into NaN.
    return tl.where(tl.abs(product) < float("inf"), both, product) * parts[2][None, :]


@triton.jit
def _query_parts(query_rows, is_query, k, D: tl.constexpr, FORMAT: tl.constexpr):
    """Values k of a query tile as `_plain_tile` takes them."""
    query = tl.load(query_rows + k[None, :], mask=is_query[:, None] & (k < D)[None, :], other=0.0)
    if FORMAT == "fp16" or FORMAT == "int8" or FORMAT == "bit1":
        parts = _in_fp16(query)
    elif FORMAT == "bf16":
        thirds = in_bf16(query)
        parts = (tl.trans(thirds[0]), tl.trans(thirds[1]), tl.trans(thirds[2]))
    else:
        parts = (tl.trans(query), 0, 0)
    return parts


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
def _plain_tile(rows, k, in_doc, parts, FORMAT: tl.constexpr):
    """Products ``[T, Q]`` of a query tile with values k of rows of any format but the residual
    ones; without scales."""
    if FORMAT == "fp32":
        doc_tile = tl.load(
            rows.to(tl.pointer_type(tl.float32))[:, None] + k[None, :], mask=in_doc, other=0.0
        )
        products = tl.dot(doc_tile, parts[0], input_precision="ieee")
    elif FORMAT == "fp16":
        doc_tile = tl.load(
            rows.to(tl.pointer_type(tl.float16))[:, None] + k[None, :], mask=in_doc, other=0.0
        )
        products = _dot_split(doc_tile, parts)
    elif FORMAT == "bf16":
        doc_tile = tl.load(
            rows.to(tl.pointer_type(tl.bfloat16))[:, None] + k[None, :], mask=in_doc, other=0.0
        )
        first = dot_bf16(doc_tile, parts[0], None)
        rest = dot_bf16(doc_tile, parts[1], dot_bf16(doc_tile, parts[2], None))
        # An infinity meets zeros in the further parts and would turn into NaN.
        products = tl.where(tl.abs(first) < float("inf"), first + rest, first)
    elif FORMAT == "int8":
        # Whole numbers up to 128 are exact in fp16.
        codes = tl.load(
            (rows + 4).to(tl.pointer_type(tl.int8))[:, None] + k[None, :], mask=in_doc, other=0
        )
        # By their bits, since converting integers is slow: 1024 + n is fp16's 0x6400 + n.
        bits = ((codes.to(tl.int16) & 0xFF) ^ 0x6480).to(tl.int16)
        products = _dot_split(bits.to(tl.float16, bitcast=True) - 1152.0, parts)
    else:
        tl.static_assert(FORMAT == "bit1")
        packed = tl.load(rows[:, None] + (k // 8)[None, :], mask=in_doc, other=0).to(tl.int32)
        signs = 2 * ((packed >> (k % 8)[None, :]) & 1) - 1
        products = _dot_split(signs.to(tl.float16), parts)
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
    """Products of `_plain_tile` times what their rows are to be multiplied by."""
    if FORMAT == "int8":
        scale = tl.load(rows.to(tl.pointer_type(tl.float32)), mask=is_token, other=0.0)
        products *= scale_or_nan(scale)[:, None]
    elif FORMAT == "bit1":
        products *= SIGN_VALUE
    return products


@triton.jit
def _whole_products(
    parts,
    rows,
    is_token,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    SIGN_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`_products` of a query of one tile, in the parts of all its values."""
    products = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.float32)
    for i in tl.static_range(0, (D + BLOCK_D - 1) // BLOCK_D):
        k = i * BLOCK_D + tl.arange(0, BLOCK_D)
        in_doc = is_token[:, None] & (k < D)[None, :]
        products += _plain_tile(rows, k, in_doc, parts[3 * i : 3 * i + 3], FORMAT)
    return _with_scales(products, rows, is_token, FORMAT, SIGN_VALUE)


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
        parts = _query_parts(query_rows, is_query, k, D, FORMAT)
        in_doc = is_token[:, None] & (k < D)[None, :]
        if IS_RESIDUAL:
            values = _residual_values(rows, k, in_doc, centroids, is_known, weight_ptr, NBITS)
            squares += tl.sum(values * values, axis=1)
            products += tl.dot(values, parts[0], input_precision="ieee")
        else:
            products += _plain_tile(rows, k, in_doc, parts, FORMAT)
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


@triton.jit(do_not_specialize=["n_docs", "n_queries", "Lq", "n_centroids"])
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
        parts = ()
        query_rows = query_ptr + (query_index * Lq + q)[:, None] * D
        for i in tl.static_range(0, (D + BLOCK_D - 1) // BLOCK_D):
            k = i * BLOCK_D + tl.arange(0, BLOCK_D)
            parts = parts + _query_parts(query_rows, q < Lq, k, D, FORMAT)
        next_tokens = tl.load(n_tokens_ptr + first)
        next_offset = tl.multiple_of(tl.load(offset_bytes_ptr + first), ALIGN_BYTES)
        for doc in tl.range(first, n_docs, stride, num_stages=1):
            n_tokens = next_tokens.to(tl.int32)
            first_row = buffer_ptr + next_offset
            further = tl.minimum(doc + stride, n_docs - 1)
            next_tokens = tl.load(n_tokens_ptr + further)
            next_offset = tl.multiple_of(tl.load(offset_bytes_ptr + further), ALIGN_BYTES)
            best = tl.full([BLOCK_T, BLOCK_Q], float("-inf"), dtype=tl.float32)
            nans = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.int32)
            for t_begin in range(0, n_tokens, BLOCK_T):
                is_token = t_begin + lane < n_tokens
                rows = first_row + (t_begin + lane).to(tl.int64) * ROW_BYTES
                products = _whole_products(
                    parts, rows, is_token, D, FORMAT, SIGN_VALUE, BLOCK_Q, BLOCK_T, BLOCK_D
                )
                best, nans = _taken(best, nans, products, is_token)
            tl.store(scores + doc, _score(best, nans, q < Lq))
    else:
        for doc in tl.range(first, n_docs, stride, num_stages=1):
            n_tokens = tl.load(n_tokens_ptr + doc).to(tl.int32)
            first_row = buffer_ptr + tl.multiple_of(tl.load(offset_bytes_ptr + doc), ALIGN_BYTES)
            total = 0.0
            for q_begin in range(0, Lq, BLOCK_Q):
                is_query = q_begin + q < Lq
                query_rows = query_ptr + (query_index * Lq + q_begin + q)[:, None] * D
                best = tl.full([BLOCK_T, BLOCK_Q], float("-inf"), dtype=tl.float32)
                nans = tl.zeros([BLOCK_T, BLOCK_Q], dtype=tl.int32)
                for t_begin in range(0, n_tokens, BLOCK_T):
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
                total += _score(best, nans, is_query)
            tl.store(scores + doc, total)
