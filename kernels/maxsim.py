"""MaxSim over token rows in place in a byte buffer.

``score[q, i] = sum over t < Lq of  max over j < n_tokens[i] of  <query[q, t], row j of document i>``

query    float32 ``[n_queries, Lq, D]``
buffer   uint8 ``[bytes]``; row j of document i begins at byte ``offset_bytes[i] + j * row bytes``
scores   float32 ``[n_queries, n_docs]``; -inf without tokens, NaN where a product with a document's row is NaN

One program scores one document for one query, in tiles of BLOCK_Q query tokens x BLOCK_T document tokens, up to the document's real
length. Programs of one document are neighbours, so its bytes come from memory once. Addresses are 64 bits wide.

D, FORMAT and the block sizes are compile-time constants; numbers of documents, queries and tokens are not, so that no candidate count
compiles anew. ALIGN_BYTES is what every offset is known to be a multiple of: 16 lets the compiler load 16 bytes at a time.
"""

import triton
import triton.language as tl


@triton.jit
def _dot_split(query, rows):
    """``query @ rows`` for float32 query ``[Q, K]`` and fp16 rows ``[K, T]`` on tensor cores, the query good to 2^-22 of each value.

    A power of two per query token brings its values below 2; fp16(q) is the first part, and what it misses, times 2^11, the second: both
    stay in fp16's normal range, where plain fp16 would lose small values.
    """
    peak_bits = tl.max(tl.abs(query), axis=1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(peak_bits >> 23, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = query * inverse[:, None]
    high = scaled.to(tl.float16)
    low = ((scaled - high.to(tl.float32)) * 2048.0).to(tl.float16)
    product = tl.dot(high, rows)
    both = product + tl.dot(low, rows) * (1.0 / 2048.0)
    # An infinity meets a zero in the second part and would turn into NaN.
    return tl.where(tl.abs(product) < float("inf"), both, product) * scale[:, None]


@triton.jit(do_not_specialize=["n_docs", "n_queries", "Lq"])
def maxsim_kernel(
    query_ptr,
    buffer_ptr,
    offset_bytes_ptr,
    n_tokens_ptr,
    score_ptr,
    n_docs,
    n_queries,
    Lq,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    doc = program // n_queries
    query_index = program % n_queries
    n_tokens = tl.load(n_tokens_ptr + doc).to(tl.int32)
    first_row = buffer_ptr + tl.multiple_of(tl.load(offset_bytes_ptr + doc), ALIGN_BYTES)
    if FORMAT == "fp16":
        rows_ptr = first_row.to(tl.pointer_type(tl.float16))
    else:
        tl.static_assert(FORMAT == "fp32")
        rows_ptr = first_row.to(tl.pointer_type(tl.float32))

    total = 0.0
    nan_tiles = tl.zeros([BLOCK_Q, BLOCK_T], dtype=tl.int32)
    for q_begin in range(0, Lq, BLOCK_Q):
        q = q_begin + tl.arange(0, BLOCK_Q)
        is_query = q < Lq
        query_rows = query_ptr + (query_index * Lq + q)[:, None] * D
        best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
        for t_begin in range(0, n_tokens, BLOCK_T):
            t = t_begin + tl.arange(0, BLOCK_T)
            is_token = t < n_tokens
            doc_rows = rows_ptr + t.to(tl.int64)[:, None] * D
            products = tl.zeros([BLOCK_Q, BLOCK_T], dtype=tl.float32)
            for k_begin in range(0, D, BLOCK_D):
                k = k_begin + tl.arange(0, BLOCK_D)
                is_value = k < D
                query_tile = tl.load(query_rows + k[None, :], mask=is_query[:, None] & is_value[None, :], other=0.0)
                doc_tile = tl.load(doc_rows + k[None, :], mask=is_token[:, None] & is_value[None, :], other=0.0)
                if FORMAT == "fp16":
                    products += _dot_split(query_tile, tl.trans(doc_tile))
                else:
                    products += tl.dot(query_tile, tl.trans(doc_tile), input_precision="ieee")
            is_product = is_query[:, None] & is_token[None, :]
            # The maximum drops NaNs, so they are counted beside it.
            nan_tiles += (is_product & (products != products)).to(tl.int32)
            products = tl.where(is_token[None, :], products, float("-inf"))
            best = tl.maximum(best, tl.max(products, axis=1))
        total += tl.sum(tl.where(is_query, best, 0.0), axis=0)
    has_nan = tl.max(tl.max(nan_tiles, axis=1), axis=0) > 0
    tl.store(score_ptr + query_index * n_docs + doc, tl.where(has_nan, float("nan"), total))
