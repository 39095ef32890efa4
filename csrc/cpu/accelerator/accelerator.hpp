// HILOS's attention accelerator (section 4.4, algorithm 1) in its own roundings: K, V, queries and
// results fp16, all between them fp32, products and sums rounded one after the other in a fixed
// order. Equal bit by bit to espnx/ops/accelerator/reference.py at every level of the processor and
// for every number of threads.
#pragma once

#include <cstdint>

namespace espnx::accelerator {

constexpr int64_t kDim = 128;    // length of a row of K, of V, of a query
constexpr int64_t kBlock = 128;  // tokens whose statistics are taken together
constexpr int64_t kPadTo = 32;   // sequences are padded to a multiple of so many tokens
constexpr float kMask = -1e4F;   // score of padding, and of a token that a query does not see
constexpr int64_t kGroup = 5;    // queries that share one pass over K and V
constexpr int64_t kRowBytes = 2 * kDim;

// Rows of consecutive tokens of one head of one sequence in whole blocks: K rows [block_rows, 128],
// then as many V rows. device::RowPiece has the same fields.
struct Piece {
  int64_t sequence, head, offset_bytes, n_rows, first_position;
};

struct Task {
  const uint16_t* query;  // fp16 [n_sequences, n_heads, n, 128], not multiplied by the scale
  int64_t n_sequences, n_heads, n;
  float scale;
  const uint8_t* buffer;
  int64_t buffer_bytes, block_rows;
  const Piece* pieces;  // those of a head in the order of its tokens
  int64_t n_pieces;
  // Tokens that wait on the host come after the stored ones: their scores, float32 [n_sequences,
  // n_heads, n, n_buffered], and V rows, fp16 [n_sequences, n_heads, n_buffered, 128]; the first
  // stands at `buffered_position`.
  const float* scores;
  const uint16_t* values;
  int64_t n_buffered, buffered_position;
  // A query sees the tokens that none of these hides; each may be nullptr.
  const int64_t* first_visible;  // [n_sequences]: positions before it are hidden
  const uint8_t* visible;        // [n_sequences, visible_stride]: 0 hides a position
  int64_t visible_stride;
  const int64_t* last_position;  // [n]: positions after it are hidden
};

// The first piece that is none of this task's: outside the buffer, of no such head, or (where
// `visible` is given) with positions that it does not have; or -1.
int64_t find_bad_piece(const Task& task);

// o: fp16 [n_sequences, n_heads, n, 128]; lse: [n_sequences, n_heads, n]. 0 and -inf for a query
// that sees nothing.
void attend(const Task& task, int threads, uint16_t* o, float* lse);

// Scores as `attend` makes them, float32 [n_units, n, n_rows], of queries fp16 [n_units, n, 128]
// and rows fp16 [n_units, n_rows, 128]: what a host hands over.
void score(const uint16_t* query, const uint16_t* rows, int64_t n_units, int64_t n, int64_t n_rows,
           float scale, int threads, float* scores);

}  // namespace espnx::accelerator
