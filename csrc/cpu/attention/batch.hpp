// Attention for a whole batch: every sequence, every KV head, each with its own table of blocks; on
// several threads.
#pragma once

#include <cstdint>

#include "attention.hpp"

namespace espnx {

// A block holds, in this order: int8 only: fp32 [d] K scales; K rows [block_rows, d]; int8 only:
// fp32 [block_rows] V scales; V rows [block_rows, dv]. With X rows it holds X rows [block_rows, d]
// alone, and dv is d; they have no int8 format.
struct AttentionBatch {
  const float* q;  // [n, n_kv, n_queries, d], already multiplied by the softmax scale
  int64_t n, n_kv, n_queries, d, dv;
  int64_t
      q_len;  // n_queries is a multiple of it: the query heads of a KV head, one after the other
  const uint8_t* buffer;
  int64_t buffer_bytes;
  const int64_t* block_offset_bytes;  // [n, n_kv, n_blocks], any alignment; blocks beyond n_rows
                                      // are not looked at
  int64_t n_blocks;
  const int64_t* n_rows;  // [n]
  int64_t block_rows;
  RowFormat format;
  bool is_x;
  const uint8_t* visible;  // [n, visible_stride] or nullptr
  int64_t visible_stride;
  const int64_t* last_position;  // [n, q_len] or nullptr; row r is at position r
};

int64_t attention_block_bytes(const AttentionBatch& batch);

// The first place in block_offset_bytes whose block is needed and does not lie wholly inside the
// buffer, or -1. n_rows must have been checked: 0..n_blocks * block_rows.
int64_t find_block_outside(const AttentionBatch& batch);

// Writes o[n, n_kv, n_queries, dv] and lse[n, n_kv, n_queries]. At most max_threads threads, fewer
// where the work does not pay for them. Throws std::bad_alloc.
void attend_batch(const AttentionBatch& batch, int max_threads, float* o, float* lse);

}  // namespace espnx
